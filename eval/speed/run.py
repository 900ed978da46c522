"""The command `pasa bench speed`: time every implementation on every case.

The accuracy gate comes first. Implementations that pass are then timed in interleaved rounds.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any, TypeAlias

import torch
import typer

from pasa.eval.kit.device import describe, find_device, named_here, timed_kind
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.options import at_least
from pasa.eval.kit.output import Report, error_line, silent
from pasa.eval.kit.timing import PROBES, Call, Clock, CudaClock, NpuClock, copy_bandwidth, interleave, ratio, summary
from pasa.eval.speed import report
from pasa.eval.speed.cases import Inputs, SpeedCase, select_cases
from pasa.eval.speed.choice import wrong
from pasa.eval.speed.gate import Gate
from pasa.eval.speed.implementations import CUDNN, FLASH, OWN, Implementation, select_implementations

OK, FAILED, NOT_RUN, NOT_INSTALLED = "ok", "failed gate", "not run", "not installed"
BLOCK = 128  # keys per anchor
Names = Annotated[list[str] | None, typer.Option(help="A name, repeatable; all if not given.")]
Record: TypeAlias = dict[str, Any]
Entrant: TypeAlias = tuple[Record, Call | None]
"""One implementation on one case, eager or in a CUDA graph; no call if it failed and must not be timed."""


def run_speed(
    case: Names = None,
    implementation: Names = None,
    data: Annotated[list[str] | None, typer.Option(help="A kind of data for each shape, repeatable.")] = None,
    rounds: Annotated[int, "Timed turns of each implementation."] = 5,
    device: Annotated[str, "cuda, or an NPU such as npu:0."] = "cuda",
    progress: Report = silent,
) -> dict[str, Any]:
    """Time attention on a GPU or NPU, accuracy first; exit 1 if one of ours fails, or the slower of two is chosen.

    Ratios are to torch's cuDNN and flash backends, so they need both among the implementations. The result has
    ``records`` (one for each case, implementation and way of running, eager or CUDA graph), ``parts`` and ``gate``,
    which passes if every PASA implementation that ran is accurate, and `pasa.attention` chooses no backend that is more
    than 5 % slower than another (eval/speed/choice.py).
    """
    kind = timed_kind(device)
    cases, implementations = select_cases(case, data), select_implementations(implementation, kind)
    at_least(1, rounds=rounds)
    clock = NpuClock(find_device(device)) if kind == "npu" else CudaClock()
    with torch.inference_mode():
        return measure(cases, implementations, clock, copy_bandwidth(clock), rounds, progress)


def measure(
    cases: Sequence[SpeedCase],
    implementations: Sequence[Implementation],
    clock: Clock,
    bandwidth: float,
    rounds: int,
    progress: Report = silent,
) -> dict[str, Any]:
    """Measure the cases with any clock, so that tests need no GPU; `bandwidth` is in bytes per second."""
    records: list[Record] = []
    parts: list[Record] = []
    for done, case in enumerate(cases):
        progress(done, len(cases), case.name)
        of_case, split_up = measure_case(case, implementations, clock, bandwidth, rounds)
        records += of_case
        parts += split_up
    return summarise(cases, records, parts, implementations, clock, bandwidth, rounds)


def summarise(
    cases: Sequence[SpeedCase],
    records: Sequence[Record],
    parts: Sequence[Record],
    implementations: Sequence[Implementation],
    clock: Clock,
    bandwidth: float,
    rounds: int,
) -> dict[str, Any]:
    """Return the result of a run from the records of its cases, with its gate."""
    # An implementation that could not run is shown in the tables, but does not fail the gate.
    failures = [
        f"{each['implementation']} on {each['case']}, {each['how']}: {each['why']}"
        for each in records
        if each["implementation"] in OWN and each["status"] == FAILED
    ]
    result = {
        "note": named_here("measured", clock.device),
        "environment": describe(clock.device),
        "rounds": rounds,
        "copy_bandwidth": bandwidth,
        "cases": [case.described for case in cases],
        "implementations": {each.name: each.what for each in implementations},
        "parts": parts,
        "records": records,
    }
    failures += wrong(result)
    return result | {"gate": {"passed": not failures, "failures": failures}}


def measure_case(
    case: SpeedCase,
    implementations: Sequence[Implementation],
    clock: Clock,
    bandwidth: float,
    rounds: int,
    split_up: bool = True,
) -> tuple[list[Record], list[Record]]:
    """Return the records of a case, and how the time of PASA's default mode splits into its parts, if `split_up`."""
    try:
        inputs = case.inputs(clock.device)
        gate = Gate(case, inputs)
    except Exception as error:  # out of memory, or the device failed in an earlier case
        failed = {"how": "eager", "status": NOT_RUN, "why": f"inputs and FP64 truth: {error_line(error)}"}
        return [{"case": case.name, "implementation": each.name} | failed for each in implementations], []
    eager = [enter(case, each, inputs, gate, clock) for each in implementations]
    graphed = [in_graph(*each, clock) for each in eager] if case.graphed else []
    for group in (eager, graphed):
        take_times(case, group, clock, bandwidth, rounds)
    ours = [call for record, call in eager if call and record["implementation"] == "pasa" and record["status"] == OK]
    parts = [split(case, inputs, call, clock, rounds) for call in ours if split_up and case.data == "randn"]
    return [record for record, _ in (*eager, *graphed)], parts


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
            lse = implementation.lse(inputs.copy()) if implementation.lse else None
            shifted, limit = implementation.shifted, implementation.limit
            judged = gate.judge(out, lse, implementation.emulation, shifted=shifted, limit=limit)
            record |= {"variant": variant, "status": FAILED if judged.why else OK, **asdict(judged)}
            if not judged.why:
                record |= {"host_us": clock.host_us(call), "workspace_bytes": clock.workspace(call)}
                record["workspace_share"] = record["workspace_bytes"] / sum(x.nbytes for x in inputs.tensors)
        except ModuleNotFoundError as error:
            return record | {"status": NOT_INSTALLED, "why": f"{error.name} is not installed"}, None
        except Exception as error:  # any exception of a kernel is shown as the reason for its missing time
            texts = [" ".join(str(each.message).split())[:160] for each in hints if each.category is UserWarning]
            why = "; ".join([error_line(error), *dict.fromkeys(texts[:2])])
            return record | {"status": NOT_RUN, "why": why}, None
    return record, None if judged.why else call


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


