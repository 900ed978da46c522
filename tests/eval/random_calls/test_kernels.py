"""A few cases of the kernels through the reference and, in the interpreter where there is no GPU, through Triton."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from io import StringIO

import pytest
import torch
from rich.console import Console

from pasa.eval.kit import output
from pasa.eval.random_calls import kernels, run, sanitize
from pasa.eval.random_calls.backends import poison
from pasa.eval.random_calls.cases import draw_case
from pasa.eval.random_calls.inputs import make
from pasa.eval.random_calls.judge import WHAT
from pasa.eval.random_calls.run import SOAK, run_soak

CASES = 20
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which interprets: infinity is meant


@pytest.fixture(scope="module")
def interpreted():
    return run_soak(CASES, seed=0, backend="triton", small=True)


def shown(result):
    text = StringIO()
    SOAK.show(result, Console(file=text, width=250))
    return text.getvalue()


def test_kernels_hold_all_bounds(interpreted, tmp_path):
    assert interpreted["failures"] == []
    gate = interpreted["gate"]
    assert gate == {"passed": True, "failed": 0, "run": CASES, "stopped": False, "absent": 0}
    assert {"nan", "range", "error", "lse", "repeat", "emulated-max"} <= set(interpreted["worst"]) <= set(WHAT)
    assert sum(interpreted["counts"]["group"].values()) == CASES
    stored, page, *_ = SOAK.save(interpreted, tmp_path)
    stored = json.loads(stored.read_text())
    assert stored["worst"]["error"]["value"] == pytest.approx(interpreted["worst"]["error"]["value"])
    assert {"device", "torch", "triton", "commit"} <= set(stored["environment"])
    assert stored["duration_s"] > 0
    assert f"All {CASES} cases hold all bounds." in shown(interpreted)
    assert "| range |" in page.read_text()


def test_one_case_gives_the_numbers_that_it_gave_among_others(interpreted):
    worst = interpreted["worst"]["error"]
    index = int(worst["case"].split()[0].partition(":")[2])
    alone = run_soak(seed=0, backend="triton", only=index, small=True)
    assert alone["worst"]["error"]["value"] == worst["value"]
    assert f'"family": "{alone["case"]["params"]["family"]}"' in shown(alone)


def test_a_kernel_that_is_wrong_fails_with_its_numbers(monkeypatch):
    """One row of every output is exchanged for the next."""
    right = kernels.attend

    def wrong(params, call):
        out, lse = right(params, call)
        out[:, :, 0] = out[:, :, -1].clone() + 0.25
        return out, lse

    monkeypatch.setattr(kernels, "attend", wrong)
    result = run_soak(12, backend="reference", small=True)
    assert not result["gate"]["passed"]
    assert result["gate"]["failed"] == len(result["failures"]) >= 6
    text = shown(result)
    assert "FAIL; repeat one: pasa bench soak --seed 0 --backend reference --small --only INDEX" in text
    assert "wrong: range" in text
    assert '"family"' in text


def test_what_a_kernel_raises_is_a_failure_and_a_broken_device_the_end(monkeypatch):
    calls = []

    def raises(params, call):
        calls.append(params)
        raise RuntimeError("out of registers" if len(calls) < 3 else "CUDA error: an illegal memory access")

    monkeypatch.setattr(kernels, "attend", raises)
    result = run_soak(9, backend="reference", small=True)
    assert result["gate"] == {"passed": False, "failed": 3, "run": 3, "stopped": True, "absent": 0}
    assert [record["verdict"] for record in result["failures"]] == ["raised"] * 3
    assert "out of registers" in SOAK.markdown(result)
    assert json.loads(output.to_json(result))["failures"][2]["why"].endswith("an illegal memory access")


@pytest.mark.parametrize("which", [0, 1], ids=["out", "lse"])
def test_a_result_that_moves_is_found(monkeypatch, which):
    right, calls = kernels.attend, []

    def moving(params, call):
        calls.append(params)
        result = right(params, call)
        result[which].fill_(len(calls))
        return result

    monkeypatch.setattr(kernels, "attend", moving)
    assert "repeat" in run_soak(1, backend="reference", small=True)["failures"][0]["why"]
    assert len(calls) == 2


def test_poisoned_memory_is_nan_and_only_within():
    with poison(True):
        assert torch.isnan(torch.empty(1000)).all()
        assert torch.isnan(torch.zeros(3, dtype=torch.float16).new_empty(1000)).all()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"cases": 0}, ValueError, "cases=0 must be at least 1"),
        ({"jobs": 0}, ValueError, "jobs=0 must be at least 1"),
        ({"only": -1}, ValueError, "only=-1 must be at least 0"),
        ({"backend": "abacus"}, ValueError, "'abacus' is not one of"),
        ({"backend": "npu"}, NotImplementedError, "backend npu cannot run here"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(how, error, message):
    with pytest.raises(error, match=message):
        run_soak(**{"cases": 1} | how)


def test_the_reference_holds_all_bounds_in_one_process_and_in_two():
    alone, shared = (run_soak(40, seed=1, backend="reference", small=True, jobs=jobs) for jobs in (1, 2))
    assert alone["failures"] == []
    assert not {"emulated-max", "lse-ordinary"} & set(alone["worst"])
    assert all(alone[name] == shared[name] for name in ("gate", "worst", "counts"))


def test_a_device_that_breaks_in_one_process_ends_all(monkeypatch):
    """The pool stands for itself: its families run here, one after the other."""

    class Here(ThreadPoolExecutor):
        def __init__(self, jobs, context):
            super().__init__(1)

    def raises(params, call):
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(run, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(kernels, "attend", raises)
    gate = run_soak(9, backend="reference", small=True, jobs=2)["gate"]
    assert gate["stopped"]
    assert gate["failed"] == gate["run"] < 9


def test_a_process_that_dies_is_a_failure_and_what_was_judged_is_kept(monkeypatch):
    """Story: a segmentation fault in one of several processes ended the soak without a word about the others."""
    monkeypatch.setattr(run, "judge_alone", die)
    result = run_soak(4, backend="reference", small=True, jobs=2)
    assert result["gate"] == {"passed": False, "failed": 1, "run": 1, "stopped": True, "absent": 0}
    assert "terminated abruptly" in result["failures"][0]["why"]


def die(kinds, drawn):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("accumulate", ["fp32", "fp16"])
def test_exact_outputs_are_held_against_fp32_sums(monkeypatch, accumulate):
    """Story: the kernels sum in FP32 whatever `accumulate` says, and were allowed the errors of FP16 sums."""
    cases = (draw_case(kernels.kinds(0, "triton", small=True), 0, index) for index in range(99))
    params = next(case.params for case in cases if case.params["recovery"] == "exact") | {"accumulate": accumulate}
    seen = []
    monkeypatch.setattr(kernels, "attend", lambda params, call: seen.append((params["accumulate"], params["backend"])))
    kernels.emulate(params, make(params))
    assert seen == [("fp32", "reference")]


@pytest.mark.parametrize("name", ["portable-careful", "paper-packed", "decode-lanes", "hopper-shifted", "shift-before"])
def test_calls_for_sanitizers(name):
    assert sanitize.main([name]) == 0


def test_calls_for_sanitizers_are_known_and_judged(monkeypatch):
    with pytest.raises(ValueError, match="'sofa' is not one of"):
        sanitize.main(["sofa"])
    right = kernels.attend
    monkeypatch.setattr(kernels, "attend", lambda params, call: (right(params, call)[0] + 0.1, right(params, call)[1]))
    assert sanitize.main(["short"]) == 1
