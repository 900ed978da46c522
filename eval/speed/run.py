"""The command `pasa bench speed`: time every implementation on every case.

The accuracy gate comes first. Implementations that pass are then timed in interleaved rounds.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import torch
import typer
from torch import Tensor

from pasa.eval.kit.device import describe
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.output import Report
from pasa.eval.kit.timing import PROBES, Call, Clock, CudaClock, Rounds, copy_bandwidth, interleave, ratio, summary
from pasa.eval.speed import plots, report
from pasa.eval.speed.cases import FORMULA, Inputs, SpeedCase, select_cases
from pasa.eval.speed.gate import Gate
from pasa.eval.speed.implementations import CUDNN, FLASH, OWN, Implementation, NotInstalledError, select_implementations
from pasa.eval.speed.targets import judge_targets
from pasa.eval.speed.time_split import one_line, split

SCHEMA = 1
NOTE = "measured on the CUDA device named here; nothing was run on an NPU"
OK, FAILED, NOT_RUN, NOT_INSTALLED = "ok", "failed gate", "not run", "not installed"
Record: TypeAlias = dict[str, Any]


@dataclass
class Entrant:
    """One implementation on one case, eager or in a CUDA graph; `call` is None if it failed and must not be timed."""

    record: Record
    call: Call | None = None

    @property
    def name(self) -> str:
        """Return the name of the implementation."""
        return str(self.record["implementation"])


def run_speed(
    case: Annotated[list[str] | None, typer.Option(help="Name of a case, repeatable (all).")] = None,
    implementation: Annotated[
        list[str] | None, typer.Option(help="Name of an implementation, repeatable (all).")
    ] = None,
    rounds: Annotated[int, "Timed turns of each implementation."] = 5,
    quick: Annotated[bool, "Time four small cases only."] = False,
    progress: Report | None = None,
) -> dict[str, Any]:
    """Time attention on a CUDA device, accuracy first; exit 1 if one of ours fails the accuracy gate.

    Ratios are to torch's cuDNN and flash backends, so they need both among the implementations. The result has
    ``records`` (one for each case, implementation and way of running, eager or CUDA graph), ``targets``, ``parts``
    and ``gate``, which passes if every PASA implementation that ran is accurate.

    Raises
    ------
    ValueError
        For an unknown name, or fewer than one round.
    NotImplementedError
        Without a CUDA device.
    """
    cases, implementations = select_cases(case, quick), select_implementations(implementation)
    if rounds < 1:
        raise ValueError(f"rounds={rounds} is not a positive integer")
    clock = CudaClock()
    with torch.inference_mode():
        return measure(cases, implementations, clock, copy_bandwidth(clock), rounds, progress)


def measure(
    cases: Sequence[SpeedCase],
    implementations: Sequence[Implementation],
    clock: Clock,
    bandwidth: float,
    rounds: int,
    progress: Report | None = None,
) -> dict[str, Any]:
    """Measure the cases with any clock, so that tests need no GPU; `bandwidth` is in bytes per second."""
    started = time.perf_counter()
    records: list[Record] = []
    parts: list[Record] = []
    for done, case in enumerate(cases):
        if progress:
            progress(done, len(cases), case.name)
        of_case, split_up = measure_case(case, implementations, clock, bandwidth, rounds)
        records += of_case
        parts += split_up
    return {
        "schema": SCHEMA,
        "experiment": "speed",
        "note": NOTE,
        "environment": describe(clock.device),
        "duration_s": round(time.perf_counter() - started, 1),
        "rounds": rounds,
        "formula": FORMULA,
        "copy_bandwidth": bandwidth,
        "cases": [{"name": c.name, "shape": c.shape, "data": c.data, "decode": c.decode} for c in cases],
        "implementations": {each.name: each.what for each in implementations},
        "gate": verdict(records),
        "targets": judge_targets(records),
        "parts": parts,
        "records": records,
    }


def measure_case(
    case: SpeedCase, implementations: Sequence[Implementation], clock: Clock, bandwidth: float, rounds: int
) -> tuple[list[Record], list[Record]]:
    """Return the records of a case, and how the time of PASA's default mode splits into its parts."""
    try:
        inputs = case.inputs(clock.device)
        gate = Gate(case, inputs)
    except Exception as error:  # out of memory, or the device failed in an earlier case
        failed = {"how": "eager", "status": NOT_RUN, "why": f"inputs and FP64 truth: {one_line(error)}"}
        return [{"case": case.name, "implementation": each.name} | failed for each in implementations], []
    eager = [enter(case, each, inputs, gate, clock) for each in implementations]
    graphed = [in_graph(each, clock) for each in eager] if case.graphed else []
    for group in (eager, graphed):
        take_times(case, group, clock, bandwidth, rounds)
    ours = next((each.call for each in eager if each.name == "pasa" and each.call), None)
    parts = [split(case, inputs, ours, clock, rounds)] if ours is not None and case.data == "randn" else []
    return [each.record for each in (*eager, *graphed)], parts


