"""How far one clip is from another: per-frame PSNR, SSIM and LPIPS, change between frames, black and broken frames."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Frames = npt.NDArray[np.float32]  # (F, H, W, 3), 0 to 1

BLACK = 1 / 255
"""A frame is black if no value exceeds the first step of 8 bits; NaN is written as black."""
LPIPS_WEIGHTS = "alexnet-owt-7be5be79.pth"
"""Where torchvision keeps what LPIPS is computed with; the calibration of `lpips` comes in its wheel."""


def describe(frames: Frames) -> dict[str, Any]:
    """What can be said of a clip alone: broken and black frames, and how much it moves.

    Returns
    -------
    dict
        ``nonfinite_share`` of all values, 0 to 1; ``nonfinite_frames`` and ``black_frames``, numbers of frames (a
        broken frame counts as black where nothing else is in it); ``temporal_difference``, mean absolute change from
        frame to frame, in units of the full range; None where that is not finite or there is one frame.
    """
    broken = ~np.isfinite(frames)
    shown = np.nan_to_num(frames, nan=0.0, posinf=1.0, neginf=0.0)
    change = np.abs(np.diff(frames, axis=0))
    return {
        "nonfinite_share": float(broken.mean()),
        "nonfinite_frames": int(broken.any(axis=(1, 2, 3)).sum()),
        "black_frames": int((shown.max(axis=(1, 2, 3)) <= BLACK).sum()),
        "temporal_difference": _finite(float(change.mean())) if len(frames) > 1 else None,
    }


def compare(frames: Frames, reference: Frames) -> dict[str, Any]:
    """How far a clip is from a reference of the same shape.

    Returns
    -------
    dict
        ``rmse`` over all values, in units of the full range; ``psnr`` (dB) and ``ssim`` by frame; ``temporal_rmse``,
        that of the changes from frame to frame; ``lpips`` by frame, with ``lpips_missing`` the reason if it is None.
        None stands for what is not finite: frames that are equal have no PSNR, broken frames nothing at all.

    Raises
    ------
    ValueError
        Clips of different shape.

    Notes
    -----
    SSIM is that of Wang et al. (2004) as scikit-image computes it by default: uniform windows of 7 x 7, by channel.
    """
    from skimage.metrics import peak_signal_noise_ratio, structural_similarity

    if frames.shape != reference.shape:
        raise ValueError(f"clips of {frames.shape} and {reference.shape} cannot be compared")
    pairs = list(zip(reference, frames, strict=True))
    with np.errstate(divide="ignore", invalid="ignore"):
        psnr = [float(peak_signal_noise_ratio(a, b, data_range=1.0)) for a, b in pairs]
        ssim = [float(structural_similarity(a, b, data_range=1.0, channel_axis=-1)) for a, b in pairs]
    perceived, missing = lpips(frames, reference)
    return {
        "rmse": rms(frames - reference),
        "psnr": [_finite(value) for value in psnr],
        "ssim": [_finite(value) for value in ssim],
        "temporal_rmse": rms(np.diff(frames, axis=0) - np.diff(reference, axis=0)) if len(frames) > 1 else None,
        "lpips": perceived,
        "lpips_missing": missing,
    }


def lpips(frames: Frames, reference: Frames) -> tuple[list[float | None] | None, str | None]:
    """Learned perceptual distance by frame (Zhang et al., 2018; AlexNet), or None and the reason.

    Nothing is downloaded: the weights must lie where torchvision would put them.
    """
    absent = [name for name in ("lpips", "torchvision") if importlib.util.find_spec(name) is None]
    if absent:
        return None, f"{absent[0]} is not installed"
    if not (Path(torch.hub.get_dir()) / "checkpoints" / LPIPS_WEIGHTS).is_file():
        return None, f"{LPIPS_WEIGHTS} is not in torch's hub folder, and nothing is downloaded"
    import lpips as package

    model = package.LPIPS(net="alex", verbose=False).eval()
    scaled = (torch.from_numpy(clip).float().permute(0, 3, 1, 2) * 2 - 1 for clip in (frames, reference))
    with torch.no_grad():
        return [_finite(value) for value in model(*scaled).flatten().tolist()], None


def rms(difference: Frames) -> float | None:
    """Root mean square; None where it is not finite."""
    return _finite(float(np.sqrt(np.mean(np.square(difference, dtype=np.float64)))))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
