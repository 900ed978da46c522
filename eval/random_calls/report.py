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
NOTE = "Measured over allowed, or a count; eval/random_calls/README.md says what is allowed."


def fuzz(result: Record) -> list[Table | str]:
    """Return what is shown of the whole API."""
    verdicts = [
        Table(title, [by, *VERDICTS], [[k, *(str(n.get(each, 0)) for each in VERDICTS)] for k, n in found.items()])
        for title, by, found in (("Verdicts", "kind", result["verdicts"]), ("Backends", "backend", result["backends"]))
    ]
    refused = defaultdict(list)
    for name, number in result["faults"].items():
        kind, _, fault = name.partition(": ")
        refused[kind].append(f"{fault} {number}")
    wrong = [[kind, ", ".join(faults)] for kind, faults in refused.items()]
    calls = Table("Wrong calls", ["of", "refused, and how often"], wrong, wraps="refused, and how often")
    return [*verdicts, bounds(result), calls, *failures(result), fuzz_verdict(result), fuzz_origin(result)]


def soak(result: Record) -> list[Table | str]:
    """Return what is shown of one backend's kernels."""
    rows = [[k, ", ".join(f"{kind} {number}" for kind, number in n.items())] for k, n in result["counts"].items()]
    counts = Table("Cases", ["by", "number"], rows, wraps="number")
    return [bounds(result, WHAT), counts, *failures(result), soak_verdict(result), soak_origin(result)]


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


def fuzz_verdict(result: Record) -> str:
    """Return what the exit status says of the whole API."""
    gate, cases = result["gate"], result["cases"]
    absent = f"; {gate['absent']} had no backend here" if gate["absent"] else ""
    if gate["passed"]:
        refused = sum(result["faults"].values())
        judged = cases - refused - gate["absent"]
        return (
            f"{cases:,} cases: {judged:,} hold all bounds against FP64, {refused:,} wrong calls of "
            f"{len(result['faults'])} kinds are refused with their documented errors{absent}."
        )
    return f"{gate['failed']} of {cases} cases FAIL{absent}; repeat one: pasa eval fuzz --replay SEED:INDEX"


def soak_verdict(result: Record) -> str:
    """Return what the exit status says of the kernels."""
    gate = result["gate"]
    stopped = "; stopped, because the device failed" if gate["stopped"] else ""
    if gate["passed"]:
        return f"All {gate['run']} cases hold all bounds."
    again = f"repeat one: pasa bench soak --seed {result['seed']} --backend {result['backend']}"
    return f"{gate['failed']} of {gate['run']} cases FAIL{stopped}; {again}{' --small' * result['small']} --only INDEX"


def fuzz_origin(result: Record) -> str:
    """Return where the numbers of the whole API come from."""
    return f"Seed {result['seed']}; {_origin(result, 'torch', 'triton', 'pasa')}"


def soak_origin(result: Record) -> str:
    """Return where the numbers of kernels come from."""
    twice = f"every {result['repeat_every']}th case run twice"
    machine = _origin(result, "torch", "triton", "cuda", "pasa")
    return f"Backend {result['backend']}, seed {result['seed']}, {twice}; {machine}"


def _origin(result: Record, *names: str) -> str:
    machine = result["environment"]
    versions = ", ".join(f"{name} {machine.get(name) or '-'}" for name in names)
    commit = machine["commit"] or "unknown"
    return f"{machine['device']}; {versions}; commit {commit}; {result['duration_s']} s. {result['note']}."
