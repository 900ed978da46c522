"""The paper's generation script (appendix G) as a regression: the same seed in FP32, in FP16, and in FP16 with PASA."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

import pasa
from pasa.eval.kit import output
from pasa.eval.kit.device import describe, origin
from pasa.eval.kit.embedded_model import require
from pasa.eval.kit.experiment import Experiment, gate, outcome
from pasa.eval.kit.options import stages
from pasa.eval.kit.tables import Column, Table, short
from pasa.eval.models.video import clip
from pasa.eval.models.video.frames import Frames, compare, describe_frames, rms, save
from pasa.eval.models.video.overflow import OFFSET, bias_scores
from pasa.eval.models.video.tiny import tiny_pipeline
from pasa.first_nonfinite import NonFiniteWatch, models_of

FPS = 7  # the paper's
MIN_PSNR, MIN_SSIM = 45.0, 0.995  # least that frames of the tiny pipeline must reach against FP32
FARTHER = 1.10  # without overflow PASA may be this much farther from FP32 than attention that stores FP16 scores
EMULATED = pasa.PasaConfig(precision="partial")
"""Q K^T stored in FP16 before it is scaled, all else as PASA has it: the paper's FP16-FP32 allocation."""
EMULATION = "FP16 scores are emulated: Q K^T is stored in FP16 before it is scaled"
BASE = "_base"  # ends the names of the runs without the bias
TITLES = {"fp32": "FP32", "fp16": "FP16 scores", "pasa": "PASA"}
TITLES |= {name + BASE: f"{title}, no bias" for name, title in TITLES.items()}


@dataclass
class Clip:
    """One generation: its frames (F, H, W, 3), 0 to 1, the first broken module, and the largest scores."""

    frames: Frames
    first_nonfinite: dict[str, Any] | None
    scores: dict[str, float]


def run_video(
    model: Annotated[str, 'Folder of a Stable Video Diffusion checkpoint, or "tiny": random weights.'] = clip.TINY,
    image: Annotated[str | None, "Picture that the video starts from."] = None,
    height: Annotated[int | None, "Height in pixels (128 if tiny, else 576)."] = None,
    width: Annotated[int | None, "Width in pixels (128 if tiny, else 1024)."] = None,
    frames: Annotated[int | None, "Frames (4 if tiny, else 25)."] = None,
    steps: Annotated[int | None, "Denoising steps (3 if tiny, else 25)."] = None,
    dtype: Annotated[str | None, "Dtype of models in the FP16 runs: float16, or float32 (default on a CPU)."] = None,
    offload: Annotated[bool, "Save memory: offload models to the CPU, chunk the forward pass."] = False,
    folder: Path | None = None,
    progress: output.Report = output.silent,
) -> dict[str, Any]:
    """Generate a video in FP32, in FP16 and in FP16 with PASA, frame by frame; exit 1 if PASA breaks it.

    The tiny model runs once as it is, and once with a bias that makes its scores overflow. The clips are written into
    `folder`.
    """
    sizes = {"height": height, "width": width, "frames": frames, "steps": steps}
    settings = clip.make_settings(sizes, tiny=model == clip.TINY, image=image, dtype=dtype)
    if model != clip.TINY:
        clip.check_pipeline(Path(model))
    require((), "video", ("scikit-image", "imageio", "imageio-ffmpeg"))
    say = stages(progress, 6 if model == clip.TINY else 3)
    clips: dict[str, Clip] = {}
    fixture = None
    if model == clip.TINY:
        for suffix, offset, label in ((BASE, 0.0, "no bias"), ("", OFFSET, "biased scores")):
            pipeline = tiny_pipeline()
            fixture = bias_scores(pipeline.unet, offset)
            made = _runs(pipeline, settings, offload, label, say)
            clips |= {name + suffix: each for name, each in made.items()}
    else:
        clips = _runs(clip.load_pipeline(model), settings, offload, Path(model).name, say)
    if folder is not None:
        shown = {TITLES[name]: each.frames for name, each in clips.items() if not name.endswith(BASE)}
        save(shown, TITLES["fp32"], folder, FPS)
    runs = _measure(clips, biased=fixture is not None)
    used = {name: getattr(settings, name) for name in (*clip.SIZES, "seed")}
    return {
        "gate": judge(runs, tiny=fixture is not None),
        "model": model,
        "settings": {**used, "model_dtype": str(settings.dtype).removeprefix("torch."), "offload": offload},
        "fixture": fixture,
        "scores": clips["pasa"].scores or None,
        "runs": runs,
        "note": EMULATION if settings.device.type == "cuda" else f"{EMULATION}; {output.NOTE}",
        "environment": describe(settings.device, "diffusers"),
    }


def _runs(
    pipeline: Any, settings: clip.Settings, offload: bool, label: str, say: Callable[[str], None]
) -> dict[str, Clip]:
    """Return the three clips of one set of weights; the pipeline is left in the dtype of the FP16 runs."""
    clip.place(pipeline, settings.device, offload)
    say(f"{label}: FP32")
    with clip.whole_fp32():
        clips = {"fp32": generate(pipeline, settings)}
    if settings.dtype == torch.float16:
        clip.halve(pipeline)
    say(f"{label}: FP16, scores stored in FP16 (emulated)")
    with pasa.patch_pipeline(pipeline, config=EMULATED, backend="reference"):
        clips["fp16"] = generate(pipeline, settings)
    say(f"{label}: FP16, PASA")
    with pasa.patch_pipeline(pipeline):
        clips["pasa"] = generate(pipeline, settings, diagnose=settings.device.type == "cpu")
    return clips


