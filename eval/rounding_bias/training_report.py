"""Shows the training runs to a person: one table for each seed, curves, and what the data say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pasa.eval import output
from pasa.eval.rmse.report import Table, percent, short, show
from pasa.eval.speed.report import markdown

Record = dict[str, Any]
CURVES = {
    "tied": "rows with repeated maxima",
    "accumulated": "error of delta, accumulated",
    "norm": "largest norm of a head's W_Q",
}
COLOURS = ("#7f7f7f", "#d62728", "#ff9896", "#1f4e9c", "#e6a700", "#2ca02c", "#c5b0d5", "#17becf")


def flat(values: Sequence[Sequence[float]]) -> list[float]:
    """Values of all heads, layer after layer."""
    return [value for layer in values for value in layer]


def rms(values: Sequence[Sequence[float]]) -> float:
    """Root of the mean square over heads."""
    found = flat(values)
    return math.sqrt(sum(value * value for value in found) / len(found))


def table(result: Record, seed: int) -> Table:
    """A row for every arm."""
    rows = [_row(result["arms"][each["arm"]]["title"], each) for each in result["records"] if each["seed"] == seed]
    settings = result["settings"]
    header = ["attention", "held-out loss", "to FP32", "tied rows", "underflow", "error of tied O", "delta", "sign"]
    return Table(
        f"{settings['steps']} steps from seed {seed}",
        [*header, "relative", "W_Q gradient", "relative", "norm of W_Q", "all gradients"],
        rows,
        f"{NOTES} {result['note']}.",
    )


NOTES = (
    "To FP32: difference of the held-out loss, ± half of its 95 % interval over windows, which knows nothing of the "
    "spread over runs. Tied rows: share with a second score within 1e-3 of the maximum. Underflow: rows without any "
    "weight. Error of tied O: mean, away from zero, over mean |O|, 1e-6, ± its 95 % interval over steps. Delta: sum "
    "over steps of delta_lp - delta_hp over the root of the sum of its squares, root mean square over heads; 1 where "
    "signs are independent from step to step, the root of the number of steps where they are equal. Sign: share of "
    "steps that have a head's commoner sign, mean over heads. Relative: the sum over that of |delta_hp|, likewise. W_Q "
    "gradient: the length of the summed error that delta puts on it, over the root of the summed squares, likewise; "
    "relative: of that root to the gradient's. Norm: largest singular value of any head's W_Q at the end. All "
    "gradients: mean relative error against FP32 attention at the same weights, scores' rounding included."
)


def _row(title: str, record: Record) -> list[str]:
    held = record["held_out"]
    loss = f"not finite in step {record['failed_step']}" if held is None else f"{held:.4f}"
    gap = f"{record['gap']:+.4f} ± {record['gap_95']:.4f}" if "gap" in record else "-"
    bias = f"{1e6 * record['output_bias']:+.2f} ± {1e6 * record['output_bias_95']:.2f}"
    cells = [title, loss, gap, percent(record["tied"]), f"{record['lost']:,.0f}", bias]
    if held is None:
        return [*cells, *["-"] * 7]
    positive = flat(record["delta_positive_steps"])
    errors = record["gradient_errors"]
    return [
        *cells,
        f"{rms(record['delta_accumulated']):.2f}",
        percent(sum(max(share, 1 - share) for share in positive) / len(positive)),
        short(rms(record["delta_relative"])),
        f"{rms(record['weight_accumulated']):.2f}",
        short(rms(record["weight_relative"])),
        f"{max(flat(record['norms'])):.2f}",
        short(sum(errors) / len(errors)),
    ]


def verdict(result: Record) -> str:
    """The gate in words."""
    gate = result["gate"]
    failed = [name.replace("_", " ") for name, held in gate.items() if name != "passed" and not held]
    held = "held: the run repeats bit for bit, rows repeat their maxima, ours stays finite, what fails has underflowed"
    return f"Gates {held}." if gate["passed"] else f"Gates failed: {', '.join(failed)}."


def origin(result: Record) -> str:
    """Where and with what it was run."""
    machine = result["environment"]
    return (
        f"({machine['processor']}, {machine['threads']} thread; torch {machine['torch']}, pasa {machine['pasa']}, "
        f"commit {machine['commit'] or 'unknown'}; {result['duration_s']:.0f} s; text: {result['settings']['text']}.)"
    )


def tables(result: Record) -> list[Table]:
    """One for each seed."""
    return [table(result, seed) for seed in result["settings"]["seeds"]]


def render(result: Record, console: Console) -> None:
    """Print the tables and the verdict."""
    for found in tables(result):
        show(found, console)
    console.print(Text(f"{verdict(result)} {origin(result)}"))


def save(result: Record, folder: Path) -> list[Path]:
    """Write ``training.json``, ``training.md`` and ``training.png``; return their paths."""
    found = tables(result)
    parts = ["# Training with rounded attention", found[0].note]
    parts += [part for each in found for part in (f"## {each.title}", markdown(each.header, each.rows))]
    paths = [folder / f"training.{suffix}" for suffix in ("json", "md", "png")]
    output.write_text(paths[0], output.to_json(result))
    output.write_text(paths[1], "\n\n".join([*parts, verdict(result), origin(result)]) + "\n")
    draw(result, paths[2])
    return paths


def draw(result: Record, path: Path) -> None:
    """Curves over the steps, a row of panels for each seed; losses as their difference to the FP32 arm's."""
    from matplotlib.figure import Figure

    seeds = result["settings"]["seeds"]
    figure = Figure(figsize=(13.0, 3.2 * len(seeds)), layout="constrained")
    panels = figure.subplots(len(seeds), 1 + len(CURVES), squeeze=False, sharex=True)
    for seed, axes in zip(seeds, panels, strict=True):
        runs = {each["arm"]: each for each in result["records"] if each["seed"] == seed}
        plain = runs["fp32"]["curves"]["loss"]
        for colour, (name, run) in zip(COLOURS, runs.items(), strict=False):
            steps = [result["settings"]["kept_every"] * point for point in range(len(run["curves"]["loss"]))]
            gaps = [
                math.nan if own is None else own - base for own, base in zip(run["curves"]["loss"], plain, strict=False)
            ]
            title = result["arms"][name]["title"]
            for axis, values in zip(axes, (gaps, *(run["curves"][curve] for curve in CURVES)), strict=True):
                axis.plot(steps, values, color=colour, label=title, linewidth=1.1)
        for axis, what in zip(axes, ("loss less that of FP32", *CURVES.values()), strict=True):
            axis.set_title(f"{what}, seed {seed}", fontsize=9)
            axis.grid(alpha=0.3)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
