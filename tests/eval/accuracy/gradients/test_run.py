"""Inputs, errors, the gate, times, and what is shown; kernels are interpreted and the clock needs no device."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from pasa.eval.accuracy.gradients import run
from pasa.eval.accuracy.gradients.cases import GradientCase, make_inputs
from pasa.eval.accuracy.gradients.truth import exact_gradients
from pasa.eval.kit.timing import Call
from pasa.eval.speed.cases import SpeedCase
from tests.eval.speed.fakes import FakeClock, Timed

CPU = torch.device("cpu")
SMALL = (
    GradientCase("small", (4, 2), (20, 33), 16, causal=True, lse=True),
    GradientCase("scores of 131072", (2, 1), (20, 33), 64, change="shared"),
    GradientCase("one key without the bias", (2, 1), (20, 33), 64, change="sink", kernels_judged=False),
)
TINY = SpeedCase("tiny", 1, 2, 1, 40, 40, 16, causal=True)


def test_scores_share_131072():
    """All of them, but for the first key in the case that says so, which is the only one that is not judged."""
    cases = {case.name: case for case in run.CASES}
    assert [name for name, case in cases.items() if not case.kernels_judged] == ["one key without the bias"]
    for name, kept in (("scores of 131072", 0), ("one key without the bias", 1)):
        inputs = make_inputs(cases[name], 0)
        scores = inputs.q.float() @ inputs.k.float().repeat_interleave(2, 1).mT / 8
        assert scores[..., kept:].min() > 131_000
        assert bool((scores[..., 0] < 1000).all()) == bool(kept)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_both_backends_hold_the_bound_where_they_are_judged(case):
    records = run.judge_case(case, ["triton", "reference"], 0, CPU)
    assert [each["judged"] for each in records] == [case.kernels_judged, True]
    assert run.judge(records)["passed"]
    assert run.judge(records)["judged"] == 3 + 3 * case.kernels_judged


def test_errors_are_relative_and_name_what_is_not_finite():
    exact = exact_gradients(make_inputs(SMALL[0], 0))
    off = (exact[0] * 1.25, exact[1], exact[2].clone())
    off[2][0, 0, 0, 0] = torch.inf
    errors = run.errors(off, exact)
    assert (errors["dq"], errors["dk"]) == (pytest.approx(0.25), 0)
    assert math.isnan(errors["dv"])


def record(case="c", judged=True, error=1e-4):
    errors = {name: 1e-4 for of in run.NAMES for name in (of, f"plain_{of}")}
    return {"case": case, "backend": "triton", "judged": judged} | errors | {"dk": error}


@pytest.mark.parametrize(("error", "passes"), [(2e-4, True), (2.1e-4, False), (math.nan, False)])
def test_the_gate_is_twice_the_plain_pass(error, passes):
    gate = run.judge([record(error=error)])
    assert gate == {"passed": passes, "judged": 3, "failures": [] if passes else ["dK of triton: c"]}
    assert run.judge([record(error=error, judged=False)])["passed"]


def test_tables_say_what_is_not_judged_and_what_is_slower():
    same = {"shape": "1x2x40x16", "part": "forward", "how": "graph", "tflops": 100.0}
    kernel = {"shape": "1x2x40x16", "launches": 1.0}
    result = {
        "records": [record(), record("sink", judged=False, error=5e-4), record("broken", error=None)],
        "times": [
            same | {"implementation": "pasa", "median_ms": 3.0, "to_flash": 0.5},
            same | {"implementation": "sdpa-flash", "median_ms": 1.5, "to_flash": 1.0},
        ],
        "kernels": [kernel | {"kernel": "rows_kernel", "ms": 0.3}, kernel | {"kernel": "centre_kernel", "ms": 0.1}],
    }
    assert [row[-1] for row in run.error_table(result).rows] == ["1.00", "5.00, not judged", "not finite"]
    assert run.time_table(result).rows == [["1x2x40x16, graph", "forward", "1.5", "3", "100", "0.50", "-", "-"]]
    assert [row[2:] for row in run.kernel_table(result).rows] == [["1", "0.3000", "75 %"], ["1", "0.1000", "25 %"]]


def test_without_a_gpu_errors_alone_are_shown(monkeypatch):
    monkeypatch.setattr(run, "CASES", SMALL)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run.run_gradients()
    assert result["gate"] == {"passed": True, "judged": 9, "failures": []}
    assert result["times"] == result["kernels"] == []
    passed = "All 9 judged errors (reference) are within 2 times a plain backward pass's."
    assert run.summary(result).startswith(f"{passed} Errors with scores of 131072: reference dQ ")
    page = run.EXPERIMENT.markdown(result)
    assert "| small | reference |" in page
    assert "Forward and backward" not in page


def test_work_of_the_parts():
    """A causal call counts half of 40 x 40 pairs; a pair costs 2 D operations a product, 2 forward and 5 backward."""
    pairs = 2 * 40 * 40 / 2
    assert run.PARTS["forward"] * TINY.flops == 2 * pairs * 2 * 16
    assert run.PARTS["forward + backward"] * TINY.flops == 7 * pairs * 2 * 16


@pytest.mark.parametrize("part", run.PARTS)
def test_ours_and_torchs_agree(part):
    """Torch's attention is computed by whatever serves a CPU."""
    outputs = {name: call.run() for name, call in run.calls(TINY, CPU)[part].items()}
    ours, flash = outputs["pasa"].double(), outputs["sdpa-flash"].double()
    assert ours.shape == (1, 2, 40, 16)
    assert not ours.requires_grad
    assert (ours - flash).norm() <= 2.0**-9 * flash.norm()


def test_every_shape_is_timed_in_every_way(monkeypatch):
    """The fake graph halves every time."""
    make = functools.partial(torch.zeros, 1)
    both = {"pasa": Call(Timed(make, 3.0)), "sdpa-flash": Call(Timed(make, 1.5))}
    monkeypatch.setattr(run, "calls", lambda shape, device: dict.fromkeys(run.PARTS, both))
    monkeypatch.setattr(run, "kernel_times", lambda call: [{"kernel": "rows_kernel", "ms": 1.0, "launches": 1.0}])
    progress = []
    result = run.measure(FakeClock(), 2, lambda *each: progress.append(each))
    assert progress == [(index, shape.name) for index, shape in enumerate(run.SHAPES)]
    assert len(result["times"]) == len(run.SHAPES) * 2 * 2 * 2
    assert [each["shape"] for each in result["kernels"]] == [shape.name for shape in run.SHAPES]
    shape = run.SHAPES[1]
    for each in (each for each in result["times"] if each["shape"] == shape.name):
        ours, graphed = each["implementation"] == "pasa", each["how"] == "graph"
        assert each["median_ms"] == (3.0 if ours else 1.5) / (1 + graphed)
        assert each["to_flash"] == (0.5 if ours else 1.0)
        assert each["tflops"] == pytest.approx(run.PARTS[each["part"]] * shape.flops / each["median_ms"] / 1e9)
        assert ("host_us" in each) == (not graphed)
