"""The equations: time of an engine = work / rate; with perfect overlap the slowest bounds, with none they add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pasa.eval.npu import rates
from pasa.eval.npu.rates import Rate
from pasa.eval.npu.twin import Work
from pasa.eval.speed.cases import HALF_BYTES, SpeedCase

PIPES = ("cube", "MTE1", "MTE2 cube", "FIX", "MTE2 vector", "vector", "MTE3")
SHARED = ("L2 read", "L2 write", "HBM")
REDUCTIONS = ("ReduceRepeat", "ReduceDataBlock")


@dataclass(frozen=True)
class Scenario:
    """Which rates and which vector work.

    Attributes
    ----------
    transfers : mapping
        Rates of the queues between the cores and global memory.
    vector : bool
        Whether vector work takes time; otherwise data movement and the cube alone do.
    """

    what: str
    transfers: Mapping[str, Rate] = field(default_factory=lambda: rates.SUSTAINED)
    vector: bool = True


SCENARIOS = {
    "as written": Scenario("the kernels' calls, sustained transfer rates"),
    "no vector": Scenario("vector work hidden altogether: cube and data movement alone", vector=False),
    "peak": Scenario("the kernels' calls, queues at their widths, bounded by L2", rates.PEAK),
}


def vector_cycles(work: Work) -> float:
    """Cycles of a vector queue: repeats by call, and the gap after each barrier."""
    calls = {name: count for name, count in work.items() if " " in name and name not in PIPES}
    return work.get("barriers", 0.0) * rates.BARRIER.value + sum(n * rates.cycles_of(name) for name, n in calls.items())


def vector_parts(work: Work) -> dict[str, float]:
    """Seconds of a vector core: row reductions, gaps after barriers, all else."""
    reductions = vector_cycles({name: count for name, count in work.items() if name.startswith(REDUCTIONS)})
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
        "vector": vector_cycles(work) / vectors / clock if scenario.vector else 0.0,
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
