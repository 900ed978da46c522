"""Errors, the gate, and what is shown and written."""

from __future__ import annotations

import math

import pytest
import torch

from pasa.eval.accuracy.gradients import run
from pasa.eval.accuracy.gradients.cases import CASES, GradientCase, make_inputs, shared, sink
from pasa.eval.accuracy.gradients.truth import exact_gradients

CPU = torch.device("cpu")
SMALL = (
    GradientCase("small", (4, 2), (20, 33), 16, causal=True, lse=True),
    GradientCase("scores of 131072", (2, 1), (20, 33), 64, change=shared),
    GradientCase("one key without the bias", (2, 1), (20, 33), 64, change=sink, kernels_judged=False),
)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_both_backends_hold_the_bound_where_they_are_judged(case):
    """The kernels in Triton's interpreter."""
    records = run.judge_case(case, ["triton", "reference"], 0, CPU)
    assert [each["judged"] for each in records] == [case.kernels_judged, True]
    assert run.judge(records)["passed"]
    assert run.judge(records)["judged"] == 3 + 3 * case.kernels_judged


def test_errors_are_relative_and_name_what_is_not_finite():
    exact = exact_gradients(make_inputs(SMALL[0], 0))
    off = (exact[0] * 1.25, exact[1], exact[2].clone())
    off[2][0, 0, 0, 0] = torch.inf
    found = run.errors(off, exact)
    assert found["dq"] == pytest.approx(0.25)
    assert found["dk"] == 0
    assert math.isnan(found["dv"])


@pytest.mark.parametrize(("error", "passes"), [(2e-4, True), (2.1e-4, False), (math.nan, False)])
def test_the_gate_is_twice_the_plain_pass(error, passes):
    record = {"case": "c", "backend": "triton", "judged": True}
    record |= {name: 1e-4 for of in run.NAMES for name in (of, f"plain_{of}")} | {"dk": error}
    gate = run.judge([record])
    assert gate == {"passed": passes, "judged": 3, "failures": [] if passes else ["dK of triton: c"]}
    assert run.judge([record | {"judged": False}])["passed"]


def record(case="c", judged=True, error=1e-4):
    errors = {name: 1e-4 for of in run.NAMES for name in (of, f"plain_{of}")}
    return {"case": case, "backend": "triton", "judged": judged} | errors | {"dk": error}


def test_tables_say_what_is_not_judged_and_what_is_slower():
    own = {"shape": "1x2x40x16", "part": "forward", "how": "graph", "tflops": 100.0}
    result = {
        "records": [record(), record("sink", judged=False, error=5e-4), record("broken", error=None)],
        "times": [
            own | {"implementation": "pasa", "median_ms": 3.0, "to_flash": 0.5},
            own | {"implementation": "sdpa-flash", "median_ms": 1.5, "to_flash": 1.0},
        ],
        "kernels": [
            {"shape": "1x2x40x16", "kernel": "rows_kernel", "ms": 0.3, "launches": 1.0},
            {"shape": "1x2x40x16", "kernel": "centre_kernel", "ms": 0.1, "launches": 1.0},
        ],
    }
    errors, times, kernels = run.tables(result)
    assert [row[-1] for row in errors.rows] == ["1.00", "5.00, not judged", "not finite"]
    assert times.rows == [["1x2x40x16, graph", "forward", "1.5", "3", "100", "0.50", "-", "-"]]
    assert [row[2:] for row in kernels.rows] == [["1", "0.3000", "75 %"], ["1", "0.1000", "25 %"]]
    gate = run.judge([record(error=3e-4)])
    said = run.verdict({"gate": gate, "backends": ["triton"]})
    assert said == "1 of 3 errors are too large; nothing is timed:\n  dK of triton: c"


def test_without_a_gpu_errors_alone_are_shown(monkeypatch):
    """Three small cases on the CPU show errors and no times."""
    monkeypatch.setattr(run, "CASES", SMALL)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run.run_gradients()
    assert result["gate"] == {"passed": True, "judged": 9, "failures": []}
    assert result["times"] == result["kernels"] == []
    said = "All 9 judged errors (reference) are within 2 times a plain backward pass's."
    assert run.summary(result).startswith(f"{said} With scores of 131072: reference dQ ")
    assert "| small | reference |" in run.EXPERIMENT.markdown(result)


def test_one_case_alone_is_not_judged():
    """The README's sentence on kernels covers every case; whoever adds one extends it."""
    assert [case.name for case in CASES if not case.kernels_judged] == ["one key without the bias"]
