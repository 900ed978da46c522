"""Commands of `pasa bench`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from pasa.eval.kit import output
from pasa.eval.kit.experiment import add_command
from pasa.eval.kit.options import (
    Json,
    deliver,
    finish,
    integer,
    integers,
)
from pasa.eval.models.longbench import throughput
from pasa.eval.models.video import step as video_step
from pasa.eval.speed.watching import run as watching

bench = typer.Typer(name="bench", help="Benchmarks.", no_args_is_help=True)
for _experiment in (throughput.EXPERIMENT, video_step.EXPERIMENT, watching.EXPERIMENT):
    add_command(bench, _experiment)

QUICK_HEADS = 4  # half a minute on two cores; the paper has 16


@bench.command()
def rmse(
    json: Json = None,
    output_dir: Annotated[
        Path | None, typer.Option(file_okay=False, help="Write JSON, CSV, Markdown and figures there.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help=f"{QUICK_HEADS} heads: under a minute on two cores.")] = False,
    heads: Annotated[int | None, typer.Option(parser=integer, metavar="N", help="Heads (16, as the paper).")] = None,
    seq: Annotated[
        int | None, typer.Option(parser=integer, metavar="N", help="Positions (1280, as the paper).")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Such as 0,1,2 (0; twelve for --large-bias).")] = None,
    overflow: Annotated[str | None, typer.Option(help="inf, saturate, or both (the default).")] = None,
    resonance: Annotated[bool, typer.Option("--resonance", help="Waves along the head dimension instead.")] = False,
    large_bias: Annotated[bool, typer.Option("--large-bias", help="Large shared biases instead.")] = False,
    sides: Annotated[bool, typer.Option("--sides", help="Shifts of K and of Q under biases instead.")] = False,
    kernels: Annotated[bool, typer.Option("--kernels", help="The Triton kernels, on a GPU or interpreted.")] = False,
) -> None:
    """RMSE of every arithmetic against FP64 on the paper's cases; exit 1 if the default one fails gate (a) or (b)."""
    from pasa.eval.accuracy.rmse import bias, plots, report, run
    from pasa.eval.accuracy.rmse import kernels as on_kernels
    from pasa.eval.accuracy.rmse import resonance as resonant
    from pasa.eval.accuracy.rmse import sides as shifted

    if resonance + large_bias + sides + kernels > 1:
        raise ValueError("--resonance, --large-bias, --sides and --kernels are experiments of their own: choose one")
    if large_bias and (overflow is not None or quick):
        raise ValueError("--large-bias takes neither --overflow nor --quick: it compares with FP32 at one small size")
    if sides and overflow is not None:
        raise ValueError("--sides takes no --overflow: its table shows both modes")
    if kernels and overflow is not None:
        raise ValueError("--kernels takes no --overflow: the scores of kernels are FP32")
    wanted = {
        "heads": QUICK_HEADS if quick and heads is None else heads,
        "seq": seq,
        "seeds": None if seeds is None else parse_seeds(seeds),
    }
    given: dict[str, Any] = {name: value for name, value in wanted.items() if value is not None}
    with output.progress_bar("bench rmse") as progress:
        if kernels:
            result = on_kernels.run_kernels(**given, progress=progress)
        elif large_bias:
            result = bias.run_large_bias(**given, progress=progress)
        elif sides:
            result = shifted.run_sides(**given, progress=progress)
        elif resonance:
            result = resonant.run_resonance(**given, overflow=overflow or "both", progress=progress)
        else:
            result = run.run_rmse(**given, overflow=overflow or "both", progress=progress)
    finish(result, json, output_dir, report.render, partial(report.save, draw=plots.draw))


@bench.command()
def speed(
    json: Json = None,
    output_dir: Annotated[
        Path | None, typer.Option(file_okay=False, help="Write JSON, Markdown and figures there.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Four small cases.")] = False,
    case: Annotated[list[str] | None, typer.Option(help="A case by name, repeatable (all).")] = None,
    implementation: Annotated[list[str] | None, typer.Option(help="An implementation, repeatable (all).")] = None,
    rounds: Annotated[int, typer.Option(parser=integer, metavar="N", help="Turns of each implementation.")] = 5,
) -> None:
    """Time attention on a CUDA device, accuracy first; exit 1 if one of ours fails the accuracy gate."""
    from pasa.eval.speed import plots, report, run

    with output.progress_bar("bench speed") as progress:
        result = run.run_speed(case, implementation, rounds, quick, progress=progress)
    finish(result, json, output_dir, report.render, partial(report.save, draw=plots.draw))


