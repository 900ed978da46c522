"""The commands `fuzz` and `soak`: draw random calls, judge them, and report the failing ones made small.

`pasa eval fuzz` calls the whole API on a CPU; `pasa bench soak` calls the kernels of one backend on a device.
"""

from __future__ import annotations

import json
import multiprocessing
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import torch

import pasa
from pasa.eval.kit.device import describe, find_device, named_here, origin, pick_device
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.options import at_least
from pasa.eval.kit.output import Report
from pasa.eval.kit.tables import Column, Table
from pasa.eval.random_calls import attention, derived, kernels, paged
from pasa.eval.random_calls.backends import NPU, TRITON, absent
from pasa.eval.random_calls.cases import COUNTS, Case, Kind, Outcome, draw_case, run_case, shrink
from pasa.ops.attention.ascend import backend as npu_backend
from pasa.ops.attention.ascend import on_310p

API: dict[str, Kind] = {**attention.KINDS, **paged.KINDS, **derived.KINDS}
HOW = {TRITON: "Triton interpreted", NPU: "Ascend C on its CPU twin"}
HOW_310P = "Ascend C for the 310P on its CPU twin"
REMEDY = {TRITON: "set TRITON_INTERPRET=1", NPU: "set PASA_ASCEND_LIBRARY to what tests/ascend_c/twin_build.py builds"}
COUNTED = ("group", "data", "values", "mask", "garbage", "dtype", "strides", "recovery", "accumulate", "dim")
RENAMED = {"blind": "fully-masked"}  # a bound in stored runs
VERDICTS = ("correct", "absent", "wrong", "raised")
SHOWN, WIDTH = 10, 1500  # failures that are shown, and characters of each
NOTE = "Each is an error divided by the allowed error, or a count. eval/random_calls/README.md derives what is allowed."
Number = Annotated[int, "Number of random calls."]
Seed = Annotated[int, "Seed of the random calls."]
Seeds = Annotated[int, "Seeds that share the cases: --seed and the numbers after it."]
Only = Annotated[int | None, "Run only the case of --seed with this index."]
Record = dict[str, Any]
Judged = tuple[Case, Outcome]


def run_fuzz(
    cases: Number = 12000,
    seed: Seed = 0,
    seeds: Seeds = 1,
    only: Only = None,
    backend: Annotated[str | None, "Call attention on this backend alone."] = None,
    progress: Report | None = None,
) -> Record:
    """Random calls of the whole API, judged against FP64 and the guarantee; exit 1 if one breaks a bound.

    The result holds what `conclude` returns, and counts of ``verdicts``: by kind of call, and by backend.
    """
    environment = describe(torch.device("cpu"))  # of the code that runs, whatever is edited meanwhile
    kinds = API if backend is None else calls_of(backend)
    drawn = draw_cases(kinds, cases, seed, only, seeds)
    judged = list(judge(kinds, drawn, progress))
    result = {
        "note": describe_backends({case.params["backend"] for case, each in judged if each.verdict != "absent"}),
        "environment": environment,
        "seed": seed,
        "seeds": seeds,
        "verdicts": count_verdicts((case.kind, each) for case, each in judged),
        "backends": count_verdicts((case.params["backend"], each) for case, each in judged),
    } | ({} if backend is None else {"backend": backend})
    return result | conclude(kinds, drawn, judged)


def calls_of(backend: str) -> dict[str, Kind]:
    """Return the kinds of calls of attention, all on one backend."""
    if backend not in (names := [status.name for status in pasa.backends()]):
        raise ValueError(f"backend={backend!r} is not one of {sorted(names)}")
    draws = {"attention": attention.draw, "attention_varlen": attention.draw_packed}
    if backend == NPU:
        draws["attention_paged"] = paged.draw_attention
    return {name: replace(API[name], draw=partial(draw, backend=backend)) for name, draw in draws.items()}


def run_soak(
    cases: Number = 2000,
    seed: Seed = 0,
    backend: Annotated[str, "Backend to call; it must run on this machine."] = TRITON,
    only: Only = None,
    small: Annotated[bool, "Draw small sizes, for Triton's interpreter."] = False,
    jobs: Annotated[int, "Processes that share the cases; compiling kernels takes most of the time."] = 1,
    device: Annotated[str | None, "Device to call on, such as npu:0; default: the accelerator, or the CPU."] = None,
    progress: Report | None = None,
) -> Record:
    """Random calls of one backend, judged against FP64 and the guarantee; exit 1 if one breaks a bound.

    The result holds what `conclude` returns, and ``counts``: how often each value of a parameter was drawn.
    """
    at_least(1, jobs=jobs)
    check_backend(backend)
    place = pick_device() if device is None else find_device(device)
    kinds = kernels.kinds(seed, backend, small, str(place))
    drawn = draw_cases(kinds, cases, seed, only)
    judged = list(judge(kinds, drawn, progress) if jobs == 1 else judge_in_processes(kinds, drawn, jobs, progress))
    result = {
        "note": named_here("random calls", place),
        "environment": describe(place),
        "backend": backend,
        "seed": seed,
        "small": small,
        "jobs": jobs,
        "counts": {name: dict(Counter(str(case.params[name]) for case, _ in judged).most_common()) for name in COUNTED},
    }
    return result | conclude(kinds, drawn, sorted(judged, key=lambda pair: pair[0].index))


