"""Times the ways to run a model in turns, and compares their results with FP32's."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pasa.eval.kit.timing import now, quantile
from pasa.eval.models.video.clip import whole_fp32
from pasa.eval.models.whole_model_speed.arms import (
    ARMS,
    COMMON,
    CONVERTED,
    COUNTING,
    FP16,
    PATCHED,
    REFERENCE,
    Prepared,
    memory,
    prepare,
)
from pasa.eval.models.whole_model_speed.subjects import KEPT, Phases, Record, Subject, overflow
from pasa.fp16.counting import EVERY

Pair: TypeAlias = tuple[float, float | None]
Times: TypeAlias = dict[str, dict[str, list[Pair]]]
"""By arm and phase, for each turn: milliseconds of host and device together, and by CUDA events (None on a CPU)."""


@dataclass(frozen=True)
class Run:
    """A run to time: what starts it, and the context that it needs, which is not timed."""

    begin: Callable[[], Phases]
    scope: Callable[[], AbstractContextManager[Any]]

    def results(self) -> dict[str, Tensor]:
        """Run all phases, and return their results."""
        with self.scope():
            return dict(self.begin())


@torch.no_grad()
def measure(subject: Subject, device: torch.device, turns: int, say: Callable[[str], None]) -> Record:
    """Return the record of a subject: its peaks, its conversion, and for each arm times, memory and errors."""
    say(f"{subject.title}: drawing weights")
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        original = subject.build().eval()
    inputs = subject.inputs(original)
    fixture = overflow(subject, original, inputs)
    names = [*COMMON, *subject.extra]
    say(f"{subject.title}: converting")
    precisions = dict.fromkeys([CONVERTED, *(ARMS[name].precision for name in names)])
    models = {precision: prepare(precision, original, subject, inputs) for precision in precisions}
    del original
    runs = {name: _run(name, subject, models, inputs, 1) for name in names}
    golden = _golden(subject, models, inputs)
    records = []
    for name in names:
        say(f"{subject.title}: {ARMS[name].title}")
        result = next(iter(_run(name, subject, models, inputs, KEPT).results().values()))
        held = memory(models[ARMS[name].precision], runs[name].results, device)
        records.append({"arm": name, "bytes": held, **errors(result, golden, subject)})
        del result
    say(f"{subject.title}: timing")
    times = take_turns(runs, turns, device)
    for record in records:
        record["phases"] = summaries(times, record["arm"])
    parts = sum(parameter.numel() for parameter in models[REFERENCE].model.parameters())
    return {
        "parameters": parts,
        "fixture": fixture,
        "conversion": conversion(models[CONVERTED].record),
        "arms": records,
        "overheads": overheads(times),
    }


def _run(name: str, subject: Subject, models: Mapping[str, Prepared], inputs: Tensor, kept: int) -> Run:
    arm = ARMS[name]
    model = models[arm.precision].model
    return Run(lambda: arm.call(subject.run, model, inputs, kept), lambda: arm.scope(model))


def _golden(subject: Subject, models: Mapping[str, Prepared], inputs: Tensor) -> Tensor:
    """Return the result of the first phase in FP32, without TF32."""
    with whole_fp32():
        results = _run(REFERENCE, subject, models, inputs, KEPT).results()
    return next(iter(results.values()))


def errors(result: Tensor, golden: Tensor, subject: Subject) -> Record:
    """Return the share of values that are not finite; if there are none, the relative error and the subject's own."""
    nonfinite = float((~result.isfinite()).double().mean())
    if nonfinite:
        return {"nonfinite": nonfinite, "error": None}
    error = float((result.double() - golden.double()).norm() / golden.double().norm())
    return {"nonfinite": nonfinite, "error": error, **subject.compare(result, golden)}


def take_turns(runs: Mapping[str, Run], turns: int, device: torch.device) -> Times:
    """Time the phases of each run in turns, in rotated order, so that drift affects all alike.

    The first turn compiles kernels, and is not counted.
    """
    times: Times = {name: {} for name in runs}
    names = list(runs)
    for turn in range(turns + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            with runs[name].scope():
                taken = time_phases(runs[name].begin(), device)
            for phase, pair in taken.items() if turn else ():
                times[name].setdefault(phase, []).append(pair)
    return times


def time_phases(phases: Phases, device: torch.device) -> dict[str, Pair]:
    """Return the milliseconds of each phase: wall time, and the time between CUDA events (None on a CPU)."""
    times: dict[str, Pair] = {}
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
    while True:
        started = now(device)
        for event in events[:1]:
            event.record()
        phase = next(phases, None)
        if phase is None:
            return times
        for event in events[1:]:
            event.record()
        wall = 1e3 * (now(device) - started)
        times[phase[0]] = wall, events[0].elapsed_time(events[1]) if events else None


def summaries(times: Times, arm: str) -> list[Record]:
    """Return for each phase the median of both times, and the median over the turns of its time over plain FP16's."""
    return [
        {
            "phase": phase,
            "wall_ms": statistics.median(wall for wall, _ in pairs),
            "device_ms": None if pairs[0][1] is None else statistics.median(ms for _, ms in pairs if ms is not None),
            "to_fp16": ratio(pairs, times[FP16][phase])["median"],
        }
        for phase, pairs in times[arm].items()
    ]


def ratio(pairs: list[Pair], base: list[Pair]) -> dict[str, float]:
    """Return median, p20 and p80 over the turns of the ratio of two wall times."""
    ratios = sorted(own / other for (own, _), (other, _) in zip(pairs, base, strict=True))
    return {name: quantile(ratios, share) for name, share in (("median", 0.5), ("p20", 0.2), ("p80", 0.8))}


def overheads(times: Times) -> list[Record]:
    """Return for each phase the time after `to_fp16` over that of plain FP16 with the same attention.

    ``still``: no pass counts; ``counting``: each does; ``amortised``: one in 16 does, as by default.
    """
    records = []
    for phase, base in times[PATCHED].items():
        still, each = times[CONVERTED][phase], times[COUNTING][phase]
        mixed: list[Pair] = [(((EVERY - 1) * a + b) / EVERY, None) for (a, _), (b, _) in zip(still, each, strict=True)]
        parts = {"still": still, "counting": each, "amortised": mixed}
        records.append({"phase": phase} | {name: ratio(pairs, base) for name, pairs in parts.items()})
    return records


def conversion(record: Record) -> Record:
    """Return what the handle's report says, and what the conversion took."""
    report = record["handle"].report()
    return {
        "seconds": record["seconds"],
        "peak_bytes": record["peak_bytes"],
        "parameters": report.parameters,
        "largest_power": max((each.power for each in report.modules), default=0),
        "fp32": [list(each) for each in report.fp32],
        "underflow": report.underflow,
        "beyond": [each[0] for each in report.beyond],
    }
