"""Both commands of random calls: short runs of the API and of kernels, planted errors, shrinking, processes."""

import itertools
import json
import os
import signal
import subprocess
import sys

import pytest
import torch

import pasa
from pasa.eval.kit import output
from pasa.eval.kit.stored import stored
from pasa.eval.random_calls import attention, kernels, run
from pasa.eval.random_calls.backends import poison
from pasa.eval.random_calls.cases import Case, run_case, shrink
from pasa.eval.random_calls.inputs import make
from pasa.eval.random_calls.run import API, FUZZ, SOAK, run_soak
from pasa.ops import plans
from pasa.ops.attention.triton import backend as triton_backend
from pasa.ops.attention.triton.hopper.launch import hopper_attention
from pasa.ops.attention.triton.short import launch as short_launch
from tests import sanitize

CASES = 250
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which interprets: infinity is meant


@pytest.fixture(scope="module")
def fuzzed():
    return FUZZ.measure(cases=CASES, seed=1)


@pytest.fixture(scope="module")
def soaked():
    return SOAK.measure(cases=20, backend="triton", small=True)


def test_short_runs_hold_all_bounds(fuzzed, soaked, tmp_path):
    assert sum(sum(counts.values()) for counts in fuzzed["verdicts"].values()) == CASES
    assert {"finite", "range", "heavy", "error", "lse", "naive"} <= set(fuzzed["worst"])
    assert soaked["gate"] == {"passed": True, "failed": 0, "run": 20, "stopped": False, "absent": 0}
    assert {"nan", "range", "error", "lse", "repeat", "emulated-max"} <= set(soaked["worst"])
    assert sum(soaked["counts"]["group"].values()) == 20
    for experiment, result in ((FUZZ, fuzzed), (SOAK, soaked)):
        assert result["failures"] == []
        held = f"All {result['cases'] - result['gate']['absent']} cases hold all bounds against FP64"
        assert held in experiment.markdown(result)
        assert "| range |" in experiment.save(result, tmp_path)[1].read_text()


def test_the_stored_runs_are_long_and_hold_all_bounds():
    for name, cases in (("fuzz", 20_000), ("soak", 3000)):
        assert stored(name)["cases"] >= cases
        assert stored(name)["gate"]["passed"]
    fuzz = stored("fuzz")
    assert set(fuzz["verdicts"]) == set(API)
    assert fuzz["seeds"] >= 12
    assert all(fuzz["backends"][backend]["correct"] >= 30 for backend in ("reference", "sdpa", "triton", "npu"))


def test_one_case_gives_the_numbers_that_it_gave_among_others(fuzzed, soaked):
    for experiment, result, how in ((FUZZ, fuzzed, {}), (SOAK, soaked, {"backend": "triton", "small": True})):
        worst = result["worst"]["error"]
        seed, index = map(int, worst["case"].split()[0].split(":"))
        alone = experiment.measure(seed=seed, only=index, **how)
        assert alone["cases"] == 1
        assert alone["worst"]["error"]["value"] == worst["value"]
        assert json.dumps(alone["case"]["params"]) in experiment.markdown(alone)


def test_seeds_share_the_cases_and_each_case_keeps_its_name():
    drawn = run.draw_cases(API, 8, 3, None, seeds=3)
    assert [case.name for case in drawn] == ["3:0", "4:0", "5:0", "3:1", "4:1", "5:1", "3:2", "4:2"]
    assert drawn[4] == run.draw_cases(API, 1, 4, 1)[0]
    failed = {"experiment": "fuzz", "seed": 3, "seeds": 3, "cases": 8, "duration_s": 1.0}
    gate = {"passed": False, "failed": 1, "run": 8, "stopped": False, "absent": 0}
    assert run.verdict(failed | {"gate": gate}).endswith("repeat one: pasa eval fuzz --seed SEED --only INDEX")
    assert "--cases 8 --seed 3 --seeds 3" in run.verdict(failed | {"gate": gate | {"passed": True}})


