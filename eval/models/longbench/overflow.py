"""Counts the scores of a prompt that do not fit FP16, layer by layer."""

from __future__ import annotations

from typing import Any

import torch

from pasa.eval.kit.attention_calls import AttentionCalls
from pasa.ops.numerics.formats import FORMATS

BEYOND_FP16 = FORMATS["fp16"].overflow_threshold  # 65,520: from here on rounding to FP16 gives infinity
ROWS = 512  # queries whose scores are formed at once: with 28 heads and 8,192 keys these are 470 MB


@torch.no_grad()
def count_overflow(model: Any, ids: torch.Tensor) -> list[dict[str, Any]]:
    """Run a prompt (1, n) through a decoder that is patched with PASA; return :func:`count_scores` of each layer.

    The activations are those that PASA keeps finite. Without it, all are NaN behind the first layer that overflows.
    """
    layers: list[dict[str, Any]] = []
    with AttentionCalls(lambda q, k: layers.append(count_scores(q, k))):
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    return layers


def count_scores(q: torch.Tensor, k: torch.Tensor) -> dict[str, Any]:
    """Count over the visible pairs of causal q (B, Hq, S, D) and k (B, Hkv, Skv, D), aligned at the last key.

    Returns ``max_score`` (the largest unscaled abs(q.k), in FP32), ``overflows`` (scores that FP16 stores as infinity)
    and ``scores`` (all of them).
    """
    queries, keys, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    k = k.float().repeat_interleave(group, 1)
    largest, beyond, total = 0.0, 0, 0
    for start in range(0, queries, ROWS):
        rows = q[:, :, start : start + ROWS].float()
        last = torch.arange(start, start + rows.shape[2], device=q.device) + keys - queries
        masked = torch.arange(keys, device=q.device)[None, :] > last[:, None]
        scores = (rows @ k.mT).abs_().masked_fill_(masked, 0.0)
        largest = max(largest, float(scores.max()))
        beyond += int((scores >= BEYOND_FP16).sum())
        total += int((~masked).sum()) * q.shape[0] * q.shape[1]
    return {"max_score": largest, "overflows": beyond, "scores": total}
