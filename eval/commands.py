"""Commands of `pasa`: each parses, calls one function and prints what it returned."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pasa.eval import output
from pasa.eval.evaluate import evaluate
from pasa.eval.options import NOTHING_KEPT, Json, deliver, integer, integers, stages, stoppable, words

app = typer.Typer(
    help="FP16 attention that cannot overflow: checks, tables, benchmarks and a demonstration.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Benchmarks.", no_args_is_help=True)
app.add_typer(bench, name="bench")
app.add_typer(evaluate, name="eval")

QUICK_HEADS = 4  # half a minute on two cores; the paper has 16


@app.callback()
def root() -> None:
    """Keep the commands apart from the group's own options."""


@app.command()
def doctor(json: Json = None) -> None:
    """Versions, devices, backends and why (not), and a self check against FP64."""
    from pasa.eval import doctor as module

    result = module.run_doctor()
    deliver(result, json, module.render)
    raise typer.Exit(0 if result["self_check"]["passed"] else 1)


@app.command()
def beta(
    json: Json = None,
    block: Annotated[int, typer.Option(parser=integer, metavar="N", help="Keys per block.")] = 128,
) -> None:
    """The paper's table 3 (optimal beta), and the same for the matrix with 1/sqrt(d) folded in."""
    from pasa.eval import beta as module

    deliver(module.run_beta(block), json, module.render)


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
    kernels: Annotated[bool, typer.Option("--kernels", help="The Triton kernels, on a GPU or interpreted.")] = False,
) -> None:
    """RMSE of every arithmetic against FP64 on the paper's cases; exit 1 if the default one fails gate (a) or (b)."""
    from pasa.eval.rmse import bias, plots, report, run
    from pasa.eval.rmse import kernels as on_kernels
    from pasa.eval.rmse import resonance as resonant

    if resonance + large_bias + kernels > 1:
        raise ValueError("--resonance, --large-bias and --kernels are experiments of their own: choose one")
    if large_bias and (overflow is not None or quick):
        raise ValueError("--large-bias takes neither --overflow nor --quick: it compares with FP32 at one small size")
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
        elif resonance:
            result = resonant.run_resonance(**given, overflow=overflow or "both", progress=progress)
        else:
            result = run.run_rmse(**given, overflow=overflow or "both", progress=progress)
    deliver(result, json, report.render)
    if output_dir is not None:
        report.save(result, output_dir, plots.draw)
    raise typer.Exit(0 if result["gate"]["passed"] else 1)


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
    deliver(result, json, report.render)
    if output_dir is not None:
        report.save(result, output_dir, plots.draw)
    raise typer.Exit(0 if result["gate"]["passed"] else 1)


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
    from pasa.eval.soak import report, run

    with output.progress_bar("bench soak") as progress:
        result = run.run_soak(cases, seed, backend, only, small, jobs, progress)
    deliver(result, json, report.render)
    if output_dir is not None:
        report.save(result, output_dir)
    raise typer.Exit(0 if result["gate"]["passed"] else 1)


@bench.command()
def gradients(
    json: Json = None,
    output_dir: Annotated[Path | None, typer.Option(file_okay=False, help="Write JSON and Markdown there.")] = None,
    seed: Annotated[int, typer.Option(parser=integer, metavar="N", help="What inputs are drawn from.")] = 0,
    rounds: Annotated[int, typer.Option(parser=integer, metavar="N", help="Turns of each implementation.")] = 5,
) -> None:
    """Errors of gradients against FP64, and on a GPU their time beside SDPA's; exit 1 if one is too large."""
    from pasa.eval.gradients import report, run

    with output.progress_bar("bench gradients") as progress:
        result = run.run_gradients(seed, rounds, progress)
    deliver(result, json, report.render)
    if output_dir is not None:
        report.save(result, output_dir)
    raise typer.Exit(0 if result["gate"]["passed"] else 1)


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
    from pasa.eval.longbench import throughput
    from pasa.eval.rmse.report import show
    from pasa.eval.speed.report import markdown

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
    deliver(result, json, lambda _, console: show(found, console))
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
    from pasa.eval.video import step, step_report

    with output.progress_bar("bench video") as progress:
        result = step.run_step(rounds, progress=stages(progress, step.STAGES))
    deliver(result, json, step_report.render)
    if output_dir is not None:
        step_report.save(result, output_dir)
    raise typer.Exit(0 if result["gate"]["passed"] else 1)


