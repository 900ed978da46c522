"""A few cases through the reference and, in the interpreter where there is no GPU, through the kernels."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from pasa.eval.kit import output
from pasa.eval.random_calls.soak import report, run, sanitize
from pasa.eval.random_calls.soak.cases import draw_case, make_inputs
from pasa.eval.random_calls.soak.judge import WHAT
from pasa.eval.random_calls.soak.run import run_soak
from pasa.eval.random_calls.soak.surroundings import poison

CASES = 20
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which interprets: infinity is meant


@pytest.fixture(scope="module")
def kernels():
    return run_soak(CASES, seed=0, backend="triton", small=True)


def shown(result):
    text = StringIO()
    report.render(result, Console(file=text, width=200))
    return text.getvalue()


def test_kernels_hold_all_bounds(kernels):
    assert kernels["failures"] == []
    assert kernels["gate"] == {"passed": True, "failed": 0, "run": CASES, "stopped": False}
    assert {"nan", "range", "error", "lse", "repeat", "emulated-max"} <= set(kernels["worst"]) <= set(WHAT)
    assert sum(kernels["counts"]["group"].values()) == CASES


def test_reference_holds_all_bounds():
    result = run_soak(40, seed=1, backend="reference", small=True)
    assert result["failures"] == []
    assert "emulated-max" not in result["worst"]


def test_result_is_stored_and_shown(kernels, tmp_path):
    paths = report.save(kernels, tmp_path)
    assert [path.name for path in paths] == ["soak.json", "soak.md"]
    stored = json.loads(paths[0].read_text())
    assert stored["worst"]["error"]["value"] == pytest.approx(kernels["worst"]["error"]["value"])
    assert {"device", "torch", "triton", "commit"} <= set(stored["environment"])
    assert stored["duration_s"] > 0
    text = shown(kernels)
    assert f"All {CASES} cases hold all bounds." in text
    assert "| range |" in Path(paths[1]).read_text()


def test_one_case_gives_the_numbers_that_it_gave_among_others(kernels):
    index = kernels["worst"]["error"]["index"]
    alone = run_soak(seed=0, backend="triton", only=index, small=True)
    assert alone["case"]["measures"]["error"] == kernels["worst"]["error"]["value"]
    assert f"family {draw_case(0, index).family.name}" in shown(alone)


def test_a_kernel_that_is_wrong_fails_with_its_numbers(monkeypatch):
    """One row of every output is exchanged for the next."""
    right = run.call

    def wrong(case, inputs, backend):
        found = right(case, inputs, backend)
        found.out[:, :, 0] = found.out[:, :, -1].clone() + 0.25
        return found

    monkeypatch.setattr(run, "call", wrong)
    result = run_soak(12, backend="reference", small=True)
    assert not result["gate"]["passed"]
    assert result["gate"]["failed"] == len(result["failures"]) >= 6
    text = shown(result)
    assert "FAIL; repeat one: pasa bench soak --seed 0 --backend reference --small --only INDEX" in text
    assert "error" in text
    assert "family" in text


def test_what_a_kernel_raises_is_a_failure_and_a_broken_device_the_end(monkeypatch):
    def broken(case, inputs, backend):
        raise RuntimeError("out of registers" if case.index < 2 else "CUDA error: an illegal memory access")

    monkeypatch.setattr(run, "call", broken)
    result = run_soak(9, backend="reference", small=True)
    assert result["gate"] == {"passed": False, "failed": 3, "run": 3, "stopped": True}
    assert [record["failed"] for record in result["failures"]] == [["raised"]] * 3
    assert "out of registers" in report.to_markdown(result)
    assert json.loads(output.to_json(result))["failures"][2]["why"].endswith("an illegal memory access")


@pytest.mark.parametrize("spoil", ["out", "lse"])
def test_a_result_that_moves_is_found(monkeypatch, spoil):
    right, calls = run.call, []

    def moving(case, inputs, backend):
        calls.append(case.index)
        found = right(case, inputs, backend)
        getattr(found, spoil).fill_(len(calls))
        return found

    monkeypatch.setattr(run, "call", moving)
    assert "repeat" in run_soak(1, backend="reference", small=True)["failures"][0]["failed"]
    assert calls == [0, 0]


def test_poisoned_memory_is_nan_and_only_within():
    with poison(True):
        assert torch.isnan(torch.empty(1000)).all()
        assert torch.isnan(torch.zeros(3, dtype=torch.float16).new_empty(1000)).all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_cannot_be_run_is_refused_by_name():
    with pytest.raises(ValueError, match="cases=0 must be at least 1"):
        run_soak(0)
    with pytest.raises(ValueError, match="jobs=0 must be at least 1"):
        run_soak(1, jobs=0)
    with pytest.raises(ValueError, match="'abacus' is not one of"):
        run_soak(1, backend="abacus")
    with pytest.raises(NotImplementedError, match="backend npu cannot run here"):
        run_soak(1, backend="npu")


def test_processes_judge_the_same_cases_alike():
    alone, shared = (run_soak(6, backend="reference", small=True, jobs=jobs) for jobs in (1, 2))
    assert shared["gate"] == alone["gate"] == {"passed": True, "failed": 0, "run": 6, "stopped": False}
    assert shared["worst"] == alone["worst"]
    assert shared["counts"] == alone["counts"]


def test_a_device_that_breaks_in_one_process_ends_all(monkeypatch):
    """The pool stands for itself: its families run here, one after the other."""

    class Here(ThreadPoolExecutor):
        def __init__(self, jobs, context):
            super().__init__(1)

    def broken(case, inputs, backend):
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(run, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(run, "call", broken)
    gate = run_soak(9, backend="reference", small=True, jobs=2)["gate"]
    assert gate["stopped"]
    assert gate["failed"] == gate["run"] < 9


def test_a_process_that_dies_is_a_failure_and_what_was_judged_is_kept(monkeypatch):
    """Story: a segmentation fault in one of several processes ended the soak without a word about the others."""
    monkeypatch.setattr(run, "_judge_alone", die)
    result = run_soak(4, backend="reference", small=True, jobs=2)
    assert result["gate"] == {"passed": False, "failed": 1, "run": 1, "stopped": True}
    assert "terminated abruptly" in result["failures"][0]["why"]


def die(drawn, backend):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("accumulate", ["fp32", "fp16"])
def test_exact_outputs_are_held_against_fp32_sums(monkeypatch, accumulate):
    """Story: the kernels sum in FP32 whatever `accumulate` says, and were allowed the errors of FP16 sums."""
    case = next(c for c in map(partial(draw_case, 0, small=True), range(99)) if c.family.recovery == "exact")
    case = replace(case, family=replace(case.family, accumulate=accumulate))
    seen = []
    monkeypatch.setattr(run, "call", lambda case, inputs, backend: seen.append((case.family.accumulate, backend)))
    run.emulate(case, make_inputs(case, torch.device("cpu")))
    assert seen == [("fp32", "reference")]


@pytest.mark.parametrize("name", ["portable-careful", "paper-packed", "decode-lanes", "hopper-shifted", "shift-before"])
def test_calls_for_sanitizers(name):
    assert sanitize.main([name]) == 0


def test_sanitizer_knows_its_calls():
    with pytest.raises(ValueError, match="'sofa' is not one of"):
        sanitize.main(["sofa"])
