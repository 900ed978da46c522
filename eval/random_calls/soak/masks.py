"""Random masks, and what rows see of the keys."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor

FLOAT_SIZES = (1.0, 1.0, 1e4)
LOWEST = (-65504.0, torch.finfo(torch.float32).min, -torch.inf)  # what models write for "hidden"


def draw_mask(kind: str, q: Tensor, k: Tensor, rng: Random, source: torch.Generator, mild: bool) -> Tensor | None:
    """A mask for q (B, Hq, Sq, D) and k (B, Hkv, Skv, D); a row or an entry may see nothing.

    `mild`: what it adds is N(0, 1) or -inf. The published algorithm keeps row vectors in FP16, where -3e38 is -inf, and
    a block of such keys NaN.
    """
    batch, heads, rows, keys = *q.shape[:3], k.shape[2]
    if kind == "none":
        return None
    share = rng.choice((0.1, 0.7, 1.0))
    if kind in ("padding", "padding-float"):
        keep = _padding(batch, keys, rng)
    else:
        shape = {"bool": (batch, heads, rows, keys), "float": (batch, 1, rows, keys), "row": (rows, 1)}.get(
            kind, (keys,)
        )
        keep = torch.rand(shape, generator=source) < share
    if kind in ("bool", "float") and rng.random() < 0.5:
        keep[:, :, rng.randrange(rows)] = False
    if kind == "float":
        size = 1.0 if mild else rng.choice(FLOAT_SIZES)
        return torch.where(keep, size * torch.randn(keep.shape, generator=source), -torch.inf)
    if kind == "padding-float":
        return torch.where(keep, 0.0, -torch.inf if mild else rng.choice(LOWEST))
    return keep


def _padding(batch: int, keys: int, rng: Random) -> Tensor:
    """Keys at the left or right that an entry does not have; in one of ten entries it has none."""
    at, left = torch.arange(keys), rng.random() < 0.5
    entries = []
    for _ in range(batch):
        hidden = keys if rng.random() < 0.1 else rng.randrange(keys)
        entries.append(at >= hidden if left else at < keys - hidden)
    return torch.stack(entries)[:, None, None]


def visible(mask: Tensor | None, causal: bool, first_row: int, rows: int, keys: int, diagonal: int,
            device: torch.device) -> Tensor:  # fmt: skip
    """What rows from `first_row` on see: (..., rows, keys), bool.

    Parameters
    ----------
    mask : Tensor, optional
        (..., rows or 1, keys or 1), bool or float.
    causal : bool
        Row i sees keys up to i + `diagonal`.
    """
    seen = torch.ones(1, 1, rows, keys, dtype=torch.bool, device=device)
    if causal:
        row = torch.arange(first_row, first_row + rows, device=device).unsqueeze(1)
        seen = seen & (torch.arange(keys, device=device) <= row + diagonal)
    if mask is not None:
        seen = seen & (mask if mask.dtype == torch.bool else mask != -torch.inf)
    return seen


def seen_rows(mask: Tensor | None, causal: bool, q: Tensor, k: Tensor) -> Tensor:
    """How many rows of all heads see each key, (B, Skv)."""
    batch, heads, rows, keys = *q.shape[:3], k.shape[2]
    seen = visible(mask, causal, 0, rows, keys, keys - rows, q.device)
    return seen.expand(batch, -1, -1, -1).sum((1, 2)) * (heads // seen.shape[1])
