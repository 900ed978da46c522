"""The figure of README.md: times as fast as SDPA cuDNN, with the targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pasa.eval.speed.report import lines, places, ran
from pasa.eval.speed.targets import CUDNN_FIELD

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


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Draw a group for each case with many rows, a bar for each implementation; a black line is the target."""
    from matplotlib.figure import Figure

    groups = places(result, decode=False, biased=False)
    records = [lines(result, *place) for place in groups]
    bars = {name: [each.get(name, {}).get(CUDNN_FIELD) or 0.0 for each in records] for name in ran(result)}
    bars = {name: heights for name, heights in bars.items() if any(heights)}
    if not bars:
        return []
    figure = Figure(figsize=(max(7.0, 1.5 * len(groups)), 4.6), layout="constrained")
    axis = figure.subplots()
    width = 0.84 / len(bars)
    for index, (name, heights) in enumerate(bars.items()):
        shift = (index - (len(bars) - 1) / 2) * width
        axis.bar([x + shift for x in range(len(groups))], heights, width, label=name, color=COLOURS.get(name))
    for each in result["targets"]:
        if each["field"] == CUDNN_FIELD and each["kernel"] == "ours" and (each["case"], each["how"]) in groups:
            x = groups.index((each["case"], each["how"]))
            axis.hlines(each["must"], x - 0.45, x + 0.45, colors="black", linewidth=1.2)
    axis.axhline(1.0, color="grey", linewidth=0.8, linestyle="--")
    axis.set_xticks(range(len(groups)), [case + ("\ngraph" if how == "graph" else "") for case, how in groups])
    axis.tick_params(axis="x", labelsize=8)
    axis.set_ylabel("times as fast as SDPA cuDNN")
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=min(len(bars), 6), fontsize=8, frameon=False)
    figure.suptitle(f"{result['environment']['device']}; black: target", fontsize=10)
    path = folder / "speed_ratios.png"
    figure.savefig(path, dpi=110)
    return [path]
