"""Predict times from counted work: an engine takes work / (efficiency x rate), and a kernel its launch besides.

With perfect overlap the slowest engine decides; without overlap the times of the engines add up. The rates are those
of documents on an Ascend 910B3, but for the efficiency and the launch, which are fitted to measurements.
``rates.json`` holds them with their sources, and marks what is inferred.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pasa.eval.npu.precision_variants import Fit, Work, combine
from pasa.eval.speed.cases import HALF_BYTES, SpeedCase

Rates = Mapping[str, float]
"""Values of the rates by name, in their units."""
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


@cache
def stored_rates() -> Rates:
    """Return the value of every rate."""
    return {name: float(each["value"]) for name, each in load_rates()["rates"].items()}


def rate(name: str) -> float:
    """Return the value of a rate in its unit."""
    return stored_rates()[name]


def cycles_of(call: str) -> float:
    """Return the cycles that a repeat (256 bytes) of a vector call such as ``"Add float"`` takes."""
    name, _, dtype = call.partition(" ")
    return float(load_rates()[CYCLES][name][0 if dtype == "float" else 1])


def changed_rates(name: str, factor: float) -> dict[str, float]:
    """Return the values of all rates, that of one multiplied by a factor."""
    return {**stored_rates(), name: factor * rate(name)}


def vector_cycles(work: Work, rates: Rates | None = None) -> float:
    """Return the cycles of a vector queue: those of the repeats of all calls, and the gap after each barrier."""
    rates = rates or stored_rates()
    calls = {name: count for name, count in work.items() if " " in name and name not in PIPES}
    cycles = sum(n * cycles_of(name) for name, n in calls.items()) / rates["vector"]
    return work.get("barriers", 0.0) * rates["vector barrier"] + cycles


def vector_parts(work: Work) -> dict[str, float]:
    """Return how many seconds a vector core spends on row reductions, gaps after barriers, and all else."""
    reductions = vector_cycles({name: count for name, count in work.items() if name.startswith(REDUCTIONS)})
    barriers = vector_cycles({"barriers": work.get("barriers", 0.0)})
    cycles = {"row reductions": reductions, "barriers": barriers, "other": vector_cycles(work) - reductions - barriers}
    speed = rate("vector cores") * rate("clock") * rate("efficiency")
    return {part: count / speed for part, count in cycles.items()}


def engine_times(work: Work, rates: Rates | None = None, vectors: float | None = None) -> dict[str, float]:
    """Return the seconds of each engine of one group; `vectors` cores share its vector work (default: all of them)."""
    rates = rates or stored_rates()
    clock, vectors = rates["efficiency"] * rates["clock"], vectors or rates["vector cores"]
    count = {name: work.get(name, 0.0) for name in ("macs", "MTE1", "MTE2 cube", "FIX", "MTE2 vector", "MTE3")}
    return {
        "cube": count["macs"] / (rates["cube"] * clock),
        "MTE1": count["MTE1"] / (rates["MTE1"] * clock),
        "MTE2 cube": count["MTE2 cube"] / (rates["MTE2 cube"] * clock),
        "FIX": count["FIX"] / (rates["FIX"] * clock),
        "MTE2 vector": count["MTE2 vector"] / vectors / (rates["MTE2 vector"] * clock),
        "vector": vector_cycles(work, rates) / vectors / clock,
        "MTE3": count["MTE3"] / vectors / (rates["MTE3"] * clock),
        "L2 read": (count["MTE2 cube"] + count["MTE2 vector"]) / (rates["L2 read"] * clock),
        "L2 write": (count["FIX"] + count["MTE3"]) / (rates["L2 write"] * clock),
    }


def hbm_time(number_bytes: float, rates: Rates | None = None) -> dict[str, float]:
    """Return the seconds that reading or writing so many bytes of HBM takes."""
    rates = rates or stored_rates()
    return {"HBM": number_bytes / (rates["groups"] * rates["HBM"] * rates["clock"] * rates["efficiency"])}


def bound(times: Mapping[str, float]) -> tuple[str, float]:
    """Return the slowest engine and its time, which is the total time with perfect overlap."""
    return max(times.items(), key=lambda item: item[1])


def serial(times: Mapping[str, float]) -> float:
    """Return the time without overlap: the sum over `PIPES`, or the time of one of `SHARED` if that is longer."""
    return max(sum(times.get(name, 0.0) for name in PIPES), *(times.get(name, 0.0) for name in SHARED))


def predict_case(
    case: SpeedCase,
    ways: Mapping[str, Fit],
    shift: Mapping[str, Fit],
    plans: Mapping[str, Mapping[str, int]],
    rates: Rates | None = None,
) -> list[dict[str, Any]]:
    """Return the times of every allocation: the pass that shifts the keys, then the busiest group's attention.

    `ways` and `shift` are the fitted work of attention and of that pass, by name. `plans` holds the numbers of
    ``tasks`` and ``tiles`` of the busiest group, by the number of query tiles of a task. Each of the two kernels pays a
    launch.
    """
    rates = rates or stored_rates()
    moved = case.kv_bytes + 2.0 * case.batch * case.heads * case.rows * case.dim * HALF_BYTES  # Q, K', V, O once
    records: list[dict[str, Any]] = []
    for name, way in ways.items():
        plan = plans[str(way.lanes)]
        work = combine((plan["tasks"], way.per_task), (plan["tiles"], way.per_tile))
        times = engine_times(work, rates) | hbm_time(moved, rates)
        before = shift_times(case, name, shift, rates)
        shift_s = rates["launch"] + bound(before)[1] if before else 0.0
        none_s = rates["launch"] + serial(before) if before else 0.0
        engine, overlap = bound(times)
        whole = rates["launch"] + overlap + shift_s
        records.append({"case": case.name, "allocation": name, "bound": engine,
                        "overlap_ms": 1e3 * whole, "shift_ms": 1e3 * shift_s,
                        "none_ms": 1e3 * (rates["launch"] + serial(times) + none_s),
                        "tflops": 1e-12 * case.flops / whole})  # fmt: skip
    reference = next(each for each in records if each["allocation"] == "fp32")
    lazy = next((each for each in records if each["allocation"] == "fp32 lazy"), reference)
    for each in records:
        each["ratio_lazy"] = lazy["overlap_ms"] / each["overlap_ms"]
        each["ratio_overlap"] = reference["overlap_ms"] / each["overlap_ms"]
        each["ratio_none"] = reference["none_ms"] / each["none_ms"]
    return records


def shift_times(case: SpeedCase, name: str, shift: Mapping[str, Fit], rates: Rates) -> dict[str, float]:
    """Return the times of the pass that computes K' before attention; empty where there is none.

    The published recovery computes K' on the cube cores, the exact recovery on the vector cores. An allocation may
    have a pass of its own name.
    """
    recovery = name.replace(",", " ").partition(" ")[0].removesuffix("-fp16")
    kernel = name if name in shift else recovery
    if kernel not in shift:
        return {}
    cores = int(rates["groups"] * (rates["vector cores"] if recovery == "exact" else 1))
    blocks = -(-case.batch * case.kv_heads * -(-case.keys // 128) // cores)
    work = combine((1.0, shift[kernel].per_task), (blocks, shift[kernel].per_tile))
    return engine_times(work, rates, vectors=1.0) | hbm_time(case.kv_bytes, rates)
