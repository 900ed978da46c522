"""Shows a result to a person: verdicts, bounds, findings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pasa.eval.kit import output
from pasa.eval.kit.tables import markdown
from pasa.eval.random_calls.fuzz.cases import COUNTS
from pasa.eval.random_calls.soak.report import short

Record = dict[str, Any]
VERDICTS = ("correct", "refused", "absent", "wrong", "raised", "accepted")
SHOWN = 10
WIDTH = 1500  # characters of a finding


def rows(counts: dict[str, dict[str, int]]) -> list[list[str]]:
    """A row for each name, and how many of each verdict."""
    return [[name, *(str(numbers.get(each, 0)) for each in VERDICTS)] for name, numbers in counts.items()]


def bounds(result: Record) -> list[list[str]]:
    """The worst ratio to every bound."""
    found = result["worst"].items()
    return [
        [name, str(x["judged"]), short(x["value"]), "0" if name in COUNTS else "1", x["case"] or "-"]
        for name, x in found
    ]


def verdict(result: Record) -> str:
    """What the exit status says."""
    gate, cases = result["gate"], result["cases"]
    absent = f"; {gate['absent']} had no backend here" if gate["absent"] else ""
    if gate["passed"]:
        refused = sum(result["faults"].values())
        judged = cases - refused - gate["absent"]
        return (
            f"{cases:,} cases: {judged:,} hold all bounds against FP64, {refused:,} wrong calls of "
            f"{len(result['faults'])} kinds are refused with their documented errors{absent}."
        )
    return f"{gate['findings']} of {cases} cases are FINDINGS{absent}; repeat one: pasa eval fuzz --replay SEED:INDEX"


def origin(result: Record) -> str:
    """Where the numbers come from, in one line."""
    found = result["environment"]
    versions = ", ".join(f"{name} {found.get(name) or '-'}" for name in ("torch", "triton", "pasa"))
    return (
        f"Seed {result['seed']}; {found['device']}; {versions}; commit {found['commit'] or 'unknown'}; "
        f"{result['duration_s']} s. {result['note']}."
    )


def lines(result: Record) -> list[str]:
    """The first findings: what is wrong, and the simplest case."""
    return [
        f"{each['case']} {each['kind']} {each['verdict']}: {each['why']} {json.dumps(each['shrunk'])}"[:WIDTH]
        for each in result["findings"][:SHOWN]
    ]


def to_markdown(result: Record) -> str:
    """Everything but the parameters of all cases."""
    parts = ["# fuzz", origin(result), verdict(result), "## Verdicts"]
    parts += [markdown(["kind", *VERDICTS], rows(result["verdicts"]))]
    parts += [markdown(["backend", *VERDICTS], rows(result["backends"]))]
    parts += ["## Bounds", "Measured over allowed, or a count; README.md says what is allowed."]
    parts += [markdown(["bound", "judged", "worst", "allowed", "case"], bounds(result))]
    parts += ["## Wrong calls", markdown(["call", "refused"], [[k, str(n)] for k, n in result["faults"].items()])]
    parts += ["## Findings", "\n".join(f"- {line}" for line in lines(result)) or "None."]
    return "\n\n".join(parts) + "\n"


def render(result: Record, console: Console) -> None:
    """Verdicts, findings, and where they come from; of a replay all measures."""
    for row in rows(result["verdicts"]):
        said = ", ".join(f"{number} {name}" for name, number in zip(VERDICTS, row[1:], strict=True) if number != "0")
        console.print(Text(f"{row[0]}: {said}"))
    if result["replay"]:
        console.print(Text(", ".join(f"{row[0]} {row[2]}" for row in bounds(result)) or "no measures"))
    for line in (*lines(result), verdict(result), origin(result)):
        console.print(Text(line))


def save(result: Record, folder: Path) -> list[Path]:
    """Write JSON and Markdown; return their paths."""
    paths = [folder / "fuzz.json", folder / "fuzz.md"]
    for path, text in zip(paths, (output.to_json(result), to_markdown(result)), strict=True):
        output.write_text(path, text)
    return paths
