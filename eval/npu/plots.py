"""The figure: what each engine takes for a score tile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pasa.eval.npu.model import PIPES
from pasa.eval.npu.report import shown


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Make ``npu_model_tiles.png``: one group for each allocation, one bar for each engine; D = 128."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    names = shown(result)
    found = {each["allocation"]: each["ns"] for each in result["tiles"] if each["dim"] == 128}
    figure = Figure(figsize=(9.0, 4.0), layout="constrained")
    axis = figure.subplots()
    width = 0.84 / len(PIPES)
    for index, engine in enumerate(PIPES):
        shift = (index - (len(PIPES) - 1) / 2) * width
        axis.bar([x + shift for x in range(len(names))], [found[name][engine] for name in names], width, label=engine)
    axis.set_xticks(range(len(names)), names, fontsize=8)
    axis.set_ylabel("ns for 128 x 128 scores, model")
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=len(PIPES), fontsize=8, frameon=False)
    figure.suptitle("Model, not measured: Ascend 910B3, one cube core and two vector cores, D = 128", fontsize=10)
    path = folder / "npu_model_tiles.png"
    figure.savefig(path, dpi=110)
    return [path]
