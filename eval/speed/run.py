"""Runs the table of cases through the implementations: gate first, then interleaved rounds."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pasa.eval.kit.device import describe
from pasa.eval.kit.timing import PROBES, Call, Clock, CudaClock, Rounds, copy_bandwidth, interleave, ratio, summary
from pasa.eval.speed.cases import FORMULA, Inputs, SpeedCase, select_cases
from pasa.eval.speed.gate import Gate, Verdict
from pasa.eval.speed.implementations import (
    CUDNN,
    FLASH,
    OWN,
    Implementation,
    NotInstalledError,
    select_implementations,
)
from pasa.eval.speed.parts import one_line, split
from pasa.eval.speed.targets import judge_targets

SCHEMA = 1
NOTE = "measured on the CUDA device named here; nothing was run on an NPU"
OK, FAILED, NOT_RUN, NOT_INSTALLED = "ok", "failed gate", "not run", "not installed"
Record: TypeAlias = dict[str, Any]
Progress: TypeAlias = Callable[[int, int, str], None]


@dataclass
class Entrant:
    """One implementation on one case, run in one way; `call` is None unless its time may be taken."""

    record: Record
    call: Call | None = None


def run_speed(
    cases: Sequence[str] | None = None,
    implementations: Sequence[str] | None = None,
    rounds: int = 5,
    quick: bool = False,
    progress: Progress | None = None,
    keep: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Time attention on the current CUDA device.

    Parameters
    ----------
    cases, implementations : sequence of str, optional
        Names of `cases.CASES` and `implementations.IMPLEMENTATIONS`; all by default. Ratios need the two of torch.
    rounds : int
        Turns of every implementation on every case.
    quick : bool
        Four small cases, without biased data.
    progress : callable, optional
        Called with (done, total, what comes next).
    keep : callable, optional
        Called with the result so far after every case.

    Returns
    -------
    dict
        JSON-able: ``records`` (one per case, implementation and way of running), ``targets``, ``parts``, ``softmax``,
        ``gate`` (whether all of ours that ran are accurate), and what was measured where.

    Raises
    ------
    ValueError
        For an unknown name, or fewer than one round.
    NotImplementedError
        Without a CUDA device.
    """
    chosen, wanted = select_cases(cases, quick), select_implementations(implementations)
    if rounds < 1:
        raise ValueError(f"rounds={rounds} is not a positive integer")
    clock = CudaClock()
    with torch.inference_mode():
        return measure(chosen, wanted, clock, copy_bandwidth(clock), rounds, progress, keep)


def measure(
    cases: Sequence[SpeedCase],
    implementations: Sequence[Implementation],
    clock: Clock,
    bandwidth: float,
    rounds: int,
    progress: Progress | None = None,
    keep: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """What `run_speed` does, on any clock; `bandwidth` in bytes per second."""
    started = time.perf_counter()
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "experiment": "speed",
        "note": NOTE,
        "environment": describe(clock.device),
        "duration_s": 0.0,
        "rounds": rounds,
        "formula": FORMULA,
        "copy_bandwidth": bandwidth,
        "cases": [{"name": c.name, "shape": c.shape, "data": c.data, "decode": c.decode} for c in cases],
        "implementations": {each.name: each.what for each in implementations},
        "gate": {},
        "targets": [],
        "parts": [],
        "softmax": [],
        "records": [],
    }
    for done, case in enumerate(cases):
        _report(progress, done, len(cases) + 1, case.name)
        records, parts = measure_case(case, implementations, clock, bandwidth, rounds)
        result["records"] += records
        result["parts"] += parts
        _conclude(result, cases, started)
        if keep is not None:
            keep(result)
    _report(progress, len(cases), len(cases) + 1, "score tiles")
    result["softmax"] = _softmax(clock, rounds)
    _conclude(result, cases, started)
    _report(progress, len(cases) + 1, len(cases) + 1, "done")
    return result


def _report(progress: Progress | None, done: int, total: int, label: str) -> None:
    if progress is not None:
        progress(done, total, label)


def _conclude(result: dict[str, Any], cases: Sequence[SpeedCase], started: float) -> None:
    """Verdicts on the records so far."""
    result["duration_s"] = round(time.perf_counter() - started, 1)
    result["targets"] = judge_targets(cases, result["records"])
    result["gate"] = verdict(result["records"])


def _softmax(clock: Clock, rounds: int) -> list[Record]:
    """The micro-benchmark, or why there is none: Triton is an extra."""
    try:
        from pasa.eval.research.softmax_tile import run_softmax
    except ImportError as error:
        return [{"where": "-", "arithmetic": "all", "status": NOT_RUN, "why": one_line(error)}]
    return run_softmax(clock, rounds)


def measure_case(
    case: SpeedCase, implementations: Sequence[Implementation], clock: Clock, bandwidth: float, rounds: int
) -> tuple[list[Record], list[Record]]:
    """Records of a case, and the split of our default mode's time."""
    try:
        inputs = case.inputs(clock.device)
        gate = Gate(case, inputs)
    except Exception as error:  # too little memory for the case, or a device that has failed before
        failed = {"how": "eager", "status": NOT_RUN, "why": f"inputs and FP64 truth: {one_line(error)}"}
        return [{"case": case.name, "implementation": each.name} | failed for each in implementations], []
    eager = [enter(case, each, inputs, gate, clock) for each in implementations]
    graphed = [in_graph(each, gate, clock) for each in eager] if case.graphed else []
    for group in (eager, graphed):
        take_times(case, group, clock, bandwidth, rounds)
    ours = next((each.call for each in eager if each.record["implementation"] == "pasa" and each.call), None)
    parts = [split(case, inputs, ours, clock, rounds)] if ours is not None and case.data == "randn" else []
    return [each.record for each in (*eager, *graphed)], parts


