"""Small pictures of the matrices of one head: the paper's figures 11 to 14 for any model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d

import pasa
from pasa.eval.accuracy.rmse.resonance import shifted_keys, stored_scores
from pasa.eval.models.diagnose.report import span_text
from pasa.eval.models.diagnose.statistics import POINTS, ROWS, sample, span

COLOURS = 32  # of a map: noise in 256 colours is what makes a PNG large
PALETTE = 64  # of the sheet
MATRICES = {  # title, rows and columns of each
    "Q": ("Q", "query", "head dimension"),
    "K": ("K", "key", "head dimension"),
    "K'": ("K′", "key", "head dimension"),
    "S": ("S = Q Kᵀ", "sampled query", "key"),
    "S'": ("S′", "sampled query", "key"),
}


@dataclass(frozen=True)
class Picture:
    """A matrix in small (`extremes`), with the range and the shape of the whole: for scores, that of `ROWS` queries."""

    values: Tensor
    low: float
    high: float
    shape: tuple[int, int]


@dataclass(frozen=True)
class HeadMaps:
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
    return {
        name: Picture(extremes(matrix).cpu(), *span(matrix), (matrix.shape[0], matrix.shape[1]))
        for name, matrix in zip(MATRICES, matrices, strict=True)
    }


def extremes(matrix: Tensor) -> Tensor:
    """Return the value of largest magnitude in every cell of a grid of at most `POINTS` x `POINTS`.

    A large score often stands alone, in a single key's column, which every n-th column would miss.
    """
    size = [min(POINTS, length) for length in matrix.shape]
    high = adaptive_max_pool2d(matrix[None], size)[0]
    low = -adaptive_max_pool2d(-matrix[None], size)[0]
    return torch.where(high >= -low, high, low)


def colours() -> Any:
    """Return a map ordered by lightness, so that it reads in grey and with any colour vision."""
    from matplotlib import colormaps

    return colormaps["viridis"].resampled(COLOURS)


def to_png(picture: Picture) -> bytes:
    """Return a PNG, one pixel a value, lowest to highest."""
    from matplotlib.image import imsave

    stream = BytesIO()
    imsave(stream, picture.values.numpy(), cmap=colours(), format="png")
    return stream.getvalue()


def draw(maps: Sequence[HeadMaps], note: str, path: Path) -> Path:
    """Draw all matrices of all heads on one sheet, a row for each head; the range stands over each matrix."""
    from matplotlib.figure import Figure
    from PIL import Image  # matplotlib brings it

    figure = Figure(figsize=(2.9 * len(MATRICES), 3.0 * len(maps) + 0.4), layout="constrained")
    parts = figure.subfigures(len(maps), 1, squeeze=False)[:, 0]
    for part, each in zip(parts, maps, strict=True):
        part.suptitle(f"{each.module}, head {each.head}, call {each.call}", fontsize=9)
        for axis, (name, picture) in zip(part.subplots(1, len(MATRICES)), each.pictures.items(), strict=True):
            title, down, across = MATRICES[name]
            extent = (0, picture.shape[1], picture.shape[0], 0)
            shown = {"aspect": "auto", "cmap": colours(), "interpolation": "nearest", "extent": extent}
            axis.imshow(picture.values.numpy(), **shown)
            axis.set_title(f"{title}  {span_text((picture.low, picture.high))}", fontsize=8)
            axis.set_xlabel(across, fontsize=7)
            axis.set_ylabel(down, fontsize=7)
            axis.tick_params(labelsize=6)
    figure.supxlabel(note, fontsize=8)
    stream = BytesIO()
    figure.savefig(stream, dpi=80)
    # 64 colours hold the map's colours and the greys of the letters, in a third of the bytes.
    Image.open(stream).convert("RGB").quantize(PALETTE).save(path, optimize=True)
    return path
