"""Commands of `pasa`: each parses, calls one function and prints what it returned."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pasa.eval.benchmarks import bench
from pasa.eval.evaluate import evaluate
from pasa.eval.kit import output
from pasa.eval.kit.experiment import add_command
from pasa.eval.kit.options import Json, at_least_one, deliver, integer, needs_models, probability
from pasa.eval.models.rescue import run as rescue

app = typer.Typer(
    help="FP16 attention that cannot overflow: checks, tables, benchmarks and a demonstration.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")
app.add_typer(evaluate, name="eval")
add_command(app, rescue.EXPERIMENT)


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
    from pasa.eval.accuracy import beta as module

    deliver(module.run_beta(block), json, module.render)


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
    needs_models("diagnose")
    from pasa.eval.models.diagnose import report, run

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


DELTA = 1e-6  # the paper's


@app.command()
def predict(
    json: Json = None,
    output_dir: Annotated[Path | None, typer.Option(file_okay=False, help="Write JSON and Markdown there.")] = None,
    model: Annotated[
        str | None, typer.Option(help='Folder of a model or pipeline, "embedded" (the default) or "tiny".')
    ] = None,
    delta: Annotated[
        float, typer.Option(callback=probability, help="Probability of overflow that counts as unlikely.")
    ] = DELTA,
    seq_len: Annotated[
        int | None,
        typer.Option(
            parser=integer, callback=at_least_one, metavar="N", help="Positions (those of the configuration)."
        ),
    ] = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Run the model once, to compare.")] = False,
    prompt: Annotated[str | None, typer.Option(help="Message for the calibration of a language model.")] = None,
    offset: Annotated[float | None, typer.Option(help="Added to a built-in model's scores (131072).")] = None,
    paper_tables: Annotated[bool, typer.Option("--paper-tables", help="Tables 2 and 3 of the paper instead.")] = False,
    soundness: Annotated[bool, typer.Option("--soundness", help="Every model at hand against its bounds.")] = False,
    auto: Annotated[bool, typer.Option("--auto", help='policy="auto" on the built-in language model.')] = False,
) -> None:
    """Which heads can overflow, from the weights alone; exit 1 if a proven bound or a check fails."""
    if not paper_tables:
        needs_models("predict")
    from pasa.eval.models.predict import auto as policy
    from pasa.eval.models.predict import paper, report, run
    from pasa.eval.models.predict import soundness as checks

    if paper_tables + soundness + auto + (model is not None) > 1:
        raise ValueError("--model, --paper-tables, --soundness and --auto exclude each other: choose one")
    own = {"delta": delta != DELTA, "seq-len": seq_len, "calibrate": calibrate, "prompt": prompt, "offset": offset}
    given = [f"--{name}" for name, value in own.items() if value not in (None, False)]
    if given and (paper_tables or soundness or auto):
        raise ValueError(f"{given[0]} is of a prediction of --model: the other experiments have settings of their own")
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
