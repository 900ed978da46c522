"""Numbers of one attention call, head by head: the range of its scores, and the two causes the paper names.

arXiv:2503.01873, section 3.3.2: scores overflow where keys share a bias along the sequence, and where queries and keys
resonate along the head dimension, in phase (large positive scores) or in opposition (large negative ones).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import pasa
from pasa.eval.rmse.resonance import shifted_keys

ROWS = 512
"""Queries whose scores are formed, evenly spread; keys are all taken. 512 rows against 9,216 keys are 19 MB a head."""
BATCH = 2
"""Entries of the batch that are looked at, evenly spread: the frames of a video, or the pixels of a temporal layer."""


@dataclass(frozen=True)
class HeadStatistics:
    """One query head and the keys it sees.

    Attributes
    ----------
    max_score : float
        Largest |q.k|, unscaled: what must stay below 65504 where scores are stored in FP16.
    scores, keys, shifted_keys : (float, float)
        Smallest and largest q.k, K, and K' of the exact recovery in the units of K.
    sequence_bias : float
        Length of the mean key over the root mean square length of the keys: 1 if all keys are the same, about
        1/sqrt(S) for S independent keys of mean 0.
    resonance : float
        Correlation of the mean query and the mean key along the head dimension: 1 in phase (0 degrees), -1 in
        opposition (180 degrees).
    """

    max_score: float
    scores: tuple[float, float]
    keys: tuple[float, float]
    shifted_keys: tuple[float, float]
    sequence_bias: float
    resonance: float

    def as_dict(self) -> dict[str, Any]:
        """Return plain containers, ready for JSON."""
        return asdict(self)


@torch.no_grad()
def head_statistics(q: Tensor, k: Tensor) -> list[HeadStatistics]:
    """Look at every query head of a call.

    Parameters
    ----------
    q : Tensor (B, Hq, S, D)
    k : Tensor (B, Hkv, Skv, D)
        As :func:`pasa.attention` takes them. At most `BATCH` entries and `ROWS` queries of each are looked at, and no
        mask: a score that a mask hides is formed and stored all the same.
    """
    q, k = (sample(x, 0, BATCH).half().float() for x in (q, k))
    rows, group = sample(q, 2, ROWS), q.shape[1] // k.shape[1]
    moved = torch.cat([shifted_keys(part, pasa.PasaConfig()) for part in k.flatten(0, 1)[:, None, None]])
    moved = moved.reshape(k.shape)
    found = []
    for head in range(q.shape[1]):
        keys = k[:, head // group]
        scores = rows[:, head] @ keys.mT
        low, high = span(scores)
        found.append(
            HeadStatistics(
                max_score=max(-low, high),
                scores=(low, high),
                keys=span(keys),
                shifted_keys=span(moved[:, head // group]),
                sequence_bias=sequence_bias(keys),
                resonance=correlation(q[:, head].mean((0, 1)), keys.mean((0, 1))),
            )
        )
    return found


def sample(x: Tensor, dim: int, most: int) -> Tensor:
    """At most `most` entries along a dimension, evenly spread, the first and the last among them."""
    size = x.shape[dim]
    if size <= most:
        return x
    return x.index_select(dim, torch.linspace(0, size - 1, most, device=x.device).round().long())


def span(x: Tensor) -> tuple[float, float]:
    """Smallest and largest value."""
    low, high = x.aminmax()
    return float(low), float(high)


def sequence_bias(keys: Tensor) -> float:
    """Length of the mean key over the root mean square length of the keys (B, S, D); 0 for keys that are all 0."""
    length = keys.square().sum(-1).mean().sqrt()
    mean = keys.mean(1).square().sum(-1).mean().sqrt()
    return float(mean / length) if length > 0 else 0.0


def correlation(first: Tensor, second: Tensor) -> float:
    """Pearson's correlation of two vectors (D,); 0 where one is constant."""
    a, b = first - first.mean(), second - second.mean()
    lengths = a.norm() * b.norm()
    return float(a @ b / lengths) if lengths > 0 else 0.0
