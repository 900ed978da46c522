"""Count large and repeated scores of sampled query rows, without reading anything back from the device.

A small share of the query rows is scored in FP32 against all keys that they see, beside the
attention itself. Every `STRIDE`-th row is sampled, counted across batch entries, heads and calls.
So the cost is a fixed share of the scores of a call, whatever its shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pasa.ops.attention.call import NO_WINDOW, Call
from pasa.ops.attention.spec.repeated_maxima import EPSILON
from pasa.ops.attention.spec.scores import soft_capped
from pasa.ops.numerics.formats import FP16_MAX

# One query row in STRIDE is sampled. It is a prime, so that heads and batch entries differ in their
# sampled rows when lengths are powers of two.
STRIDE = 1021
FIRST_BLOCK = 128  # keys of a block in the default configuration
RUNAWAY = 8.0  # nats above the largest score of the first block
FIELDS = ("rows", "repeated", "runaway", "scores", "saturated")


def sample(counted: int, rows: int) -> range:
    """Return which of a call's B Hq Sq rows to sample, after `counted` earlier rows; most short calls have none."""
    return range((STRIDE // 2 - counted) % STRIDE, rows, STRIDE)


def count_scores(
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None,
    totals: Tensor,
    is_causal: bool,
    scale: float,
    sampled: range,
    window: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
) -> None:
    """Add the counts of one call to `totals` (5,), INT64, in the order of `FIELDS`.

    rows
        Sampled rows that see a key.
    repeated
        Of these, rows with more than one score within 1e-3 nats of the row's largest (arXiv:2510.04212, section 4.1).
    runaway
        Rows whose largest score is more than 8 nats above the largest among the first 128 keys, if
        they see one of these. FP16 tiles referenced to that block could not hold such a row to the
        accuracy of the exact recovery.
    scores
        Visible scores of the sampled rows.
    saturated
        Of these, |q.k| > 65504 before scale and mask: what plain FP16 attention stores as infinity, or as 65504.

    Scores that are not finite (because inputs or masks are not) count as masked out.

    Parameters
    ----------
    q : Tensor (B, Hq, Sq, D)
    k : Tensor (B, Hkv, Skv, D)
    attn_mask : Tensor, optional
        Bool or float, broadcastable to (B, Hq, Sq, Skv).
    totals : Tensor (5,), INT64
    is_causal, scale
        As for attention.
    sampled : range
        The sampled rows among the B Hq Sq rows of this call, as `sample` returns them: the start is
        below the step, and the stop is the number of rows.
    window, softcap
        As for attention. Scores are counted after the cap, but `saturated` before it.
    """
    lower, upper = Call(q, k, k, scale, is_causal=is_causal, window=window).band(q.shape[2], k.shape[2])
    (batch, heads, rows, _), (kv_heads, keys) = q.shape, k.shape[1:3]
    mask = None if attn_mask is None else attn_mask.expand(batch, heads, rows, keys)
    length = heads // kv_heads * rows
    for pair in range(batch * kv_heads):
        start = (sampled.start - pair * length) % sampled.step
        if start >= length:
            continue
        index = torch.arange(start, length, sampled.step, device=q.device)
        entry, kv_head, row = pair // kv_heads, pair % kv_heads, index % rows
        at = entry, kv_head * (heads // kv_heads) + index // rows, row
        products = q.detach()[at].half().float() @ k.detach()[entry, kv_head].half().float().mT  # FP16, as attention
        scores = soft_capped(products * scale, softcap)
        visible = torch.ones_like(scores, dtype=torch.bool)
        ahead = torch.arange(keys, device=q.device) - row.unsqueeze(1)
        if upper is not None:
            visible = ahead <= upper
        if lower is not None:
            visible = visible & (ahead >= lower)
        if mask is not None and mask.dtype == torch.bool:
            visible = visible & mask[at]
        elif mask is not None:
            scores = scores + mask[at].float()
        totals += _counts(products, scores, visible & torch.isfinite(scores))


def _counts(products: Tensor, scores: Tensor, visible: Tensor) -> Tensor:
    """Return the counts of rows (n, Skv), in the order of `FIELDS`."""
    seen = scores.masked_fill(~visible, -torch.inf)
    top, first = seen.amax(-1), seen[:, :FIRST_BLOCK].amax(-1)
    repeated = (visible & (top.unsqueeze(-1) - seen <= EPSILON)).sum(-1) > 1
    runaway = (first > -torch.inf) & (top - first > RUNAWAY)
    saturated = visible & (products.abs() > FP16_MAX)
    return torch.stack([x.sum() for x in (visible.any(-1), repeated, runaway, visible, saturated)])