@bench.command()
def ring(
    json: Json = None,
    output_dir: Annotated[Path | None, typer.Option(file_okay=False, help="Write JSON and Markdown there.")] = None,
    tokens: Annotated[int, typer.Option(parser=integer, metavar="N", help="Of the whole sequence.")] = 131072,
    heads: Annotated[str, typer.Option(help="Query and key heads, between a comma.")] = "28,4",
    rounds: Annotated[int, typer.Option(parser=integer, metavar="N", help="Rounds that are counted.")] = 5,
) -> None:
    """Causal attention of several devices beside one, under torchrun; exit 1 if it errs more than one device does."""
    from pasa.eval.ring import report, run

    counts = integers(heads)
    if len(counts) != 2 or min(*counts, rounds) < 1:
        raise ValueError(f"--heads {heads!r} --rounds {rounds}: two numbers of heads, and a round, are the least")
    with output.progress_bar("bench ring") as progress:
        result = run.run_ring(tokens, (counts[0], counts[1]), rounds, progress)
    if result is None:
        return
    deliver(result, json, report.render)
    if output_dir is not None:
        report.save(result, output_dir)
    raise typer.Exit(0 if result["gate"]["passed"] else 1)


@bench.command()
def watch(
    json: Json = None,
    output_dir: Annotated[Path | None, typer.Option(file_okay=False, help="Write JSON and Markdown there.")] = None,
    small: Annotated[bool, typer.Option("--small", help="Tiny sizes, on any device.")] = False,
    turns: Annotated[int, typer.Option(parser=integer, metavar="N", help="Of each case, with and without.")] = 15,
) -> None:
    """What pasa.watch costs on a CUDA device; exit 1 if a count or an output is wrong, or a model pays 2 % or more."""
    from pasa.eval.watching import report, run

    with output.progress_bar("bench watch") as progress:
        result = run.run_watch(small, turns, progress)
    deliver(result, json, report.render)
    if output_dir is not None:
        report.save(result, output_dir)
    raise typer.Exit(0 if result["gate"]["passed"] else 1)


@bench.command("npu-model")
def npu_model(
    json: Json = None,
    output_dir: Annotated[
        Path | None, typer.Option(file_okay=False, help="Write JSON, Markdown and a figure there.")
    ] = None,
) -> None:
    """Model an Ascend 910B3: what the Ascend C kernels spend on the CPU twin over published rates. Not measured."""
    from pasa.eval.npu_model import plots, report, run

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


@app.command()
def demo(
    json: Json = None,
    model: Annotated[str | None, typer.Option(help="Folder of a causal language model, not the built-in.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Message to answer.")] = None,
    offset: Annotated[float | None, typer.Option(help="Constant to add to every score.")] = None,
    new_tokens: Annotated[int, typer.Option(parser=integer, metavar="N", help="Tokens to generate.")] = 64,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(parser=integer, metavar="N", help="Length to cut the built-in prompt to.")
    ] = None,
) -> None:
    """Rescue a language model that FP16 attention cannot run; exit 1 if PASA does not reproduce FP32."""
    from pasa.eval.rescue import run as module

    with output.progress_bar("demo") as progress:
        result = module.run_rescue(model, prompt, offset, new_tokens, max_prompt_tokens, progress=stages(progress, 5))
    deliver(result, json, module.render)
    raise typer.Exit(0 if result["proof"]["passed"] else 1)


