"""The counts of `pasa.watch` by their definitions in FP64; and the calls that its kernels are judged on."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from pasa.ops import library
from pasa.ops.attention.spec import watch
from pasa.ops.attention.spec.repeated_maxima import EPSILON
from pasa.ops.attention.spec.scores import RESCUE_REACH

FP16_MAX = 65504
SCALE = 0.125
SAMPLES = ((1, 0, 127), (12, 63, 127), (200, 510, watch.STRIDE))
"""Largest of the numbers, first row, step: maxima repeat; rows run away; products pass FP16."""


@dataclass(frozen=True)
class Shape:
    """A call: batch, query heads, key heads, queries, keys, head dimension; causal; mask "bool", "float" or none."""

    sizes: tuple[int, int, int, int, int, int]
    causal: bool
    mask: str | None = None

    def __str__(self) -> str:
        parts = ["causal"] * self.causal + ([f"{self.mask} mask"] if self.mask else [])
        return ", ".join([str(self.sizes), *parts])


SMALL = (Shape((2, 4, 2, 300, 407, 64), False, "bool"), Shape((1, 4, 4, 129, 300, 80), True, "float"))
SHAPES = (
    *SMALL,
    Shape((1, 28, 4, 2048, 2048, 128), True),
    Shape((1, 28, 4, 1, 32768, 128), False),
    Shape((1, 2, 2, 257, 257, 256), True),
    Shape((1, 5, 5, 2304, 2304, 64), False),
)


def judge(shapes: tuple[Shape, ...], device: torch.device) -> list[dict[str, Any]]:
    """Count each call by the counter of `device`, and say whether all five counts are those of the definitions.

    Whole numbers times 1/8: scores are exact in FP32, whatever the order of a sum, so counts can be equal.
    """
    generator, records = torch.Generator().manual_seed(0), []
    for shape in shapes:
        for size, first, step in SAMPLES:
            q, k, mask = draw(shape, size, generator)
            q, k, mask = q.to(device), k.to(device), None if mask is None else mask.to(device)
            totals = torch.zeros(len(watch.FIELDS), dtype=torch.int64, device=device)
            rows = q.shape[:3].numel()
            taken = range(first % min(step, rows), rows, step)
            library.watch_counter(device.type, q.shape[-1])(q, k, mask, totals, shape.causal, SCALE, taken)
            counts = totals.tolist()
            exact = counts == define(q, k, mask, shape.causal, SCALE, taken)
            record = {"shape": str(shape), "size": size, "step": step, "exact": exact}
            records.append(record | dict(zip(watch.FIELDS, counts, strict=True)))
    return records


def draw(shape: Shape, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return q (B, Hq, Sq, D), k (B, Hkv, Skv, D), FP16, and mask or None."""
    batch, heads, kv_heads, rows, keys, dim = shape.sizes
    q = torch.randint(-size, size + 1, (batch, heads, rows, dim), generator=generator).half()
    k = torch.randint(-size, size + 1, (batch, kv_heads, keys, dim), generator=generator).half()
    if size == 1:
        q[..., 8:] = 0  # few different scores, so that maxima repeat
    if shape.mask is None:
        return q, k, None
    keep = torch.rand(batch, 1, rows, keys, generator=generator) < 0.3
    if shape.mask == "bool":
        return q, k, keep
    return q, k, torch.randint(-9, 10, keep.shape, generator=generator).float().where(keep, -torch.inf)


def define(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float, taken: range) -> list[int]:
    """Return `watch.FIELDS` of the rows `taken` of all B Hq Sq, in FP64, a head at a time."""
    totals = [0] * len(watch.FIELDS)
    _, heads, rows, _ = q.shape
    for number, of_head in groupby(taken, lambda row: row // rows):
        entry, head, sampled = number // heads, number % heads, [row % rows for row in of_head]
        products = q[entry, head, sampled].double() @ k[entry, head // (heads // k.shape[1])].double().T
        scores, seen = products * scale, torch.ones_like(products, dtype=torch.bool)
        if causal:
            last = torch.tensor(sampled, device=q.device) + (k.shape[2] - rows)
            seen = torch.arange(k.shape[2], device=q.device) <= last[:, None]
        if mask is not None:
            added = mask.expand(*q.shape[:3], k.shape[2])[entry, head, sampled]
            added = torch.where(added, 0.0, -torch.inf) if mask.dtype == torch.bool else added
            scores, seen = scores + added.double(), seen & (added > -torch.inf)
        scores = scores.masked_fill(~seen, -torch.inf)
        top, near = scores.amax(1), scores[:, : watch.FIRST_BLOCK].amax(1)
        counts = (
            seen.any(1),
            (seen & (scores >= top[:, None] - EPSILON)).sum(1) > 1,
            (near > -torch.inf) & (top - near > RESCUE_REACH),
            seen,
            seen & (products.abs() > FP16_MAX),
        )
        totals = [total + int(each.sum()) for total, each in zip(totals, counts, strict=True)]
    return totals
