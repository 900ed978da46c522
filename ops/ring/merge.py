"""One output from those of chunks of keys, by their log-sum-exps (LSE), without the digits that an LSE lacks.

A chunk's weight in a row is exp(LSE of the chunk - LSE of the row). In the true frame scores may share an offset of
1e5, beside which FP32 leaves an LSE two digits behind the point: weights would be off by a percent. So all ranks
subtract one anchor from their keys, column by column, where that is exact for every key of the sequence. Softmax
does not see it, and what it adds to a row's scores, scale * q.anchor, is in no number that is compared.

What remains: a column in which some key would be rounded keeps anchor 0, and a chunk's weight errs by 2^-24 of the
row's LSE in that frame, as scores beside such a key do on one device (offsets of blocks are FP32 there).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pasa.ops.ring.group import Ring
from pasa.ops.shift_keys.reference import anchor_near, shifts_exactly


def common_anchor(k: Tensor, keys: int, ring: Ring) -> Tensor:
    """What all ranks can subtract from their keys without rounding.

    Parameters
    ----------
    k : Tensor (B, Hkv, S, D), FP16
        Keys of this rank; a NaN or infinity among them does not count.
    keys : int
        Those of all ranks.
    ring : Ring

    Returns
    -------
    Tensor (B, Hkv, 1, D), FP16
        The mean key on the grid of the largest one, or 0; the same bits on every rank.
    """
    finite = torch.nan_to_num(k.float(), nan=0.0, posinf=0.0, neginf=0.0)
    found = torch.stack((finite.sum(2, keepdim=True), finite.abs().amax(2, keepdim=True)))
    sums, largest = torch.stack(ring.gather(found)).unbind(1)
    anchor = anchor_near(sums.sum(0) / keys, largest.amax(0))
    exact = shifts_exactly(finite, anchor).all(2, keepdim=True)
    everywhere = torch.stack(ring.gather(exact.to(torch.uint8))).bool().all(0)
    return anchor.where(everywhere, 0.0).half()


class Merge:
    """Weighted mean of the outputs of chunks, in FP32, to be rounded once.

    The weights are exp(LSE - largest LSE so far) over their sum, so the result is a mean whatever the LSEs lack: it
    lies within the range of the values, and its error is at most the largest of the chunks' plus one rounding.

    Parameters
    ----------
    q : Tensor (B, Hq, S, D)
        For shape and device.
    """

    def __init__(self, q: Tensor) -> None:
        self.out = q.new_zeros(q.shape, dtype=torch.float32)
        self.top = q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float32)
        self.sum = torch.zeros_like(self.top)

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Take in what rows found in a chunk: output (B, Hq, R, D), LSE (B, Hq, R). Each row sees some key of it."""
        old = self.top[:, :, rows]
        top = torch.maximum(old, lse)
        keep, new = torch.exp(old - top), torch.exp(lse - top)
        self.top[:, :, rows] = top
        self.sum[:, :, rows].mul_(keep).add_(new)
        self.out[:, :, rows].mul_(keep.unsqueeze(-1)).addcmul_(out, new.unsqueeze(-1))

    def finish(self) -> tuple[Tensor, Tensor]:
        """Output and LSE, both FP32; nothing can be added any more."""
        return self.out.div_(self.sum.unsqueeze(-1)), self.top + torch.log(self.sum)