@bench.command()
def soak(
    json: Json = None,
    output_dir: Annotated[Path | None, typer.Option(file_okay=False, help="Write JSON and Markdown there.")] = None,
    cases: Annotated[int, typer.Option(parser=integer, metavar="N", help="Random calls.")] = 2000,
    seed: Annotated[int, typer.Option(parser=integer, metavar="N", help="What they are drawn from.")] = 0,
    backend: Annotated[str, typer.Option(help="A backend that can run here.")] = "triton",
    only: Annotated[int | None, typer.Option(parser=integer, metavar="N", help="Run the case of this index.")] = None,
    small: Annotated[bool, typer.Option("--small", help="Sizes for Triton's interpreter.")] = False,
    jobs: Annotated[int, typer.Option(parser=integer, metavar="N", help="Processes to share the cases.")] = 1,
) -> None:
    """Random calls of one backend, judged against FP64 and the guarantee; exit 1 if one breaks a bound."""
    from pasa.eval.random_calls.soak import report, run

    with output.progress_bar("bench soak") as progress:
        result = run.run_soak(cases, seed, backend, only, small, jobs, progress)
    finish(result, json, output_dir, report.render, report.save)


@bench.command()
def gradients(
    json: Json = None,
    output_dir: Annotated[Path | None, typer.Option(file_okay=False, help="Write JSON and Markdown there.")] = None,
    seed: Annotated[int, typer.Option(parser=integer, metavar="N", help="What inputs are drawn from.")] = 0,
    rounds: Annotated[int, typer.Option(parser=integer, metavar="N", help="Turns of each implementation.")] = 5,
) -> None:
    """Errors of gradients against FP64, and on a GPU their time beside SDPA's; exit 1 if one is too large."""
    from pasa.eval.accuracy.gradients import report, run

    with output.progress_bar("bench gradients") as progress:
        result = run.run_gradients(seed, rounds, progress)
    finish(result, json, output_dir, report.render, report.save)


@bench.command()
def ring(
    json: Json = None,
    output_dir: Annotated[Path | None, typer.Option(file_okay=False, help="Write JSON and Markdown there.")] = None,
    tokens: Annotated[int, typer.Option(parser=integer, metavar="N", help="Of the whole sequence.")] = 131072,
    heads: Annotated[str, typer.Option(help="Query and key heads, between a comma.")] = "28,4",
    rounds: Annotated[int, typer.Option(parser=integer, metavar="N", help="Rounds that are counted.")] = 5,
) -> None:
    """Causal attention of several devices beside one, under torchrun; exit 1 if it errs more than one device does."""
    from pasa.eval.speed.ring import report, run

    counts = integers(heads)
    if len(counts) != 2 or min(*counts, rounds) < 1:
        raise ValueError(f"--heads {heads!r} --rounds {rounds}: two numbers of heads, and a round, are the least")
    with output.progress_bar("bench ring") as progress:
        result = run.run_ring(tokens, (counts[0], counts[1]), rounds, progress)
    if result is None:
        return
    finish(result, json, output_dir, report.render, report.save)


@bench.command()
def unbiased(
    json: Json = None,
    output_dir: Annotated[Path | None, typer.Option(file_okay=False, help="Write JSON and Markdown there.")] = None,
    rounds: Annotated[int, typer.Option(parser=integer, metavar="N", help="Turns of each softmax.")] = 9,
) -> None:
    """What softmax="unbiased" costs on a CUDA device; exit 1 if an output is wrong, 0 if a target is missed."""
    from pasa.eval.accuracy.rounding_bias import cost, cost_report

    with output.progress_bar("bench unbiased") as progress:
        result = cost.run_cost(rounds, progress)
    finish(result, json, output_dir, cost_report.render, cost_report.save)


@bench.command()
def predict(
    json: Json = None,
    output_dir: Annotated[Path | None, typer.Option(file_okay=False, help="Write JSON and Markdown there.")] = None,
    small: Annotated[bool, typer.Option("--small", help="A tiny size, on any device.")] = False,
    turns: Annotated[int, typer.Option(parser=integer, metavar="N", help="Of each case, with and without.")] = 9,
) -> None:
    """What FP8 scales from the weights cost a forward pass on a CUDA device; exit 1 if a norm is wrong."""
    from pasa.eval.research.fp8_scaling import overhead, overhead_report

    with output.progress_bar("bench predict") as progress:
        result = overhead.run_overhead(small, turns, progress)
    finish(result, json, output_dir, overhead_report.render, overhead_report.save)


@bench.command("npu-model")
def npu_model(
    json: Json = None,
    output_dir: Annotated[
        Path | None, typer.Option(file_okay=False, help="Write JSON, Markdown and a figure there.")
    ] = None,
) -> None:
    """Model an Ascend 910B3: what the Ascend C kernels spend on the CPU twin over published rates. Not measured."""
    from pasa.eval.npu import plots, report, run

    with output.progress_bar("bench npu-model") as progress:
        result = run.run_npu_model(progress)
    deliver(result, json, report.render)
    if output_dir is not None:
        report.save(result, output_dir, plots.draw)


def parse_seeds(text: str) -> list[int]:
    """Integers between commas.

    Raises
    ------
    ValueError
        Naming what is not an integer.
    """
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not part.isdecimal():
            raise ValueError(f"--seeds {text!r}: {part!r} is not a non-negative integer")
    return [int(part) for part in parts]
