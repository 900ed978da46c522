"""Shows what scales cost to a person, in the terminal, as Markdown and in a README."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pasa.eval.kit import output
from pasa.eval.kit.tables import Table, markdown
from pasa.eval.speed.watching.run import origin

Result = dict[str, Any]


def table(result: Result) -> Table:
    """A row for every model, part and way."""
    rows = [
        [
            f"{each['model']}, {each['batch']} x {each['tokens']}, {each['part']}",
            each["way"],
            f"{1e3 * each['plain_ms']:,.0f}",
            f"{each['cost_percent']:+.1f} %",
            f"{each['p20_percent']:+.1f} to {each['p80_percent']:+.1f} %",
            f"{each['printed_percent']:+.1f} %",
        ]
        for each in result["records"]
    ]
    settings = result["settings"]
    note = (
        "Time of layers in BF16, causal, no norms, in a CUDA graph, beside the same without scales; wall time, medians "
        f"of {settings['turns']} interleaved turns of {settings['calls']} passes. Batch and tokens: the paper's table "
        "8. One warm step of power iteration a pass, a norm for each head; sum of heads: the paper's norm of a layer. "
        "Side stream: all scales begin with the pass, and each attention waits for its own. Printed: the paper's table "
        "9, whole models beside delayed scaling, which has costs of its own; nothing is rounded to FP8 here."
    )
    header = ["case", "way", "us a layer", "cost of the scale", "p20 to p80", "printed"]
    return Table("What a scale from the weights costs", header, rows, note, wraps="case")


def verdict(result: Result) -> str:
    """What holds and what does not."""
    worst = max(each["error"] for each in result["checks"])
    failed = [name for name, passed in result["gate"]["checks"].items() if not passed]
    checked = f"Norms are those of a full SVD in FP64 within {100 * worst:.2g} % (BF16)."
    return f"{checked} FAILED: {', '.join(failed)}." if failed else f"{checked} All checks hold."


def summary(result: Result) -> str:
    """A paragraph for README.md: the range over the models, by part and way."""
    told = []
    for part in dict.fromkeys(each["part"] for each in result["records"]):
        for way in dict.fromkeys(each["way"] for each in result["records"]):
            costs = [each["cost_percent"] for each in result["records"] if (each["part"], each["way"]) == (part, way)]
            told.append(f"{part}, {way} {min(costs):+.1f} to {max(costs):+.1f} %")
    models = ", ".join(dict.fromkeys(each["model"] for each in result["records"]))
    return f"Added to a forward pass of {models}: {'; '.join(told)}. {verdict(result)} {origin(result)}"


def section(result: Result) -> str:
    """The table with all that belongs to it, for the experiment's README."""
    found = table(result)
    return "\n\n".join([found.note, markdown(found.header, found.rows), f"{verdict(result)} {origin(result)}"])


def render(result: Result, console: Console) -> None:
    """Print the table and the verdict."""
    table(result).show(console)
    console.print(Text(verdict(result)))


def save(result: Result, folder: Path) -> None:
    """Write ``overhead.json`` and ``overhead.md``."""
    stored = output.to_json(result)
    result = json.loads(stored)  # what both say is rounded alike
    output.write_text(folder / "overhead.json", stored)
    output.write_text(folder / "overhead.md", f"# {table(result).title}\n\n{section(result)}\n")
