"""Frames of clips: how far they are from a reference, which are black or broken, and pictures of them to look at."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Frames = npt.NDArray[np.float32]  # (F, H, W, 3), 0 to 1

BLACK = 1 / 255  # a frame is black if no value exceeds the first step of 8 bits; NaN is written as black
COLUMNS = 6  # frames on a contact sheet
LABEL = 18  # height in pixels of the line above a row
TILE = 256  # frames are shown no wider than this


def describe_frames(frames: Frames) -> dict[str, Any]:
    """Return the share of values that are not finite, and the numbers of broken and of black frames.

    A broken frame counts as black where nothing else is in it.
    """
    broken = ~np.isfinite(frames)
    return {
        "nonfinite_share": float(broken.mean()),
        "nonfinite_frames": int(broken.any(axis=(1, 2, 3)).sum()),
        "black_frames": int((_shown(frames).max(axis=(1, 2, 3)) <= BLACK).sum()),
    }


def compare(frames: Frames, reference: Frames) -> dict[str, Any]:
    """Return the distance of a clip from a reference of the same shape.

    ``rmse`` is over all values, in units of the full range; ``psnr`` (dB) and ``ssim`` are by frame;
    ``temporal_rmse`` is that of the changes from frame to frame. None stands for a value that is not finite: equal
    frames have no PSNR, broken frames nothing at all. SSIM is that of Wang et al. (2004) as scikit-image computes it
    by default: uniform windows of 7 x 7, by channel.
    """
    from skimage.metrics import peak_signal_noise_ratio, structural_similarity

    pairs = list(zip(reference, frames, strict=True))
    with np.errstate(divide="ignore", invalid="ignore"):
        psnr = [float(peak_signal_noise_ratio(a, b, data_range=1.0)) for a, b in pairs]
        ssim = [float(structural_similarity(a, b, data_range=1.0, channel_axis=-1)) for a, b in pairs]
    return {
        "rmse": rms(frames - reference),
        "psnr": [_finite(value) for value in psnr],
        "ssim": [_finite(value) for value in ssim],
        "temporal_rmse": rms(np.diff(frames, axis=0) - np.diff(reference, axis=0)),
    }


def rms(difference: Frames) -> float | None:
    """Return the root mean square; None where it is not finite."""
    return _finite(float(np.sqrt(np.mean(np.square(difference, dtype=np.float64)))))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _shown(frames: Frames) -> Frames:
    """Return the values as the pipeline itself would write them: NaN is black."""
    return np.clip(np.nan_to_num(frames, nan=0.0, posinf=1.0, neginf=0.0), 0, 1)


def to_images(frames: Frames) -> list[Any]:
    """Return the frames as PIL images."""
    from PIL import Image

    return [Image.fromarray(frame) for frame in (255 * _shown(frames)).round().astype(np.uint8)]


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
