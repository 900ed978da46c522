"""Subtract from all keys of a head what they share, where that costs no row any accuracy.

A bias that all keys share shifts all scores of a row alike, so softmax does not change. FP32 sums of shorter products
are more accurate. Nothing else depends on anchors: scores are bounded without them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pasa.ops.attention.call import Call, capturing
from pasa.ops.attention.spec.masking import hidden_keys

LEAST_KEYS = 512  # with fewer keys, the passes over them cost more than a tenth of the attention
LEAST_ROWS = 16  # query rows of a key head; decoding would read all keys three times instead of once
# K is read twice and written once, V once: with 8192 rows this takes up to a tenth of the time of the attention (H100,
# causal), and half of that with twice as many.
LEAST_ROWS_ON_GPU = 16384


def rows_of_key_head(call: Call) -> int:
    """Return the number of query rows that share a key head."""
    return call.q.shape[2] * (call.q.shape[1] // call.k.shape[1])


def pay(call: Call) -> bool:
    """Return whether anchors are worth the passes over the keys."""
    least = LEAST_ROWS_ON_GPU if call.q.is_cuda else LEAST_ROWS
    return call.k.shape[2] >= LEAST_KEYS and rows_of_key_head(call) >= least


def head_anchors(call: Call) -> Tensor | None:
    """Return what to subtract from the keys of each head, (B, Hkv, 1, D), FP16; None for nothing.

    The anchor of a column is the middle between the smallest and the largest key that some row sees, if both have one
    sign and the larger is at most three times the smaller; otherwise it is 0. Then every key is half to twice the
    anchor. So the difference is exact (Sterbenz), no longer than the key, and each score errs by no more than it would
    without anchors, whichever keys its row sees.
    """
    k = call.k
    if not pay(call):
        return None
    least, most = _extremes(k, None if call.mask is None else hidden_keys(call.mask, k)[:, None, :, None])
    nearest, farthest = torch.minimum(least.abs(), most.abs()), torch.maximum(least.abs(), most.abs())
    shared = (least.sign() == most.sign()) & (farthest <= 3 * nearest) & torch.isfinite(farthest)
    if not capturing(k) and not bool(shared.any()):
        return None
    return torch.where(shared, (least + most) / 2, 0.0).half()


def _extremes(k: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest value of each column, (B, Hkv, 1, D), FP32, over the keys that are seen."""
    if hidden is None:
        least, most = k.aminmax(dim=2, keepdim=True)
    else:
        least = k.masked_fill(hidden, torch.inf).amin(2, keepdim=True)
        most = k.masked_fill(hidden, -torch.inf).amax(2, keepdim=True)
    return least.float(), most.float()
