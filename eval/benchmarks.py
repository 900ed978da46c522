"""Commands of `pasa bench`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from pasa.eval.accuracy.gradients import run as gradients
from pasa.eval.accuracy.rmse import run as rmse
from pasa.eval.accuracy.rounding_bias import cost
from pasa.eval.kit import output
from pasa.eval.kit.experiment import add_command
from pasa.eval.kit.options import (
    Json,
    deliver,
    finish,
    integer,
    integers,
)
from pasa.eval.npu import run as npu
from pasa.eval.research.fp8_scaling import overhead
from pasa.eval.speed import counters
from pasa.eval.speed import run as speed
from pasa.eval.speed.ring import run as ring
from pasa.eval.speed.watching import run as watching

bench = typer.Typer(name="bench", help="Benchmarks.", no_args_is_help=True)
for _experiment in (rmse.EXPERIMENT, gradients.EXPERIMENT, cost.EXPERIMENT, watching.EXPERIMENT):
    add_command(bench, _experiment)


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
def model(
    json: Json = None,
    output_dir: Annotated[Path | None, typer.Option(file_okay=False, help="Write JSON and Markdown there.")] = None,
    config: Annotated[str, typer.Option(help="Configuration: qwen2-7b (on an accelerator), or tiny.")] = "qwen2-7b",
    tokens: Annotated[str, typer.Option(help="Prompt lengths, between commas.")] = "8192",
    attention: Annotated[str, typer.Option(help="Between commas.")] = "eager,sdpa,pasa",
    new_tokens: Annotated[int, typer.Option(parser=integer, metavar="N", help="Tokens to decode.")] = 32,
    rounds: Annotated[int, typer.Option(parser=integer, metavar="N", help="Rounds that are counted.")] = 3,
) -> None:
    """Prefill, decode and memory of a whole model with random weights, by its attention."""
    needs_models("bench model")

    from pasa.eval.kit.tables import markdown
    from pasa.eval.models.longbench import throughput

    with stoppable(NOTHING_KEPT), output.progress_bar("bench model") as progress:
        result = throughput.run_throughput(
            config,
            tokens=integers(tokens),
            attentions=words(attention) or (),
            new_tokens=new_tokens,
            rounds=rounds,
            progress=progress,
        )
    found = throughput.table(result)
    deliver(result, json, lambda _, console: found.show(console))
    if output_dir is not None:
        output.write_text(output_dir / "throughput.json", output.to_json(result))
        text = "\n\n".join([f"# {found.title}", markdown(found.header, found.rows), found.note])
        output.write_text(output_dir / "throughput.md", text + "\n")


@bench.command()
def video(
    json: Json = None,
    output_dir: Annotated[Path | None, typer.Option(file_okay=False, help="Write JSON and Markdown there.")] = None,
    rounds: Annotated[int, typer.Option(parser=integer, metavar="N", help="Turns of each way to attend.")] = 3,
) -> None:
    """Time a denoising step of the full-size video UNet on a CUDA device; exit 1 if PASA is slower or farther off."""
    needs_models("bench video")
    from pasa.eval.models.video import step, step_report

    with output.progress_bar("bench video") as progress:
        result = step.run_step(rounds, progress=stages(progress, step.STAGES))
    finish(result, json, output_dir, step_report.render, step_report.save)


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
