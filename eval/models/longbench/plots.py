"""The figure: scores by category, a bar for each precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(result: dict[str, Any], path: Path) -> Path:
    """Make the bar chart; a collapsed precision shows as the gap it leaves."""
    from matplotlib.figure import Figure

    names, categories = list(result["precisions"]), result["categories"]
    figure = Figure(figsize=(9.0, 4.0), layout="constrained")
    axis = figure.subplots()
    width = 0.84 / len(names)
    for index, name in enumerate(names):
        shift = (index - (len(names) - 1) / 2) * width
        heights = [score[name] for score in categories.values()]
        axis.bar([x + shift for x in range(len(categories))], heights, width, label=result["titles"][name])
    axis.set_xticks(range(len(categories)), list(categories), fontsize=8)
    axis.set_ylabel("score, 0 to 100")
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=len(names), fontsize=8, frameon=False)
    figure.suptitle(f"LongBench, {result['model']}, {result['data']}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path
