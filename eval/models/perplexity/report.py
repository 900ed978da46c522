"""Shows perplexities to a person, in the terminal and as Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pasa.eval.accuracy.precisions import REFERENCE
from pasa.eval.kit import output
from pasa.eval.kit.tables import Table, markdown, number
from pasa.eval.models.longbench.report import conclusion, origin


def table(result: dict[str, Any]) -> Table:
    """A row for every precision, two columns for every offset."""
    offsets = result["settings"]["offsets"]
    found = {(each["precision"], each["offset"]): each["perplexity"] for each in result["perplexities"]}
    base = found[REFERENCE, offsets[0]]
    rows = []
    for name, title in result["titles"].items():
        cells = []
        for offset in offsets:
            value = found[name, offset]
            change = None if None in (value, base) else value - base
            cells += ["not finite" if value is None else f"{value:,.4f}", number(change, "+,.4f")]
        rows.append([title, *cells])
    header = ["precision", *(text for offset in offsets for text in (f"offset {offset:,.0f}", "change"))]
    settings = result["settings"]
    title = (
        f"Perplexity of {settings['tokens']:,} tokens of {result['text']}, windows of {settings['window']:,}, "
        f"stride {settings['stride']:,}: {result['model']}"
    )
    note = (
        "Offset: constant added to every score q.k, which changes nothing in exact arithmetic; change: to "
        f"{result['titles'][REFERENCE]} at offset {offsets[0]:,.0f}. {result['note']}."
    )
    return Table(title, header, rows, note)


def render(result: dict[str, Any], console: Console | None = None) -> None:
    """Print the table and the verdict."""
    console = console or Console()
    table(result).show(console)
    console.print(Text(conclusion(result["gate"])))


def save(result: dict[str, Any], folder: Path) -> None:
    """Write ``perplexity.json`` and ``perplexity.md``."""
    found, said = table(result), conclusion(result["gate"])
    parts = [f"# {found.title}", markdown(found.header, found.rows), found.note, said, origin(result)]
    output.write_text(folder / "perplexity.json", output.to_json(result))
    output.write_text(folder / "perplexity.md", "\n\n".join(parts) + "\n")