def generate(pipeline: Any, settings: clip.Settings, *, diagnose: bool = False) -> Clip:
    """Run the pipeline once; `diagnose` records the largest scores, of the reference backend alone."""
    recorder: AbstractContextManager[list[Any]] = pasa.record_diagnostics() if diagnose else nullcontext([])
    with NonFiniteWatch(models_of(pipeline)) as watch, recorder as records:
        frames = clip.make_frames(pipeline, settings)
    names = ("max_score_before", "max_score_after") if records else ()
    scores = {name: max(float(getattr(record, name).max()) for record in records) for name in names}
    return Clip(frames.float().permute(0, 2, 3, 1).cpu().numpy(), watch.first, scores)


def _measure(clips: dict[str, Clip], *, biased: bool) -> dict[str, Any]:
    """Return the metrics of every clip, and its distance from FP32 on the same weights."""
    runs: dict[str, Any] = {}
    for name, each in clips.items():
        base = name.endswith(BASE)
        reference = "fp32_base" if base or (name == "fp32" and biased) else "fp32"
        run: dict[str, Any] = {"title": TITLES[name], "first_nonfinite": each.first_nonfinite}
        run |= describe_frames(each.frames)
        if biased and not base:
            run["rmse_to_no_bias"] = rms(each.frames - clips["fp32_base"].frames)
        if name != reference:
            run |= {"reference": reference, **compare(each.frames, clips[reference].frames)}
        runs[name] = run
    return runs


def judge(runs: dict[str, Any], *, tiny: bool) -> dict[str, Any]:
    """Return what must hold, as named booleans.

    Of any model: with PASA no value that is not finite, and no black frame that FP32 has not. Of the tiny one besides:
    FP16 scores break the biased clip, PASA is within `MIN_PSNR` and `MIN_SSIM` of FP32, and without the bias PASA is at
    most `FARTHER` times as far from FP32 as FP16 scores are.
    """
    ours = runs["pasa"]
    checks = {
        "pasa_finite": ours["nonfinite_share"] == 0 and ours["first_nonfinite"] is None,
        "pasa_not_black": ours["black_frames"] <= runs["fp32"]["black_frames"],
    }
    ratio = None
    if tiny:
        ratio = runs["pasa_base"]["rmse"] / runs["fp16_base"]["rmse"]
        checks |= {
            "fp16_breaks": runs["fp16"]["nonfinite_frames"] + runs["fp16"]["black_frames"] > 0,
            "psnr": all(value is not None and value >= MIN_PSNR for value in ours["psnr"]),
            "ssim": all(value is not None and value >= MIN_SSIM for value in ours["ssim"]),
            "no_farther_without_bias": ratio <= FARTHER,
        }
    return gate(checks, error_ratio_without_bias=ratio)


def run_table(result: dict[str, Any]) -> Table:
    """Return a row for every clip; distances are those to FP32 on the same weights."""
    settings = result["settings"]
    size = f"{settings['frames']} frames of {settings['width']} x {settings['height']}"
    title = f"{result['model']}: {size}, {settings['steps']} steps, seed {settings['seed']}"
    base = " FP32 itself and the column to no bias are compared with FP32 before the bias." if result["fixture"] else ""
    note = (
        "Broken, black: number of frames. Distances are those from FP32 on the same weights. PSNR and SSIM: worst "
        f"frame. Temporal: RMSE of the change from frame to frame.{base} Models in {settings['model_dtype']}, "
        "attention in FP16."
    )
    columns: dict[str, Column] = {
        "run": "title",
        "broken": "nonfinite_frames",
        "black": "black_frames",
        "PSNR dB": lambda run: _worst(run.get("psnr"), ".1f"),
        "SSIM": lambda run: _worst(run.get("ssim"), ".5f"),
        "RMSE": lambda run: short(run["rmse"]) if "rmse" in run else "-",
        "to no bias": lambda run: short(run["rmse_to_no_bias"]) if "rmse_to_no_bias" in run else "-",
        "temporal": lambda run: "-" if run.get("temporal_rmse") is None else short(run["temporal_rmse"]),
    }
    return Table.of(title, result["runs"].values(), columns, note)


def _worst(values: list[float | None] | None, form: str) -> str:
    """Return the smallest value; "-" for a clip that is compared with none."""
    if not values:
        return "-"
    known = [value for value in values if value is not None]
    return format(min(known), form) if len(known) == len(values) else "not finite"


def verdict(result: dict[str, Any]) -> str:
    """Return what the exit status says, with the numbers."""
    parts = []
    if fixture := result["fixture"]:
        parts.append(
            f"A bias of {fixture['bias']} in q and k of {fixture['modules']} spatial attentions adds "
            f"{fixture['offset']:,} to every score"
        )
    if scores := result["scores"]:
        before, after = scores["max_score_before"], scores["max_score_after"]
        parts.append(f"the largest |Q K^T| is {before:,.0f}, and {after:,.1f} as PASA stores it")
    if (ratio := result["gate"]["error_ratio_without_bias"]) is not None:
        parts.append(f"without the bias PASA's error is {ratio:.3f} x that of FP16 scores")
    for run in result["runs"].values():
        if first := run["first_nonfinite"]:
            parts.append(f"{run['title']}: first broken is {first['module']}, call {first['call']} of its model")
    return f"{'; '.join(parts)}. {outcome(result)}" if parts else outcome(result)


EXPERIMENT = Experiment(
    name="video",
    run=run_video,
    report=lambda result: [verdict(result), run_table(result), origin(result)],
    title="Video: one clip in FP32, in FP16, and in FP16 with PASA",
    needs_models=True,
)
