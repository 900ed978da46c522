"""Predict times from counted work: an engine takes work / rate.

With perfect overlap the slowest engine decides; without overlap the times of the engines add up. The rates are those
published for an Ascend 910B3. ``rates.json`` holds them with their sources, and marks what is inferred.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pasa.eval.npu.precision_variants import Fit, Work, combine
from pasa.eval.speed.cases import HALF_BYTES, SpeedCase

RATES = Path(__file__).with_name("rates.json")
CYCLES = "cycles of a repeat of 256 bytes, FP32 and FP16"
# Queues that run one after the other if nothing overlaps, and paths that several queues share.
PIPES = ("cube", "MTE1", "MTE2 cube", "FIX", "MTE2 vector", "vector", "MTE3")
SHARED = ("L2 read", "L2 write", "HBM")
REDUCTIONS = ("ReduceRepeat", "ReduceDataBlock")  # calls that reduce rows


@cache
def load_rates() -> dict[str, Any]:
    """Return the contents of ``rates.json``; a rate has ``value``, ``unit``, ``source`` and ``inferred``."""
    data: dict[str, Any] = json.loads(RATES.read_text(encoding="utf-8"))
    for each in data["rates"].values():
        each["source"] = data["sources"][each["source"]]
    return data


def rate(name: str) -> float:
    """Return the value of a rate in its unit."""
    return float(load_rates()["rates"][name]["value"])


def cycles_of(call: str) -> float:
    """Return the cycles that a repeat (256 bytes) of a vector call such as ``"Add float"`` takes."""
    name, _, dtype = call.partition(" ")
    return float(load_rates()[CYCLES][name][0 if dtype == "float" else 1])


@dataclass(frozen=True)
class Scenario:
    """The assumptions of a prediction, described by `what`."""

    what: str
    peak: bool = False  # transfers run at the width of their queues, not at sustained rates
    vector: bool = True  # vector work takes time


SCENARIOS = {
    "as written": Scenario("the kernels' calls, sustained transfer rates"),
    "no vector": Scenario("vector work hidden altogether: cube and data movement alone", vector=False),
    "peak": Scenario("the kernels' calls, queues at their widths, bounded by L2", peak=True),
}
MAIN = SCENARIOS["as written"]


def vector_cycles(work: Work) -> float:
    """Return the cycles of a vector queue: those of the repeats of all calls, and the gap after each barrier."""
    calls = {name: count for name, count in work.items() if " " in name and name not in PIPES}
    return work.get("barriers", 0.0) * rate("vector barrier") + sum(n * cycles_of(name) for name, n in calls.items())


def vector_parts(work: Work) -> dict[str, float]:
    """Return how many seconds a vector core spends on row reductions, gaps after barriers, and all else."""
    reductions = vector_cycles({name: count for name, count in work.items() if name.startswith(REDUCTIONS)})
    barriers = vector_cycles({"barriers": work.get("barriers", 0.0)})
    cycles = {"row reductions": reductions, "barriers": barriers, "other": vector_cycles(work) - reductions - barriers}
    return {part: count / rate("vector cores") / rate("clock") for part, count in cycles.items()}


def engine_times(work: Work, how: Scenario, vectors: float | None = None) -> dict[str, float]:
    """Return the seconds of each engine of one group; `vectors` cores share its vector work (default: all of them)."""
    clock, vectors, width = rate("clock"), vectors or rate("vector cores"), ", peak" if how.peak else ""
    count = {name: work.get(name, 0.0) for name in ("macs", "MTE1", "MTE2 cube", "FIX", "MTE2 vector", "MTE3")}
    return {
        "cube": count["macs"] / (rate("cube") * clock),
        "MTE1": count["MTE1"] / (rate("MTE1") * clock),
        "MTE2 cube": count["MTE2 cube"] / rate(f"MTE2 cube{width}"),
        "FIX": count["FIX"] / rate(f"FIX{width}"),
        "MTE2 vector": count["MTE2 vector"] / vectors / rate(f"MTE2 vector{width}"),
        "vector": vector_cycles(work) / vectors / clock if how.vector else 0.0,
        "MTE3": count["MTE3"] / vectors / rate(f"MTE3{width}"),
        "L2 read": (count["MTE2 cube"] + count["MTE2 vector"]) / (rate("L2 read") * clock),
        "L2 write": (count["FIX"] + count["MTE3"]) / (rate("L2 write") * clock),
    }


def hbm_time(number_bytes: float) -> dict[str, float]:
    """Return the seconds that reading or writing so many bytes of HBM takes."""
    return {"HBM": number_bytes / (rate("groups") * rate("HBM") * rate("clock"))}


def bound(times: Mapping[str, float]) -> tuple[str, float]:
    """Return the slowest engine and its time, which is the total time with perfect overlap."""
    return max(times.items(), key=lambda item: item[1])


def serial(times: Mapping[str, float]) -> float:
    """Return the time without overlap: the sum over `PIPES`, or the time of one of `SHARED` if that is longer."""
    return max(sum(times.get(name, 0.0) for name in PIPES), *(times.get(name, 0.0) for name in SHARED))


def predict_case(
    case: SpeedCase, scenario: str, ways: Mapping[str, Fit], shift: Mapping[str, Fit], plan: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return the times of every allocation: the pass that shifts the keys, then the busiest group's attention.

    `ways` and `shift` are the fitted work of attention and of that pass, by name. `plan` holds the numbers of ``tasks``
    and ``tiles`` of the busiest group.
    """
    how = SCENARIOS[scenario]
    moved = case.kv_bytes + 2.0 * case.batch * case.heads * case.rows * case.dim * HALF_BYTES  # Q, K', V, O once
    records: list[dict[str, Any]] = []
    for name, way in ways.items():
        work = combine((plan["tasks"], way.per_task), (plan["tiles"], way.per_tile))
        times = engine_times(work, how) | hbm_time(moved)
        before = shift_times(case, how, name, shift)
        engine, overlap = bound(times)
        shift_s = bound(before)[1]
        records.append({"case": case.name, "scenario": scenario, "allocation": name, "bound": engine,
                        "overlap_ms": 1e3 * (overlap + shift_s), "shift_ms": 1e3 * shift_s,
                        "none_ms": 1e3 * (serial(times) + serial(before)),
                        "tflops": 1e-12 * case.flops / (overlap + shift_s)})  # fmt: skip
    reference = next(each for each in records if each["allocation"] == "fp32")
    for each in records:
        each["ratio_overlap"] = reference["overlap_ms"] / each["overlap_ms"]
        each["ratio_none"] = reference["none_ms"] / each["none_ms"]
    return records


def shift_times(case: SpeedCase, how: Scenario, name: str, shift: Mapping[str, Fit]) -> dict[str, float]:
    """Return the times of the pass that computes K' before attention.

    The published recovery computes K' on the cube cores, the exact recovery on the vector cores.
    """
    kernel = name.partition(" ")[0].removesuffix("-fp16")
    if kernel not in shift:
        return {"HBM": 0.0}
    cores = int(rate("groups") * (rate("vector cores") if kernel == "exact" else 1))
    blocks = -(-case.batch * case.kv_heads * -(-case.keys // 128) // cores)
    work = combine((1.0, shift[kernel].per_task), (blocks, shift[kernel].per_tile))
    return engine_times(work, how, vectors=1.0) | hbm_time(case.kv_bytes)
