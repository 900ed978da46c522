"""Shows what ring attention costs and errs, in the terminal and as Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from pasa.eval.kit import output
from pasa.eval.kit.tables import Table, markdown, number, short


def table(result: dict[str, Any]) -> Table:
    """Two rows for every offset: one device, and the ring."""
    settings, machine = result["settings"], result["environment"]
    rows = []
    for each in result["records"]:
        case = f"offset {each['offset']:,.0f}"
        for name, title, peaks in (
            ("one", "one device", [each["one_peak_bytes"]]),
            ("ring", f"ring of {settings['ranks']}", each["ring_peak_bytes"]),
        ):
            most = None if None in peaks else max(peaks) / 2**30
            cells = [f"{1e3 * each[f'{name}_s']:,.1f}", number(most, ".2f")]
            rows.append([f"{case}, {title}", *cells, short(each[f"{name}_rmse"]), short(each[f"{name}_max_error"])])
    heads, kv = settings["heads"]
    verdict = "passed" if result["gate"]["passed"] else "FAILED"
    note = (
        "Offset: what the keys' bias adds to every scaled score. Errors: against FP64, of rows spread over the "
        f"sequence. Medians of {settings['rounds']}; {result['note']}. Gate {verdict}. "
        f"({machine['device']}, torch {machine['torch']}, commit {machine['commit'] or 'unknown'}.)"
    )
    title = f"Causal attention of {settings['tokens']:,} tokens, {heads} heads of {kv}, head dim {settings['dim']}"
    return Table(title, ["case", "ms", "peak GiB per device", "RMSE", "largest error"], rows, note)


def to_markdown(result: dict[str, Any]) -> str:
    """The table and what it rests on, without a title."""
    found = table(result)
    return f"{found.title}:\n\n{markdown(found.header, found.rows)}\n\n{found.note}"


def render(result: dict[str, Any], console: Console) -> None:
    """Print it."""
    table(result).show(console)


def save(result: dict[str, Any], folder: Path) -> None:
    """Write JSON and Markdown."""
    found = table(result)
    output.write_text(folder / "ring.json", output.to_json(result))
    output.write_text(folder / "ring.md", f"# {found.title}\n\n{markdown(found.header, found.rows)}\n\n{found.note}\n")