@app.command()
def diagnose(
    json: Json = None,
    output_dir: Annotated[
        Path | None, typer.Option(file_okay=False, help="Write a page, JSON, Markdown and a figure there.")
    ] = None,
    model: Annotated[
        str, typer.Option(help='Folder of a language model or a Stable Video Diffusion pipeline, "embedded" or "tiny".')
    ] = "embedded",
    prompt: Annotated[str | None, typer.Option(help="Message for a language model.")] = None,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(parser=integer, metavar="N", help="Length to cut the built-in prompt to.")
    ] = None,
    image: Annotated[str | None, typer.Option(help="Picture a video starts from.")] = None,
    height: Annotated[int | None, typer.Option(parser=integer, metavar="N", help="Pixels (128; 576).")] = None,
    width: Annotated[int | None, typer.Option(parser=integer, metavar="N", help="Pixels (128; 1024).")] = None,
    frames: Annotated[int | None, typer.Option(parser=integer, metavar="N", help="Frames (4; 25).")] = None,
    steps: Annotated[int | None, typer.Option(parser=integer, metavar="N", help="Denoising steps (3; 25).")] = None,
    seed: Annotated[int | None, typer.Option(parser=integer, metavar="N", help="Of a video's noise (42).")] = None,
    offload: Annotated[bool, typer.Option("--offload", help="Model offload and forward chunking, of a video.")] = False,
    offset: Annotated[float | None, typer.Option(help="Added to a built-in model's scores (131072).")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the model: float16 or float32.")] = None,
) -> None:
    """Where a model's attention leaves FP16, head by head, and why; exit 1 if PASA breaks what the model computes."""
    from pasa.eval.diagnose import report, run

    with output.progress_bar("diagnose") as progress:
        result, maps = run.run_diagnose(
            model,
            prompt=prompt,
            max_prompt_tokens=max_prompt_tokens,
            image=image,
            height=height,
            width=width,
            frames=frames,
            steps=steps,
            seed=seed,
            offload=offload,
            offset=offset,
            dtype=dtype,
            progress=progress,
        )
    deliver(result, json, report.render)
    if output_dir is not None:
        report.save(result, maps, output_dir)
    raise typer.Exit(0 if result["gate"]["passed"] else 1)


@app.command()
def predict(
    json: Json = None,
    output_dir: Annotated[Path | None, typer.Option(file_okay=False, help="Write JSON and Markdown there.")] = None,
    model: Annotated[
        str | None, typer.Option(help='Folder of a model or pipeline, "embedded" (the default) or "tiny".')
    ] = None,
    delta: Annotated[float, typer.Option(help="Probability of overflow that counts as unlikely.")] = 1e-6,
    seq_len: Annotated[
        int | None, typer.Option(parser=integer, metavar="N", help="Positions (those of the configuration).")
    ] = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Run the model once, to compare.")] = False,
    prompt: Annotated[str | None, typer.Option(help="Message for the calibration of a language model.")] = None,
    offset: Annotated[float | None, typer.Option(help="Added to a built-in model's scores (131072).")] = None,
    paper_tables: Annotated[bool, typer.Option("--paper-tables", help="Tables 2 and 3 of the paper instead.")] = False,
    soundness: Annotated[bool, typer.Option("--soundness", help="Every model at hand against its bounds.")] = False,
    auto: Annotated[bool, typer.Option("--auto", help='policy="auto" on the built-in language model.')] = False,
) -> None:
    """Which heads can overflow, from the weights alone; exit 1 if a proven bound or a check fails."""
    from pasa.eval.predict import auto as policy
    from pasa.eval.predict import paper, report, run
    from pasa.eval.predict import soundness as checks

    if paper_tables + soundness + auto + (model is not None) > 1:
        raise ValueError("--model, --paper-tables, --soundness and --auto exclude each other: choose one")
    with output.progress_bar("predict") as progress:
        if paper_tables:
            result = paper.run_paper_tables()
        elif soundness:
            result = checks.run_soundness(progress)
        elif auto:
            result = policy.run_auto(progress)
        else:
            result = run.run_predict(
                model or "embedded",
                delta=delta,
                seq_len=seq_len,
                calibrate=calibrate,
                prompt=prompt,
                offset=offset,
                progress=progress,
            )
    deliver(result, json, report.render)
    if output_dir is not None:
        report.save(result, output_dir)
    found = result.get("calibration")
    refuted = found is not None and found["beyond_proven"] > 0
    raise typer.Exit(int(refuted or not result.get("gate", {"passed": True})["passed"]))
