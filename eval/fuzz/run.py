"""Draws cases, runs them, keeps what must be mended."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch

from pasa.eval import output
from pasa.eval.fuzz.cases import Case, Outcome, draw_case, run_case, shrink
from pasa.eval.fuzz.kinds import KINDS
from pasa.eval.speed.device import describe

SCHEMA = 1
NOTE = "random calls on a CPU: Triton interpreted, Ascend C on its CPU twin; nothing was run on a GPU or an NPU"
Record = dict[str, Any]


def run_fuzz(
    cases: int = 20000, seed: int = 0, replay: str | None = None, progress: output.Report | None = None
) -> dict[str, Any]:
    """Judge random calls of the whole public API.

    Parameters
    ----------
    cases : int
        How many; indices count from 0.
    seed : int
    replay : str, optional
        "SEED:INDEX", the one case to run, in place of the others.
    progress : callable, optional

    Returns
    -------
    dict
        JSON-able: ``verdicts`` by kind, ``worst`` ratio to every bound and its case, ``findings`` and what they shrink
        to, ``faults`` and how often each was refused, ``gate``.

    Raises
    ------
    ValueError
        For fewer than one case, a negative seed, or a name that is no SEED:INDEX.
    """
    if cases < 1 or seed < 0:
        raise ValueError(f"cases={cases} must be at least 1 and seed={seed} at least 0")
    started = time.perf_counter()
    wanted = [(seed, index) for index in range(cases)] if replay is None else [parse(replay)]
    verdicts: Counter[tuple[str, str]] = Counter()
    backends: Counter[tuple[str, str]] = Counter()
    faults: Counter[str] = Counter()
    worst: dict[str, Record] = {}
    findings: list[Record] = []
    for done, (number, index) in enumerate(wanted):
        case = draw_case(KINDS, number, index)
        if progress is not None:
            progress(done, len(wanted), f"{case.name} {case.kind}, {len(findings)} findings")
        found = run_case(KINDS, case)
        verdicts[case.kind, found.verdict] += 1
        if "backend" in case.params:
            backends[str(case.params["backend"]), found.verdict] += 1
        if found.verdict == "refused":
            faults[f"{case.kind}: {case.params['fault']}"] += 1
        note_worst(worst, case, found)
        if found.finding:
            findings.append(describe_finding(case, found))
    return {
        "schema": SCHEMA,
        "experiment": "fuzz",
        "note": NOTE,
        "environment": describe(torch.device("cpu")),
        "duration_s": round(time.perf_counter() - started, 1),
        "seed": seed,
        "cases": len(wanted),
        "replay": replay,
        "gate": {"passed": not findings, "findings": len(findings), "absent": total(verdicts, "absent")},
        "verdicts": nested(verdicts),
        "backends": nested(backends),
        "faults": dict(sorted(faults.items())),
        "worst": worst,
        "findings": findings,
    }


def parse(name: str) -> tuple[int, int]:
    """Seed and index of a case."""
    seed, _, index = name.partition(":")
    if not (seed.isdecimal() and index.isdecimal()):
        raise ValueError(f"replay={name!r} is not SEED:INDEX, such as 0:137")
    return int(seed), int(index)


def note_worst(worst: dict[str, Record], case: Case, found: Outcome) -> None:
    """Keep the largest ratio to each bound."""
    for name, value in found.measures.items():
        entry = worst.setdefault(name, {"value": 0.0, "case": None, "judged": 0})
        entry["judged"] += 1
        if not value <= entry["value"]:
            entry |= {"value": value, "case": f"{case.name} {case.kind}"}


def describe_finding(case: Case, found: Outcome) -> Record:
    """What is wrong, the case, and the simplest case that shows it."""
    return {
        "case": case.name, "kind": case.kind, "verdict": found.verdict, "why": found.why, "params": case.params,
        "shrunk": shrink(KINDS, case).params,
    }  # fmt: skip


def total(counts: Counter[tuple[str, str]], verdict: str) -> int:
    """Of one verdict."""
    return sum(number for (_, name), number in counts.items() if name == verdict)


def nested(counts: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    """By the first name, then the second."""
    found: dict[str, dict[str, int]] = {}
    for (first, second), number in sorted(counts.items()):
        found.setdefault(first, {})[second] = number
    return found
