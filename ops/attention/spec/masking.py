"""Masks of the reference: which keys a tile's rows see, and which results a non-finite input turns to NaN."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pasa.ops.attention.call import Call
from pasa.ops.numerics.formats import FP32_MAX

# A score, its block's offset and its frame are each below 2^43 times the scale (README.md, "Why it
# cannot overflow").
LARGEST_PRODUCT = 2.0**46


@dataclass(frozen=True)
class KeyMask:
    """Hold the band of visible keys (causal, window) and the dense mask of one call, to be cut tile by tile.

    Attributes
    ----------
    keep : Tensor (B or 1, Hkv or 1, G or 1, Sq, Skv), bool, optional
        An expanded view, which holds no memory of that size.
    bias : Tensor, same shape, optional
        Added to the scaled scores in FP32; -inf masks a key out.
    lower, upper : int, optional
        Row i sees keys i + lower to i + upper.
    rows, keys : int
        Sq and Skv.
    device : torch.device
    """

    keep: Tensor | None
    bias: Tensor | None
    lower: int | None
    upper: int | None
    rows: int
    keys: int
    device: torch.device

    @property
    def adds_nonfinite(self) -> bool:
        """Return whether the mask adds a NaN or +inf somewhere."""
        return self.bias is not None and bool((torch.isnan(self.bias) | (self.bias == torch.inf)).any())

    def rows_of(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of rows that may see one of the keys [start, stop)."""
        first = 0 if self.upper is None else max(0, start - self.upper)
        return first, self.rows if self.lower is None else min(self.rows, stop - self.lower)

    def tile(self, row: int, end: int, start: int, stop: int) -> tuple[Tensor | None, Tensor | None]:
        """Return (visible, bias) for rows [row, end) and keys [start, stop); visible is None if all are seen."""
        visible = None if self.keep is None else self.keep[..., row:end, start:stop]
        bias = None if self.bias is None else self.bias[..., row:end, start:stop].float()
        if bias is not None:
            visible = bias != -torch.inf
        for band in self._edges(row, end, start, stop):
            visible = band if visible is None else visible & band
        return visible, bias

    def _edges(self, row: int, end: int, start: int, stop: int) -> Iterator[Tensor]:
        """Yield a bool tensor for each side of the band that crosses the tile."""
        keys = torch.arange(start, stop, device=self.device)
        rows = torch.arange(row, end, device=self.device).unsqueeze(1)
        if self.upper is not None and row + self.upper < stop - 1:
            yield keys <= rows + self.upper
        if self.lower is not None and end - 1 + self.lower > start:
            yield keys >= rows + self.lower


def fitting_mask(attn_mask: Tensor, scale: float) -> Tensor:
    """Return the mask with finite elements limited, so that FP32 holds their sums with scores.

    A mask of finfo.min leaves no room for a score of -2^103: their sum is -inf, which would mask
    the key out. So finite elements are clamped to FP32's largest number minus the largest score. Up
    to a scale of 2^57 that is the same number.
    """
    if attn_mask.dtype in (torch.bool, torch.float16):
        return attn_mask
    room = FP32_MAX - LARGEST_PRODUCT * scale
    if room > FP32_MAX - 2.0**103:  # less than half of FP32's last spacing
        return attn_mask
    return attn_mask.float().clamp(-room, room).where(attn_mask.isfinite(), attn_mask)


def read_mask(call: Call, attn_mask: Tensor | None) -> KeyMask:
    """Return `attn_mask` and the band of a dense call, with heads split into (Hkv, group)."""
    q, heads, rows, keys = call.q, call.k.shape[1], call.q.shape[2], call.k.shape[2]
    lower, upper = call.band(rows, keys)
    if attn_mask is None:
        return KeyMask(None, None, lower, upper, rows, keys, q.device)
    mask = attn_mask.reshape((1,) * (4 - attn_mask.dim()) + attn_mask.shape).expand(-1, -1, rows, keys)
    mask = mask.unflatten(1, (heads, -1)) if mask.shape[1] > 1 else mask.unsqueeze(1)
    if attn_mask.dtype == torch.bool:
        return KeyMask(mask, None, lower, upper, rows, keys, q.device)
    return KeyMask(None, mask, lower, upper, rows, keys, q.device)


def hidden_keys(attn_mask: Tensor, k: Tensor) -> Tensor:
    """Return which keys (B, Skv) are masked out for every query of their batch entry."""
    keep = attn_mask if attn_mask.dtype == torch.bool else attn_mask != -torch.inf
    keep = keep.reshape((1,) * (4 - keep.dim()) + keep.shape)
    return ~keep.any(1).any(1).expand(k.shape[0], k.shape[2])


def dense_mask(call: Call, attn_mask: Tensor) -> Tensor:
    """Combine `attn_mask` with the band of a dense call into one mask, (B or 1, Hq or 1, Sq, Skv)."""
    mask = attn_mask.reshape((1,) * (4 - attn_mask.dim()) + attn_mask.shape)
    rows, keys = call.q.shape[2], call.k.shape[2]
    lower, upper = call.band(rows, keys)
    if lower is None and upper is None:
        return mask
    band = torch.ones(rows, keys, dtype=torch.bool, device=mask.device)
    band = band if upper is None else band.tril(upper)
    band = band if lower is None else band.triu(lower)
    return mask & band if mask.dtype == torch.bool else mask.expand(-1, -1, rows, keys).masked_fill(~band, -torch.inf)


def non_finite_reach(q: Tensor, k: Tensor, v: Tensor, mask: KeyMask, block: int) -> tuple[Tensor, Tensor]:
    """Return the rows (B, Hq, Sq) and outputs (B, Hq, Sq, D) that NaN or infinity in q, k, v or a float mask reaches.

    A non-finite query, visible key or mask element (NaN or +inf; -inf masks out) turns the whole
    row to NaN. A non-finite visible value turns its column of the row to NaN.
    """
    groups = q.shape[1] // k.shape[1]
    bad_query = ~torch.isfinite(q).all(-1).unflatten(1, (-1, groups))  # (B, Hkv, G, Sq)
    bad_row, sees_any = torch.zeros_like(bad_query), torch.zeros_like(bad_query)
    bad_key, bad_value = ~torch.isfinite(k).all(-1), ~torch.isfinite(v)
    hits = torch.zeros_like(q).unflatten(1, (-1, groups))
    for start in range(0, mask.keys, block):
        part = slice(start, min(start + block, mask.keys))
        visible, bias = mask.tile(0, mask.rows, part.start, part.stop)
        seen = q.new_ones(1) if visible is None else visible.to(q)
        seen = seen.expand(*bad_row.shape, part.stop - part.start)
        if bias is not None:
            bad_row |= ((seen > 0) & ~torch.isfinite(bias)).any(-1)
        sees_any |= seen.any(-1)
        bad_row |= (seen * bad_key[:, :, None, None, part]).any(-1)
        hits += seen @ bad_value[:, :, None, part].to(q)
    bad_row |= bad_query & sees_any
    return bad_row.flatten(1, 2), (bad_row.unsqueeze(-1) | (hits > 0)).flatten(1, 2)
