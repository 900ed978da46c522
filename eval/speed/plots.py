"""Figures: times as fast as SDPA cuDNN, with the targets; and decoding against reading K and V once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pasa.eval.speed.report import lines, ran, ways
from pasa.eval.speed.targets import CUDNN_FIELD, FLOOR_FIELD

COLOURS = {
    "sdpa-cudnn": "#4d4d4d",
    "sdpa-flash": "#8c8c8c",
    "sdpa-efficient": "#bfbfbf",
    "flash-attn": "#c49c94",
    "flash-attn-3": "#8c564b",
    "sageattention": "#e377c2",
    "triton-fp32": "#ffbb78",
    "pasa": "#1f4e9c",
    "pasa-paper": "#2ca02c",
    "pasa-portable": "#17becf",
}
PANELS = (
    ("speed_ratios.png", CUDNN_FIELD, "times as fast as SDPA cuDNN", "randn", False),
    ("speed_biased.png", CUDNN_FIELD, "times as fast as SDPA cuDNN, biased keys", "biased", False),
    ("speed_decode.png", FLOOR_FIELD, "decoding: time over reading K and V once", "randn", True),
)


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Make the figures that the result has numbers for, as PNG; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, field, title, data, decode in PANELS:
        cases = [c for c in result["cases"] if c["decode"] == decode and (c["data"] == "randn") == (data == "randn")]
        places = [(case["name"], how) for case in cases for how in ways(result, case["name"])]
        names = [each for each in ran(result) if any(_value(result, place, each, field) for place in places)]
        if names:
            made.append(draw_bars(result, places, names, field, title, folder / name))
    return made


def _value(result: dict[str, Any], place: tuple[str, str], name: str, field: str) -> float | None:
    record = lines(result, *place).get(name, {})
    return record.get(field) if record.get("status") == "ok" else None


def draw_bars(
    result: dict[str, Any], places: list[tuple[str, str]], names: list[str], field: str, title: str, path: Path
) -> Path:
    """One group per case and way of running, one bar per implementation; a black line is the target."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(7.0, 1.5 * len(places)), 4.6), layout="constrained")
    axis = figure.subplots()
    width = 0.84 / len(names)
    for index, name in enumerate(names):
        shift = (index - (len(names) - 1) / 2) * width
        values = [_value(result, place, name, field) or 0.0 for place in places]
        axis.bar([x + shift for x in range(len(places))], values, width, label=name, color=COLOURS.get(name))
    for each in result["targets"]:
        place = (each["case"], each["how"])
        if each["field"] == field and each["kernel"] == "ours" and place in places:
            x = places.index(place)
            axis.hlines(each["must"], x - 0.45, x + 0.45, colors="black", linewidth=1.2)
    axis.axhline(1.0, color="grey", linewidth=0.8, linestyle="--")
    axis.set_xticks(range(len(places)), [case + ("\ngraph" if how == "graph" else "") for case, how in places])
    axis.tick_params(axis="x", labelsize=8)
    axis.set_ylabel(title)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=min(len(names), 6), fontsize=8, frameon=False)
    figure.suptitle(f"{result['environment']['device']}; black: target", fontsize=10)
    figure.savefig(path, dpi=110)
    return path
