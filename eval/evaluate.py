"""Commands of `pasa eval`: whole models, with and without PASA; what rounding leaves in their outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    stages,
    stoppable,
    words,
)
from pasa.eval.models.zoo import run as zoo

evaluate = typer.Typer(name="eval", help="Whole models, with and without PASA; bias of rounding.", no_args_is_help=True)
add_command(evaluate, zoo.EXPERIMENT)


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
PRECISIONS = "fp32,bf16,fp16-eager,pasa"
Model = Annotated[str | None, typer.Option(help="Folder of a causal language model, not the built-in.")]
Precisions = Annotated[
    str, typer.Option(help="Between commas; fp32 is always added: fp32-base, bf16[-eager], fp16-{eager,sdpa}, pasa.")
]
Offset = Annotated[float | None, typer.Option(help="Constant to add to every score (131072; 0 with --model).")]
Half = Annotated[
    bool | None, typer.Option("--half/--emulate", help="FP16 models, or FP16 attention in FP32 (default on a CPU).")
]


@evaluate.command()
def longbench(
    json: Json = None,
    output_dir: Annotated[
        Path | None, typer.Option(file_okay=False, help="Answers and results; a stopped run goes on there.")
    ] = None,
    model: Model = None,
    data: Annotated[str | None, typer.Option(help="Folder, zip or hf:OWNER/NAME (default: an offline set).")] = None,
    precisions: Precisions = PRECISIONS,
    dataset: Annotated[str | None, typer.Option(help="Data sets between commas (all).")] = None,
    extended: Annotated[bool, typer.Option("--e", help="LongBench-E.")] = False,
    limit: Annotated[int | None, typer.Option(parser=integer, metavar="N", help="Items of each data set.")] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Approximate tokens of the offline set's contexts, between commas (1024).")
    ] = None,
    items: Annotated[
        int | None, typer.Option(parser=integer, metavar="N", help="Offline items of each length (1).")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(parser=integer, metavar="N", help="Longest prompt in tokens (as published).")
    ] = None,
    batch_size: Annotated[int, typer.Option(parser=integer, metavar="N", help="Items answered together.")] = 1,
    chat: Annotated[bool, typer.Option("--chat/--no-chat", help="The tokenizer's chat template.")] = True,
    offset: Offset = None,
    half: Half = None,
    diagnose: Annotated[
        int, typer.Option(parser=integer, metavar="N", help="Items of a data set whose scores are counted by layer.")
    ] = 1,
) -> None:
    """LongBench by precision; exit 1 if PASA breaks an answer or, on the built-in overflowing model, leaves FP32's."""
    needs_models("eval longbench")
    from pasa.eval.models.longbench import report, run

    with stoppable(GOES_ON if output_dir else NOTHING_KEPT), output.progress_bar("eval longbench") as progress:
        result = run.run_longbench(
            model,
            data,
            precisions=words(precisions) or (),
            datasets=words(dataset),
            extended=extended,
            limit=limit,
            tokens=None if tokens is None else integers(tokens),
            items=items,
            max_length=max_length,
            batch_size=batch_size,
            chat=chat,
            offset=offset,
            half=half,
            diagnose=diagnose,
            folder=output_dir,
            progress=progress,
        )
    if result is None:  # another process has it
        return
    finish(result, json, output_dir, report.render, report.save)


@evaluate.command()
def ppl(
    json: Json = None,
    output_dir: Annotated[Path | None, typer.Option(file_okay=False, help="Write JSON and Markdown there.")] = None,
    model: Model = None,
    text: Annotated[str | None, typer.Option(help="File to read (default: an essay).")] = None,
    precisions: Precisions = "fp32,bf16,bf16-eager,fp16-sdpa,fp16-eager,pasa",
    offsets: Annotated[
        str | None,
        typer.Option(help="Constants to add to every score, between commas (0,4096,131072; 0 with --model)."),
    ] = None,
    tokens: Annotated[int, typer.Option(parser=integer, metavar="N", help="Length of the text.")] = 2048,
    window: Annotated[int, typer.Option(parser=integer, metavar="N", help="Tokens that are read at once.")] = 1024,
    stride: Annotated[int, typer.Option(parser=integer, metavar="N", help="Tokens between two windows.")] = 512,
    half: Half = None,
) -> None:
    """Perplexity of a long text in several precisions; exit 1 if PASA leaves FP32's."""
    needs_models("eval ppl")
    from pasa.eval.models.perplexity import report, run

    with stoppable(NOTHING_KEPT), output.progress_bar("eval ppl") as progress:
        result = run.run_perplexity(
            model,
            text,
            precisions=words(precisions) or (),
            offsets=None if offsets is None else integers(offsets),
            tokens=tokens,
            window=window,
            stride=stride,
            half=half,
            progress=progress,
        )
    finish(result, json, output_dir, report.render, report.save)


