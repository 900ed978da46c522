"""Shows what each scaling did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pasa.eval.kit import output
from pasa.eval.kit.tables import Table, markdown, percent, short
from pasa.eval.models.predict.run import origin


def tables(result: dict[str, Any]) -> list[Table]:
    """The transients, and the tiles."""
    return [transient_table(result), tile_table(result)]


def transient_table(result: dict[str, Any]) -> Table:
    """A row for every model, scenario and method."""
    rows = [
        [
            *(each[name] for name in ("model", "scenario", "method")),
            f"{each['overflowing_layers_first_step']}/{each['layers']}",
            f"{each['overflowing_steps']}/{each['steps']}",
            f"{each['largest_scaled']:,.0f}",
            " / ".join(percent(each["utilisation"][name]) for name in ("p10", "median", "p90")),
            "-" if each["alpha"] is None else f"{each['alpha']:.3g}",
        ]
        for each in result["records"]
    ]
    header = ["model", "scenario", "method", "layers beyond, first step", "steps with overflow", "largest scaled"]
    settings = result["settings"]
    note = (
        "What logits are divided by before E4M3, whose largest number is 448, in the steps after the event. Delayed: "
        "history of 16 steps, eta 0.9, initial 1.0. Geometry: alpha for delta = "
        f"{settings['delta']:g}, norm by power iteration, of the worst head or, as in the paper, of the sum of heads. "
        f"Auto-alpha is calibrated on the steps before the event. Training is in FP32, {settings['tokens']} tokens a "
        f"step, AdamW at {settings['learning_rate']:g}; the methods look on."
    )
    return Table("FP8 scaling in transients", [*header, "utilisation P10 / median / P90", "alpha"], rows, note)


def tile_table(result: dict[str, Any]) -> Table:
    """RMSE by the format of the score tile."""
    names = list(result["tiles"][0]["rmse"])
    rows = [[each["case"], *(short(each["rmse"][name]) for name in names)] for each in result["tiles"]]
    note = (
        "RMSE against FP64; statistics, probabilities and sums in FP32, so that only the score tile is rounded. plain: "
        "q.k/sqrt(d); pasa: shifted by the block's mean and referenced to the row's largest score so far. A block has "
        "128 x 128 scores. Emulated."
    )
    return Table("Score tiles in FP16 and in FP8 (E4M3)", ["case (x0,Am)", *names], rows, note)


def verdict(result: dict[str, Any]) -> str:
    """The checks, in a sentence."""
    by = {"geometry": 0, "delayed": 0}
    for each in result["records"]:
        if each["method"] in by:
            by[each["method"]] += each["overflows"]
    passed = "All checks hold." if result["gate"]["passed"] else f"FAILED: {result['gate']['checks']}."
    counts = f"Geometry-aware scaling: {by['geometry']} overflows in all scenarios. Delayed scaling: {by['delayed']}."
    return f"{counts} {passed}"


def render(result: dict[str, Any], console: Console) -> None:
    """Print the tables and the verdict."""
    for table in tables(result):
        table.show(console)
    console.print(Text(f"{verdict(result)} {origin(result)}"))


def save(result: dict[str, Any], folder: Path) -> None:
    """Write ``fp8.json`` and ``fp8.md``."""
    output.write_text(folder / "fp8.json", output.to_json(result))
    found = tables(result)
    parts = [text for each in found for text in (f"# {each.title}", markdown(each.header, each.rows), each.note)]
    output.write_text(folder / "fp8.md", "\n\n".join([*parts, verdict(result), origin(result)]) + "\n")
