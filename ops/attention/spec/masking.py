"""Masks of the reference: which keys a tile's rows see, and which results a non-finite input turns to NaN."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pasa.ops.numerics.formats import FP32_MAX

# A score, its block's offset and its frame are each below 2^43 times the scale (README.md, "Why it
# cannot overflow").
LARGEST_PRODUCT = 2.0**46


@dataclass(frozen=True)
class KeyMask:
    """Hold the causal band and dense mask of one call, to be cut tile by tile.

    Attributes
    ----------
    keep : Tensor (B or 1, Hkv or 1, G or 1, Sq, Skv), bool, optional
        An expanded view, which holds no memory of that size.
    bias : Tensor, same shape, optional
        Added to the scaled scores in FP32; -inf masks a key out.
    causal_shift : int, optional
        Row i sees keys j <= i + causal_shift.
    rows, keys : int
        Sq and Skv.
    device : torch.device
    """

    keep: Tensor | None
    bias: Tensor | None
    causal_shift: int | None
    rows: int
    keys: int
    device: torch.device

    @property
    def adds_nonfinite(self) -> bool:
        """Return whether the mask adds a NaN or +inf somewhere."""
        return self.bias is not None and bool((torch.isnan(self.bias) | (self.bias == torch.inf)).any())

    def first_row(self, key: int) -> int:
        """Return the first row that may see `key` or a later one."""
        return 0 if self.causal_shift is None else max(0, key - self.causal_shift)

    def tile(self, row: int, start: int, stop: int) -> tuple[Tensor | None, Tensor | None]:
        """Return (visible, bias) for rows from `row` on and keys [start, stop); visible is None if all are seen."""
        visible = None if self.keep is None else self.keep[..., row:, start:stop]
        bias = None if self.bias is None else self.bias[..., row:, start:stop].float()
        if bias is not None:
            visible = bias != -torch.inf
        if self.causal_shift is not None and row + self.causal_shift < stop - 1:
            rows = torch.arange(row, self.rows, device=self.device).unsqueeze(1)
            band = torch.arange(start, stop, device=self.device) <= rows + self.causal_shift
            visible = band if visible is None else visible & band
        return visible, bias


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


def read_mask(attn_mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> KeyMask:
    """Return the mask of queries (B, Hq, Sq, D) over keys (B, Hkv, Skv, D), with heads split into (Hkv, group)."""
    rows, keys = q.shape[2], k.shape[2]
    shift = keys - rows if is_causal else None
    if attn_mask is None:
        return KeyMask(None, None, shift, rows, keys, q.device)
    mask = attn_mask.reshape((1,) * (4 - attn_mask.dim()) + attn_mask.shape).expand(-1, -1, rows, keys)
    mask = mask.unflatten(1, (k.shape[1], -1)) if mask.shape[1] > 1 else mask.unsqueeze(1)
    if attn_mask.dtype == torch.bool:
        return KeyMask(mask, None, shift, rows, keys, q.device)
    return KeyMask(None, mask, shift, rows, keys, q.device)


def hidden_keys(attn_mask: Tensor, k: Tensor) -> Tensor:
    """Return which keys (B, Skv) are masked out for every query of their batch entry."""
    keep = attn_mask if attn_mask.dtype == torch.bool else attn_mask != -torch.inf
    keep = keep.reshape((1,) * (4 - keep.dim()) + keep.shape)
    return ~keep.any(1).any(1).expand(k.shape[0], k.shape[2])


def dense_mask(attn_mask: Tensor, is_causal: bool, q: Tensor, k: Tensor) -> Tensor:
    """Combine mask and causal band into one `attn_mask`, (B or 1, Hq or 1, Sq, Skv)."""
    mask = attn_mask.reshape((1,) * (4 - attn_mask.dim()) + attn_mask.shape)
    if not is_causal:
        return mask
    rows, keys = q.shape[2], k.shape[2]
    band = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
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
        visible, bias = mask.tile(0, part.start, part.stop)
        seen = q.new_ones(1) if visible is None else visible.to(q)
        seen = seen.expand(*bad_row.shape, part.stop - part.start)
        if bias is not None:
            bad_row |= ((seen > 0) & ~torch.isfinite(bias)).any(-1)
        sees_any |= seen.any(-1)
        bad_row |= (seen * bad_key[:, :, None, None, part]).any(-1)
        hits += seen @ bad_value[:, :, None, part].to(q)
    bad_row |= bad_query & sees_any
    return bad_row.flatten(1, 2), (bad_row.unsqueeze(-1) | (hits > 0)).flatten(1, 2)