@evaluate.command()
def bias(
    json: Json = None,
    output_dir: Annotated[Path | None, typer.Option(file_okay=False, help="Write JSON and Markdown there.")] = None,
    rows: Annotated[int, typer.Option(parser=integer, metavar="N", help="Independent rows of each case.")] = 2048,
    seed: Annotated[int, typer.Option(parser=integer, metavar="N", help="Of inputs and drawn roundings.")] = 0,
) -> None:
    """Signed errors where rows repeat their maximum, by rule; exit 1 if ours keeps a bias or adds an error."""
    from pasa.eval.accuracy.rounding_bias import report, run

    with stoppable(NOTHING_KEPT), output.progress_bar("eval bias") as progress:
        result = run.run_bias(rows, seed, progress)
    finish(result, json, output_dir, report.render, report.save)


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
def fuzz(
    json: Json = None,
    output_dir: Annotated[Path | None, typer.Option(file_okay=False, help="Write JSON and Markdown there.")] = None,
    cases: Annotated[int | None, typer.Option(parser=integer, metavar="N", help="Random calls (20000).")] = None,
    seed: Annotated[int | None, typer.Option(parser=integer, metavar="N", help="What they are drawn from (0).")] = None,
    replay: Annotated[str | None, typer.Option(metavar="SEED:INDEX", help="Run this case alone.")] = None,
) -> None:
    """Random calls of the whole API, right and wrong; exit 1 if one is neither correct nor refused as documented."""
    from pasa.eval.random_calls.fuzz import report, run

    with stoppable(NOTHING_KEPT), output.progress_bar("eval fuzz") as progress:
        result = run.run_fuzz(cases, seed, replay, progress)
    finish(result, json, output_dir, report.render, report.save)


@evaluate.command()
def training(
    json: Json = None,
    output_dir: Annotated[
        Path | None, typer.Option(file_okay=False, help="Write JSON, Markdown and a figure there.")
    ] = None,
    steps: Annotated[int, typer.Option(parser=integer, metavar="N", help="Of each run.")] = 300,
    seeds: Annotated[str, typer.Option(help="Of weights and batches, between commas.")] = "0,1",
    gpu_seconds: Annotated[
        float | None, typer.Option(help="Train GPT-2 small's shape on a GPU instead, so long.")
    ] = None,
    text: Annotated[Path | None, typer.Option(dir_okay=False, help="What it reads there: some MB, UTF-8.")] = None,
) -> None:
    """A decoder trained with rounded attention, emulated: what its errors add up to; exit 1 if ours is not finite."""
    from pasa.eval.research.rounding_training import gpu as training_gpu
    from pasa.eval.research.rounding_training import report as training_report
    from pasa.eval.research.rounding_training import training as emulated

    if (gpu_seconds is None) != (text is None):
        raise ValueError("--gpu-seconds and --text belong together")
    with stoppable(NOTHING_KEPT), output.progress_bar("eval training") as progress:
        if text is not None and gpu_seconds is not None:
            read = emulated.as_bytes(text.read_text(encoding="utf-8"))
            result = training_gpu.run_training_gpu(read, gpu_seconds, source=text.name, progress=progress)
        else:
            result = emulated.run_training(steps=steps, seeds=integers(seeds), progress=progress)
    deliver(result, json, training_report.render)
    if output_dir is not None:
        training_report.save(result, output_dir)
    raise typer.Exit(0 if result.get("gate", {"passed": True})["passed"] else 1)
