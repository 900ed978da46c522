"""Measures a clip: distance from a reference by frame, change between frames, black and broken frames."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Frames = npt.NDArray[np.float32]  # (F, H, W, 3), 0 to 1

BLACK = 1 / 255
"""A frame is black if no value exceeds the first step of 8 bits; NaN is written as black."""


def describe_frames(frames: Frames) -> dict[str, Any]:
    """Return the share of values that are not finite, and the numbers of broken and of black frames.

    A broken frame counts as black where nothing else is in it.
    """
    broken = ~np.isfinite(frames)
    shown = np.nan_to_num(frames, nan=0.0, posinf=1.0, neginf=0.0)
    return {
        "nonfinite_share": float(broken.mean()),
        "nonfinite_frames": int(broken.any(axis=(1, 2, 3)).sum()),
        "black_frames": int((shown.max(axis=(1, 2, 3)) <= BLACK).sum()),
    }


def compare(frames: Frames, reference: Frames) -> dict[str, Any]:
    """Return the distance of a clip from a reference of the same shape.

    ``rmse`` is over all values, in units of the full range; ``psnr`` (dB) and ``ssim`` are by frame;
    ``temporal_rmse`` is that of the changes from frame to frame. None stands for a value that is not finite: equal
    frames have no PSNR, broken frames nothing at all. SSIM is that of Wang et al. (2004) as scikit-image computes it
    by default: uniform windows of 7 x 7, by channel.
    """
    from skimage.metrics import peak_signal_noise_ratio, structural_similarity

    if frames.shape != reference.shape:
        raise ValueError(f"clips of {frames.shape} and {reference.shape} cannot be compared")
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
