"""Tables of the training runs: one for each seed, or one of the training on a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pasa.eval.kit.tables import Table, percent, short

Record = dict[str, Any]
TITLE = "Training with rounded attention"
GAP = "difference of the held-out loss, ± half of its 95 % interval over windows; how far runs spread it does not know."
NOTES = (
    "Tied rows: share with a second score within 1e-3 of the maximum. Error of tied O: mean, away from zero, over mean "
    "|O|, 1e-6, ± half of its 95 % interval over steps. Delta: sum over steps of delta_lp - delta_hp over the root of "
    "the sum of its squares, root mean square over heads; 1 where signs are independent from step to step, the root of "
    "the number of steps where they are equal. Sign: share of steps that have a head's commoner sign, mean over heads. "
    "Relative: the sum over that of |delta_hp|, root mean square. W_Q gradient: length of the summed error over root "
    "of the summed squares, root mean square too; relative: of that root to the gradient's. Norm: largest singular "
    "value of any head's W_Q at the end. Gradients: mean relative error against FP32 attention at the same weights."
)
ERRORS = ["error of tied O", "delta", "sign", "relative", "W_Q gradient", "relative", "norm of W_Q", "gradients"]


def report(result: Record) -> list[Table | str]:
    """Return the tables, what their columns are, the checks and the machine."""
    if result["experiment"] == "training-gpu":
        every = result["settings"]["sample_every"]
        table = gpu_table(result)
        meaning = (
            f"To the first: {GAP} Of BF16 scores: tied rows if the scores were rounded, which none here does. "
            f"Steps are samples here, every {every}th; the gradients are those of W_Q."
        )
        return [table, f"{NOTES} {meaning} {result['note']}.", origin(result)]
    tables = [seed_table(result, seed) for seed in result["settings"]["seeds"]]
    meaning = f"To FP32: {GAP} Underflow: rows without any weight."
    return [verdict(result), *tables, f"{NOTES} {meaning} {result['note']}.", origin(result)]


def seed_table(result: Record, seed: int) -> Table:
    """Return a row for every arm."""
    rows = []
    for each in result["records"]:
        if each["seed"] == seed:
            beginning = [*_loss(each), percent(each["tied"]), f"{each['lost']:,.0f}"]
            rows.append([result["arms"][each["arm"]]["title"], *beginning, *_errors(each)])
    header = ["attention", "held-out loss", "to FP32", "tied rows", "underflow", *ERRORS]
    return Table(f"{result['settings']['steps']} steps from seed {seed}", header, rows)


def gpu_table(result: Record) -> Table:
    """Return a row for every attention."""
    rows = []
    for each in result["records"]:
        beginning = [*_loss(each), percent(each["tied"]), percent(each["tied_bf16"])]
        rows.append([result["arms"][each["arm"]]["title"], *beginning, *_errors(each)])
    settings = result["settings"]
    shape = settings["shape"]
    title = (
        f"{settings['steps']} steps of {settings['batch']} x {shape['context']} bytes: {shape['layers']} layers, width "
        f"{shape['width']}, {shape['heads']} heads, {settings['parameters'] / 1e6:.0f} M parameters"
    )
    header = ["attention", "held-out loss", f"to {rows[0][0]}", "tied rows", "of BF16 scores", *ERRORS]
    return Table(title, header, rows)


def _loss(record: Record) -> list[str]:
    if record["failed_step"] is not None:
        return [f"not finite in step {record['failed_step']}", "-"]
    return [f"{record['held_out']:.3f}", f"{record['gap']:+.4f} ± {record['gap_95']:.4f}" if "gap" in record else "-"]


def _errors(record: Record) -> list[str]:
    if record["failed_step"] is not None:
        return ["-"] * len(ERRORS)
    positive, errors = flat(record["delta_positive_steps"]), record["gradient_errors"]
    return [
        f"{1e6 * record['output_bias']:+.2f} ± {1e6 * (record['output_bias_95'] or math.nan):.2f}",
        f"{rms(record['delta_accumulated']):.2f}",
        percent(sum(max(share, 1 - share) for share in positive) / len(positive)),
        short(rms(record["delta_relative"])),
        f"{rms(record['weight_accumulated']):.2f}",
        short(rms(record["weight_relative"])),
        f"{max(flat(record['norms'])):.2f}",
        short(sum(errors) / len(errors)),
    ]


def flat(values: Sequence[Sequence[float]]) -> list[float]:
    """Return the values of all heads, layer after layer."""
    return [value for layer in values for value in layer]


def rms(values: Sequence[Sequence[float]]) -> float:
    """Return the root mean square over heads."""
    return math.sqrt(sum(value * value for value in flat(values)) / len(flat(values)))


def verdict(result: Record) -> str:
    """Return the gate in words."""
    failed = [name.replace("_", " ") for name, held in result["gate"].items() if name != "passed" and not held]
    held = "held: the run repeats bit for bit, rows repeat their maxima, ours stays finite, what fails has underflowed"
    return f"Gates failed: {', '.join(failed)}." if failed else f"Gates {held}."


def origin(result: Record) -> str:
    """Return where and with what it was run."""
    machine = result["environment"]
    return (
        f"({machine.get('device', machine['processor'])}; torch {machine['torch']}, pasa {machine['pasa']}, commit "
        f"{machine['commit'] or 'unknown'}; {result['duration_s']:.0f} s; text: {result['settings']['text']}.)"
    )
