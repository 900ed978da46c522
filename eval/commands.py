"""Commands of `pasa`: one for each declared experiment."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

import pasa
from pasa.eval import build_ascend, doctor
from pasa.eval.accuracy import beta
from pasa.eval.accuracy.gradients import run as gradients
from pasa.eval.accuracy.rmse import run as rmse
from pasa.eval.accuracy.rounding_bias import cost
from pasa.eval.accuracy.rounding_bias import run as bias
from pasa.eval.check_device import forced
from pasa.eval.check_device import run as check_device
from pasa.eval.check_device.npu import run as check_npu
from pasa.eval.kit.experiment import add_command
from pasa.eval.models.diagnose import run as diagnose
from pasa.eval.models.generation import run as generation
from pasa.eval.models.longbench import run as longbench
from pasa.eval.models.perplexity import run as perplexity
from pasa.eval.models.predict import run as predict
from pasa.eval.models.predict import soundness
from pasa.eval.models.rescue import run as rescue
from pasa.eval.models.saturating import run as saturating
from pasa.eval.models.to_fp16 import run as to_fp16
from pasa.eval.models.video import run as video
from pasa.eval.models.video import step
from pasa.eval.models.whole_model import run as whole_model
from pasa.eval.models.whole_model_speed import run as whole_model_speed
from pasa.eval.models.zoo import run as zoo
from pasa.eval.npu import run as npu
from pasa.eval.npu import run_310p as npu_310p
from pasa.eval.random_calls import run as random_calls
from pasa.eval.research.fp8_scaling import overhead
from pasa.eval.research.fp8_scaling import run as fp8
from pasa.eval.research.rl import run as rl
from pasa.eval.research.rounding_training import gpu, training
from pasa.eval.research.rounding_triggers import run as triggers
from pasa.eval.speed import choice_run, counters, random_run
from pasa.eval.speed import run as speed
from pasa.eval.speed.ring import run as ring
from pasa.eval.speed.watching import run as watching

app = typer.Typer(
    help="FP16 attention that cannot overflow.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(name="bench", help="Accuracy, speed and cost of kernels.", no_args_is_help=True)
evaluate = typer.Typer(name="eval", help="Models, random calls and studies of rounding.", no_args_is_help=True)
PREDICT = replace(predict.EXPERIMENT, variants=(predict.PAPER_TABLES, soundness.EXPERIMENT, soundness.AUTO))
add_command(app, doctor.EXPERIMENT)
add_command(app, replace(check_device.EXPERIMENT, variants=(check_npu.EXPERIMENT,)))
for _group, _modules in (
    (app, (rescue,)),
    (bench, (beta, rmse, gradients, cost, counters, ring, watching, generation)),
    (bench, (step, whole_model_speed, npu, npu_310p, overhead, choice_run)),
    (evaluate, (bias, forced, longbench, perplexity, whole_model, saturating, video, fp8, triggers, rl, zoo)),
):
    for _module in _modules:
        add_command(_group, _module.EXPERIMENT)
add_command(app, PREDICT)
add_command(app, diagnose.EXPERIMENT)
add_command(app, to_fp16.EXPERIMENT)
app.command("build-ascend", context_settings=build_ascend.SETTINGS)(build_ascend.build_ascend)
add_command(bench, replace(speed.EXPERIMENT, variants=(random_run.EXPERIMENT, choice_run.GRID_EXPERIMENT)))
add_command(bench, random_calls.SOAK)
add_command(evaluate, random_calls.FUZZ)
add_command(evaluate, replace(training.EXPERIMENT, variants=(gpu.EXPERIMENT,)))
app.add_typer(bench)
app.add_typer(evaluate)


def _show_version(requested: bool) -> None:
    if requested:
        print(f"pasa {pasa.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Declare the options of `pasa` itself."""
