"""Random calls of the whole API: a short run, replays, verdicts, shrinking; the stored run is longer."""

import json
from io import StringIO

import pytest
import torch
from rich.console import Console

import pasa
from pasa.eval.kit.stored import stored
from pasa.eval.random_calls import attention, run
from pasa.eval.random_calls.cases import Case, draw_case, run_case, shrink
from pasa.eval.random_calls.run import API, FUZZ

CASES = 250
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which interprets: infinity is meant


@pytest.fixture(scope="module")
def short():
    return run.run_fuzz(CASES, seed=1)


def test_a_short_run_finds_nothing(short):
    assert short["failures"] == []
    assert short["gate"]["passed"]
    assert sum(sum(counts.values()) for counts in short["verdicts"].values()) == CASES
    assert {"finite", "range", "heavy", "error", "lse", "naive"} <= set(short["worst"])
    assert len(short["faults"]) > 20


def test_the_stored_run_is_long_and_found_nothing():
    result = stored("fuzz")
    assert result["cases"] >= 20_000
    assert result["gate"]["passed"]
    assert set(result["verdicts"]) == set(API)
    for backend in ("reference", "triton", "npu"):
        assert result["backends"][backend]["correct"] >= 30
    refused = set(result["faults"])
    assert refused == {f"{kind}: {fault}" for kind, each in API.items() for fault in each.faults}


def test_a_case_comes_from_its_seed_and_index():
    case = draw_case(API, 3, 17)
    assert draw_case(API, 3, 17) == case
    assert json.loads(json.dumps(case.params)) == case.params
    assert run.parse(case.name) == (3, [17])
    alone = run.run_fuzz(replay=case.name)
    assert alone["cases"] == 1
    assert list(alone["verdicts"]) == [case.kind]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        *(({"replay": name}, "is not SEED:INDEX") for name in ("", "x", "1", "1:", ":2", "-1:3", "1:2:3")),
        *((how | {"replay": "1:2"}, "leave out cases and seed") for how in ({"cases": 9}, {"seed": 0})),
        *((how, "must be at least") for how in ({"cases": 0}, {"seed": -1})),
    ],
)
def test_numbers_and_names_are_checked(how, message):
    with pytest.raises(ValueError, match=message):
        run.run_fuzz(**how)


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


def simple(**changes):
    """A valid call of attention."""
    params = attention.SIMPLEST | {
        "lse": True,
        "fault": None,
        "data_seed": 5,
        "twice": False,
        "rows": 9,
        "keys": 40,
        "dim": 16,
    }
    return Case(0, 0, "attention", params | {"heads": 2} | changes)


def test_what_is_wrong_is_found_and_shrunk(monkeypatch):
    """Outputs are shifted where there is more than one key."""
    right = pasa.attention

    def wrong(**arguments):
        out, lse = right(**arguments)
        return (out + 100 if arguments["k"].shape[2] > 1 else out), lse

    assert run_case(API, simple()).verdict == "correct"
    monkeypatch.setattr(pasa, "attention", wrong)
    outcome = run_case(API, simple())
    assert outcome.verdict == "wrong"
    assert "range" in outcome.why
    smaller = shrink(API, simple()).params
    assert (smaller["keys"], smaller["rows"], smaller["heads"], smaller["dim"]) == (2, 1, 1, 1)


def test_errors_are_held_against_the_documented_ones(monkeypatch):
    def raises(error):
        def call(**arguments):
            raise error

        monkeypatch.setattr(pasa, "attention", call)
        return run_case(API, simple()).verdict, run_case(API, simple(fault="scale")).verdict

    assert run_case(API, simple(fault="scale")).verdict == "refused"
    assert raises(ValueError("scale=0 is not a positive finite number")) == ("raised", "refused")
    assert raises(TypeError("scale=0")) == ("raised", "raised")
    assert raises(ValueError("bad")) == ("raised", "raised")
    monkeypatch.setattr(pasa, "attention", lambda **arguments: (arguments["q"], arguments["q"]))
    assert run_case(API, simple(fault="scale")).verdict == "accepted"


def test_an_absent_backend_is_counted_not_judged(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_case(API, simple(backend="triton")).verdict == "absent"


def test_a_result_is_shown_and_stored(short, tmp_path):
    text = StringIO()
    FUZZ.show(short, Console(file=text, width=200))
    assert f"{CASES} cases: " in text.getvalue()
    paths = FUZZ.save(short, tmp_path)
    assert "| attention |" in paths[1].read_text()
