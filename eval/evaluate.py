"""Commands of `pasa eval`: whole models, with and without PASA; what rounding leaves in their outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pasa.eval.accuracy.rounding_bias import run as bias
from pasa.eval.kit import output
from pasa.eval.kit.experiment import add_command
from pasa.eval.kit.options import (
    NOTHING_KEPT,
    Json,
    deliver,
    finish,
    integer,
    integers,
    needs_models,
    stoppable,
    words,
)
from pasa.eval.research.fp8_scaling import run as fp8

evaluate = typer.Typer(name="eval", help="Whole models, with and without PASA; bias of rounding.", no_args_is_help=True)
for _experiment in (bias.EXPERIMENT,):
    add_command(evaluate, _experiment)


@evaluate.command()
def video(
    json: Json = None,
    output_dir: Annotated[
        Path | None, typer.Option(file_okay=False, help="Write JSON, Markdown, MP4, GIF and PNG there.")
    ] = None,
    model: Annotated[str, typer.Option(help='Folder of a Stable Video Diffusion checkpoint, or "tiny".')] = "tiny",
    image: Annotated[str | None, typer.Option(help="Picture to start from.")] = None,
    height: Annotated[int | None, typer.Option(parser=integer, metavar="N", help="Pixels (128; 576).")] = None,
    width: Annotated[int | None, typer.Option(parser=integer, metavar="N", help="Pixels (128; 1024).")] = None,
    frames: Annotated[int | None, typer.Option(parser=integer, metavar="N", help="Frames (4; 25).")] = None,
    steps: Annotated[int | None, typer.Option(parser=integer, metavar="N", help="Denoising steps (3; 25).")] = None,
    seed: Annotated[int, typer.Option(parser=integer, metavar="N", help="Of the noise.")] = 42,
    dtype: Annotated[str | None, typer.Option(help="Of the models in the FP16 runs: float16 or float32.")] = None,
    offload: Annotated[bool, typer.Option("--offload", help="Model offload and forward chunking.")] = False,
) -> None:
    """A video in FP32, in FP16 and in FP16 with PASA, frame by frame; exit 1 if PASA breaks it."""
    needs_models("eval video")
    from pasa.eval.models.video import clip, report, run

    with output.progress_bar("eval video") as progress:
        result, clips = run.run_video(
            model,
            image=image,
            height=height,
            width=width,
            frames=frames,
            steps=steps,
            seed=seed,
            dtype=dtype,
            offload=offload,
            progress=stages(progress, 6 if model == clip.TINY else 3),
        )
    deliver(result, json, report.render)
    if output_dir is not None:
        report.save(result, clips, output_dir, run.FPS)
    raise typer.Exit(0 if result["gate"]["passed"] else 1)


GOES_ON = "start again with the same --output-dir to go on"


@evaluate.command()
def fp8(
    json: Json = None,
    output_dir: Annotated[Path | None, typer.Option(file_okay=False, help="Write JSON and Markdown there.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Synthetic weights alone.")] = False,
) -> None:
    """FP8 scale factors of logits in transients of training; exit 1 if those from the weights overflow."""
    needs_models("eval fp8")
    from pasa.eval.research.fp8_scaling import report, run

    with output.progress_bar("eval fp8") as progress:
        result = run.run_fp8(quick, progress)
    finish(result, json, output_dir, report.render, report.save)


@evaluate.command()
def zoo(
    json: Json = None,
    output_dir: Annotated[Path | None, typer.Option(file_okay=False, help="Write JSON and Markdown there.")] = None,
    kinds: Annotated[
        str | None,
        typer.Option(
            help="Between commas, of causal, base, encoder-decoder, diffusers model, diffusers pipeline. All."
        ),
    ] = None,
    names: Annotated[str | None, typer.Option(help="Classes, between commas. All.")] = None,
    jobs: Annotated[int, typer.Option(parser=integer, metavar="N", help="Processes at once.")] = 2,
) -> None:
    """Every architecture of transformers and diffusers, small, patched against unpatched; exit 1 if one is wrong."""
    needs_models("eval zoo")
    from pasa.eval.models.zoo import report, run

    kept = None if output_dir is None else output_dir / run.KEPT
    with stoppable(GOES_ON if kept else NOTHING_KEPT), output.progress_bar("eval zoo") as progress:
        result = run.run_zoo(words(kinds), words(names), jobs, kept, progress)
    finish(result, json, output_dir, report.render, report.save)


@evaluate.command()
def training(
    json: Json = None,
    output_dir: Folder = None,
    steps: Annotated[int, typer.Option(parser=integer, metavar="N", help="Of each run.")] = 300,
    seeds: Annotated[str, typer.Option(help="Of weights and batches, between commas.")] = "0,1",
    gpu_seconds: Annotated[
        float | None, typer.Option(help="Train GPT-2 small's shape on a GPU instead, so long.")
    ] = None,
    text: Annotated[Path | None, typer.Option(dir_okay=False, help="Text to train on there: some MB, UTF-8.")] = None,
) -> None:
    """Train a decoder with rounded attention, emulated: what its errors add up to; exit 1 if ours is not finite."""
    from pasa.eval.research.rounding_training import gpu, training

    if (gpu_seconds is None) != (text is None):
        raise ValueError("--gpu-seconds and --text belong together")
    with stoppable(NOTHING_KEPT), output.progress_bar("eval training") as progress:
        if text is not None and gpu_seconds is not None:
            experiment, data = gpu.EXPERIMENT, training.as_bytes(text.read_text(encoding="utf-8"))
            result = gpu.run_training_gpu(data, gpu_seconds, source=text.name, progress=progress)
        else:
            experiment = training.EXPERIMENT
            result = training.run_training(steps=steps, seeds=integers(seeds), progress=progress)
    finish(result, json, output_dir, experiment.show, experiment.save)
