"""The timed calls give the gradients, and every time has its place; the clock needs no device."""

import functools

import pytest
import torch
from torch import Tensor

from pasa.eval.accuracy.gradients import times
from pasa.eval.kit.timing import Call
from pasa.eval.speed.cases import SpeedCase
from tests.eval.speed.fakes import FakeClock, Timed

TINY = SpeedCase("tiny", 1, 2, 1, 40, 40, 16, causal=True)


def test_work_of_the_parts():
    """A causal call counts half of 40 x 40 pairs; a pair costs 2 D operations a product, 2 forward and 5 backward."""
    pairs = 2 * 40 * 40 / 2
    assert times.PARTS["forward"] * TINY.flops == 2 * pairs * 2 * 16
    assert times.PARTS["forward + backward"] * TINY.flops == 7 * pairs * 2 * 16


@pytest.mark.parametrize("part", times.PARTS)
def test_ours_and_torchs_agree(part):
    """Kernels interpreted; torch's attention by whatever serves a CPU."""
    found = {name: call.run() for name, call in times.calls(TINY, torch.device("cpu"))[part].items()}
    ours, flash = found["pasa"].double(), found["sdpa-flash"].double()
    assert ours.shape == (1, 2, 40, 16)
    assert not ours.requires_grad
    assert (ours - flash).norm() <= 2.0**-9 * flash.norm()


def fake_calls(shape: SpeedCase, device: torch.device) -> dict[str, dict[str, Call]]:
    make: functools.partial[Tensor] = functools.partial(torch.zeros, 1)
    both = {"pasa": Call(Timed(make, 3.0)), "sdpa-flash": Call(Timed(make, 1.5))}
    return {part: dict(both) for part in times.PARTS}


def test_every_shape_is_timed_in_every_way(monkeypatch):
    """The fake graph halves every time."""
    monkeypatch.setattr(times, "calls", fake_calls)
    said = []
    profile = lambda call: [{"kernel": "rows_kernel", "ms": 1.0, "launches": 1.0}]  # noqa: E731
    found = times.measure(FakeClock(), 2, profile, lambda *each: said.append(each))
    assert said == [(index, shape.name) for index, shape in enumerate(times.SHAPES)]
    assert len(found["times"]) == len(times.SHAPES) * 2 * 2 * 2
    assert [each["shape"] for each in found["kernels"]] == [shape.name for shape in times.SHAPES]
    shape = times.SHAPES[1]
    for each in (each for each in found["times"] if each["shape"] == shape.name):
        ours, graphed = each["implementation"] == "pasa", each["how"] == "graph"
        assert each["median_ms"] == (3.0 if ours else 1.5) / (1 + graphed)
        assert each["to_flash"] == (0.5 if ours else 1.0)
        assert each["tflops"] == pytest.approx(times.PARTS[each["part"]] * shape.flops / each["median_ms"] / 1e9)
        assert ("host_us" in each) == (not graphed)
