"""The equations: time of an engine = work / rate; with perfect overlap the slowest bounds, with none they add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pasa.eval.npu_model import rates
from pasa.eval.npu_model.rates import Rate
from pasa.eval.npu_model.twin import Work
from pasa.eval.speed.cases import HALF_BYTES, SpeedCase

PIPES = ("cube", "MTE1", "MTE2 cube", "FIX", "MTE2 vector", "vector", "MTE3")
SHARED = ("L2 read", "L2 write", "HBM")
FOLDED = {
    "ReduceRepeat float": {"Max float": 0.5, "ReduceDataBlock float": 0.5625},
    "ReduceRepeat half": {"Max half": 0.875, "ReduceDataBlock half": 0.125},
}
"""What a repeat of a row reduction costs if it folds first: halves of a row onto each other until a row of FP32 has 64
numbers, of FP16 16, then block reductions (64 to 8 to 1; 16 to 1)."""


@dataclass(frozen=True)
class Scenario:
    """Which rates and which vector work.

    Attributes
    ----------
    transfers : mapping
        Rates of the queues between the cores and global memory.
    vector : str
        "written" (the kernel's calls), "folded" (row reductions by `FOLDED`), or "none" (data movement and cube alone).
    """

    what: str
    transfers: Mapping[str, Rate] = field(default_factory=lambda: rates.SUSTAINED)
    vector: str = "written"


SCENARIOS = {
    "as written": Scenario("the kernels' calls, sustained transfer rates"),
    "folded": Scenario("row reductions folded before they are reduced: not in the kernels", vector="folded"),
    "no vector": Scenario("vector work hidden altogether: cube and data movement alone", vector="none"),
    "peak": Scenario("folded, and queues at their widths, bounded by L2", rates.PEAK, "folded"),
}


def vector_cycles(work: Work, treatment: str = "written") -> float:
    """Cycles of a vector queue: repeats by call, and the gap after each barrier."""
    if treatment == "none":
        return 0.0
    total = work.get("barriers", 0.0) * rates.BARRIER.value
    for name, count in work.items():
        if " " not in name or name in PIPES:
            continue
        parts = FOLDED.get(name, {name: 1.0}) if treatment == "folded" else {name: 1.0}
        total += count * sum(share * rates.cycles_of(call) for call, share in parts.items())
    return total


def vector_parts(work: Work) -> dict[str, float]:
    """Seconds of a vector core, as the kernels are written: row reductions, gaps after barriers, all else."""
    reductions = vector_cycles({name: count for name, count in work.items() if name in FOLDED})
    barriers = vector_cycles({"barriers": work.get("barriers", 0.0)})
    cycles = {"row reductions": reductions, "barriers": barriers, "other": vector_cycles(work) - reductions - barriers}
    return {part: count / rates.VECTORS.value / rates.CLOCK.value for part, count in cycles.items()}


def engine_times(work: Work, scenario: Scenario, vectors: float = rates.VECTORS.value) -> dict[str, float]:
    """Seconds of each engine of one group; `vectors` cores share the vector work."""
    clock = rates.CLOCK.value
    got = {name: work.get(name, 0.0) for name in ("macs", "MTE1", "MTE2 cube", "FIX", "MTE2 vector", "MTE3")}
    return {
        "cube": got["macs"] / (rates.CUBE.value * clock),
        "MTE1": got["MTE1"] / (rates.TO_L0.value * clock),
        "MTE2 cube": got["MTE2 cube"] / scenario.transfers["MTE2 cube"].value,
        "FIX": got["FIX"] / scenario.transfers["FIX"].value,
        "MTE2 vector": got["MTE2 vector"] / vectors / scenario.transfers["MTE2 vector"].value,
        "vector": vector_cycles(work, scenario.vector) / vectors / clock,
        "MTE3": got["MTE3"] / vectors / scenario.transfers["MTE3"].value,
        "L2 read": (got["MTE2 cube"] + got["MTE2 vector"]) / (rates.L2_READ.value * clock),
        "L2 write": (got["FIX"] + got["MTE3"]) / (rates.L2_WRITE.value * clock),
    }


def hbm_time(number_bytes: float) -> float:
    """Seconds of the whole chip's memory for what must be read or written once."""
    return number_bytes / (rates.GROUPS.value * rates.HBM.value * rates.CLOCK.value)


def bound(times: Mapping[str, float]) -> tuple[str, float]:
    """The slowest engine, and its time: perfect overlap."""
    name = max(times, key=lambda engine: times[engine])
    return name, times[name]


def serial(times: Mapping[str, float]) -> float:
    """No overlap: one engine after the other; what they share is not a step of its own."""
    return max(sum(times.get(name, 0.0) for name in PIPES), *(times.get(name, 0.0) for name in SHARED))


def attention_bytes(case: SpeedCase) -> float:
    """Q, K', V and the output, each once."""
    return case.kv_bytes + 2.0 * case.batch * case.heads * case.rows * case.dim * HALF_BYTES


def peak_flops() -> float:
    """Of the cube, FP16, chip-wide."""
    return 2 * rates.CUBE.value * rates.CLOCK.value * rates.GROUPS.value
