"""Clips to look at: side by side as MP4, and a contact sheet as PNG."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pasa.eval.models.video.metrics import Frames

COLUMNS = 6  # frames on a contact sheet
LABEL = 18  # height in pixels of the line above a row
TILE = 256  # frames are shown no wider than this


def to_images(frames: Frames) -> list[Any]:
    """Return PIL images; NaN is black, as the pipeline itself would write it."""
    from PIL import Image

    levels = np.clip(np.nan_to_num(frames, nan=0.0, posinf=1.0, neginf=0.0), 0, 1)
    return [Image.fromarray(frame) for frame in (255 * levels).round().astype(np.uint8)]


def contact_sheet(clips: Mapping[str, Frames], reference: str) -> Any:
    """Return an image with some frames of every clip, a row each.

    The last row shows how the last clip differs from `reference`, amplified.
    """
    from PIL import Image, ImageDraw

    last = list(clips)[-1]
    difference = np.abs(clips[last] - clips[reference])
    largest = float(np.nanmax(difference)) if np.isfinite(difference).any() else 0.0
    gain = 1 / largest if largest > 0 else 1.0
    rows = {**clips, f"|{last} - {reference}| x {gain:,.0f}": difference * gain}
    chosen = np.unique(np.linspace(0, len(difference) - 1, COLUMNS).round().astype(int))
    height, width = difference.shape[1:3]
    size = (min(width, TILE), max(1, round(height * min(width, TILE) / width)))
    sheet = Image.new("RGB", (size[0] * len(chosen), (size[1] + LABEL) * len(rows)), "white")
    for row, (name, frames) in enumerate(rows.items()):
        top = row * (size[1] + LABEL)
        label = name if np.isfinite(frames).all() else f"{name} (not finite)"
        ImageDraw.Draw(sheet).text((4, top + 3), label, fill="black")
        for column, image in enumerate(to_images(frames[chosen])):
            sheet.paste(image.resize(size), (column * size[0], top + LABEL))
    return sheet


def save(clips: Mapping[str, Frames], reference: str, folder: Path, fps: int) -> None:
    """Write ``video.mp4``, all clips side by side in their order, and ``video.png``, the contact sheet."""
    from diffusers.utils import export_to_video

    folder.mkdir(parents=True, exist_ok=True)
    together = to_images(np.concatenate(list(clips.values()), axis=2))
    export_to_video(together, str(folder / "video.mp4"), fps=fps, macro_block_size=2)
    contact_sheet(clips, reference).save(folder / "video.png", optimize=True)
