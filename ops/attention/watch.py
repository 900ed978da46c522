"""Counts what the scores of sampled query rows do, without asking the device for a number.

A small share of the query rows is looked at, over all keys that they see and in FP32, beside the attention itself.
Rows are counted on over batch entries, heads and calls, and every `STRIDE`-th is taken: the cost is a fixed share of
the scores of a call, whatever its shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pasa.ops.attention.repeated_maxima import EPSILON
from pasa.ops.attention.scores import RESCUE_REACH
from pasa.ops.numerics.formats import FORMATS

STRIDE = 1021  # prime: with lengths that are powers of two, heads and batch entries differ in the rows that are taken
FIRST_BLOCK = 128  # keys; that of a call in the default configuration
FIELDS = ("rows", "repeated", "runaway", "scores", "saturated")


def sample(walked: int, rows: int) -> range:
    """Which of the B Hq Sq query rows of a call to take, that comes after `walked` rows; most short calls have none."""
    return range((STRIDE // 2 - walked) % STRIDE, rows, STRIDE)


def count(
    q: Tensor, k: Tensor, attn_mask: Tensor | None, totals: Tensor, is_causal: bool, scale: float, taken: range
) -> None:
    """Add one call's counts to `totals` (5,), INT64, in the order of `FIELDS`.

    rows
        Sampled rows that see a key.
    repeated
        Of these, rows with more than one score within 1e-3 nats of the row's largest (arXiv:2510.04212, section 4.1).
    runaway
        Rows whose largest score stands more than 8 nats above the largest of the first 128 keys, where they see one
        of these. FP16 tiles that refer to that block could not hold such a row to the accuracy of the exact recovery.
    scores
        Visible scores of the sampled rows.
    saturated
        Of these, |q.k| > 65504 before scale and mask: what plain FP16 attention stores as infinity, or as 65504.

    Scores that are not finite (of inputs or masks that are not) count as hidden.

    Parameters
    ----------
    q : Tensor (B, Hq, Sq, D)
    k : Tensor (B, Hkv, Skv, D)
    attn_mask : Tensor, optional
        Bool or float, broadcastable to (B, Hq, Sq, Skv).
    totals : Tensor (5,), INT64
    is_causal, scale
        As for attention.
    taken : range
        Of the B Hq Sq rows of this call, those to look at: from below the step to the last one.
    """
    (batch, heads, rows, _), (kv_heads, keys) = q.shape, k.shape[1:3]
    mask = None if attn_mask is None else attn_mask.expand(batch, heads, rows, keys)
    length = heads // kv_heads * rows
    for pair in range(batch * kv_heads):
        start = (taken.start - pair * length) % taken.step
        if start >= length:
            continue
        own = torch.arange(start, length, taken.step, device=q.device)
        entry, kv_head, row = pair // kv_heads, pair % kv_heads, own % rows
        at = entry, kv_head * (heads // kv_heads) + own // rows, row
        products = q.detach()[at].half().float() @ k.detach()[entry, kv_head].half().float().mT  # FP16, as attention
        scores = products * scale
        visible = torch.ones_like(scores, dtype=torch.bool)
        if is_causal:
            visible = torch.arange(keys, device=q.device) <= (row + (keys - rows)).unsqueeze(1)
        if mask is not None and mask.dtype == torch.bool:
            visible = visible & mask[at]
        elif mask is not None:
            scores = scores + mask[at].float()
        totals += _counts(products, scores, visible & torch.isfinite(scores))


def _counts(products: Tensor, scores: Tensor, visible: Tensor) -> Tensor:
    """`FIELDS` of rows (n, Skv)."""
    seen = scores.masked_fill(~visible, -torch.inf)
    top, first = seen.amax(-1), seen[:, :FIRST_BLOCK].amax(-1)
    repeated = (visible & (top.unsqueeze(-1) - seen <= EPSILON)).sum(-1) > 1
    runaway = (first > -torch.inf) & (top - first > RESCUE_REACH)
    saturated = visible & (products.abs() > FORMATS["fp16"].max)
    return torch.stack([x.sum() for x in (visible.any(-1), repeated, runaway, visible, saturated)])
