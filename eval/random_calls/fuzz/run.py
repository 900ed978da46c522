"""Draws cases, runs them, keeps what must be mended."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch

from pasa.eval.kit import output
from pasa.eval.kit.device import describe
from pasa.eval.random_calls.fuzz.backends import NPU, TRITON, absent
from pasa.eval.random_calls.fuzz.cases import Case, Outcome, draw_case, run_case, shrink
from pasa.eval.random_calls.fuzz.kinds import KINDS

SCHEMA = 1
CASES = 20000
HOW = {TRITON: "Triton interpreted", NPU: "Ascend C on its CPU twin"}
REMEDY = {TRITON: "set TRITON_INTERPRET=1", NPU: "set PASA_ASCEND_LIBRARY to what tests/ascend_c/twin_build.py builds"}
Record = dict[str, Any]


def run_fuzz(
    cases: int | None = None,
    seed: int | None = None,
    replay: str | None = None,
    progress: output.Report | None = None,
) -> dict[str, Any]:
    """Judge random calls of the whole public API.

    Parameters
    ----------
    cases : int, optional
        How many (20,000); indices count from 0.
    seed : int, optional
        What they are drawn from (0).
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
        For fewer than one case, a negative seed, a name that is no SEED:INDEX, or one beside `cases` or `seed`.
    """
    wanted = select(cases, seed, replay)
    started = time.perf_counter()
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
        "note": describe_backends({name for name, verdict in backends if verdict != "absent"}),
        "environment": describe(torch.device("cpu")),
        "duration_s": round(time.perf_counter() - started, 1),
        "seed": wanted[0][0],
        "cases": len(wanted),
        "replay": replay,
        "gate": {"passed": not findings, "findings": len(findings), "absent": total(verdicts, "absent")},
        "verdicts": nested(verdicts),
        "backends": nested(backends),
        "faults": dict(sorted(faults.items())),
        "worst": worst,
        "findings": findings,
    }


def select(cases: int | None, seed: int | None, replay: str | None) -> list[tuple[int, int]]:
    """Seed and index of every case to run."""
    if replay is not None:
        if cases is not None or seed is not None:
            raise ValueError(f"replay={replay!r} is one case, with a seed of its own: leave out cases and seed")
        return [parse(replay)]
    cases, seed = CASES if cases is None else cases, seed or 0
    if cases < 1 or seed < 0:
        raise ValueError(f"cases={cases} must be at least 1 and seed={seed} at least 0")
    return [(seed, index) for index in range(cases)]


def describe_backends(ran: set[str]) -> str:
    """What ran besides the reference, and how to get what is not here."""
    others = ", ".join(how for name, how in HOW.items() if name in ran)
    missing = ", ".join(f"{name} ({remedy})" for name, remedy in REMEDY.items() if absent(name) is not None)
    note = "random calls on a CPU" + (f": {others}" if others else "") + "; nothing was run on a GPU or an NPU"
    return note + (f"; absent: {missing}" if missing else "")


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
