"""Arrange the ranks of a process group as a ring: gloo on CPUs, NCCL on GPUs, HCCL on NPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Ring:
    """A process group whose ranks hand tensors to the next one.

    Parameters
    ----------
    group : ProcessGroup, optional
        The default group when None.

    Raises
    ------
    ValueError
        Without an initialised group, or in a process that is not in it.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError("there is no process group: call torch.distributed.init_process_group first")
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not in the group")

    @property
    def devices(self) -> tuple[str, ...]:
        """Return the types of the devices that the group serves."""
        pairs = dist.get_backend_config(self.group).split(",")
        return tuple(sorted({pair.partition(":")[0] for pair in pairs}))

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return the tensor of every rank; all have one shape and dtype."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, group=self.group)
        return parts

    def tell(self, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
        """Return the integers of every rank, on the host."""
        every = torch.stack(self.gather(torch.tensor(numbers, dtype=torch.int64, device=device))).tolist()
        return [[int(number) for number in each] for each in every]

    def rotate(self, held: Tensor, lengths: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield (rank, tensor that it held), this rank first; the next tensor travels meanwhile.

        Parameters
        ----------
        held : Tensor (..., S, D)
        lengths : sequence of int
            S of every rank.
        """
        for step in range(self.size):
            source = (self.rank - step) % self.size
            if step == self.size - 1:
                yield source, held
                return
            arrived = self._start(held, lengths[(source - 1) % self.size])
            yield source, held
            held = arrived()

    def hand_on(self, held: Tensor, length: int) -> Tensor:
        """Send (..., S, D) to the next rank, and return what the previous rank sent: (..., length, D)."""
        return held if self.size == 1 else self._start(held, length)()

    def _start(self, held: Tensor, length: int) -> Callable[[], Tensor]:
        """Start sending to the next rank and receiving from the previous one; the result waits for the tensor."""
        held = held.contiguous()
        coming = held.new_empty((*held.shape[:-2], length, held.shape[-1]))
        after, before = ((self.rank + way) % self.size for way in (1, -1))
        if self.group is not None:
            after, before = (dist.get_global_rank(self.group, each) for each in (after, before))
        sending = dist.P2POp(dist.isend, held, after, self.group)
        receiving = dist.P2POp(dist.irecv, coming, before, self.group)
        works = dist.batch_isend_irecv([sending, receiving])

        def arrived() -> Tensor:
            for work in works:
                work.wait()
            return coming

        return arrived
