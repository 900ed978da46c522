"""Drawings of a diagnosis: a map of all heads, and the matrices of one head as in the paper's figures 11 to 14."""

from __future__ import annotations

import base64
import math
from html import escape
from io import BytesIO
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d

import pasa
from pasa.eval.accuracy.rmse.resonance import shifted_keys, stored_scores
from pasa.eval.models.diagnose.report import FP16_MAX, number, ratio

ROWS = 512  # sampled queries, evenly spread; with 2 batch entries and 9,216 keys their scores are 38 MB a head
POINTS = 128  # rows and columns of a matrix, at most
MATRICES = {  # title, rows and columns of each
    "Q": ("Q", "query", "head dimension"),
    "K": ("K", "key", "head dimension"),
    "K'": ("K′", "key", "head dimension"),
    "S": ("S = Q Kᵀ", "sampled query", "key"),
    "S'": ("S′", "sampled query", "key"),
}
LETTER, CELL, LINE = 6.2, 26, 16  # pixels: width of a letter, width and height of a cell
LEGEND = {"≤ 0.001": 0.001, "0.01": 0.01, "0.1": 0.1, "1": 1.0, "> 1": 1.001, "≥ 10": 10.0}
STYLE = (
    "svg.map{font:11px system-ui,sans-serif;color:#1b1f24}.map text{fill:currentColor}"
    ".within{fill:#2f6fb5}.beyond{fill:#c0271d;stroke:currentColor}"
    "@media(prefers-color-scheme:dark){svg.map{color:#e6e9ec}}"
)


def draw_map(result: dict[str, Any]) -> str:
    """Return an SVG with a rectangle for each layer and head, coloured by its largest score over 65504.

    The scale is logarithmic from 0.001 to 10, and saturated outside. It is blue up to 1, where FP16 ends, and red and
    outlined beyond. Layers are in the order of their first call.
    """
    lines = {layer: LINE * (row + 3) for row, layer in enumerate(result["modules"]["calls"])}
    heads = 1 + max(each["head"] for each in result["records"])
    left = LETTER * max(map(len, lines)) + 4
    parts = [_text(left, 2 * LINE, "layer", "end"), _text(left + CELL / 2, LINE, "head")]
    parts += [_text(left + CELL * (head + 0.5), 2 * LINE, str(head), "middle") for head in range(heads)]
    parts += [_text(left, y, layer, "end") for layer, y in lines.items()]
    for each in result["records"]:
        score = f"{number(each['max_score'])}, {ratio(each['max_score'])} × 65504"
        title = f"{each['module']}, head {each['head']}: peak {score}"
        parts.append(_cell(left + CELL * (each["head"] + 0.5) - 11, lines[each["module"]], each["max_score"], title))
    bottom = LINE * (len(lines) + 4)
    parts.append(_text(left, bottom, "peak / 65504", "end"))
    for index, (label, share) in enumerate(LEGEND.items()):
        x = left + 8 + 3 * CELL * index
        parts += [_cell(x, bottom, share * FP16_MAX, label), _text(x + CELL, bottom, label)]
    width, height = left + CELL * max(heads, 3 * len(LEGEND)) + 8, bottom + LINE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="map" role="img" width="{width:.0f}" height="{height}" '
        f'aria-label="Largest score of every head over 65504"><style>{STYLE}</style>{"".join(parts)}</svg>\n'
    )


def _cell(x: float, baseline: float, score: float, title: str) -> str:
    share = score / FP16_MAX
    depth = min(1.0, max(0.0, math.log10(max(share, 1e-9)) / 3 + 1 if share <= 1 else 0.5 + math.log10(share) / 2))
    return (
        f'<rect x="{x:.1f}" y="{baseline - 11:.1f}" width="22" height="14" fill-opacity="{0.08 + 0.92 * depth:.2f}" '
        f'class="{"within" if share <= 1 else "beyond"}"><title>{escape(title)}</title></rect>\n'
    )


def _text(x: float, baseline: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{baseline}" text-anchor="{anchor}">{escape(text)}</text>\n'


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
