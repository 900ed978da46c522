"""The paper's generation script (appendix G) as a regression: the same seed in FP32, in FP16, and in FP16 with PASA."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import pasa
from pasa.eval.kit import output
from pasa.eval.models.video import metrics
from pasa.eval.models.video.clip import (
    SEED,
    SIZES,
    TINY,
    Settings,
    halve,
    load_pipeline,
    make_frames,
    make_settings,
    place,
    whole_fp32,
)
from pasa.eval.models.video.overflow import OFFSET, bias_scores
from pasa.eval.models.video.tiny import tiny_pipeline
from pasa.eval.watch import NonFiniteWatch, models_of

if TYPE_CHECKING:
    from pasa.eval.models.video.metrics import Frames

FPS = 7  # the paper's
MIN_PSNR, MIN_SSIM = 45.0, 0.995
"""What frames of the tiny pipeline must reach against FP32."""
FARTHER = 1.10
"""Without overflow PASA may be this much farther from FP32 than attention that stores its scores in FP16."""
EMULATED = pasa.PasaConfig(precision="partial")
"""Q K^T stored in FP16 before it is scaled, all else as PASA has it: the paper's FP16-FP32 allocation."""
EMULATION = "FP16 scores are emulated: Q K^T is stored in FP16 before it is scaled"
Progress = Callable[[str], None]


@dataclass
class Clip:
    """One generation: its frames (F, H, W, 3), 0 to 1, and what was seen on the way."""

    frames: Frames
    seconds: float
    first_nonfinite: dict[str, Any] | None
    scores: dict[str, float] = field(default_factory=dict)


def run_video(
    model: str = TINY,
    *,
    image: str | None = None,
    height: int | None = None,
    width: int | None = None,
    frames: int | None = None,
    steps: int | None = None,
    seed: int = SEED,
    dtype: str | None = None,
    offload: bool = False,
    progress: Progress | None = None,
) -> tuple[dict[str, Any], dict[str, Frames]]:
    """Generate one clip in FP32, in FP16 with scores stored in FP16, and in FP16 with PASA; compare the frames.

    Parameters
    ----------
    model : str
        Folder of a Stable Video Diffusion checkpoint, or "tiny": random weights, run once as they are and once with
        scores that a bias makes overflow. Nothing is downloaded.
    image : str, optional
        Picture to start from; a synthetic one by default.
    height, width, frames, steps : int, optional
        Pixels (multiples of 8), frames and denoising steps; by default 128, 128, 4 and 3 for "tiny", and the paper's
        576, 1024, 25 and 25 for a checkpoint.
    seed : int
        Of the noise, drawn on the CPU and so the same on every device and in both dtypes.
    dtype : str, optional
        "float16" or "float32": what the models run in when attention is FP16. Default: float16 on an accelerator;
        on a CPU float32, where FP16 convolutions are slow and attention alone is compared.
    offload : bool
        Model offload and forward chunking, as in the paper's script.
    progress : callable, optional
        Called with a line before each run.

    Returns
    -------
    result : dict
        JSON-able: ``gate``, ``runs`` (metrics of each clip, by name), ``fixture``, ``settings``, ``environment``.
    clips : dict
        Frames (F, H, W, 3) of the runs to look at, by title; FP32 first.

    Raises
    ------
    FileNotFoundError, ValueError
        The model is not a folder; a size, dtype or image that cannot be used.
    """
    sizes = {"height": height, "width": width, "frames": frames, "steps": steps}
    settings = make_settings(sizes, tiny=model == TINY, image=image, seed=seed, dtype=dtype)
    say = progress or (lambda line: None)
    clips: dict[str, Clip] = {}
    fixture = None
    if model == TINY:
        pipeline = tiny_pipeline()
        bias_scores(pipeline.unet, offset=0)
        clips |= {f"{name}_base": clip for name, clip in _runs(pipeline, settings, offload, "no bias", say).items()}
        pipeline = tiny_pipeline()
        fixture = bias_scores(pipeline.unet, OFFSET)
        clips |= _runs(pipeline, settings, offload, "biased scores", say)
    else:
        clips = _runs(load_pipeline(model), settings, offload, Path(model).name, say)
    result = _collect(clips, settings, model, fixture, offload)
    return result, {title: clips[name].frames for name, title in TITLES.items() if name in clips and "base" not in name}


TITLES = {
    "fp32_base": "FP32, no bias",
    "fp16_base": "FP16 scores, no bias",
    "pasa_base": "PASA, no bias",
    "fp32": "FP32",
    "fp16": "FP16 scores",
    "pasa": "PASA",
}


