"""Figures: times as fast as SDPA cuDNN, with the targets; and decoding against reading K and V once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pasa.eval.speed.report import lines, places, ran
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
PANELS = (  # file, field, title, biased, decoding
    ("speed_ratios.png", CUDNN_FIELD, "times as fast as SDPA cuDNN", False, False),
    ("speed_biased.png", CUDNN_FIELD, "times as fast as SDPA cuDNN, biased keys", True, False),
    ("speed_decode.png", FLOOR_FIELD, "decoding: time over reading K and V once", False, True),
)


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Draw the figures that the result has numbers for, as PNG; return their paths."""
    paths = []
    for name, field, title, biased, decode in PANELS:
        groups = places(result, decode=decode, biased=biased)
        values = {each: [_value(result, place, each, field) for place in groups] for each in ran(result)}
        values = {each: heights for each, heights in values.items() if any(heights)}
        if values:
            paths.append(draw_bars(result, groups, values, field, title, folder / name))
    return paths


def _value(result: dict[str, Any], place: tuple[str, str], name: str, field: str) -> float:
    record = lines(result, *place).get(name, {})
    return record.get(field) or 0.0 if record.get("status") == "ok" else 0.0


def draw_bars(
    result: dict[str, Any],
    groups: list[tuple[str, str]],
    values: dict[str, list[float]],
    field: str,
    title: str,
    path: Path,
) -> Path:
    """Draw a group for each case and way of running, a bar for each implementation; a black line is the target."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(7.0, 1.5 * len(groups)), 4.6), layout="constrained")
    axis = figure.subplots()
    width = 0.84 / len(values)
    for index, (name, heights) in enumerate(values.items()):
        shift = (index - (len(values) - 1) / 2) * width
        axis.bar([x + shift for x in range(len(groups))], heights, width, label=name, color=COLOURS.get(name))
    for each in result["targets"]:
        if each["field"] == field and each["kernel"] == "ours" and (each["case"], each["how"]) in groups:
            x = groups.index((each["case"], each["how"]))
            axis.hlines(each["must"], x - 0.45, x + 0.45, colors="black", linewidth=1.2)
    axis.axhline(1.0, color="grey", linewidth=0.8, linestyle="--")
    axis.set_xticks(range(len(groups)), [case + ("\ngraph" if how == "graph" else "") for case, how in groups])
    axis.tick_params(axis="x", labelsize=8)
    axis.set_ylabel(title)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=min(len(values), 6), fontsize=8, frameon=False)
    figure.suptitle(f"{result['environment']['device']}; black: target", fontsize=10)
    figure.savefig(path, dpi=110)
    return path
