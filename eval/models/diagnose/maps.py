"""Matrices of the worst heads, small enough to be kept and drawn: the paper's figures 11 to 14 for any model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d

import pasa
from pasa.eval.accuracy.rmse.resonance import shifted_keys, stored_scores
from pasa.eval.models.diagnose.statistics import ROWS, sample, span

MODULES = 3
"""Modules of which a head is kept: the worst head of each, because heads of one module often look the same."""
POINTS = 128
"""Rows and columns of a picture, at most."""


@dataclass(frozen=True)
class Picture:
    """A matrix in small.

    Attributes
    ----------
    values : Tensor (rows, columns)
        At most `POINTS` each; see :func:`extremes`.
    low, high : float
        Smallest and largest value of the whole matrix.
    shape : (int, int)
        Of the whole matrix; of scores, those of `ROWS` queries.
    """

    values: Tensor
    low: float
    high: float
    shape: tuple[int, int]


@dataclass(frozen=True)
class HeadMaps:
    """Pictures of one head in one call, by the paper's names: Q, K, K', S, S'."""

    module: str
    head: int
    call: int
    max_score: float
    pictures: dict[str, Picture]


class Gallery:
    """Keeps the pictures of the `most` modules with the largest scores, each from its worst call.

    Attributes
    ----------
    kept : dict of str to HeadMaps
    """

    def __init__(self, most: int = MODULES) -> None:
        self.most = most
        self.kept: dict[str, HeadMaps] = {}

    def offer(self, module: str, head: int, call: int, max_score: float, q: Tensor, k: Tensor) -> None:
        """Take a head (q (S, D), k (Skv, D)) in if it is worse than what is kept; pictures are made only then."""
        rivals = [self.kept[module]] if module in self.kept else list(self.kept.values())
        crowded = module in self.kept or len(self.kept) == self.most
        if crowded and max_score <= min(maps.max_score for maps in rivals):
            return
        self.kept[module] = HeadMaps(module, head, call, max_score, head_pictures(q, k))
        if len(self.kept) > self.most:
            del self.kept[min(self.kept, key=lambda name: self.kept[name].max_score)]

    def worst(self) -> list[HeadMaps]:
        """What is kept, largest score first."""
        return sorted(self.kept.values(), key=lambda maps: -maps.max_score)


@torch.no_grad()
def head_pictures(q: Tensor, k: Tensor) -> dict[str, Picture]:
    """Pictures of one head's q (S, D) and k (Skv, D), as FP16 holds them.

    K' and S' are those of the exact recovery, in the units of K and q.k. Scores are formed for `ROWS` queries, never
    all at once; masks are left out, as in the paper's figures.
    """
    q, k = (x.half().float() for x in (q, k))
    rows, config = sample(q, 0, ROWS), pasa.PasaConfig()
    matrices = {
        "Q": q,
        "K": k,
        "K'": shifted_keys(k[None, None], config)[0, 0],
        "S": rows @ k.mT,
        "S'": stored_scores(rows[None, None], k[None, None], config),
    }
    return {name: picture(matrix) for name, matrix in matrices.items()}


def picture(matrix: Tensor) -> Picture:
    """A matrix in small, with its range."""
    low, high = span(matrix)
    return Picture(extremes(matrix).cpu(), low, high, (matrix.shape[0], matrix.shape[1]))


def extremes(matrix: Tensor) -> Tensor:
    """The value of largest magnitude in every cell of a grid of at most `POINTS` x `POINTS`.

    A large score often stands alone, in a single key's column, which every n-th column would miss.
    """
    size = [min(POINTS, length) for length in matrix.shape]
    high = adaptive_max_pool2d(matrix[None], size)[0]
    low = -adaptive_max_pool2d(-matrix[None], size)[0]
    return torch.where(high >= -low, high, low)