def _runs(pipeline: Any, settings: Settings, offload: bool, what: str, say: Progress) -> dict[str, Clip]:
    """The three clips of one set of weights; the pipeline is left in the dtype of the FP16 runs."""
    place(pipeline, settings.device, offload)
    say(f"{what}: FP32")
    with whole_fp32():
        clips = {"fp32": generate(pipeline, settings)}
    if settings.dtype == torch.float16:
        halve(pipeline)
    say(f"{what}: FP16, scores stored in FP16 (emulated)")
    with pasa.patch_pipeline(pipeline, config=EMULATED, backend="reference"):
        clips["fp16"] = generate(pipeline, settings)
    say(f"{what}: FP16, PASA")
    with pasa.patch_pipeline(pipeline):
        clips["pasa"] = generate(pipeline, settings, diagnose=settings.device.type == "cpu")
    return clips


def generate(pipeline: Any, settings: Settings, *, diagnose: bool = False) -> Clip:
    """Run the pipeline once.

    Parameters
    ----------
    diagnose : bool
        Record the largest score before and after the shift; of the reference backend alone.
    """
    recorder: AbstractContextManager[list[Any]] = pasa.record_diagnostics() if diagnose else nullcontext([])
    started = time.perf_counter()
    with NonFiniteWatch(models_of(pipeline)) as watch, recorder as records:
        frames = make_frames(pipeline, settings)
    array = frames.float().permute(0, 2, 3, 1).cpu().numpy()
    scores = {
        name: max(float(getattr(record, name).max()) for record in records)
        for name in ("max_score_before", "max_score_after")
        if records
    }
    return Clip(array, time.perf_counter() - started, watch.first, scores)


def _collect(
    clips: dict[str, Clip], settings: Settings, model: str, fixture: dict[str, Any] | None, offload: bool
) -> dict[str, Any]:
    """Metrics of every clip against FP32 on the same weights, and the verdict."""
    runs: dict[str, Any] = {}
    for name, clip in clips.items():
        reference = "fp32_base" if name.endswith("_base") or (name == "fp32" and fixture) else "fp32"
        runs[name] = {"title": TITLES[name], "seconds": clip.seconds, "first_nonfinite": clip.first_nonfinite}
        runs[name] |= metrics.describe(clip.frames)
        if fixture and not name.endswith("_base"):
            runs[name]["rmse_to_no_bias"] = metrics.rms(clip.frames - clips["fp32_base"].frames)
        if name != reference:
            runs[name] |= {"reference": reference, **metrics.compare(clip.frames, clips[reference].frames)}
    import diffusers

    return {
        "experiment": "video",
        "gate": judge(runs, tiny=fixture is not None),
        "model": model,
        "settings": {
            **{name: getattr(settings, name) for name in (*SIZES, "seed")},
            "model_dtype": str(settings.dtype).removeprefix("torch."),
            "offload": offload,
        },
        "fixture": fixture,
        "scores": clips["pasa"].scores or None,
        "runs": runs,
        "note": EMULATION if settings.device.type == "cuda" else f"{EMULATION}; {output.NOTE}",
        "environment": {**output.environment(), "diffusers": diffusers.__version__, "device": _name(settings.device)},
    }


def judge(runs: dict[str, Any], *, tiny: bool) -> dict[str, Any]:
    """What must hold, as named booleans.

    Of any model: with PASA no value that is not finite, and no black frame that FP32 has not. Of the tiny one besides:
    FP16 scores break the biased clip, PASA is within `MIN_PSNR` and `MIN_SSIM` of FP32, and without the bias PASA is at
    most `FARTHER` times as far from FP32 as FP16 scores are.
    """
    pasa_run = runs["pasa"]
    checks = {
        "pasa_finite": pasa_run["nonfinite_share"] == 0 and pasa_run["first_nonfinite"] is None,
        "pasa_not_black": pasa_run["black_frames"] <= runs["fp32"]["black_frames"],
    }
    ratio = None
    if tiny:
        broken = runs["fp16"]["nonfinite_frames"] + runs["fp16"]["black_frames"]
        ratio = runs["pasa_base"]["rmse"] / runs["fp16_base"]["rmse"]
        checks |= {
            "fp16_breaks": broken > 0,
            "psnr": all(value is not None and value >= MIN_PSNR for value in pasa_run["psnr"]),
            "ssim": all(value is not None and value >= MIN_SSIM for value in pasa_run["ssim"]),
            "no_farther_without_bias": ratio <= FARTHER,
        }
    return {"passed": all(checks.values()), "checks": checks, "error_ratio_without_bias": ratio}


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
