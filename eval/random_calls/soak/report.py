"""Shows a result to a person: bounds, counts, failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from pasa.eval.kit import output
from pasa.eval.kit.tables import Table, markdown
from pasa.eval.random_calls.soak.judge import COUNTS, WHAT

Record = dict[str, Any]
SHOWN_FAILURES = 10
HIDDEN = ("measures", "failed", "why", "fatal", "seed", "index", "group")


def bound_table(result: Record) -> Table:
    """The worst number of every bound."""
    rows = []
    for name, entry in result["worst"].items():
        allowed = "0" if name in COUNTS else "1"
        case = "-" if entry["index"] is None else str(entry["index"])
        rows.append([name, str(entry["judged"]), short(entry["value"]), allowed, case, WHAT[name]])
    note = "Measured over allowed, or a count; eval/random_calls/soak/README.md derives what is allowed."
    return Table("Bounds", ["bound", "judged", "worst", "allowed", "case", "what"], rows, note)


def count_table(result: Record) -> Table:
    """How many cases of what."""
    rows = [
        [name, ", ".join(f"{kind} {number}" for kind, number in kinds.items())]
        for name, kinds in result["counts"].items()
    ]
    return Table("Cases", ["by", "number"], rows, "")


def short(value: float | None) -> str:
    """Three digits; JSON has no infinity or NaN."""
    return "not finite" if value is None else f"{value:.3g}"


def describe_failure(record: Record) -> str:
    """What failed, by how much, and the case."""
    numbers = ", ".join(f"{name} {short(record['measures'][name])}" for name in record["failed"] if name != "raised")
    case = ", ".join(f"{name} {value}" for name, value in record.items() if name not in HIDDEN)
    return f"case {record['index']}: {numbers or record['why']} [{case}]"


def verdict(result: Record) -> str:
    """What the exit status says."""
    gate = result["gate"]
    stopped = "; stopped, because the device failed" if gate["stopped"] else ""
    if gate["passed"]:
        return f"All {gate['run']} cases hold all bounds."
    again = f"repeat one: pasa bench soak --seed {result['seed']} --backend {result['backend']}"
    return f"{gate['failed']} of {gate['run']} cases FAIL{stopped}; {again}{' --small' * result['small']} --only INDEX"


def origin(result: Record) -> str:
    """Where the numbers come from, in one line."""
    found = result["environment"]
    versions = ", ".join(f"{name} {found.get(name) or '-'}" for name in ("torch", "triton", "cuda", "pasa"))
    return (
        f"Backend {result['backend']}, seed {result['seed']}, every {result['repeat_every']}th case run twice; "
        f"{found['device']}; {versions}; commit {found['commit'] or 'unknown'}; {result['duration_s']} s. "
        f"{result['note']}."
    )


def render(result: Record, console: Console) -> None:
    """Print the tables, the first failures, the verdict and the origin; with one case, all of its numbers."""
    tables = [bound_table(result)] if "case" in result else [count_table(result), bound_table(result)]
    for table in tables:
        shown = RichTable(title=table.title, caption=table.note or None, title_justify="left")
        for heading in table.header:
            shown.add_column(heading, overflow="fold")
        for row in table.rows:
            shown.add_row(*(Text(text) for text in row))
        console.print(shown)
    lines = [describe_failure(record) for record in result["failures"][:SHOWN_FAILURES]]
    if "case" in result and not lines:
        lines = [", ".join(f"{name} {value}" for name, value in result["case"].items() if name not in HIDDEN)]
    left = len(result["failures"]) - SHOWN_FAILURES
    more = [f"... and {left} more, all of them in the JSON"] if left > 0 else []
    for line in (*lines, *more, verdict(result), origin(result)):
        console.print(Text(line))


def to_markdown(result: Record) -> str:
    """Everything."""
    parts = ["# soak", origin(result), verdict(result)]
    for table in (bound_table(result), count_table(result)):
        parts += [f"## {table.title}", markdown(table.header, table.rows), table.note]
    parts += ["## Failures", "\n".join(f"- {describe_failure(each)}" for each in result["failures"]) or "None."]
    return "\n\n".join(part for part in parts if part) + "\n"


def save(result: Record, folder: Path) -> list[Path]:
    """Write JSON and Markdown; return their paths."""
    paths = [folder / "soak.json", folder / "soak.md"]
    for path, text in zip(paths, (output.to_json(result), to_markdown(result)), strict=True):
        output.write_text(path, text)
    return paths
