"""Times the ways to run a model in turns, and compares their results with FP32's."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
    Arm,
    counting_every,
    memory,
    prepare,
)
from pasa.eval.models.whole_model_speed.subjects import KEPT, SEED, Phases, Record, Subject, overflow
from pasa.fp16.counting import EVERY

Pair: TypeAlias = tuple[float, float | None]
Times: TypeAlias = dict[str, dict[str, list[Pair]]]
"""By arm and phase, for each turn: milliseconds of wall time, and by CUDA events (None on a CPU)."""


@dataclass(frozen=True)
class Run:
    """A subject's run in some way."""

    arm: Arm
    subject: Subject
    model: Any
    inputs: Tensor
    kept: int = 1

    def begin(self) -> Phases:
        """Return the phases, none of which has begun."""
        return self.arm.call(self.subject.run, self.model, self.inputs, self.kept)

    def first(self) -> Tensor:
        """Run the first phase, and return its result."""
        with counting_every(self.arm.every):
            return next(self.begin())[1]

    def all(self) -> None:
        """Run all phases."""
        with counting_every(self.arm.every):
            deque(self.begin(), maxlen=0)


@torch.no_grad()
def measure(subject: Subject, device: torch.device, turns: int, say: Callable[[str], None]) -> Record:
    """Return the record of a subject: its peaks, its conversion, and for each arm times, memory and errors."""
    say(f"{subject.title}: drawing weights")
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        original = subject.build().eval()
    inputs = subject.inputs(original, SEED)
    names = [*COMMON, *subject.extra]
    models = {each: prepare(each, original, subject, device) for each in (SOUND, SOUND_PATCHED)}
    fixture = overflow(subject, original, inputs)
    say(f"{subject.title}: converting")
    models[CONVERTED] = prepare(CONVERTED, original, subject, device)  # first, because it needs most memory
    models[REFERENCE] = prepare(REFERENCE, original, subject, device)
    with whole_fp32():
        golden = Run(ARMS[REFERENCE], subject, models[REFERENCE].model, inputs, KEPT).first()
    say(f"{subject.title}: comparing with FP32")
    timed = {ARMS[name].precision for name in names if ARMS[name].timed}
    records: list[Record] = []
    for name in names:
        arm = ARMS[name]
        if arm.precision not in models:
            models[arm.precision] = prepare(arm.precision, original, subject, device)
        record: Record = {"arm": name, "bytes": None, "nonfinite": None, "error": None}
        if arm.judged:
            record |= errors(Run(arm, subject, models[arm.precision].model, inputs, KEPT).first(), golden, subject)
        if arm.precision not in timed:
            del models[arm.precision]
        records.append(record)
    del original, golden
    say(f"{subject.title}: timing")
    runs = {
        name: Run(ARMS[name], subject, models[ARMS[name].precision].model, inputs) for name in names if ARMS[name].timed
    }
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


def errors(result: Tensor, golden: Tensor, subject: Subject) -> Record:
    """Return the share of values that are not finite; if there are none, the relative error and the subject's own."""
    nonfinite = float((~result.isfinite()).double().mean())
    if nonfinite:
        return {"nonfinite": nonfinite, "error": None}
    error = float((result.double() - golden.double()).norm() / golden.double().norm())
    return {"nonfinite": nonfinite, "error": error, **subject.compare(result, golden)}


def take_turns(runs: Mapping[str, Run], turns: int, device: torch.device) -> Times:
    """Time the phases of all runs, which must have compiled their kernels.

    In each turn every run begins anew. Phases alternate between the runs, in rotated order, so that drift affects all
    alike: a step of decoding waits for the host, whose speed scatters. A turn's time is the median of its steps,
    because ratios of single steps scatter more.
    """
    times: Times = {name: {} for name in runs}
    for turn in range(turns):
        steps: Times = {name: {} for name in runs}
        begun = {name: run.begin() for name, run in runs.items()}
        place = turn
        while begun:
            names = list(begun)
            first, place = place % len(names), place + 1
            for name in names[first:] + names[:first]:
                with counting_every(runs[name].arm.every):
                    timed = time_phase(begun[name], device)
                if timed is None:
                    del begun[name]
                else:
                    steps[name].setdefault(timed[0], []).append(timed[1])
        for name, phases in steps.items():
            for phase, pairs in phases.items():
                times[name].setdefault(phase, []).append(middle(pairs))
    return times


def middle(pairs: Sequence[Pair]) -> Pair:
    """Return the medians of wall times and of times by CUDA events."""
    events = [ms for _, ms in pairs if ms is not None]
    return statistics.median(wall for wall, _ in pairs), statistics.median(events) if events else None


def time_phase(phases: Phases, device: torch.device) -> tuple[str, Pair] | None:
    """Run the next phase; return its name and milliseconds: wall time, and between CUDA events (None on a CPU)."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
    started = now(device)
    for event in events[:1]:
        event.record()
    phase = next(phases, None)
    for event in events[1:]:
        event.record()
    wall = 1e3 * (now(device) - started)
    return None if phase is None else (phase[0], (wall, events[0].elapsed_time(events[1]) if events else None))


def summaries(times: Times, arm: str) -> list[Record]:
    """Return for each phase the median of both times, and the median of the turns' ratios to `SOUND`, plain FP16."""
    records = []
    for phase, pairs in times.get(arm, {}).items():
        wall, events = middle(pairs)
        beside = ratio(pairs, times[SOUND][phase])["median"]
        records.append({"phase": phase, "wall_ms": wall, "device_ms": events, "to_fp16": beside})
    return records


def ratio(pairs: list[Pair], base: list[Pair]) -> dict[str, float]:
    """Return median, p20 and p80 of the ratio of two wall times."""
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