def enter(case: SpeedCase, implementation: Implementation, inputs: Inputs, gate: Gate, clock: Clock) -> Entrant:
    """Prepare an implementation, choose its fastest variant, and apply the gate; record why if it cannot run.

    It is timed on one copy of the inputs and judged on another, because a peer once wrote into its caller's tensors.
    """
    record: Record = {"case": case.name, "implementation": implementation.name, "how": "eager", "status": OK, "why": ""}
    record["checked_share"] = gate.share
    with warnings.catch_warnings(record=True) as hints:
        warnings.simplefilter("always")  # torch says in warnings why a backend refuses
        try:
            variant, call = fastest(implementation.prepare(inputs.copy()), clock)
            out = implementation.prepare(inputs.copy())[variant].output()
            lse = implementation.lse(inputs.copy())[1] if implementation.lse else None
            shifted, limit = implementation.shifted, implementation.limit
            judged = gate.judge(out, lse, implementation.emulation, shifted=shifted, limit=limit)
            record |= {"variant": variant, "status": OK if judged.passed else FAILED, "why": judged.why}
            record |= {name: getattr(judged, name) for name in ("rmse", "rmse_limit", "lse_error", "nonfinite")}
            if judged.passed:
                record |= {"host_us": clock.host_us(call), "workspace_bytes": clock.workspace(call)}
                record["workspace_share"] = record["workspace_bytes"] / inputs.bytes
        except NotInstalledError as error:
            return Entrant(record | {"status": NOT_INSTALLED, "why": str(error)})
        except Exception as error:  # any exception of a kernel is shown as the reason for its missing time
            return Entrant(record | {"status": NOT_RUN, "why": _reason(error, hints)})
    return Entrant(record, call if judged.passed else None)


def _reason(error: Exception, hints: Sequence[warnings.WarningMessage]) -> str:
    """Return the exception on one line, and up to two of the warnings that came before it."""
    texts = [" ".join(str(each.message).split())[:160] for each in hints if issubclass(each.category, UserWarning)]
    return "; ".join([one_line(error), *dict.fromkeys(texts[:2])])


def fastest(variants: dict[str, Call], clock: Clock) -> tuple[str, Call]:
    """Return the variant that takes the least time; raise the first one's exception if none runs.

    Calls are timed with a cold L2 cache. The read that flushes the cache hides the host's launch overhead, so that
    device time decides.
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


def in_graph(eager: Entrant, clock: Clock) -> Entrant:
    """Capture the same call in a CUDA graph, and check that its replay gives the same output."""
    record = {name: value for name, value in eager.record.items() if name not in ("host_us", "workspace_bytes")}
    record["how"] = "graph"
    if eager.call is None:
        return Entrant(record)
    try:
        expected = eager.call.output().clone()
        call = clock.graph(eager.call)
        if not _close(call.output(), expected, record["rmse_limit"]):
            return Entrant(record | {"status": FAILED, "why": "the replay of the graph gives other numbers"})
        return Entrant(record | {"host_us": clock.host_us(call)}, call)
    except Exception as error:  # not every peer can be captured
        return Entrant(record | {"status": NOT_RUN, "why": f"in a CUDA graph: {one_line(error)}"})


def _close(out: Tensor, other: Tensor, limit: float) -> bool:
    """Check that two outputs differ by no more than the gate's RMSE limit.

    They need not be equal, because splits over the keys are summed in no fixed order.
    """
    return bool((out.float() - other.float()).norm() <= limit * other.float().norm())


def take_times(case: SpeedCase, entrants: Sequence[Entrant], clock: Clock, bandwidth: float, rounds: int) -> None:
    """Time the entrants that passed the gate, and add times and ratios to their records."""
    calls = {each.name: each.call for each in entrants if each.call is not None}
    if not calls:
        return
    try:
        times, cold = interleave(clock, calls, rounds)
    except Exception as error:  # the call ran before, so the device has failed
        for each in entrants:
            if each.call is not None:
                each.record |= {"status": NOT_RUN, "why": f"while timed: {one_line(error)}"}
                each.call = None
        return
    for each in entrants:
        if each.name in times:
            times_and_ratios = figures(case, times[each.name], times.get(CUDNN), times.get(FLASH), bandwidth)
            each.record |= times_and_ratios | {"cold": cold}


def figures(case: SpeedCase, times: Rounds, cudnn: Rounds | None, flash: Rounds | None, bandwidth: float) -> Record:
    """Return times, TFLOPS and ratios of one implementation.

    ``to_floor``, for decoding, is the time divided by the time of reading K and V once at the bandwidth of a copy.
    """
    measured: Record = dict(summary(times))
    seconds = 1e-3 * measured["median_ms"]
    return measured | {
        "tflops": 1e-12 * case.flops / seconds,
        "to_cudnn": None if cudnn is None else ratio(times, cudnn),
        "to_flash": None if flash is None else ratio(times, flash),
        "to_floor": seconds * bandwidth / case.kv_bytes if case.decode else None,
    }


def verdict(records: Sequence[Record]) -> dict[str, Any]:
    """Return the gate of the run: it fails if a PASA implementation failed its accuracy gate.

    An implementation that could not run is shown in the tables, but does not fail the gate.
    """
    failures = [
        {name: each[name] for name in ("case", "implementation", "how", "why")}
        for each in records
        if each["implementation"] in OWN and each["status"] == FAILED
    ]
    return {"passed": not failures, "failures": failures, "limits": "see eval/speed/README.md"}


EXPERIMENT = Experiment(
    name="speed",
    run=run_speed,
    report=report.report,
    appendix=report.appendix,
    title="Speed on a CUDA device",
    figures=plots.draw,
)
