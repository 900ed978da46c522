"""Numbers of one attention call, head by head: the range of its scores, and the two causes the paper names.

arXiv:2503.01873, section 3.3.2: scores overflow where keys share a bias along the sequence, and where queries and keys
resonate along the head dimension, in phase (large positive scores) or in opposition (large negative ones).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import pasa
from pasa.eval.accuracy.rmse.resonance import shifted_keys
from pasa.ops.numerics.formats import FORMATS

FP16_MAX = FORMATS["fp16"].max

ROWS = 512
"""Queries whose scores are formed, evenly spread; keys are all taken. 512 rows of 2 batch entries against 9,216 keys
are 38 MB a head."""
BATCH = 2
"""Entries of the batch that are looked at, evenly spread: the frames of a video, or the pixels of a temporal layer."""
CHANCE = 4.0
"""Independent vectors correlate beyond so many standard deviations, 1/sqrt(D) each, once in 16,000 times."""


@dataclass(frozen=True)
class HeadStatistics:
    """One query head and the keys it sees.

    Attributes
    ----------
    queries, keys_seen, head_dim : int
        Sizes of the call.
    max_score : float
        Largest |q.k|, unscaled: what must stay below 65504 where scores are stored in FP16.
    overflow_share : float
        Share of the scores beyond 65504, 0..1.
    scores, keys, shifted_keys : (float, float)
        Smallest and largest q.k, K, and K' of the exact recovery in the units of K.
    sequence_bias : float or None
        Length of the mean key over the root mean square length of the keys: 1 if all keys are the same, about
        1/sqrt(S) for S independent keys of mean 0. None for a single key, which is its own mean.
    resonance : float or None
        Correlation of the mean query and the mean key along the head dimension: 1 in phase (0 degrees), -1 in
        opposition (180 degrees), about 1/sqrt(D) for independent vectors. None for a single key: it is added to every
        score of a row, whatever its phase.
    """

    queries: int
    keys_seen: int
    head_dim: int
    max_score: float
    overflow_share: float
    scores: tuple[float, float]
    keys: tuple[float, float]
    shifted_keys: tuple[float, float]
    sequence_bias: float | None
    resonance: float | None

    @property
    def phase(self) -> int | None:
        """0 or 180 degrees where the resonance is beyond `CHANCE` / sqrt(D), else None."""
        if self.resonance is None or abs(self.resonance) <= CHANCE / math.sqrt(self.head_dim):
            return None
        return 0 if self.resonance > 0 else 180

    def as_dict(self) -> dict[str, Any]:
        """Return plain containers, ready for JSON."""
        return asdict(self) | {"phase": self.phase}


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
    queries, group = q.shape[2], q.shape[1] // k.shape[1]
    rows = sample(q, 2, ROWS)
    moved = torch.cat([shifted_keys(part, pasa.PasaConfig()) for part in k.flatten(0, 1)[:, None, None]])
    moved = moved.reshape(k.shape)
    found, single = [], k.shape[2] == 1
    for head in range(q.shape[1]):
        keys = k[:, head // group]
        scores = rows[:, head] @ keys.mT
        low, high = span(scores)
        found.append(
            HeadStatistics(
                queries=queries,
                keys_seen=k.shape[2],
                head_dim=k.shape[3],
                max_score=max(-low, high),
                overflow_share=float((scores.abs() > FP16_MAX).float().mean()),
                scores=(low, high),
                keys=span(keys),
                shifted_keys=span(moved[:, head // group]),
                sequence_bias=None if single else sequence_bias(keys),
                resonance=None if single else correlation(q[:, head].mean((0, 1)), keys.mean((0, 1))),
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
