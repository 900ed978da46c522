"""Time calls on a GPU or NPU: interleaved rounds, cold L2 cache, device events. The statistics need no device."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pasa.ops.memory import release_memory

COLD_BELOW_MS = 2.0  # a longer call reads its inputs many times over, so the initial contents of L2 do not matter
FLUSH_L2 = 3  # a cold call follows a read of so many times the size of L2
BUDGET_MS = 60.0  # time to spend per implementation and round
CALLS = (3, 50)  # fewest and most calls per implementation and round
PROBES = 5  # calls that estimate the time of an implementation before its rounds; the first is not counted
WARM_CALLS = 3  # calls before a graph is captured
NPU_L2_BYTES = 192 * 2**20  # of an Atlas A2: what torch_npu's own benchmarks clear (its Inductor backend)
COPY_BYTES = 2**31

Rounds: TypeAlias = list[list[float]]  # milliseconds of each call: one list per round


@dataclass(frozen=True)
class Call:
    """A call to time.

    `run` enqueues the call. `scope` returns a context manager that is entered once around many runs. `restore` brings
    the output into the shape (B, Hq, Sq, D), and is not timed.
    """

    run: Callable[[], Tensor]
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    restore: Callable[[Tensor], Tensor] = torch.Tensor.detach

    def output(self) -> Tensor:
        """Run the call once; return its output in the shape (B, Hq, Sq, D)."""
        with self.scope():
            return self.restore(self.run())


class DeviceClock:
    """Measure calls on a device whose module in torch has events and graphs: CUDA, or an NPU with torch_npu.

    Before a cold call, three times the size of the L2 cache is read. It is not written, because modified cache lines
    would be written back to memory during the timed call. That would be most of the time of a short decoding step.
    """

    def __init__(self, device: torch.device, l2_bytes: int) -> None:
        self.device, self.l2_bytes = device, l2_bytes
        self._torch: Any = getattr(torch, device.type)
        self._graph: Any = getattr(self._torch, "NPUGraph", None) or getattr(self._torch, "CUDAGraph", None)
        self._flushed = torch.ones(FLUSH_L2 * self.l2_bytes // 4, device=self.device)
        gc.collect()  # what is frozen is never collected, with the memory of the device that it holds
        gc.freeze()  # collections before a capture search what is new alone; a search of all takes 0.1 s

    def times(self, call: Call, count: int, cold: bool) -> list[float]:
        """Return the milliseconds of each call, by the device's events; the host does not wait between calls."""
        events = [[self._torch.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        with call.scope():
            for start, stop in events:
                if cold:
                    self._flushed.sum()
                start.record()
                call.run()
                stop.record()
            self._torch.synchronize()
        return [start.elapsed_time(stop) for start, stop in events]

    def host_us(self, call: Call) -> float:
        """Return the microseconds that the host takes to enqueue a call: median of ten, the device idle before each."""
        taken = []
        with call.scope():
            for _ in range(10):
                self._torch.synchronize()
                start = time.perf_counter()
                call.run()
                taken.append(1e6 * (time.perf_counter() - start))
            self._torch.synchronize()
        return statistics.median(taken)

    def workspace(self, call: Call) -> int:
        """Return the peak bytes allocated besides the output; a log-sum-exp counts, even if it is not returned."""
        self._torch.synchronize()
        release_memory()  # which pasa keeps between calls
        before = self._torch.memory_allocated()
        self._torch.reset_peak_memory_stats()
        with call.scope():
            out = call.run()
            self._torch.synchronize()
        held: int = self._torch.max_memory_allocated() - before
        return max(0, held - out.numel() * out.element_size())

    def graph(self, call: Call) -> Call:
        """Return the call in a graph, captured after warming up on another stream, as capture requires."""
        stream = self._torch.Stream()
        stream.wait_stream(self._torch.current_stream())
        graph = self._graph()
        with call.scope():
            with self._torch.stream(stream):
                for _ in range(WARM_CALLS):
                    call.run()
            self._torch.current_stream().wait_stream(stream)
            self._torch.synchronize()
            gc.collect()  # a graph that is collected during the capture of another one ends it
            with self._torch.graph(graph):
                out = call.run()

        def replay() -> Tensor:
            graph.replay()
            return out

        return Call(replay, restore=call.restore)


class CudaClock(DeviceClock):
    """Measure calls on the current CUDA device."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise NotImplementedError(f"timing needs a CUDA device, and torch {torch.__version__} finds none")
        device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(device, int(torch.cuda.get_device_properties(device).L2_cache_size))


class NpuClock(DeviceClock):
    """Measure calls on an NPU. No NPU has run it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, NPU_L2_BYTES)


Clock: TypeAlias = DeviceClock  # what a benchmark takes; tests pass one that needs no device


def interleave(
    clock: Clock, calls: Mapping[str, Call], rounds: int, cold: bool | None = None
) -> tuple[dict[str, Rounds], bool]:
    """Time calls in rounds; in each round every call has a turn, in another order.

    So drift affects all alike, and so does the call before: a GPU that has just done heavy work runs up to 9 % slower.

    Return the milliseconds by name, without the first call of every turn, and whether calls were cold. If `cold` is
    None, all calls are cold if the fastest of them takes less than `COLD_BELOW_MS`.
    """
    probes = {name: statistics.median(clock.times(call, PROBES, False)[1:]) for name, call in calls.items()}
    if cold is None:
        cold = min(probes.values(), default=COLD_BELOW_MS) < COLD_BELOW_MS
    counts = {name: max(CALLS[0], min(CALLS[1], int(BUDGET_MS / max(taken, 1e-6)))) for name, taken in probes.items()}
    times: dict[str, Rounds] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(rounds):
        for name in Random(turn).sample(names, len(names)):
            times[name].append(clock.times(calls[name], counts[name] + 1, cold)[1:])
    return times, cold


def summary(times: Rounds) -> dict[str, float]:
    """Return median, p20 and p80 over the calls of all rounds, and their number."""
    every = sorted(value for turn in times for value in turn)
    shares = {"median_ms": 0.5, "p20_ms": 0.2, "p80_ms": 0.8}
    return {name: quantile(every, share) for name, share in shares.items()} | {"calls": len(every)}


def quantile(ordered: Sequence[float], share: float) -> float:
    """Interpolate linearly between the values of a sorted sequence."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def ratio(times: Rounds, baseline: Rounds) -> float:
    """Return the speedup over a baseline: the median over the rounds of median(baseline) / median(times)."""
    median = statistics.median
    return median(median(theirs) / median(ours) for ours, theirs in zip(times, baseline, strict=True))


def now(device: torch.device) -> float:
    """Wait until the device has finished all enqueued work; return the wall time in seconds."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(*([] if device.type == "mps" else [device]))  # there is one mps
    return time.perf_counter()


def added_cost(plain: Call, extended: Call, turns: int, calls: int, device: torch.device) -> dict[str, float]:
    """Return by how many percent an addition to a call increases its wall time, host and device together.

    `plain` is the call without the addition, `extended` with it. In each turn both run `calls` times, in alternating
    order. The first turn is not counted, and scopes are not timed. Return the median of both times, and of the turns'
    increases the median and two quantiles.
    """
    times: dict[str, list[float]] = {"plain": [], "extended": []}
    both = [("plain", plain), ("extended", extended)]
    for turn in range(turns + 1):
        for name, call in both if turn % 2 else both[::-1]:
            with call.scope():
                started = now(device)
                for _ in range(calls):
                    call.run()
                times[name].append(1e3 * (now(device) - started) / calls)
    without, added = times["plain"][1:], times["extended"][1:]
    costs = sorted(100 * (own / other - 1) for own, other in zip(added, without, strict=True))
    shares = {"cost_percent": 0.5, "p20_percent": 0.2, "p80_percent": 0.8}
    medians = {"plain_ms": statistics.median(without), "extended_ms": statistics.median(added)}
    return medians | {name: quantile(costs, share) for name, share in shares.items()}


def copy_bandwidth(clock: Clock) -> float:
    """Return bytes per second of a large copy within the device's memory, counting what is read and what is written."""
    source = torch.ones(COPY_BYTES // 4, device=clock.device)
    target = torch.empty_like(source)
    taken = clock.times(Call(lambda: target.copy_(source)), 11, False)[1:]
    return 2 * COPY_BYTES / (1e-3 * statistics.median(taken))