def draw_cases(kinds: Mapping[str, Kind], cases: int, seed: int, only: int | None, seeds: int = 1) -> list[Case]:
    """Return the first cases of each seed, `cases` in all, or the case of `seed` whose index is `only`."""
    at_least(1, cases=cases, seeds=seeds)
    at_least(0, seed=seed, only=only)
    if only is not None:
        return [draw_case(kinds, seed, only)]
    return [draw_case(kinds, seed + case % seeds, case // seeds) for case in range(cases)]


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
    here = HOW | ({NPU: HOW_310P} if npu_backend.architecture() == on_310p.ARCHITECTURE else {})
    others = ", ".join(how for name, how in here.items() if name in ran)
    missing = ", ".join(f"{name} ({remedy})" for name, remedy in REMEDY.items() if absent(name) is not None)
    note = "random calls on a CPU" + (f": {others}" if others else "") + "; nothing was run on a GPU or an NPU"
    return note + (f"; absent: {missing}" if missing else "")


def count_verdicts(named: Iterable[tuple[str, Outcome]]) -> dict[str, dict[str, int]]:
    """Count each verdict by name."""
    counts = Counter((name, outcome.verdict) for name, outcome in named)
    return {name: {each: counts[name, each] for each in VERDICTS} for name in sorted({name for name, _ in counts})}


def report(result: Record) -> list[Table | str]:
    """Return the tables of counts and bounds, the first failures, and what the exit status says."""
    tables = []
    for title, by, counts in (("Verdicts", "kind", "verdicts"), ("Backends", "backend", "backends")):
        records = [each | {by: name} for name, each in result.get(counts, {}).items()]
        tables += [Table.of(title, records, {name: name for name in (by, *VERDICTS)})] if records else []
    tables.append(bounds(result))
    if "counts" in result:
        rows = [
            [name, ", ".join(f"{value} {n}" for value, n in each.items())] for name, each in result["counts"].items()
        ]
        tables.append(Table("Cases", ["of", "number"], rows, wraps="number"))
    return [verdict(result), *failures(result), *tables, origin(result)]


def bounds(result: Record) -> Table:
    """Return the worst number of every bound, and the case that has it."""
    columns: dict[str, Column] = {
        "bound": "bound",
        "judged": "judged",
        "worst": lambda each: "not finite" if each["value"] is None else f"{each['value']:.3g}",  # JSON has no infinity
        "allowed": lambda each: "0" if each["bound"] in COUNTS else "1",
        "case": "case",
    }
    records = [each | {"bound": RENAMED.get(name, name)} for name, each in result["worst"].items()]
    return Table.of("Bounds", records, columns, NOTE)


def failures(result: Record) -> list[str]:
    """Return the first failures: what is wrong, and the simplest case; of a case that runs alone its parameters."""
    lines = [
        f"{each['case']} {each['kind']} {each['verdict']}: {each['why']} {json.dumps(each['shrunk'])}"[:WIDTH]
        for each in result["failures"]
    ]
    if "case" in result and not lines:
        lines = [f"{result['case']['case']} {result['case']['kind']}: {json.dumps(result['case']['params'])}"]
    more = [f"... and {len(lines) - SHOWN} more, all of them in the JSON"] if len(lines) > SHOWN else []
    return lines[:SHOWN] + more


def verdict(result: Record) -> str:
    """Return what the exit status says."""
    gate, seeds, command = result["gate"], result.get("seeds", 1), "pasa eval fuzz"
    command += f" --backend {result['backend']}" if "backend" in result else ""
    seed = f"--seed {result['seed']}" + f" --seeds {seeds}" * (seeds > 1)
    if result["experiment"] == "soak":
        command = f"pasa bench soak --backend {result['backend']}" + " --small" * result["small"]
    absences = f"; {gate['absent']} had no backend here" if gate["absent"] else ""
    if gate["passed"]:
        held = f"All {gate['run'] - gate['absent']:,} cases hold all bounds against FP64{absences}"
        return f"{held} ({command} --cases {result['cases']} {seed}, {result['duration_s']} s)."
    stopped = "; stopped, because the device failed" if gate["stopped"] else ""
    again = f"repeat one: {command} --seed {'SEED' if seeds > 1 else result['seed']} --only INDEX"
    return f"{gate['failed']} of {gate['run']} cases FAIL{absences}{stopped}; {again}"


FUZZ = Experiment(name="fuzz", run=run_fuzz, report=report, title="fuzz")
SOAK = Experiment(name="soak", run=run_soak, report=report, title="soak")
