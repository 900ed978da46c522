"""Figures: the bars of the paper's figures 9 and 10, and the maps of its figures 11 to 14."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from torch import Tensor

from pasa.eval.accuracy.rmse.cases import ARITHMETICS, PANELS, RESONANCE_CASES
from pasa.eval.accuracy.rmse.resonance import VARIANTS, Maps, make_maps

NUMBERS = {"uniform": "9", "hybrid": "10"}
COLOURS = {
    "fp32": "#7f7f7f",
    "partial": "#d62728",
    "fp16": "#8c1515",
    "prescaled": "#ff9896",
    "smooth_k": "#ffbb78",
    "pasa-paper": "#98df8a",
    "pasa-paper-fp16": "#2ca02c",
    "pasa-exact": "#1f4e9c",
    "pasa-exact-fp16": "#9ecae1",
}
MAP_POINTS = 128  # rows and columns of a map that are drawn


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Make the figures of a result, as PNG; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    if result["experiment"] == "rmse":
        measured = {case["distribution"] for case in result["cases"]}
        return [draw_bars(result, name, folder / f"rmse_{name}.png") for name in PANELS if name in measured]
    if result["experiment"] == "resonance":
        cases = zip(RESONANCE_CASES, (tuple(case["shape"]) for case in result["cases"]), strict=True)
        sized = [dataclasses.replace(case, shape=shape) for case, shape in cases]
        seed = result["seeds"][0]
        return [draw_maps(make_maps(case, seed), case.name, folder / f"{_slug(case.name)}.png") for case in sized]
    return []


def _slug(name: str) -> str:
    return "resonance_" + "".join(c if c.isalnum() else "_" for c in name).replace("__", "_")


def draw_bars(result: dict[str, Any], distribution: str, path: Path) -> Path:
    """RMSE by case and arithmetic on a log axis; "NaN" stands where the bar would, for an overflow."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    mode = "inf" if result["overflow"] == "both" else result["overflow"]
    worst = _worst_rmse(result, mode)
    for axis, panel, varies in zip(axes, PANELS[distribution], ("x0", "Am"), strict=True):
        _bar_panel(axis, [case for case in panel if (case, "fp32") in worst], worst)
        axis.set_xlabel(f"case (x0, Am); {varies} varies")
    axes[0].set_ylabel("RMSE (Eq. 19)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
    title = (
        f"{distribution} data (paper figure {NUMBERS[distribution]}), worst of seeds {result['seeds']}, overflow={mode}"
    )
    figure.suptitle(f"{title}\n{result['note']}", fontsize=10)
    figure.savefig(path, dpi=110)
    return path


def _worst_rmse(result: dict[str, Any], mode: str) -> dict[tuple[str, str], float]:
    """Largest RMSE over the seeds; NaN if any seed gave NaN."""
    worst: dict[tuple[str, str], float] = {}
    for each in result["records"]:
        if each["overflow"] == mode:
            key = (each["case"], each["arithmetic"])
            before = worst.get(key, 0.0)
            worst[key] = math.nan if math.isnan(before) else max(each["rmse"], before)
    return worst


def _bar_panel(axis: Any, cases: list[str], worst: dict[tuple[str, str], float]) -> None:
    width = 0.8 / len(ARITHMETICS)
    finite = [value for value in worst.values() if value > 0]  # NaN is not
    floor = min(finite) / 2
    for index, arithmetic in enumerate(ARITHMETICS):
        values = [worst[case, arithmetic.name] for case in cases]
        places = [position + (index - (len(ARITHMETICS) - 1) / 2) * width for position in range(len(cases))]
        heights = [0.0 if math.isnan(value) else value for value in values]
        axis.bar(places, heights, width, label=arithmetic.name, color=COLOURS[arithmetic.name])
        for place, value in zip(places, values, strict=True):
            if math.isnan(value):
                marks = {"rotation": 90, "ha": "center", "va": "bottom", "fontsize": 7}
                axis.text(place, floor * 1.15, "NaN", color=COLOURS[arithmetic.name], **marks)
    axis.set_yscale("log")
    axis.set_ylim(floor, 2 * max(finite))
    axis.set_xticks(range(len(cases)), [case.partition("(")[2].rstrip(")").replace(",", ", ") for case in cases])
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)


def draw_maps(maps: Maps, name: str, path: Path) -> Path:
    """Q, K and S before, K' and S' after both shifts; the range stands over each map."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    colours = colormaps["coolwarm"].resampled(24)  # noise in 256 colours is what makes a PNG large
    shown = [("Q", maps.q), ("K", maps.k), *((f"K' ({v})", maps.shifted_keys[v]) for v in VARIANTS)]
    shown += [("S = Q K^T", maps.scores), *((f"S' ({v})", maps.stored_scores[v]) for v in VARIANTS)]
    figure = Figure(figsize=(14, 6.4), layout="constrained")
    for place, (title, matrix) in zip((1, 2, 3, 4, 5, 6, 7), shown, strict=True):
        axis = figure.add_subplot(2, 4, place)
        image = axis.imshow(_thinned(matrix), aspect="auto", cmap=colours, interpolation="nearest")
        low, high = float(matrix.min()), float(matrix.max())
        axis.set_title(f"{title}\n[{low:.5g}, {high:.5g}]", fontsize=9)
        axis.set_xlabel("key position" if title.startswith("S") else "head dimension", fontsize=8)
        axis.set_ylabel("query position" if title.startswith("S") else "position", fontsize=8)
        axis.tick_params(labelsize=7)
        figure.colorbar(image, ax=axis).ax.tick_params(labelsize=7)
    figure.suptitle(f"{name}, first head; emulated NPU arithmetic on CPU, not run on an NPU", fontsize=10)
    figure.savefig(path, dpi=70)
    return path


def _thinned(matrix: Tensor) -> Any:
    """Every n-th row and column: a sample of the values, where a mean would show a range that is not there."""
    steps = [max(1, size // MAP_POINTS) for size in matrix.shape]
    return matrix[:: steps[0], :: steps[1]].numpy()