def test_a_sink_of_a_packed_call_runs_in_triton_s_own_interpreter():
    """Story: Triton's interpreter cannot combine scalar conditions by &, and that of these tests, made faster, can."""
    command = [sys.executable, "-m", "pasa.eval.cli", "eval", "fuzz", "--seed", "7", "--only", "409"]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"TRITON_INTERPRET": "1"})


def test_the_note_names_what_ran_and_how_to_get_what_did_not(fuzzed, monkeypatch):
    """Story: the note said "Triton interpreted, Ascend C on its CPU twin" of every run, whatever was there."""
    assert ("Triton interpreted" in fuzzed["note"]) == (fuzzed["backends"]["triton"]["absent"] == 0)
    monkeypatch.setattr(run, "absent", lambda name: "no" if name == "triton" else None)
    note = run.describe_backends({"reference", "npu"})
    assert note.startswith("random calls on a CPU: Ascend C on its CPU twin; nothing was run on a GPU or an NPU")
    assert note.endswith("absent: triton (set TRITON_INTERPRET=1)")


PACKED = {"row_lengths": [4, 5], "key_lengths": [17, 23], "strides": "reversed", "wide": True, "spaced": True}


def simple(kind="attention", **changes):
    """Return a valid call."""
    how = {"lse": True, "data_seed": 5, "twice": False, "rows": 9, "keys": 40, "dim": 16, "heads": 2}
    return Case(0, 0, kind, attention.SIMPLEST | how | changes)


def test_a_failing_case_is_shrunk(monkeypatch):
    right = pasa.attention

    def wrong(**arguments):
        out, lse = right(**arguments)
        return out + 100 * (arguments["k"].shape[2] > 1), lse

    monkeypatch.setattr(pasa, "attention", wrong)
    assert "range" in run_case(API, simple()).why
    smaller = shrink(API, simple()).params
    assert (smaller["keys"], smaller["rows"], smaller["heads"], smaller["dim"]) == (2, 1, 1, 1)


@pytest.mark.parametrize(
    ("kind", "how", "change", "measure"),
    [
        ("attention", {}, lambda out, lse: (out.float(), lse), "shape"),
        ("attention", {}, lambda out, lse: (out, lse[..., :-1]), "shape"),
        ("attention_varlen", PACKED, lambda out, lse: (out[:, :-1], lse), "shape"),
        ("attention", {"operator": True}, lambda out, lse: (out * 1.001, lse), "same"),
        ("attention_varlen", PACKED | {"operator": True}, lambda out, lse: (out * 1.001, lse), "same"),
    ],
)
def test_other_shapes_and_operators_that_differ_are_found(kind, how, change, measure, monkeypatch):
    right, case = getattr(pasa, kind), simple(kind, **how)
    assert run_case(API, case).verdict == "correct"
    monkeypatch.setattr(pasa, kind, lambda **arguments: change(*right(**arguments)))
    assert measure in run_case(API, case).why


def test_an_absent_backend_is_counted_not_judged(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_case(API, simple(backend="triton")).verdict == "absent"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda turn, out, lse: out[:, :, 0].copy_(out[:, :, -1] + 0.25), "range"),  # a row is exchanged for another
        (lambda turn, out, lse: out.fill_(turn), "repeat"),
        (lambda turn, out, lse: lse.fill_(turn), "repeat"),
    ],
)
def test_a_kernel_that_is_wrong_fails_with_its_numbers(change, why, monkeypatch):
    right, turns = kernels.attend, itertools.count()

    def wrong(params, call):
        result = right(params, call)
        change(next(turns), *result)
        return result

    monkeypatch.setattr(kernels, "attend", wrong)
    result = SOAK.measure(cases=12, backend="reference", small=True)
    assert result["gate"]["failed"] == len(result["failures"]) >= 6
    assert why in result["failures"][0]["why"]
    text = SOAK.markdown(result)
    assert "FAIL; repeat one: pasa bench soak --backend reference --small --seed 0 --only INDEX" in text
    assert '"family"' in text


