"""The commands `fuzz` and `soak`: draw random calls, judge them, and report the failing ones made small.

`pasa eval fuzz` calls the whole API on a CPU; `pasa bench soak` calls the kernels of one backend on a device.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Annotated, Any

import torch
import typer

import pasa
from pasa.eval.kit.device import describe
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.output import Report
from pasa.eval.random_calls import attention, caches, derived, kernels, packed, paged, report
from pasa.eval.random_calls import non_attention as others
from pasa.eval.random_calls.backends import NPU, TRITON, absent
from pasa.eval.random_calls.cases import TWICE_EVERY, Case, Kind, Outcome, draw_case, run_case, shrink

SCHEMA = 2
API_CASES = 20000
API: dict[str, Kind] = {
    "attention": attention.KIND, "attention_varlen": packed.KIND, "attention_paged": paged.KIND,
    "write_pages": caches.KIND, **derived.KINDS, **others.KINDS,
}  # fmt: skip
HOW = {TRITON: "Triton interpreted", NPU: "Ascend C on its CPU twin"}
REMEDY = {TRITON: "set TRITON_INTERPRET=1", NPU: "set PASA_ASCEND_LIBRARY to what tests/ascend_c/twin_build.py builds"}
KERNELS_NOTE = "random calls on the device named here; nothing was run on an NPU"
COUNTED = ("group", "data", "values", "mask", "garbage", "dtype", "strides", "recovery", "accumulate", "dim")
Record = dict[str, Any]
Judged = tuple[Case, Outcome]


def run_fuzz(
    cases: Annotated[int | None, f"Number of random calls ({API_CASES})."] = None,
    seed: Annotated[int | None, "Seed of the random calls (0)."] = None,
    replay: Annotated[str | None, typer.Option(metavar="SEED:INDEX", help="Run only this case.")] = None,
    progress: Report | None = None,
) -> Record:
    """Random calls of the whole API, right and wrong; exit 1 if one is neither correct nor refused as documented.

    The result holds what `conclude` returns, and counts: ``verdicts`` by kind of call, ``backends`` by backend, and
    ``faults``, how often each wrong call was refused.
    """
    if replay is not None and (cases is not None or seed is not None):
        raise ValueError(f"replay={replay!r} is one case, with a seed of its own: leave out cases and seed")
    first, indices = (seed or 0, range(API_CASES if cases is None else cases)) if replay is None else parse(replay)
    at_least(1, cases=len(indices))
    at_least(0, seed=first)
    started = time.perf_counter()
    drawn = [draw_case(API, first, index) for index in indices]
    judged = list(judge(API, drawn, progress))
    backends = Counter((str(case.params["backend"]), each.verdict) for case, each in judged if "backend" in case.params)
    refused = Counter(f"{case.kind}: {case.params['fault']}" for case, each in judged if each.verdict == "refused")
    result = {
        "schema": SCHEMA,
        "experiment": "fuzz",
        "note": describe_backends({name for name, verdict in backends if verdict != "absent"}),
        "environment": describe(torch.device("cpu")),
        "duration_s": round(time.perf_counter() - started, 1),
        "seed": first,
        "verdicts": nested(Counter((case.kind, each.verdict) for case, each in judged)),
        "backends": nested(backends),
        "faults": dict(sorted(refused.items())),
    }
    return result | conclude(API, drawn, judged)


def run_soak(
    cases: Annotated[int, "Number of random calls."] = 2000,
    seed: Annotated[int, "Seed of the random calls."] = 0,
    backend: Annotated[str, "Backend to call; it must run on this machine."] = TRITON,
    only: Annotated[int | None, "Run only the case with this index."] = None,
    small: Annotated[bool, "Draw small sizes, for Triton's interpreter."] = False,
    jobs: Annotated[int, "Processes that share the cases; compiling kernels takes most of the time."] = 1,
    progress: Report | None = None,
) -> Record:
    """Random calls of one backend, judged against FP64 and the guarantee; exit 1 if one breaks a bound.

    The result holds what `conclude` returns, and ``counts``: how often each value of a parameter was drawn.
    """
    at_least(1, cases=cases, jobs=jobs)
    at_least(0, seed=seed, only=only or 0)
    check_backend(backend)
    started = time.perf_counter()
    kinds = kernels.kinds(seed, backend, small)
    drawn = [draw_case(kinds, seed, index) for index in ([only] if only is not None else range(cases))]
    judged = list(judge(kinds, drawn, progress) if jobs == 1 else judge_in_processes(kinds, drawn, jobs, progress))
    result = {
        "schema": SCHEMA,
        "experiment": "soak",
        "note": KERNELS_NOTE,
        "environment": describe(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "duration_s": round(time.perf_counter() - started, 1),
        "backend": backend,
        "seed": seed,
        "small": small,
        "jobs": jobs,
        "repeat_every": TWICE_EVERY,
        "counts": {name: dict(Counter(str(case.params[name]) for case, _ in judged).most_common()) for name in COUNTED},
    }
    return result | conclude(kinds, drawn, sorted(judged, key=lambda pair: pair[0].index))


def at_least(least: int, **numbers: int) -> None:
    """Raise ValueError for the first option whose value is below `least`."""
    for name, value in numbers.items():
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}")


def parse(name: str) -> tuple[int, Sequence[int]]:
    """Parse the name of a case, SEED:INDEX: return the seed, and a list of the one index."""
    seed, _, index = name.partition(":")
    if not (seed.isdecimal() and index.isdecimal()):
        raise ValueError(f"replay={name!r} is not SEED:INDEX, such as 0:137")
    return int(seed), [int(index)]


def check_backend(name: str) -> None:
    """Refuse a backend that is unknown or cannot run here."""
    known = {status.name: status for status in pasa.backends()}
    if name not in known:
        raise ValueError(f"backend={name!r} is not one of {sorted(known)}")
    if not known[name].available:
        raise NotImplementedError(f"backend {name} cannot run here: {known[name].reason}")


def judge(kinds: Mapping[str, Kind], drawn: Sequence[Case], progress: Report | None = None) -> Iterator[Judged]:
    """Run cases in order, and stop after a case that broke the device, since no later result could be trusted."""
    failures = 0
    for done, case in enumerate(drawn):
        if progress is not None:
            progress(done, len(drawn), f"{case.name} {case.kind}, {failures} failures")
        outcome = run_case(kinds, case)
        failures += outcome.failed
        yield case, outcome
        if outcome.fatal:
            return


def judge_in_processes(
    kinds: Mapping[str, Kind], drawn: Sequence[Case], jobs: int, progress: Report | None
) -> Iterator[Judged]:
    """Run cases in several processes, and stop after a case that broke the device.

    Cases of one family share a process, because they share compiled kernels.
    """
    families = defaultdict(list)
    for case in drawn:
        families[case.params["family"]].append(case)
    wide_first = sorted(families.values(), key=lambda cases: -cases[0].params["dim"])  # slowest to compile first
    done = 0
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:  # a fork shares the device's state
        futures = {pool.submit(judge_alone, kinds, cases): cases for cases in wide_first}
        for future in as_completed(futures):
            try:
                judged = future.result()
            except BrokenProcessPool as error:  # one process died and broke the pool; cases judged before are kept
                why = f"{type(error).__name__}: {error}"
                judged = [(futures[future][0], Outcome("raised", why, fatal=True))]
            yield from judged
            done += len(judged)
            if progress is not None:
                progress(done, len(drawn), judged[-1][0].params["family"])
            if judged[-1][1].fatal:
                pool.shutdown(cancel_futures=True)
                return


def judge_alone(kinds: Mapping[str, Kind], drawn: Sequence[Case]) -> list[Judged]:
    """Judge the cases of one family on one thread, in a process of their own."""
    torch.set_num_threads(1)
    return list(judge(kinds, drawn))


def conclude(kinds: Mapping[str, Kind], drawn: Sequence[Case], judged: Sequence[Judged]) -> Record:
    """Summarise judged cases: their number, the ``gate``, the ``worst`` measure of every bound, and the ``failures``.

    Each failing case is recorded with ``shrunk``, the parameters of the simplest case that fails too. A run of one case
    also records that ``case``, whether it fails or not.
    """
    worst: dict[str, Record] = {}
    for case, outcome in judged:
        for name, value in outcome.measures.items():
            entry = worst.setdefault(name, {"value": 0.0, "case": None, "judged": 0})
            entry["judged"] += 1
            if not value <= entry["value"]:
                entry |= {"value": value, "case": f"{case.name} {case.kind}"}
    failures = [record(case, outcome) | {"shrunk": shrink(kinds, case).params} for case, outcome in judged
                if outcome.failed]  # fmt: skip
    stopped, absences = len(judged) < len(drawn), sum(outcome.verdict == "absent" for _, outcome in judged)
    gate = {"passed": not failures and not stopped, "failed": len(failures), "run": len(judged), "stopped": stopped}
    result = {"cases": len(drawn), "gate": gate | {"absent": absences}, "worst": worst, "failures": failures}
    return result | ({"case": record(*judged[0])} if len(drawn) == 1 else {})


def record(case: Case, outcome: Outcome) -> Record:
    """Return a case and its outcome as a dict for JSON."""
    return {"case": case.name, "kind": case.kind, "verdict": outcome.verdict, "why": outcome.why, "params": case.params}


def describe_backends(ran: set[str]) -> str:
    """Return a note: the backends that ran besides the reference, and how to enable those that are absent."""
    others = ", ".join(how for name, how in HOW.items() if name in ran)
    missing = ", ".join(f"{name} ({remedy})" for name, remedy in REMEDY.items() if absent(name) is not None)
    note = "random calls on a CPU" + (f": {others}" if others else "") + "; nothing was run on a GPU or an NPU"
    return note + (f"; absent: {missing}" if missing else "")


def nested(counts: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    """Turn counts of pairs into a dict of dicts: first name, then second."""
    table: dict[str, dict[str, int]] = {}
    for (first, second), number in sorted(counts.items()):
        table.setdefault(first, {})[second] = number
    return table


FUZZ = Experiment(name="fuzz", run=run_fuzz, report=report.report, title="fuzz")
SOAK = Experiment(name="soak", run=run_soak, report=report.report, title="soak")