def in_graph(eager: Record, call: Call | None, clock: Clock) -> Entrant:
    """Capture the same call in a CUDA graph, and check that its replay gives the same output."""
    record = {name: value for name, value in eager.items() if name not in ("host_us", "workspace_bytes")}
    record["how"] = "graph"
    if call is None:
        return record, None
    try:
        expected = call.output().float().clone()
        graph = clock.graph(call)
        difference = graph.output().float() - expected
        # Outputs need not be equal, because splits over the keys are summed in no fixed order.
        if not difference.norm() <= record["rmse_limit"] * expected.norm():
            return record | {"status": FAILED, "why": "the replay of the graph gives other numbers"}, None
        return record | {"host_us": clock.host_us(graph)}, graph
    except Exception as error:  # not every peer can be captured
        return record | {"status": NOT_RUN, "why": f"in a CUDA graph: {error_line(error)}"}, None


def take_times(case: SpeedCase, entrants: Sequence[Entrant], clock: Clock, bandwidth: float, rounds: int) -> None:
    """Time the entrants that passed the gate, and add times, TFLOPS and ratios to their records.

    ``to_floor``, for decoding, is the time divided by the time of reading K and V once at the bandwidth of a copy.
    """
    records = {record["implementation"]: record for record, call in entrants if call}
    try:
        times, cold = interleave(clock, {record["implementation"]: call for record, call in entrants if call}, rounds)
    except Exception as error:  # the call ran before, so the device has failed
        for record in records.values():
            record |= {"status": NOT_RUN, "why": f"while timed: {error_line(error)}"}
        return
    for name, own in times.items():
        measured = summary(own)
        seconds = 1e-3 * measured["median_ms"]
        records[name] |= measured | {
            "tflops": 1e-12 * case.flops / seconds,
            "to_cudnn": ratio(own, times[CUDNN]) if CUDNN in times else None,
            "to_flash": ratio(own, times[FLASH]) if FLASH in times else None,
            "to_floor": seconds * bandwidth / case.kv_bytes if case.decode else None,
            "cold": cold,
        }


def prepass(inputs: Inputs) -> Call:
    """Return the pass over the keys alone: norms, and keys less what they share, known before a query is read."""
    backend: Any = importlib.import_module("pasa.ops.attention.triton.anchor_launch")  # Triton is an extra
    return Call(lambda: backend.centre_keys(inputs.k, BLOCK).norms)


def reading(inputs: Inputs) -> Call:
    """Return a call that reads K and V once and does nothing else."""
    module: Any = importlib.import_module("pasa.eval.speed.reading_bound")  # Triton is an extra
    call: Call = module.prepare_read(inputs.k, inputs.v)
    return call


def split(case: SpeedCase, inputs: Inputs, whole: Call, clock: Clock, rounds: int) -> dict[str, Any]:
    """Time the whole call and its part in CUDA graphs, without what the host adds.

    The part is the pass over the keys, and the rest is the main loop. In decoding it is a kernel that only reads K and
    V: no part of the whole, but its bound. Times are None, with the reason in ``why``, if one of them cannot be timed.
    """
    name, make = ("reading", reading) if case.decode else ("pre-pass", prepass)
    ms: dict[str, Any] = {"whole": None, name: None}
    why = ""
    try:
        calls = {"whole": whole, name: make(inputs)}
        times, _ = interleave(clock, {each: clock.graph(call) for each, call in calls.items()}, rounds)
        ms = {each: summary(taken)["median_ms"] for each, taken in times.items()}
    except Exception as error:  # the records of the case stand
        why = f"while timed: {error_line(error)}"
    if not case.decode:
        ms["main loop"] = None if why else ms["whole"] - ms["pre-pass"]
    return {"case": case.name, **ms, "why": why}


EXPERIMENT = Experiment(
    "speed", run_speed, report.report, "Speed on a CUDA device", report.draw, appendix=report.appendix
)
