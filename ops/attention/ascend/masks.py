"""Prepare masks for the NPU kernels: one mask for a call, and the key blocks that its query tiles visit."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from pasa.ops.attention.call import NO_WINDOW, Call
from pasa.ops.attention.spec.masking import dense_mask, fitting_mask

TILE, HALF, BLOCK = 128, 64, 128  # kTileRows, kHalfRows, kBlockKeys in ascend_c/tiling/tiling.h
FRACTAL, BYTE = 16, 8  # columns that lie together on a 310P, and bits of a byte


class KernelMask(NamedTuple):
    """Hold a mask as the kernels read it (ascend_c/binding/binding.cpp, ReadMask).

    Attributes
    ----------
    elements : Tensor (B, Hq, Sq, Skv), bool or FP32
        A view: axes that repeat have strides of 0.
    visits : Tensor (B or 1, Hq or 1, tiles, blocks + 1, 3), INT64
        See `find_visits`.
    seeing, invalid : Tensor (B or 1, Hq or 1, Sq or 1), bool
        Rows that see a key, and rows to which the mask adds a NaN or +inf.
    """

    elements: Tensor
    visits: Tensor
    seeing: Tensor
    invalid: Tensor


def fold_mask(call: Call, *, has_table: bool = True) -> tuple[Call, KernelMask | None]:
    """Return the call without its mask, and the mask with the call's band in it, and with its table if `has_table`.

    Keys and values that are not finite and that no query of their head sees become 0. The matrix unit multiplies values
    by weights of 0 too, and the anchor of a block is the mean of all its keys. A float mask becomes FP32, and its NaN
    and +inf become 0, because the vector unit must not make NaN of them.
    """
    if call.mask is None:
        return call, None
    mask = dense_mask(call, call.mask)
    hidden = _hidden_keys(mask, call.k)[..., None]
    k, v = (x.masked_fill(hidden & ~torch.isfinite(x), 0.0) for x in (call.k, call.v))
    keys = call.k.shape[2]
    mask = mask.expand(-1, -1, -1, keys)
    mask = without_repeats(mask)
    invalid = torch.zeros((1, 1, 1), dtype=torch.bool, device=mask.device)
    if mask.dtype != torch.bool:
        mask = fitting_mask(mask, call.scale).float()
        bad = torch.isnan(mask) | (mask == torch.inf)
        mask, invalid = mask.masked_fill(bad, 0.0), bad.any(-1)
    mask = mask if mask.stride(3) == 1 else mask.contiguous()
    seen, elements = keeps(mask), mask.expand(*call.q.shape[:3], keys)
    bare = replace(call, k=k, v=v, mask=None, is_causal=False, window=NO_WINDOW)
    visits = find_visits(seen, call.q.shape[2]) if has_table else seen.new_empty(0, dtype=torch.int64)
    return bare, KernelMask(elements, visits, seen.any(-1), invalid)


def _hidden_keys(mask: Tensor, k: Tensor) -> Tensor:
    """Return which keys (B, Hkv, Skv) a mask (B or 1, Hq or 1, Sq or 1, Skv or 1) hides from their head's queries."""
    seen = keeps(mask).any(2)
    if seen.shape[1] > 1:
        seen = seen.unflatten(1, (k.shape[1], -1)).any(2)
    return ~seen.expand(k.shape[:3])


def keeps(mask: Tensor) -> Tensor:
    """Return where a bool or float mask lets a row see a key."""
    return mask if mask.dtype == torch.bool else mask != -torch.inf


def without_repeats(mask: Tensor) -> Tensor:
    """Return a mask (B, Hq, Sq, Skv) that may come expanded with one entry of each axis that repeats."""
    for axis in range(3):
        mask = mask.narrow(axis, 0, 1) if mask.stride(axis) == 0 else mask
    return mask


def find_visits(keep: Tensor, rows: int, tile: int = TILE) -> Tensor:
    """Return the table of visits of a bool mask (B or 1, Hq or 1, Sq or 1, Skv) for Sq = `rows`.

    A tile is 128 query rows, or 64 on a 310P. The first entry of its table is the number of its key blocks in which a
    row sees a key. The next ones are, for each of those blocks in order: the block, and 64 bits for each 64 rows. A
    bit is set where the row sees a key of the block.

    Returns
    -------
    Tensor (B or 1, Hq or 1, tiles, blocks + 1, 1 + tile / 64), INT64
    """
    seen = torch.nn.functional.pad(keep, (0, -keep.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK)).any(-1)
    seen = seen.expand(-1, -1, rows, -1)
    last = seen[:, :, -1:].expand(-1, -1, -rows % tile, -1)  # the kernel may compute the last row twice
    halves = torch.cat([seen, last], 2).unflatten(2, (-1, tile // HALF, HALF))
    places = torch.arange(HALF, device=keep.device).view(HALF, 1)
    bits = (halves.long() << places).sum(-2)  # (..., tiles, tile / 64, blocks)
    visited = bits.ne(0).any(-2)
    order = torch.argsort((~visited).int(), dim=-1, stable=True).unsqueeze(-2)
    steps = torch.cat([order, bits.gather(-1, order.expand_as(bits))], -2).mT
    count = torch.nn.functional.pad(visited.sum(-1, keepdim=True), (0, tile // HALF)).unsqueeze(-2)
    return torch.cat([count, steps], -2).contiguous()


def tile_bits(keep: Tensor) -> Tensor:
    """Return the bits of a bool mask (B or 1, Hq or 1, Sq or 1, Skv) as they lie beside a score tile of a 310P.

    A tile is 64 rows and a block of keys: 16 keys of all rows, then the next 16. Its first number is the lowest bit.

    Returns
    -------
    Tensor (B or 1, Hq or 1, tiles or 1, blocks, 1024), UINT8
    """
    keep = keep.expand(-1, -1, HALF, -1) if keep.shape[2] == 1 else keep
    whole = torch.nn.functional.pad(keep, (0, -keep.shape[3] % BLOCK, 0, -keep.shape[2] % HALF))
    tiles = whole.unflatten(3, (-1, BLOCK // FRACTAL, FRACTAL // BYTE, BYTE)).unflatten(2, (-1, HALF))
    bits = torch.zeros(tiles.shape[:-1], dtype=torch.uint8, device=keep.device)
    for place in range(BYTE):
        bits += tiles[..., place].to(torch.uint8) * 2**place
    return bits.permute(0, 1, 2, 4, 5, 3, 6).flatten(4).contiguous()
