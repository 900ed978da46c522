"""Shows results of random calls: counts, bounds, failures."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from pasa.eval.kit.tables import Table
from pasa.eval.random_calls.cases import COUNTS
from pasa.eval.random_calls.judge import WHAT

Record = Mapping[str, Any]
VERDICTS = ("correct", "refused", "absent", "wrong", "raised", "accepted")
SHOWN = 10
WIDTH = 1500  # characters of a failure
NOTE = "Each is an error divided by the allowed error, or a count. eval/random_calls/README.md derives what is allowed."


def report(result: Record) -> list[Table | str]:
    """Return what is shown of a run."""
    named = result.get("verdicts", {}), result.get("backends", {})
    tables = [
        Table(title, [by, *VERDICTS], [[k, *(str(n.get(each, 0)) for each in VERDICTS)] for k, n in counts.items()])
        for title, by, counts in zip(("Verdicts", "Backends"), ("kind", "backend"), named, strict=True)
        if counts
    ]
    tables.append(bounds(result, WHAT if result["experiment"] == "soak" else None))
    lists: dict[str, list[str]] = defaultdict(list)
    for name, number in result.get("faults", {}).items():
        kind, _, fault = name.partition(": ")
        lists[kind].append(f"{fault} {number}")
    for name, numbers in result.get("counts", {}).items():
        lists[name] = [f"{kind} {number}" for kind, number in numbers.items()]
    title = "Wrong calls that are refused" if "faults" in result else "Cases"
    rows = [[name, ", ".join(texts)] for name, texts in lists.items()]
    tables.append(Table(title, ["of", "number"], rows, wraps="number"))
    return [*tables, *failures(result), verdict(result), origin(result)]


def bounds(result: Record, what: Mapping[str, str] | None = None) -> Table:
    """Return the worst number of every bound, the case that has it (an index in schema 1), and what it is."""
    names = result["worst"] if what is None else [name for name in what if name in result["worst"]]
    rows = []
    for name in names:
        entry = result["worst"][name]
        case = entry.get("case", entry.get("index"))
        value = "not finite" if entry["value"] is None else f"{entry['value']:.3g}"  # JSON has no infinity or NaN
        row = [name, str(entry["judged"]), value, "0" if name in COUNTS else "1", "-" if case is None else str(case)]
        rows.append(row if what is None else [*row, what[name]])
    header = ["bound", "judged", "worst", "allowed", "case"]
    return Table("Bounds", header if what is None else [*header, "what"], rows, NOTE, "" if what is None else "what")


def failures(result: Record) -> list[str]:
    """Return the first failures: what is wrong, and the simplest case; of a case that runs alone its parameters."""
    lines = [
        f"{each['case']} {each['kind']} {each['verdict']}: {each['why']} {json.dumps(each['shrunk'])}"[:WIDTH]
        for each in result.get("failures", [])
    ]
    if "case" in result and not lines:
        lines = [f"{result['case']['case']} {result['case']['kind']}: {json.dumps(result['case']['params'])}"]
    more = [f"... and {len(lines) - SHOWN} more, all of them in the JSON"] if len(lines) > SHOWN else []
    return lines[:SHOWN] + more


def verdict(result: Record) -> str:
    """Return what the exit status says."""
    gate, cases = result["gate"], result["cases"]
    absent = f"; {gate['absent']} had no backend here" if gate.get("absent") else ""
    if not gate["passed"]:
        stopped = "; stopped, because the device failed" if gate["stopped"] else ""
        again = "pasa eval fuzz --replay SEED:INDEX"
        if result["experiment"] == "soak":
            small = " --small" * result["small"]
            again = f"pasa bench soak --seed {result['seed']} --backend {result['backend']}{small} --only INDEX"
        return f"{gate['failed']} of {gate['run']} cases FAIL{absent}{stopped}; repeat one: {again}"
    if result["experiment"] == "soak":
        return f"All {gate['run']} cases hold all bounds."
    refused = sum(result["faults"].values())
    return (
        f"{cases:,} cases: {cases - refused - gate['absent']:,} hold all bounds against FP64, {refused:,} wrong calls "
        f"of {len(result['faults'])} kinds are refused with their documented errors{absent}."
    )


def origin(result: Record) -> str:
    """Return where the numbers come from, in one line."""
    machine = result["environment"]
    names: tuple[str, ...] = ("torch", "triton", "pasa")
    what = f"Seed {result['seed']}"
    if result["experiment"] == "soak":
        names = ("torch", "triton", "cuda", "pasa")
        what = f"Backend {result['backend']}, seed {result['seed']}, every {result['repeat_every']}th case run twice"
    versions = ", ".join(f"{name} {machine.get(name) or '-'}" for name in names)
    commit = machine["commit"] or "unknown"
    return f"{what}; {machine['device']}; {versions}; commit {commit}; {result['duration_s']} s. {result['note']}."
