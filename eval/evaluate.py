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
    stoppable,
    words,
)
from pasa.eval.models.longbench import run as longbench
from pasa.eval.models.perplexity import run as perplexity
from pasa.eval.models.video import run as video

evaluate = typer.Typer(name="eval", help="Whole models, with and without PASA; bias of rounding.", no_args_is_help=True)
for _experiment in (longbench.EXPERIMENT, perplexity.EXPERIMENT, video.EXPERIMENT):
    add_command(evaluate, _experiment)


GOES_ON = "start again with the same --output-dir to go on"


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
