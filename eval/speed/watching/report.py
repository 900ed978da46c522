"""Shows what watching costs to a person, in the terminal and as Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pasa.eval.accuracy.rmse.report import Table, show
from pasa.eval.kit import output
from pasa.eval.speed.report import markdown


def table(result: dict[str, Any]) -> Table:
    """A row for every case."""
    rows = [
        [
            f"{each['kind']}: {each['case']}",
            f"{each['plain_ms']:.3f}",
            f"{each['watched_ms']:.3f}",
            f"{each['cost_percent']:+.2f} %",
            f"{each['p20_percent']:+.2f} to {each['p80_percent']:+.2f} %",
        ]
        for each in result["records"]
    ]
    settings = result["settings"]
    note = (
        f"One query row in {settings['stride']:,} is looked at. Wall time of host and device, medians of "
        f"{settings['turns']} interleaved turns; cost: median and p20 to p80 of the turns' ratios. The model: "
        f"{'a tiny Qwen2' if settings['small'] else 'four layers of Qwen2-7B'}, random weights, eager. To begin and "
        "end a watch is not in the times: "
        + ("not measured." if result["begin_ms"] is None else f"{result['begin_ms']:.2f} ms once.")
    )
    return Table("What watching costs", ["case", "ms", "ms watched", "cost", "p20 to p80"], rows, note)


def summary(result: dict[str, Any]) -> str:
    """A line for README.md: what it costs a model."""
    costs = ", ".join(
        f"{each['case']} {each['cost_percent']:+.1f} % ({each['p20_percent']:+.1f} to {each['p80_percent']:+.1f})"
        for each in result["records"]
        if each["kind"] == "model"
    )
    turns = result["settings"]["turns"]
    return (
        f"Four layers of Qwen2-7B, median and p20 to p80 of {turns} turns: {costs}. {verdict(result)} {origin(result)}"
    )


def verdict(result: dict[str, Any]) -> str:
    """What holds and what does not."""
    exact = sum(each["exact"] for each in result["checks"])
    counted = f"Counts equal to FP64's in {exact} of {len(result['checks'])} calls."
    failed = [name for name, passed in result["gate"]["checks"].items() if not passed]
    return f"{counted} FAILED: {', '.join(failed)}." if failed else f"{counted} All checks hold."


def origin(result: dict[str, Any]) -> str:
    """Where and with what it was measured."""
    machine = result["environment"]
    return (
        f"({machine['device']}; torch {machine['torch']}, triton {machine['triton']}, pasa {machine['pasa']}, "
        f"commit {machine['commit']}; not run on an NPU.)"
    )


def to_markdown(result: dict[str, Any]) -> str:
    """The table, what it says, and where it was measured; without a title."""
    found = table(result)
    return f"{markdown(found.header, found.rows)}\n\n{found.note} {verdict(result)} {origin(result)}"


def render(result: dict[str, Any], console: Console) -> None:
    """Print the table and the verdict."""
    show(table(result), console)
    console.print(Text(verdict(result)))


def save(result: dict[str, Any], folder: Path) -> None:
    """Write ``watch.json`` and ``watch.md``."""
    stored = output.to_json(result)
    result = json.loads(stored)  # what both say is rounded alike
    output.write_text(folder / "watch.json", stored)
    output.write_text(folder / "watch.md", f"# {table(result).title}\n\n{to_markdown(result)}\n")
