"""Launch the kernels that sort the score tiles of a masked call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pasa.ops.attention.triton.kernel_call import KernelCall
from pasa.ops.attention.triton.launcher import early, launch, launched_early
from pasa.ops.attention.triton.prefill.mask_kernel import mask_tiles_kernel, order_tiles_kernel

# A call of 2,048 rows has just 16 row tiles, so a program reads 256 bytes of each row. A thread then loads 64 bytes at
# once, and holds 32 counts. With 128 rows at a time, registers of unaligned masks and of windows spill (sm_90).
ROW_BYTES = 256
LOADED, COUNTED = 32, 16  # rows
ORDERED = 1024  # key tiles that are put in order together
# Elements. Where a stride of a mask is not known to be a multiple, the addresses of a tile take so many registers that
# the kernel of attention spills 400 others, and takes three times as long (sm_90, D = 192).
ALIGNED = 16


@dataclass(frozen=True)
class MaskTiles:
    """List which tiles of block_m query rows and block_n keys the mask and the causal band leave visible.

    Attributes
    ----------
    order : Tensor (B or 1, Hq or 1, row tiles, key tiles), INT32
        Key tiles that all rows see whole, in order from the front, and those seen in part, from the
        back.
    counts : Tensor (B or 1, Hq or 1, row tiles, 2), INT32
        The number of tiles of either kind.
    visible : Tensor (B, Hkv, group x row tiles, Skv), UINT8
        1 for keys that some row of a tile sees, of the query heads of a group that differ.
    mask : Tensor (B, Hq, Sq, Skv)
        The mask, or an aligned copy.
    """

    order: Tensor
    counts: Tensor
    visible: Tensor
    mask: Tensor

    @classmethod
    def of(cls, call: KernelCall, block_m: int, block_n: int) -> MaskTiles:
        """Read the mask once, and sort its tiles into those that are seen whole, in part, or not at all.

        Raises
        ------
        ValueError
            If the call has no mask.
        """
        if call.mask is None:
            raise ValueError("a call without a mask has no tiles to sort")
        mask = _without_repeats(call.mask)
        rows, keys = call.q.shape[2], call.k.shape[2]
        tiles = (-(-rows // block_m), -(-keys // block_n))
        order = torch.empty((*mask.shape[:2], *tiles), dtype=torch.int32, device=mask.device)
        counts = torch.empty((*order.shape[:3], 2), dtype=torch.int32, device=mask.device)
        seen = torch.empty((*order.shape[:3], keys), dtype=torch.uint8, device=mask.device)
        states = torch.empty(order.shape, dtype=torch.uint8, device=mask.device)
        copy = None if _is_aligned(mask) else _aligned_like(mask)
        written = mask if copy is None else copy
        at_once, work = max(1, ROW_BYTES // mask.element_size() // block_n), counts[..., 0].numel()
        chunks = -(-tiles[1] // at_once)
        launch(
            mask_tiles_kernel, (work * chunks, 1, 1), (mask, states, seen, written),
            (*mask.stride(), *written.stride()[:3], mask.shape[1], *tiles, chunks, rows, keys, *call.limits),
            {"MASK": call.mask_kind, "CAUSAL": call.banded, "WINDOW": call.has_window, "BLOCK_M": block_m,
             "BLOCK_N": block_n, "TILES": at_once, "LOADED": min(LOADED, block_m),
             "COUNTED": min(COUNTED, block_m), "COPY": copy is not None}, num_warps=4,
        )  # fmt: skip
        launch(
            order_tiles_kernel, (work, 1, 1), (states, order, counts), (tiles[1],),
            {"BLOCK": ORDERED, "PDL": early(mask.device)}, num_warps=4, **launched_early(mask.device),
        )  # fmt: skip
        batch, heads, _, _ = call.k.shape
        own = heads if mask.shape[1] > 1 else 1  # key heads whose query heads have masks of their own
        seen = seen.view(len(seen), own, -1, keys).expand(batch, heads, -1, keys)
        return cls(order, counts, seen, call.mask if copy is None else copy.expand_as(call.mask))

    def strides(self) -> tuple[int, int]:
        """Return the strides of batch and head, in row tiles; 0 where all share one mask."""
        batch, heads, rows = self.order.shape[:3]
        return (heads * rows if batch > 1 else 0), (rows if heads > 1 else 0)


def _without_repeats(mask: Tensor) -> Tensor:
    """Return the mask without the batches and heads that repeat it."""
    batch, heads = (slice(None) if stride else slice(1) for stride in mask.stride()[:2])
    return mask[batch, heads]


def _is_aligned(mask: Tensor) -> bool:
    """Return whether the keys of a row lie side by side, and rows at multiples of `ALIGNED`.

    A row that is one number is left as it is: written out, it would be as long as the keys.
    """
    if mask.stride(3) == 0:
        return True
    return mask.stride(3) == 1 and mask.data_ptr() % 16 == 0 and all(step % ALIGNED == 0 for step in mask.stride()[:3])


def _aligned_like(mask: Tensor) -> Tensor:
    """Return an uninitialised mask of this shape, aligned, whose rows are one if those of the mask are."""
    batch, heads, rows, keys = mask.shape
    memory = mask.new_empty(batch, heads, rows if mask.stride(2) else 1, -(-keys // ALIGNED) * ALIGNED)
    return memory[..., :keys].expand(mask.shape)