def test_what_a_kernel_raises_is_a_failure_and_a_broken_device_the_end(monkeypatch):
    calls = []

    def raises(params, call):
        calls.append(params)
        raise RuntimeError("out of registers" if len(calls) < 3 else "CUDA error: an illegal memory access")

    monkeypatch.setattr(kernels, "attend", raises)
    result = SOAK.measure(cases=9, backend="reference", small=True)
    assert result["gate"] == {"passed": False, "failed": 3, "run": 3, "stopped": True, "absent": 0}
    assert [each["verdict"] for each in result["failures"]] == ["raised"] * 3
    assert json.loads(output.to_json(result))["failures"][2]["why"].endswith("an illegal memory access")


def test_poisoned_memory_is_nan_and_only_within():
    with poison(True):
        assert torch.isnan(torch.empty(1000)).all()
        assert torch.isnan(torch.zeros(3, dtype=torch.float16).new_empty(1000)).all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_reference_holds_all_bounds_in_one_process_and_in_two():
    alone, shared = (run_soak(40, seed=1, backend="reference", small=True, jobs=jobs) for jobs in (1, 2))
    assert alone["failures"] == []
    assert not {"emulated-max", "lse-ordinary"} & set(alone["worst"])
    assert all(alone[name] == shared[name] for name in ("gate", "worst", "counts"))


def test_a_process_that_dies_is_a_failure_and_what_was_judged_is_kept(monkeypatch):
    """Story: a segmentation fault in one of several processes ended the soak without a word about the others."""
    monkeypatch.setattr(run, "judge_alone", die)
    result = run_soak(4, backend="reference", small=True, jobs=2)
    assert result["gate"] == {"passed": False, "failed": 1, "run": 1, "stopped": True, "absent": 0}
    assert "terminated abruptly" in result["failures"][0]["why"]


def die(kinds, drawn):
    os.kill(os.getpid(), signal.SIGKILL)


def test_exact_outputs_are_held_against_fp32_sums(monkeypatch):
    """Story: the kernels sum in FP32 whatever `accumulate` says, and were allowed the errors of FP16 sums."""
    params = simple(backend="triton", accumulate="fp16").params
    seen = []
    monkeypatch.setattr(kernels, "attend", lambda params, call: seen.append((params["accumulate"], params["backend"])))
    kernels.emulate(params, make(params))
    assert seen == [("fp32", "reference")]


@pytest.mark.parametrize(
    "name",
    ["portable-careful", "paper-packed", "decode-lanes", "hopper-shifted", "shift-before", "guard-bool-anchored"],
)
def test_calls_for_sanitizers(name):
    assert sanitize.main([name]) == 0


@pytest.mark.parametrize("name", [each for each in sanitize.CALLS if not each.startswith("paper")])
def test_a_call_for_sanitizers_goes_to_the_kernel_of_its_name(name, monkeypatch):
    """Story: calls for the portable kernels had so few keys that all of them went to the kernel of few keys."""
    family = triton_backend._family

    def note(call):
        raise RuntimeError(f"served by {family(call).__name__}")

    monkeypatch.setattr(plans, "_plans", {})  # a plan would repeat the launches alone
    monkeypatch.setattr(short_launch, "processors", lambda _: 132)
    monkeypatch.setattr(triton_backend, "_is_hopper", lambda _: True)
    monkeypatch.setattr(triton_backend, "_hopper", lambda: hopper_attention)
    monkeypatch.setattr(triton_backend, "_family", note)
    with pytest.raises(RuntimeError, match=f"served by {name.partition('-')[0]}"):
        sanitize.run(name, torch.device("cpu"))


def test_calls_for_sanitizers_are_judged(monkeypatch):
    right = kernels.attend
    monkeypatch.setattr(kernels, "attend", lambda params, call: (right(params, call)[0] + 0.1, right(params, call)[1]))
    assert sanitize.main(["short"]) == 1
