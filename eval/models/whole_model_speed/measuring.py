"""Times the ways to run a model in turns, and compares their results with FP32's."""

from __future__ import annotations

import statistics
from collections import deque
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
    REFERENCE,
    SOUND,
    SOUND_PATCHED,
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

    def first(self) -> Tensor:
        """Run the first phase, and return its result."""
        with self.scope():
            return next(self.begin())[1]

    def all(self) -> None:
        """Run all phases."""
        with self.scope():
            deque(self.begin(), maxlen=0)


@torch.no_grad()
def measure(subject: Subject, device: torch.device, turns: int, say: Callable[[str], None]) -> Record:
    """Return the record of a subject: its peaks, its conversion, and for each arm times, memory and errors."""
    say(f"{subject.title}: drawing weights")
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        original = subject.build().eval()
    inputs = subject.inputs(original)
    names = [*COMMON, *subject.extra]
    models = {SOUND: prepare(SOUND, original, subject, inputs)}
    fixture = overflow(subject, original, inputs)
    say(f"{subject.title}: converting")
    for precision in (CONVERTED, *(ARMS[name].precision for name in names)):  # the conversion needs most memory
        if precision not in models:
            models[precision] = prepare(precision, original, subject, inputs)
    del original
    say(f"{subject.title}: comparing with FP32")
    with whole_fp32():
        golden = _run(REFERENCE, subject, models, inputs, KEPT).first()
    records: list[Record] = [{"arm": name, "bytes": None, "nonfinite": None, "error": None} for name in names]
    for record in records:
        if ARMS[record["arm"]].judged:
            result = _run(record["arm"], subject, models, inputs, KEPT).first()
            record |= errors(result, golden, subject)
            del result
    say(f"{subject.title}: timing")
    runs = {name: _run(name, subject, models, inputs, 1) for name in names if ARMS[name].timed}
    for record in records:
        if record["arm"] in runs:
            record["bytes"] = memory(models[ARMS[record["arm"]].precision], runs[record["arm"]].all, device)
    times = take_turns(runs, turns, device)
    for record in records:
        record["phases"] = summaries(times, record["arm"])
    return {
        "parameters": sum(parameter.numel() for parameter in models[REFERENCE].model.parameters()),
        "fixture": fixture,
        "conversion": conversion(models[CONVERTED].record),
        "arms": records,
        "overheads": overheads(times),
    }


def _run(name: str, subject: Subject, models: Mapping[str, Prepared], inputs: Tensor, kept: int) -> Run:
    arm = ARMS[name]
    model = models[arm.precision].model
    return Run(lambda: arm.call(subject.run, model, inputs, kept), lambda: arm.scope(model))


def errors(result: Tensor, golden: Tensor, subject: Subject) -> Record:
    """Return the share of values that are not finite; if there are none, the relative error and the subject's own."""
    nonfinite = float((~result.isfinite()).double().mean())
    if nonfinite:
        return {"nonfinite": nonfinite, "error": None}
    error = float((result.double() - golden.double()).norm() / golden.double().norm())
    return {"nonfinite": nonfinite, "error": error, **subject.compare(result, golden)}


def take_turns(runs: Mapping[str, Run], turns: int, device: torch.device) -> Times:
    """Time the phases of each run in turns, in rotated order, so that drift affects all alike.

    Runs must have compiled their kernels.
    """
    times: Times = {name: {} for name in runs}
    names = list(runs)
    for turn in range(turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            with runs[name].scope():
                taken = time_phases(runs[name].begin(), device)
            for phase, pair in taken.items():
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
    """Return for each phase the median of both times, and the median of the turns' ratios to `SOUND`, plain FP16."""
    return [
        {
            "phase": phase,
            "wall_ms": statistics.median(wall for wall, _ in pairs),
            "device_ms": None if pairs[0][1] is None else statistics.median(ms for _, ms in pairs if ms is not None),
            "to_fp16": ratio(pairs, times[SOUND][phase])["median"],
        }
        for phase, pairs in times.get(arm, {}).items()
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
    for phase, base in times[SOUND_PATCHED].items():
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
