"""Commands of `pasa`: each parses, calls one function and prints what it returned."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pasa.eval import doctor
from pasa.eval.accuracy import beta
from pasa.eval.benchmarks import bench
from pasa.eval.evaluate import evaluate
from pasa.eval.kit import output
from pasa.eval.kit.experiment import add_command
from pasa.eval.kit.options import Json, at_least_one, deliver, integer, needs_models, probability, stages

app = typer.Typer(
    help="FP16 attention that cannot overflow: checks, tables, benchmarks and a demonstration.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _experiment in (doctor.EXPERIMENT, beta.EXPERIMENT):
    add_command(app, _experiment)
app.add_typer(bench, name="bench")
app.add_typer(evaluate, name="eval")
add_command(app, diagnosis.EXPERIMENT)


@app.callback()
def root() -> None:
    """Keep the commands apart from the group's own options."""


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
    needs_models("demo")
    from pasa.eval.models.rescue import run as module

    with output.progress_bar("demo") as progress:
        result = module.run_rescue(model, prompt, offset, new_tokens, max_prompt_tokens, progress=stages(progress, 5))
    deliver(result, json, module.render)
    raise typer.Exit(0 if result["proof"]["passed"] else 1)


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
    from pasa.eval.models.predict import paper, run
    from pasa.eval.models.predict import soundness as checks

    if paper_tables + soundness + auto + (model is not None) > 1:
        raise ValueError("--model, --paper-tables, --soundness and --auto exclude each other: choose one")
    options = {"delta": delta, "seq_len": seq_len, "calibrate": calibrate, "prompt": prompt, "offset": offset}
    experiment = run.EXPERIMENT
    for chosen, other in ((paper_tables, paper), (soundness, checks), (auto, policy)):
        experiment = other.EXPERIMENT if chosen else experiment
    if experiment is run.EXPERIMENT:
        options["model"] = model
    elif changed := [name for name, value in options.items() if value not in (None, False, DELTA)]:
        option = changed[0].replace("_", "-")
        raise ValueError(f"--{option} is of a prediction of --model: the other experiments have settings of their own")
    with output.progress_bar("predict") as progress:
        result = experiment.run(**(options if experiment is run.EXPERIMENT else {}), progress=progress)
    if result is not None:
        finish(result, json, output_dir, experiment.show, experiment.save)
