"""Errors, the gate, and what is shown and written."""

from __future__ import annotations

import io
import json
import math

import pytest
import torch
from rich.console import Console

from pasa.eval import cli
from pasa.eval.accuracy.gradients import report, run
from pasa.eval.accuracy.gradients.cases import CASES, GradientCase, make_inputs, shared, sink
from pasa.eval.accuracy.gradients.truth import exact_gradients

CPU = torch.device("cpu")
SMALL = (
    GradientCase("small", (4, 2), (20, 33), 16, causal=True, lse=True),
    GradientCase("scores of 131072", (2, 1), (20, 33), 64, change=shared),
    GradientCase("one key without the bias", (2, 1), (20, 33), 64, change=sink, kernels_judged=False),
)


@pytest.fixture
def small(monkeypatch):
    """Three small cases, on the CPU."""
    monkeypatch.setattr(run, "CASES", SMALL)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


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
    assert gate["passed"] == passes
    assert gate["failures"] == ([] if passes else [{"case": "c", "backend": "triton", "of": "dk"}])
    assert run.judge([record | {"judged": False}])["passed"]


def test_what_is_shown_and_written(small, tmp_path):
    said = []
    result = run.run_gradients(progress=lambda *each: said.append(each))
    assert said == [(index, 3, case.name) for index, case in enumerate(SMALL)]
    assert result["gate"] == {"passed": True, "judged": 9, "failures": []}
    assert result["times"] == result["kernels"] == []
    console = Console(file=io.StringIO(), width=200)
    report.render(result, console)
    for part in ("All 9 judged errors (reference)", "reference", "one key without the bias", "device named here"):
        assert part in console.file.getvalue()
    report.save(result, tmp_path)
    stored = json.loads((tmp_path / "gradients.json").read_text())
    assert report.verdict(stored) == report.verdict(result)
    assert report.summary(stored).startswith(f"{report.verdict(stored)} {report.example(stored)}")
    assert "| small | reference |" in (tmp_path / "gradients.md").read_text()


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
    errors, times, kernels = report.tables(result)
    assert [row[-1] for row in errors.rows] == ["1.00", "5.00, not judged", "not finite"]
    assert times.rows == [["1x2x40x16, graph", "forward", "1.5", "3", "100", "0.50", "-", "-"]]
    assert [row[2:] for row in kernels.rows] == [["1", "0.3000", "75 %"], ["1", "0.1000", "25 %"]]
    result["records"].append(record(report.EXAMPLE, error=3e-4))
    own, plain = (f"dQ 1.0e-04, dK {error}, dV 1.0e-04" for error in ("3.0e-04", "1.0e-04"))
    assert report.example(result) == f"With scores of 131072: triton {own}; plain {plain}."
    gate = run.judge([record(error=3e-4)])
    assert "1 of 3 errors are too large; nothing is timed:\n  dK of triton: c" in report.verdict({"gate": gate})


def test_command_fails_with_the_gate(small, monkeypatch, tmp_path):
    monkeypatch.setattr(run, "FACTOR", 0.0)
    with pytest.raises(SystemExit) as left:
        cli.main(["bench", "gradients", "--json", str(tmp_path / "found.json")])
    assert left.value.code == 1
    assert json.loads((tmp_path / "found.json").read_text())["gate"]["judged"] == 9


@pytest.mark.parametrize(("change", "reason"), [({"seed": -1}, "seed=-1"), ({"rounds": 0}, "rounds=0")])
def test_bad_settings_are_named(change, reason):
    with pytest.raises(ValueError, match=reason):
        run.run_gradients(**change)


def test_one_case_alone_is_not_judged():
    """What the README of the project says of the kernels; whoever adds another has to say it too."""
    assert [case.name for case in CASES if not case.kernels_judged] == ["one key without the bias"]