def enter(case: SpeedCase, implementation: Implementation, inputs: Inputs, gate: Gate, clock: Clock) -> Entrant:
    """Prepare, choose the fastest variant, and apply the gate; an implementation that cannot run says why.

    It is given copies of the inputs, to be timed on, and others to be judged on: a peer once wrote into its caller's.
    """
    record: Record = {
        "case": case.name,
        "implementation": implementation.name,
        "how": "eager",
        "status": OK,
        "why": "",
        "checked_share": gate.share,
    }
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")  # torch says in warnings why a backend refuses
        try:
            variant, call = fastest(implementation.prepare(inputs.copy()), clock)
            out, lse = implementation.prepare(inputs.copy())[variant].output(), None
            if implementation.lse is not None:
                _, lse = implementation.lse(inputs.copy())
            judged = gate.judge(
                out, lse, implementation.emulation, shifted=implementation.shifted, limit=implementation.limit
            )
            record |= {"variant": variant, **_judged(judged)}
            if judged.passed:
                record |= {"host_us": clock.host_us(call), "workspace_bytes": clock.workspace(call)}
                record["workspace_share"] = record["workspace_bytes"] / inputs.bytes
        except NotInstalledError as error:
            return Entrant(record | {"status": NOT_INSTALLED, "why": str(error)})
        except Exception as error:  # whatever a kernel raises is the reason why its row has no time
            return Entrant(record | {"status": NOT_RUN, "why": _reason(error, told)})
    return Entrant(record, call if judged.passed else None)


def _reason(error: Exception, told: Sequence[warnings.WarningMessage]) -> str:
    """The exception, and the first of the warnings that came before it."""
    hints = [" ".join(str(each.message).split())[:160] for each in told if issubclass(each.category, UserWarning)]
    return "; ".join([one_line(error), *dict.fromkeys(hints[:2])])


def _judged(judged: Verdict) -> Record:
    return {
        "status": OK if judged.passed else FAILED,
        "why": judged.why,
        "rmse": judged.rmse,
        "rmse_limit": judged.rmse_limit,
        "lse_error": judged.lse_error,
        "nonfinite": judged.nonfinite,
    }


def fastest(variants: dict[str, Call], clock: Clock) -> tuple[str, Call]:
    """The variant that takes the least time; the first one's exception if none runs.

    Cold, because the read before each call hides what the host takes: the device's time is to decide.
    """
    failures: list[Exception] = []
    taken: dict[str, float] = {}
    for name, call in variants.items():
        try:
            taken[name] = min(clock.times(call, PROBES, True)[1:])
        except Exception as error:  # another variant may run
            failures.append(error)
    if not taken:
        raise failures[0]
    name = min(taken, key=lambda each: taken[each])
    return name, variants[name]


def in_graph(eager: Entrant, gate: Gate, clock: Clock) -> Entrant:
    """The same call captured in a CUDA graph; its replay has to give the same numbers."""
    record = {name: value for name, value in eager.record.items() if name not in ("host_us", "workspace_bytes")}
    record["how"] = "graph"
    if eager.call is None:
        return Entrant(record)
    try:
        expected = eager.call.output().clone()
        call = clock.graph(eager.call)
        replayed = call.output()
        if not _close(replayed, expected, record["rmse_limit"]):
            return Entrant(record | {"status": FAILED, "why": "the replay of the graph gives other numbers"})
        return Entrant(record | {"host_us": clock.host_us(call)}, call)
    except Exception as error:  # not every peer can be captured
        return Entrant(record | {"status": NOT_RUN, "why": f"in a CUDA graph: {one_line(error)}"})


def _close(own: Tensor, other: Tensor, limit: float) -> bool:
    """Relative distance within the error that the gate allows (a split over keys need not sum in one order)."""
    return bool((own.float() - other.float()).norm() <= limit * other.float().norm())


def take_times(case: SpeedCase, entrants: Sequence[Entrant], clock: Clock, bandwidth: float, rounds: int) -> None:
    """Add times and ratios to the records of those that passed."""
    calls = {each.record["implementation"]: each.call for each in entrants if each.call is not None}
    if not calls:
        return
    try:
        times, cold = interleave(clock, calls, rounds)
    except Exception as error:  # it ran before: the device has failed, and the other cases will say so too
        for each in entrants:
            if each.call is not None:
                each.record |= {"status": NOT_RUN, "why": f"while timed: {one_line(error)}"}
                each.call = None
        return
    for each in entrants:
        name = each.record["implementation"]
        if name in times:
            each.record |= figures(case, times[name], times.get(CUDNN), times.get(FLASH), bandwidth) | {"cold": cold}


def figures(case: SpeedCase, times: Rounds, cudnn: Rounds | None, flash: Rounds | None, bandwidth: float) -> Record:
    """Times, TFLOPS, and ratios; ``to_floor``, for decoding, is the time over that of reading K and V once."""
    found: Record = dict(summary(times))
    seconds = 1e-3 * found["median_ms"]
    return found | {
        "tflops": 1e-12 * case.flops / seconds,
        "to_cudnn": None if cudnn is None else ratio(times, cudnn),
        "to_flash": None if flash is None else ratio(times, flash),
        "to_floor": seconds * bandwidth / case.kv_bytes if case.decode else None,
    }


def verdict(records: Sequence[Record]) -> dict[str, Any]:
    """Every gate that one of ours failed; one that could not run is told, and decides nothing."""
    failures = [
        {name: each[name] for name in ("case", "implementation", "how", "why")}
        for each in records
        if each["implementation"] in OWN and each["status"] == FAILED
    ]
    return {"passed": not failures, "failures": failures, "limits": "see eval/speed/README.md"}
