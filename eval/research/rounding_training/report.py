"""Shows the training runs to a person: one table for each seed, curves, and what the data say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pasa.eval.kit import output
from pasa.eval.kit.tables import Table, markdown, percent, short

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


def tables(result: Record) -> list[Table]:
    """One for each seed; one in all of the training on a GPU."""
    if result["experiment"] == "training-gpu":
        return [gpu_table(result)]
    return [table(result, seed) for seed in result["settings"]["seeds"]]


def table(result: Record, seed: int) -> Table:
    """A row for every arm."""
    rows = []
    for each in result["records"]:
        if each["seed"] == seed:
            beginning = [*_loss(each), percent(each["tied"]), f"{each['lost']:,.0f}"]
            rows.append([result["arms"][each["arm"]]["title"], *beginning, *_errors(each)])
    title = f"{result['settings']['steps']} steps from seed {seed}"
    note = f"{NOTES} To FP32: {GAP} Underflow: rows without any weight. {result['note']}."
    return Table(title, ["attention", "held-out loss", "to FP32", "tied rows", "underflow", *ERRORS], rows, note)


def gpu_table(result: Record) -> Table:
    """A row for every attention."""
    rows = []
    for each in result["records"]:
        beginning = [*_loss(each), percent(each["tied"]), percent(each["tied_bf16"])]
        rows.append([result["arms"][each["arm"]]["title"], *beginning, *_errors(each)])
    settings = result["settings"]
    shape, first = settings["shape"], rows[0][0]
    title = (
        f"{settings['steps']} steps of {settings['batch']} x {shape['context']} bytes: {shape['layers']} layers, width "
        f"{shape['width']}, {shape['heads']} heads, {settings['parameters'] / 1e6:.0f} M parameters"
    )
    note = (
        f"{NOTES} To the first: {GAP} Of BF16 scores: tied rows if the scores were rounded, which none here does. "
        f"Steps are samples here, every {settings['sample_every']}th; the gradients are those of W_Q. {result['note']}."
    )
    header = ["attention", "held-out loss", f"to {first}", "tied rows", "of BF16 scores", *ERRORS]
    return Table(title, header, rows, note)


GAP = "difference of the held-out loss, ± half of its 95 % interval over windows; how far runs spread it does not know."
NOTES = (
    "Tied rows: share with a second score within 1e-3 of the maximum. Error of tied O: mean, away from zero, over mean "
    "|O|, 1e-6, ± half of its 95 % interval over steps. Delta: sum over steps of delta_lp - delta_hp over the root of "
    "the sum of its squares, root mean square over heads; 1 where signs are independent from step to step, the root of "
    "the number of steps where they are equal. Sign: share of steps that have a head's commoner sign, mean over heads. "
    "Relative: the sum over that of |delta_hp|, root mean square. W_Q gradient: length of the summed error over root "
    "of the summed squares, likewise; relative: of that root to the gradient's. Norm: largest singular value of "
    "any head's W_Q at the end. Gradients: mean relative error against FP32 attention at the same weights."
)
ERRORS = ["error of tied O", "delta", "sign", "relative", "W_Q gradient", "relative", "norm of W_Q", "gradients"]


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


def verdict(result: Record) -> str:
    """The gate in words; the training on a GPU has none."""
    gate = result.get("gate", {})
    failed = [name.replace("_", " ") for name, held in gate.items() if name != "passed" and not held]
    held = "held: the run repeats bit for bit, rows repeat their maxima, ours stays finite, what fails has underflowed"
    return f"Gates failed: {', '.join(failed)}. " if failed else f"Gates {held}. " if gate else ""


def origin(result: Record) -> str:
    """Where and with what it was run."""
    machine = result["environment"]
    return (
        f"({machine.get('device', machine['processor'])}; torch {machine['torch']}, pasa {machine['pasa']}, commit "
        f"{machine['commit'] or 'unknown'}; {result['duration_s']:.0f} s; text: {result['settings']['text']}.)"
    )


def render(result: Record, console: Console) -> None:
    """Print the tables and the verdict."""
    for found in tables(result):
        found.show(console)
    console.print(Text(f"{verdict(result)}{origin(result)}"))


def save(result: Record, folder: Path) -> list[Path]:
    """Write JSON, Markdown and the figure, as ``training`` or ``training_gpt2_small``; return their paths."""
    found, on_gpu = tables(result), result["experiment"] == "training-gpu"
    parts = ["# Training with rounded attention", found[0].note]
    parts += [part for each in found for part in (f"## {each.title}", markdown(each.header, each.rows))]
    paths = [folder / f"{'training_gpt2_small' if on_gpu else 'training'}.{suffix}" for suffix in ("json", "md", "png")]
    output.write_text(paths[0], output.to_json(result))
    output.write_text(paths[1], "\n\n".join([*parts, f"{verdict(result)}{origin(result)}"]) + "\n")
    (draw_gpu if on_gpu else draw)(result, paths[2])
    return paths


def draw(result: Record, path: Path) -> None:
    """Curves over the steps, a row of panels for each seed; losses as their difference to the FP32 arm's."""
    from matplotlib.figure import Figure

    seeds = result["settings"]["seeds"]
    figure = Figure(figsize=(13.0, 3.0 * len(seeds)), layout="constrained")
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
                axis.plot(steps, values, color=colour, label=title, linewidth=1.0)
        for axis, what in zip(axes, ("loss less that of FP32", *CURVES.values()), strict=True):
            axis.set_title(f"{what}, seed {seed}", fontsize=9)
            axis.grid(alpha=0.3)
    _finish(figure, panels[0, 0], path)


def draw_gpu(result: Record, path: Path) -> None:
    """Loss by step and, by sample, tied rows and the accumulated error of delta."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    settings = result["settings"]
    whats = {"loss": "loss", "tied": CURVES["tied"], "accumulated": CURVES["accumulated"]}
    for colour, each in zip(COLOURS, result["records"], strict=False):
        for axis, name in zip(axes, whats, strict=True):
            values = [math.nan if value is None else value for value in each["curves"][name]]
            apart = settings["kept_every" if name == "loss" else "sample_every"]
            steps = [apart * point for point in range(len(values))]
            axis.plot(steps, values, color=colour, label=result["arms"][each["arm"]]["title"], linewidth=1.0)
    for axis, what in zip(axes, whats.values(), strict=True):
        axis.set_title(what, fontsize=9)
        axis.grid(alpha=0.3)
    _finish(figure, axes[0], path)


def _finish(figure: Any, labelled: Any, path: Path) -> None:
    handles, labels = labelled.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=64)
