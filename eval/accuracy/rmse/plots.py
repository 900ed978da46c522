"""The bars of the paper's figures 9 and 10."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pasa.eval.accuracy.rmse.cases import ARITHMETICS

PANELS = {
    "uniform": ("9", ("(0,0.5)", "(10,0.5)", "(20,0.5)", "(30,0.5)"),
                ("(20,0.5)", "(20,5)", "(20,10)", "(20,15)", "(20,20)")),
    "hybrid": ("10", ("(0,10)", "(10,10)", "(20,10)", "(30,10)"), ("(20,10)", "(20,20)", "(20,50)", "(20,100)")),
}  # fmt: skip
"""By distribution: the paper's figure; its left panel, where x0 varies; its right one, where Am varies."""
COLOURS = ("#7f7f7f", "#d62728", "#8c1515", "#ff9896", "#ffbb78", "#98df8a", "#2ca02c", "#1f4e9c", "#9ecae1")


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Draw both figures as PNG; return their paths."""
    return [draw_bars(result, name, folder / f"rmse_{name}.png") for name in PANELS]


def draw_bars(result: dict[str, Any], distribution: str, path: Path) -> Path:
    """Draw RMSE by case and arithmetic on a log axis; "NaN" stands where the bar would, for an overflow."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.6), layout="constrained")
    number, *panels = PANELS[distribution]
    worst = worst_rmse(result)
    for axis, panel, varies in zip(figure.subplots(1, 2, sharey=True), panels, ("x0", "Am"), strict=True):
        _bar_panel(axis, distribution, panel, worst)
        axis.set_xlabel(f"case (x0, Am); {varies} varies")
    figure.axes[0].set_ylabel("RMSE (Eq. 19)")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
    title = f"{distribution} data (paper figure {number}), worst of seeds {result['seeds']}, overflow=inf"
    figure.suptitle(f"{title}\n{result['note']}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def worst_rmse(result: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Return the largest RMSE over the seeds by case and arithmetic; NaN if any seed gave NaN (stored as None)."""
    worst: dict[tuple[str, str], float] = {}
    for each in result["records"]:
        if each["overflow"] == "inf":
            key = (each["case"], each["arithmetic"])
            value, before = math.nan if each["rmse"] is None else each["rmse"], worst.get(key, 0.0)
            worst[key] = math.nan if math.isnan(before) or math.isnan(value) else max(value, before)
    return worst


def _bar_panel(axis: Any, distribution: str, panel: tuple[str, ...], worst: dict[tuple[str, str], float]) -> None:
    width = 0.8 / len(ARITHMETICS)
    finite = [value for value in worst.values() if value > 0]  # NaN is not
    floor = min(finite) / 2
    for index, (arithmetic, colour) in enumerate(zip(ARITHMETICS, COLOURS, strict=True)):
        values = [worst[f"{distribution}{case}", arithmetic.name] for case in panel]
        places = [position + (index - (len(ARITHMETICS) - 1) / 2) * width for position in range(len(panel))]
        heights = [0.0 if math.isnan(value) else value for value in values]
        axis.bar(places, heights, width, label=arithmetic.name, color=colour)
        for place, value in zip(places, values, strict=True):
            if math.isnan(value):
                axis.text(place, floor * 1.15, "NaN", color=colour, rotation=90, ha="center", va="bottom", fontsize=7)
    axis.set_yscale("log")
    axis.set_ylim(floor, 2 * max(finite))
    axis.set_xticks(range(len(panel)), [case.strip("()").replace(",", ", ") for case in panel])
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
