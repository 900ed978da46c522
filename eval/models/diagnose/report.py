"""Shows a diagnosis to a person: in the terminal, as Markdown, and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from pasa.eval.kit import output
from pasa.eval.kit.tables import Table, markdown
from pasa.eval.models.diagnose import page, plots
from pasa.eval.models.diagnose.maps import HeadMaps
from pasa.eval.models.diagnose.words import COLUMNS, how_measured, meanings, origin, rows, verdict

SHOWN = 10
"""Heads in the terminal and in Markdown; JSON has all."""
TERMINAL = ("layer", "head", "peak QKᵀ", "× 65504", "stored", "bias", "resonance")  # what 80 columns hold


def head_table(result: dict[str, Any], columns: Sequence[str] = tuple(COLUMNS), most: int = SHOWN) -> Table:
    """The worst heads, a row each."""
    found, total = rows(result["records"][:most], columns), len(result["records"])
    left = f" {total - most} more in the JSON." if total > most else ""
    return Table(f"{result['model']}: heads, worst first", list(columns), found, f"{meanings(columns)}{left}")


def render(result: dict[str, Any], console: Console | None = None) -> None:
    """Print the verdict and the worst heads."""
    console = console or Console()
    found = head_table(result, TERMINAL)
    shown = RichTable(title=Text(found.title), caption=Text(found.note), box=box.SIMPLE_HEAD)
    shown.add_column(found.header[0], overflow="fold")
    for heading in found.header[1:]:
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in found.rows:
        shown.add_row(*map(Text, row))
    console.print(shown)
    console.print(Text(verdict(result)))


def to_markdown(result: dict[str, Any], picture: str | None) -> str:
    """The same, with how it was measured."""
    found = head_table(result)
    parts = [
        f"# {result['model']}",
        verdict(result),
        f"## {found.title.rpartition(': ')[2].capitalize()}",
        markdown(found.header, found.rows),
        found.note,
        f"![Matrices of the worst heads]({picture})" if picture else "",
        "\n".join(f"- {line}" for line in how_measured(result)),
        origin(result),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def save(result: dict[str, Any], maps: Sequence[HeadMaps], folder: Path) -> list[Path]:
    """Write ``diagnose.html``, ``.json``, ``.md`` and, if there is anything to draw, ``.png``; return their paths."""
    texts = {
        "diagnose.html": page.render_page(result, maps),
        "diagnose.json": output.to_json(result),
        "diagnose.md": to_markdown(result, "diagnose.png" if maps else None),
    }
    for name, text in texts.items():
        output.write_text(folder / name, text)
    drawn = [plots.draw(maps, result["note"], folder / "diagnose.png")] if maps else []
    return [folder / name for name in texts] + drawn
