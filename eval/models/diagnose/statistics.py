"""Numbers of one attention call, head by head: the range of its scores, and the two causes the paper names.

arXiv:2503.01873, section 3.3.2: scores overflow where keys share a bias along the sequence, and where queries and keys
resonate along the head dimension, in phase (large positive scores) or in opposition (large negative ones).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import pasa
from pasa.eval.accuracy.rmse.resonance import shifted_keys
from pasa.ops.numerics.formats import FORMATS

FP16_MAX = FORMATS["fp16"].max

ROWS = 512  # sampled queries, evenly spread; with 2 batch entries and 9,216 keys their scores are 38 MB a head
BATCH = 2  # sampled batch entries, evenly spread: the frames of a video, or the pixels of a temporal layer
CHANCE = 4.0  # independent vectors correlate beyond so many times 1/sqrt(D) once in 16,000 times


@torch.no_grad()
def head_statistics(q: Tensor, k: Tensor) -> list[dict[str, Any]]:
    """Return the numbers of every query head of a call.

    At most `BATCH` entries and `ROWS` queries of q (B, Hq, S, D) are sampled against all keys k (B, Hkv, Skv, D),
    without the mask: a score that a mask hides is formed and stored nevertheless. ``max_score`` is the largest |q.k|,
    unscaled, and ``overflow_share`` the share beyond 65504; ``scores``, ``keys`` and ``shifted_keys`` are the smallest
    and largest q.k, K, and K' of the exact recovery in the units of K. ``sequence_bias``, ``resonance`` and ``phase``
    are those of the functions below; None for a single key, whose weight is 1 whatever its score.
    """
    q, k = (sample(x, 0, BATCH).half().float() for x in (q, k))
    group, rows, (seen, dim) = q.shape[1] // k.shape[1], sample(q, 2, ROWS), k.shape[2:]
    shifted = torch.cat([shifted_keys(part, pasa.PasaConfig()) for part in k.flatten(0, 1)[:, None, None]])
    shifted, records = shifted.reshape(k.shape), []
    for head in range(q.shape[1]):
        keys = k[:, head // group]
        scores = rows[:, head] @ keys.mT
        low, high = span(scores)
        resonance = correlation(q[:, head].mean((0, 1)), keys.mean((0, 1))) if seen > 1 else None
        records.append(
            {
                "queries": q.shape[2],
                "keys_seen": seen,
                "head_dim": dim,
                "max_score": max(-low, high),
                "overflow_share": float((scores.abs() > FP16_MAX).float().mean()),
                "scores": (low, high),
                "keys": span(keys),
                "shifted_keys": span(shifted[:, head // group]),
                "sequence_bias": sequence_bias(keys) if seen > 1 else None,
                "resonance": resonance,
                "phase": phase(resonance, dim),
            }
        )
    return records


def sample(x: Tensor, dim: int, most: int) -> Tensor:
    """Return at most `most` entries along a dimension, evenly spread, the first and the last among them."""
    size = x.shape[dim]
    if size <= most:
        return x
    return x.index_select(dim, torch.linspace(0, size - 1, most, device=x.device).round().long())


def span(x: Tensor) -> tuple[float, float]:
    """Return the smallest and the largest value."""
    low, high = x.aminmax()
    return float(low), float(high)


def sequence_bias(keys: Tensor) -> float:
    """Return the length of the mean key over the root mean square length of the keys (B, S, D).

    This is 1 if all keys are the same, about 1/sqrt(S) for S independent keys of mean 0, and 0 for keys that are all 0.
    """
    length = keys.square().sum(-1).mean().sqrt()
    mean = keys.mean(1).square().sum(-1).mean().sqrt()
    return float(mean / length) if length > 0 else 0.0


def correlation(first: Tensor, second: Tensor) -> float:
    """Return Pearson's correlation of two vectors (D,), about 1/sqrt(D) if independent; 0 if one is constant."""
    return float(torch.cosine_similarity(first - first.mean(), second - second.mean(), dim=0))


def phase(resonance: float | None, dim: int) -> int | None:
    """Return 0 or 180 degrees where the resonance is beyond `CHANCE` / sqrt(D), else None."""
    if resonance is None or abs(resonance) <= CHANCE / math.sqrt(dim):
        return None
    return 0 if resonance > 0 else 180
