"""Pictures of matrices: bare pixels for the page, and one sheet with axes for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from pasa.eval.models.diagnose.maps import HeadMaps, Picture
from pasa.eval.models.diagnose.words import span

AXES = {"Q": ("query", "head dimension"), "S": ("sampled query", "key"), "S'": ("sampled query", "key")}
OTHER_AXES = ("key", "head dimension")
TITLES = {"S": "S = Q Kᵀ", "K'": "K′", "S'": "S′"}
COLOURS = 32  # of the map: noise in 256 colours is what makes a PNG large
PALETTE = 64  # of the sheet


def colours() -> Any:
    """Ordered by lightness, so that it reads in grey and with any colour vision."""
    from matplotlib import colormaps

    return colormaps["viridis"].resampled(COLOURS)


def title(name: str) -> str:
    """A matrix's name as the paper writes it."""
    return TITLES.get(name, name)


def axes_of(name: str) -> tuple[str, str]:
    """What the rows and the columns of a matrix are."""
    return AXES.get(name, OTHER_AXES)


def to_png(picture: Picture) -> bytes:
    """A PNG, one pixel a value, lowest to highest."""
    from matplotlib.image import imsave

    stream = BytesIO()
    imsave(stream, picture.values.numpy(), cmap=colours(), format="png")
    return stream.getvalue()


def draw(maps: Sequence[HeadMaps], note: str, path: Path) -> Path:
    """All matrices of all heads on one sheet, a row each; the range stands over each."""
    from matplotlib.figure import Figure
    from PIL import Image  # matplotlib brings it

    columns = max(len(each.pictures) for each in maps)
    figure = Figure(figsize=(2.9 * columns, 3.0 * len(maps) + 0.4), layout="constrained")
    parts = figure.subfigures(len(maps), 1, squeeze=False)[:, 0]
    for part, each in zip(parts, maps, strict=True):
        part.suptitle(f"{each.module}, head {each.head}, call {each.call}", fontsize=9)
        for axis, (name, picture) in zip(part.subplots(1, columns), each.pictures.items(), strict=True):
            _panel(axis, name, picture)
    figure.supxlabel(note, fontsize=8)
    stream = BytesIO()
    figure.savefig(stream, dpi=80)
    # A palette holds them: the map's colours and the greys of the letters, a third of the bytes.
    Image.open(stream).convert("RGB").quantize(PALETTE).save(path, optimize=True)
    return path


def _panel(axis: Any, name: str, picture: Picture) -> None:
    rows, columns = picture.shape
    axis.imshow(
        picture.values.numpy(),
        aspect="auto",
        cmap=colours(),
        interpolation="nearest",
        extent=(0, columns, rows, 0),
    )
    down, across = axes_of(name)
    axis.set_title(f"{title(name)}  {span((picture.low, picture.high))}", fontsize=8)
    axis.set_xlabel(across, fontsize=7)
    axis.set_ylabel(down, fontsize=7)
    axis.tick_params(labelsize=6)
