"""A short run, replays, verdicts, shrinking; the stored run is longer."""

import json
from io import StringIO
from random import Random

import pytest
import torch
from rich.console import Console

import pasa
from pasa.eval.kit.stored import stored
from pasa.eval.random_calls.fuzz import attention, report, run, truth
from pasa.eval.random_calls.fuzz.cases import COUNTS, Case, draw_case, run_case, shrink
from pasa.eval.random_calls.fuzz.kinds import KINDS

CASES = 250
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which interprets: infinity is meant


@pytest.fixture(scope="module")
def short():
    return run.run_fuzz(CASES, seed=1)


def test_a_short_run_finds_nothing(short):
    assert short["findings"] == []
    assert short["gate"]["passed"]
    assert sum(sum(counts.values()) for counts in short["verdicts"].values()) == CASES
    assert {"finite", "range", "heavy", "error", "lse", "naive"} <= set(short["worst"])
    assert len(short["faults"]) > 20


def test_the_stored_run_is_long_and_found_nothing():
    result = stored("fuzz")
    assert result["cases"] >= 20_000
    assert result["gate"]["passed"]
    assert set(result["verdicts"]) == set(KINDS)
    for backend in ("reference", "triton", "npu"):
        assert result["backends"][backend]["correct"] >= 30
    refused = set(result["faults"])
    assert refused == {f"{kind}: {fault}" for kind, each in KINDS.items() for fault in each.faults}


def test_a_case_comes_from_its_seed_and_index():
    case = draw_case(KINDS, 3, 17)
    assert draw_case(KINDS, 3, 17) == case
    assert json.loads(json.dumps(case.params)) == case.params
    assert run.parse(case.name) == (3, 17)
    alone = run.run_fuzz(replay=case.name)
    assert alone["cases"] == 1
    assert list(alone["verdicts"]) == [case.kind]


@pytest.mark.parametrize("name", ["", "x", "1", "1:", ":2", "-1:3", "1:2:3"])
def test_a_replay_needs_a_name(name):
    with pytest.raises(ValueError, match="is not SEED:INDEX"):
        run.run_fuzz(replay=name)


@pytest.mark.parametrize("how", [{"cases": 9}, {"seed": 0}])
def test_a_replay_has_no_other_cases(how):
    with pytest.raises(ValueError, match="leave out cases and seed"):
        run.run_fuzz(**how, replay="1:2")


def test_the_note_names_what_ran_and_how_to_get_what_did_not(short, monkeypatch):
    """It said "Triton interpreted, Ascend C on its CPU twin" of every run, whatever was there."""
    assert ("Triton interpreted" in short["note"]) == (set(short["backends"]["triton"]) != {"absent"})
    monkeypatch.setattr(run, "absent", lambda name: None)
    assert run.describe_backends({"reference", "triton", "npu"}) == stored("fuzz")["note"]
    monkeypatch.setattr(run, "absent", lambda name: "no" if name == "triton" else None)
    assert run.describe_backends({"reference", "npu"}) == (
        "random calls on a CPU: Ascend C on its CPU twin; nothing was run on a GPU or an NPU; "
        "absent: triton (set TRITON_INTERPRET=1)"
    )


@pytest.mark.parametrize("how", [{"cases": 0}, {"seed": -1}])
def test_numbers_are_checked(how):
    with pytest.raises(ValueError, match="must be at least"):
        run.run_fuzz(**how)


def simple(**changes):
    """A valid call of attention."""
    params = attention.SIMPLEST | {"lse": True, "fault": None, "data_seed": 5, "rows": 9, "keys": 40, "dim": 16}
    return Case(0, 0, "attention", params | {"heads": 2} | changes)


def test_what_is_wrong_is_found_and_shrunk(monkeypatch):
    """Outputs are shifted where there is more than one key."""
    right = pasa.attention

    def wrong(**arguments):
        out, lse = right(**arguments)
        return (out + 100 if arguments["k"].shape[2] > 1 else out), lse

    assert run_case(KINDS, simple()).verdict == "correct"
    monkeypatch.setattr(pasa, "attention", wrong)
    found = run_case(KINDS, simple())
    assert found.verdict == "wrong"
    assert "range" in found.why
    smaller = shrink(KINDS, simple()).params
    assert (smaller["keys"], smaller["rows"], smaller["heads"], smaller["dim"]) == (2, 1, 1, 1)


def test_errors_are_held_against_the_documented_ones(monkeypatch):
    def raises(error):
        def call(**arguments):
            raise error

        monkeypatch.setattr(pasa, "attention", call)
        return run_case(KINDS, simple()).verdict, run_case(KINDS, simple(fault="scale")).verdict

    assert run_case(KINDS, simple(fault="scale")).verdict == "refused"
    assert raises(ValueError("scale=0 is not a positive finite number")) == ("raised", "refused")
    assert raises(TypeError("scale=0")) == ("raised", "raised")
    assert raises(ValueError("bad")) == ("raised", "raised")
    monkeypatch.setattr(pasa, "attention", lambda **arguments: (arguments["q"], arguments["q"]))
    assert run_case(KINDS, simple(fault="scale")).verdict == "accepted"


def test_an_absent_backend_is_counted_not_judged(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_case(KINDS, simple(backend="triton")).verdict == "absent"


def test_truth_is_that_of_the_definition():
    """Beside the package's own FP64 attention, of which it knows nothing."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 8, generator=g).half() for h, n in ((4, 9), (2, 13), (2, 13)))
    mask = torch.rand(2, 1, 9, 13, generator=g) < 0.5
    found, _ = truth.find_truth(q, k, v, mask, True, 0.3)
    out, lse = pasa.golden_attention(q, k, v, attn_mask=mask, is_causal=True, scale=0.3)
    torch.testing.assert_close(found.out, out)
    torch.testing.assert_close(found.lse, lse)


def test_every_bound_can_be_broken():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 8, generator=g).half() for n in (3, 5, 5))
    k[0, 0, 1, 0] = torch.nan
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[0], mask[1, 1] = False, False
    true, _ = truth.find_truth(q, k, v, mask, False, 1.0)
    how = truth.Arithmetic(True, 1, torch.float16, False)
    found = truth.judge(true, torch.full_like(true.out, 9.0), torch.zeros_like(true.lse) + 9, how)
    assert all(value > (0 if name in COUNTS else 1) for name, value in found.items() if name != "finite"), found
    assert truth.judge(true, torch.full_like(true.out, torch.inf), true.lse, how)["finite"] > 0


def test_every_fault_is_drawn_and_named():
    rng = Random(0)
    for kind in KINDS.values():
        assert kind.share > 0
        assert isinstance(kind.draw(rng), dict)


def test_report(short, tmp_path):
    text = StringIO()
    report.render(short, Console(file=text, width=200))
    assert f"{CASES} cases: " in text.getvalue()
    paths = report.save(short, tmp_path)
    assert [path.name for path in paths] == ["fuzz.json", "fuzz.md"]
    assert "| attention |" in paths[1].read_text()
