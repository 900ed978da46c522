"""Shows which architectures are right, and why others are not, in the terminal and as Markdown."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pasa.eval.kit import output
from pasa.eval.kit.tables import Table, markdown
from pasa.eval.models.zoo.judging import AMPLIFIES, FINDINGS, LIKEWISE, VERDICTS

WIDTH = 160  # characters of a reason


def count_table(result: dict[str, Any]) -> Table:
    """Architectures by kind and verdict."""
    rows = [
        [kind, str(sum(own.values())), *(str(own.get(name, 0)) for name in VERDICTS)]
        for kind, own in result["counts"].items()
    ]
    libraries = " and ".join(f"{name} {result['environment'][name]}" for name in ("transformers", "diffusers"))
    return Table("Architectures, patched against unpatched", ["kind", "classes", *VERDICTS], rows, f"Of {libraries}.")


def case_table(result: dict[str, Any]) -> Table:
    """How far right ones are from the bounds, by kind and case."""
    bounds = result["settings"]["bounds"]
    cases: dict[tuple[str, str], list[dict[str, float | None]]] = {}
    amplified: set[str] = set()
    for each in result["records"]:
        if each["verdict"] == "right":
            for name, errors in each["cases"].items():
                cases.setdefault((each["kind"], name), []).append(errors)
                if "rounded" in errors:
                    amplified.add(each["name"])
    rows = [[f"{kind}: {name}", *_errors(errors)] for (kind, name), errors in cases.items()]
    note = (
        "Largest difference from the unpatched model, relative to the RMS of its output. With FP64 attention in the "
        f"place of PASA: at most {bounds['PLUMBING']:g} ({', '.join(AMPLIFIES)}: 2^{math.log2(LIKEWISE):.0f} of what "
        f"FP16's roundings do to it). With PASA, whose reference rounds q, k and v to FP16: at most "
        f"{bounds['ROUNDING']:g}, or, where a model amplifies roundings, {bounds['AMPLIFIED']:g} times what rounding "
        f"q, k and v alone does to it (amplified: {', '.join(sorted(amplified))}). Planted: with a wrong mask."
    )
    return Table("What right ones err by", CASE_HEADER, rows, note)


CASE_HEADER = ["case", "models", "FP64, worst", "PASA, median", "PASA, worst", "amplified", "planted, median"]


def _errors(own: list[dict[str, float | None]]) -> list[str]:
    """A row of `case_table`; JSON, which has no infinity, has None for it."""
    values = {
        name: sorted(math.inf if each[name] is None else float(each[name] or 0) for each in own if name in each)
        for name in ("plumbing", "error", "planted")
    }
    planted = values["planted"]
    return [
        str(len(own)), f"{values['plumbing'][-1]:.1e}", f"{values['error'][len(own) // 2]:.1e}",
        f"{values['error'][-1]:.1e}", str(sum("rounded" in each for each in own)),
        f"{planted[len(planted) // 2]:.1e}" if planted else "-",
    ]  # fmt: skip


def reason_table(result: dict[str, Any]) -> Table:
    """Every architecture that is not right."""
    rows = [
        [each["name"], each["kind"], each["verdict"], each["why"][:WIDTH]]
        for each in result["records"]
        if each["verdict"] not in ("right", "nothing to patch")
    ]
    return Table("Why others are not right", ["class", "kind", "verdict", "why"], rows, "")


def verdict(result: dict[str, Any]) -> str:
    """What the exit status says."""
    total: Counter[str] = Counter()
    for own in result["counts"].values():
        total.update(own)
    judged = sum(total[name] for name in ("right", "refused", *FINDINGS))
    said = f"{total['right']} right, {total['refused']} refused by name, {total['wrong']} wrong"
    others = sum(total[name] for name in FINDINGS) - total["wrong"]
    failed = f" FINDINGS: {', '.join(result['gate']['findings'])}." if not result["gate"]["passed"] else ""
    more = f", {others} refused or crashed in a call" if others else ""
    return f"{judged} architectures with attention: {said}{more}.{failed}"


def origin(result: dict[str, Any]) -> str:
    """Where and with what it was run."""
    machine = result["environment"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "transformers", "diffusers", "pasa"))
    return (
        f"({machine['processor']}; {versions}, commit {machine['commit']}; {result['cpu_s'] / 60:.0f} minutes of CPU; "
        f"{result['note']}.)"
    )


def to_markdown(result: dict[str, Any]) -> str:
    """Counts, errors and the verdict; without a title and without the reasons."""
    counts, cases = count_table(result), case_table(result)
    return "\n\n".join(
        [
            f"{counts.note} {verdict(result)} {origin(result)}",
            markdown(counts.header, counts.rows),
            cases.note,
            markdown(cases.header, cases.rows),
        ]
    )


def render(result: dict[str, Any], console: Console) -> None:
    """Print the counts, the reasons and the verdict."""
    for found in (count_table(result), case_table(result), reason_table(result)):
        found.show(console)
    console.print(Text(verdict(result)))


def save(result: dict[str, Any], folder: Path) -> None:
    """Write ``zoo.json`` and ``zoo.md``."""
    stored = output.to_json(result)
    result = json.loads(stored)  # what both say is rounded alike
    reasons = reason_table(result)
    listed = [[cell.replace("|", "\\|") for cell in row] for row in reasons.rows]
    text = f"# Architectures\n\n{to_markdown(result)}\n\n## {reasons.title}\n\n{markdown(reasons.header, listed)}\n"
    output.write_text(folder / "zoo.json", stored)
    output.write_text(folder / "zoo.md", text)
