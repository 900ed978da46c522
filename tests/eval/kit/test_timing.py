"""Rounds and statistics, with a clock that needs no device."""

import statistics
import time
from contextlib import contextmanager, nullcontext
from itertools import pairwise, permutations

import pytest
import torch

from pasa.eval.kit import timing
from pasa.eval.kit.timing import CALLS, COLD_BELOW_MS, Call, DeviceClock, interleave, quantile, ratio, summary
from tests.eval.speed.fakes import FakeClock, Timed


def calls(**milliseconds: float) -> dict[str, Call]:
    return {name: Call(Timed(lambda: torch.zeros(1), ms)) for name, ms in milliseconds.items()}


def test_every_implementation_has_one_turn_per_round_behind_each_other_one() -> None:
    """Story: in rotated order the same kernel took 9 % longer behind a kernel that heats the GPU, in each round."""
    clock, own = FakeClock(), calls(a=1.0, b=2.0, c=3.0)
    times, cold = interleave(clock, own, rounds=9)
    names = {call.run: name for name, call in own.items()}
    turns = [names[run] for run, _, _ in clock.log[len(own) :]]  # the first three are probes
    assert all(sorted(turns[start : start + 3]) == [*"abc"] for start in range(0, 27, 3))
    assert {*pairwise(turns)} >= {*permutations("abc", 2)}
    assert cold
    assert all(len(rounds) == 9 for rounds in times.values())


def test_calls_follow_the_budget_within_limits_and_the_first_of_a_turn_is_left_out() -> None:
    times, _ = interleave(FakeClock(), calls(short=0.01, middle=6.0, long=500.0), rounds=1)
    assert [len(times[name][0]) for name in times] == [CALLS[1], 10, CALLS[0]]
    assert set(times["middle"][0]) == {6.0}


@pytest.mark.parametrize(("fastest", "cold"), [(COLD_BELOW_MS / 2, True), (COLD_BELOW_MS * 2, False)])
def test_cold_or_warm_is_decided_for_all_alike(fastest: float, cold: bool) -> None:
    clock = FakeClock()
    _, decided = interleave(clock, calls(fast=fastest, slow=50.0), rounds=2)
    assert decided == cold
    assert {used for _, _, used in clock.log[2:]} == {cold}
    _, forced = interleave(clock, calls(fast=fastest), rounds=1, cold=not cold)
    assert forced != cold


def test_ratio_is_the_median_round() -> None:
    """A card that slows down by half in every round still gives the same ratio, which is why there are rounds."""
    own = [[1.0 * 2**turn] * 3 for turn in range(5)]
    other = [[1.5 * 2**turn] * 3 for turn in range(5)]
    assert ratio(own, other) == 1.5
    assert ratio([[1.0], [1.0], [1.0]], [[2.0], [2.2], [50.0]]) == 2.2
    with pytest.raises(ValueError, match="shorter"):
        ratio(own, other[:2])


def test_summary_and_quantiles() -> None:
    """A summary is over the calls of all rounds; quantiles agree with the library's."""
    expected = {"median_ms": 3.0, "p20_ms": pytest.approx(1.8), "p80_ms": pytest.approx(4.2), "calls": 5}
    assert summary([[5.0, 1.0], [3.0, 2.0, 4.0]]) == expected
    values = sorted(float(x) for x in torch.randn(37, generator=torch.Generator().manual_seed(0)))
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    assert [quantile(values, share / 10) for share in range(1, 10)] == pytest.approx(deciles)
    assert quantile([7.0], 0.8) == 7.0


def test_scope_is_entered_for_output_and_shape_restored() -> None:
    log = []

    @contextmanager
    def scope():
        log.append("in")
        yield
        log.append("out")

    call = Call(lambda: log.append("run") or torch.zeros(2, 3), scope, lambda out: out.reshape(6))
    assert call.output().shape == (6,)
    assert log == ["in", "run", "out"]


def test_cost_is_the_median_of_the_ratios_of_turns(monkeypatch):
    """Each call takes what the clock is moved by; the first turn is not counted, and scopes are not timed."""
    clock = [0.0]

    def call(milliseconds, scope=0.0):
        left = iter(milliseconds)

        def advance(seconds):
            clock[0] += seconds
            return torch.zeros(1)

        @contextmanager
        def slow():
            yield advance(scope)
            advance(scope)

        return Call(lambda: advance(next(left) / 1e3), slow)

    monkeypatch.setattr(timing, "now", lambda device: clock[0])
    plain, extended = call([50, 10, 20, 40]), call([99, 11, 21, 44], scope=9.0)
    cost = timing.added_cost(plain, extended, 3, 1, torch.device("cpu"))
    expected = {"plain_ms": 20, "extended_ms": 21, "cost_percent": 10, "p20_percent": 7, "p80_percent": 10}
    assert cost == pytest.approx(expected)


@pytest.mark.parametrize(("device", "arguments"), [("xpu:1", [torch.device("xpu:1")]), ("mps:0", [])])
def test_the_time_waits_for_any_accelerator(monkeypatch, device, arguments):
    waited = []
    monkeypatch.setattr(getattr(torch, device.partition(":")[0]), "synchronize", lambda *given: waited.extend(given))
    timing.now(torch.device(device))
    assert waited == arguments


class FakeModule:
    """Stand in for torch.npu, on a device whose work is done at once."""

    NPUGraph = type("NPUGraph", (), {"replay": lambda self: self.run()})

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = time.perf_counter()

        def elapsed_time(self, other):
            return 1e3 * (other.at - self.at)

    class Stream:
        def wait_stream(self, other):
            assert isinstance(other, FakeModule.Stream)

    def __init__(self):
        self.captured, self.held = [], 0

    def current_stream(self):
        return self.Stream()

    def stream(self, stream):
        return nullcontext()

    def graph(self, graph):
        self.captured.append(graph)
        return nullcontext()

    def synchronize(self):
        pass

    def memory_allocated(self):
        return 1000

    def reset_peak_memory_stats(self):
        self.held = 0

    def max_memory_allocated(self):
        return 1000 + 5000


def test_a_clock_of_any_device_takes_the_module_of_its_type(monkeypatch):
    """The module may be torch.npu, whose graphs have another name than CUDA's."""
    module = FakeModule()
    clock = DeviceClock(torch.device("cpu"), l2_bytes=1024)
    assert clock._flushed.nbytes == 3 * 1024
    clock._torch, clock._graph = module, module.NPUGraph
    call = Call(lambda: torch.ones(250))
    assert len(clock.times(call, 4, cold=True)) == 4
    assert all(ms >= 0 for ms in clock.times(call, 4, cold=False))
    assert clock.workspace(call) == 5000 - 1000
    assert clock.host_us(call) > 0
    clock.graph(call)
    assert [type(each).__name__ for each in module.captured] == ["NPUGraph"]
