"""Small pictures of the matrices of one head, Q, K, K', S and S', as in the paper's figures 11 to 14."""

from __future__ import annotations

import base64
from io import BytesIO
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d

import pasa
from pasa.eval.accuracy.rmse.resonance import shifted_keys, stored_scores

ROWS = 512  # sampled queries, evenly spread; with 2 batch entries and 9,216 keys their scores are 38 MB a head
POINTS = 128  # rows and columns of a matrix, at most
MATRICES = {  # title, rows and columns of each
    "Q": ("Q", "query", "head dimension"),
    "K": ("K", "key", "head dimension"),
    "K'": ("K′", "key", "head dimension"),
    "S": ("S = Q Kᵀ", "sampled query", "key"),
    "S'": ("S′", "sampled query", "key"),
}


class Picture(NamedTuple):
    """A matrix in small (`extremes`), and the shape of the whole: for scores, that of `ROWS` queries."""

    values: Tensor
    shape: tuple[int, ...]

    def png(self) -> str:
        """Return the address of a PNG, one pixel a value, lowest to highest, which is the picture itself."""
        from matplotlib.image import imsave

        stream = BytesIO()  # viridis is ordered by lightness: it reads in grey and with any colour vision
        imsave(stream, self.values.numpy(), cmap="viridis", format="png")
        return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


class HeadMaps(NamedTuple):
    """Pictures of one head in one call, by the names of `MATRICES`."""

    module: str
    head: int
    call: int
    max_score: float
    pictures: dict[str, Picture]


@torch.no_grad()
def head_pictures(q: Tensor, k: Tensor) -> dict[str, Picture]:
    """Return pictures of one head's q (S, D) and k (Skv, D), as FP16 holds them.

    K' and S' are those of the exact recovery, in the units of K and q.k. Scores are formed for `ROWS` queries, never
    all at once; masks are left out, as in the paper's figures.
    """
    q, k = (x.half().float() for x in (q, k))
    rows, config = sample(q, 0, ROWS), pasa.PasaConfig()
    moved = shifted_keys(k[None, None], config)[0, 0]
    matrices = (q, k, moved, rows @ k.mT, stored_scores(rows[None, None], k[None, None], config))
    return {name: Picture(extremes(x).cpu(), tuple(x.shape)) for name, x in zip(MATRICES, matrices, strict=True)}


def sample(x: Tensor, dim: int, most: int) -> Tensor:
    """Return at most `most` entries along a dimension, evenly spread, the first and the last among them."""
    size = x.shape[dim]
    if size <= most:
        return x
    return x.index_select(dim, torch.linspace(0, size - 1, most, device=x.device).round().long())


def extremes(matrix: Tensor) -> Tensor:
    """Return the value of largest magnitude in every cell of a grid of at most `POINTS` x `POINTS`.

    A large score often stands alone, in a single key's column, which every n-th column would miss.
    """
    size = [min(POINTS, length) for length in matrix.shape]
    high = adaptive_max_pool2d(matrix[None], size)[0]
    low = -adaptive_max_pool2d(-matrix[None], size)[0]
    return torch.where(high >= -low, high, low)
