"""Times calls on a CUDA device: interleaved rounds, cold L2, events; and the statistics, which need no device."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

COLD_BELOW_MS = 2.0  # a longer call reads its inputs many times over: what L2 held before does not show
FLUSH_L2 = 3  # sizes of L2 that are read before a cold call
BUDGET_MS = 60.0  # per implementation and round
CALLS = (3, 50)  # at least and at most, per implementation and round
PROBES, WARM_CALLS = 5, 3
COPY_BYTES = 2**31

Rounds: TypeAlias = list[list[float]]  # milliseconds: of each call, by round


@dataclass(frozen=True)
class Call:
    """A call to time: `run` enqueues it, inside of `scope`, which is entered once for many runs.

    `restore` gives the output its shape (B, Hq, Sq, D); it is not timed.
    """

    run: Callable[[], Tensor]
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    restore: Callable[[Tensor], Tensor] = torch.Tensor.detach

    def output(self) -> Tensor:
        """Run once, and restore."""
        with self.scope():
            return self.restore(self.run())


class CudaClock:
    """Measures calls on the current CUDA device.

    A cold call follows a read of three times the L2 cache. Read, not written: modified lines would go back to memory
    inside of the timed region, which is most of the time of a short decoding step.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise NotImplementedError(f"timing needs a CUDA device, and torch {torch.__version__} finds none")
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.l2_bytes = int(torch.cuda.get_device_properties(self.device).L2_cache_size)
        self._flushed = torch.ones(FLUSH_L2 * self.l2_bytes // 4, device=self.device)

    def times(self, call: Call, count: int, cold: bool) -> list[float]:
        """Return the milliseconds of each call, by CUDA events; nothing waits in between: the device stays busy."""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        with call.scope():
            for start, stop in events:
                if cold:
                    self._flushed.sum()
                start.record()
                call.run()
                stop.record()
            torch.cuda.synchronize()
        return [start.elapsed_time(stop) for start, stop in events]

    def host_us(self, call: Call) -> float:
        """Return the microseconds that the host takes to enqueue a call: median of ten, the device idle before each."""
        taken = []
        with call.scope():
            for _ in range(10):
                torch.cuda.synchronize()
                start = time.perf_counter()
                call.run()
                taken.append(1e6 * (time.perf_counter() - start))
            torch.cuda.synchronize()
        return statistics.median(taken)

    def workspace(self, call: Call) -> int:
        """Return the peak bytes beside the output; a log-sum-exp that is not returned counts, as for every peer."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with call.scope():
            out = call.run()
            torch.cuda.synchronize()
        held = torch.cuda.max_memory_allocated() - before
        return max(0, held - out.numel() * out.element_size())

    def graph(self, call: Call) -> Call:
        """Return the call in a CUDA graph, captured after warming up on another stream, as capture requires."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with call.scope():
            with torch.cuda.stream(stream):
                for _ in range(WARM_CALLS):
                    call.run()
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                out = call.run()

        def replay() -> Tensor:
            graph.replay()
            return out

        return Call(replay, restore=call.restore)


Clock: TypeAlias = CudaClock  # what a benchmark takes; tests pass one that needs no device


def interleave(
    clock: Clock, calls: Mapping[str, Call], rounds: int, cold: bool | None = None
) -> tuple[dict[str, Rounds], bool]:
    """Time calls in rounds, each call's turn once per round and the order rotated, so that drift hits all alike.

    Return the milliseconds by name, without the first call of every turn, and whether calls were cold. If `cold` is
    not set, they are if the fastest takes less than `COLD_BELOW_MS`: the same for all.
    """
    probes = {name: statistics.median(clock.times(call, PROBES, False)[1:]) for name, call in calls.items()}
    if cold is None:
        cold = min(probes.values(), default=COLD_BELOW_MS) < COLD_BELOW_MS
    counts = {name: max(CALLS[0], min(CALLS[1], int(BUDGET_MS / max(taken, 1e-6)))) for name, taken in probes.items()}
    times: dict[str, Rounds] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(rounds):
        first = turn % max(len(names), 1)
        for name in names[first:] + names[:first]:
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


def ratio(own: Rounds, other: Rounds) -> float:
    """Return how many times as fast as the other: median over the rounds of median(other) / median(own)."""
    median = statistics.median
    return median(median(theirs) / median(ours) for ours, theirs in zip(own, other, strict=True))


def now(device: torch.device) -> float:
    """Return seconds of wall time, after the device has done all that was enqueued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def added_cost(plain: Call, extended: Call, turns: int, calls: int, device: torch.device) -> dict[str, float]:
    """Compare the wall time of a call, host and device together, with that of the same call and an addition.

    Both have their turn of so many calls in alternating order; the first turn is not counted, and scopes are not timed.
    Return medians, and median and quantiles of the turns' ratios in percent.
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
