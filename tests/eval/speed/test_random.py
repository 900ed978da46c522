"""Random cases: draws within limits, the fastest right peer, each gate alone, and runs that stop and go on."""

import dataclasses
import json
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pasa
from pasa.eval.kit.timing import Call
from pasa.eval.speed import random_report, random_run, recorded
from pasa.eval.speed.cases import DATA, Inputs, SpeedCase
from pasa.eval.speed.implementations import DEFAULT, MATH, Implementation, select_implementations
from pasa.eval.speed.random_cases import MOST_BYTES, MOST_FLOPS, draw_case
from pasa.eval.speed.random_run import OTHERS, PEERS, judge, measure
from tests.eval.speed.fakes import FP32, TINY, FakeClock, Timed, absent, implementation, refuse

CASE = dataclasses.replace(TINY, batch=2, padded=True)


def timed(name: str, milliseconds: float, host_us: float = 30.0, add: float = 0.0) -> Implementation:
    """The reference backend, its output off by `add`, with a duration and a host time."""

    def prepare(inputs: Inputs) -> dict[str, Call]:
        def attend() -> torch.Tensor:
            return add + pasa.attention(*inputs.tensors, **inputs.visibility, config=FP32, backend="reference")

        run = Timed(attend, milliseconds)
        run.host_us = host_us  # type: ignore[attr-defined]
        return {"as given": Call(run)}

    return Implementation(name, name, prepare, FP32)


class HostClock(FakeClock):
    """A clock that takes the host time from the call as well."""

    def host_us(self, call: Call) -> float:
        return float(getattr(call.run, "host_us", 5.0))  # of a graph 5


def compare(
    ours: Implementation,
    *peers: Implementation,
    last: Implementation = MATH,
    others: Iterable[Implementation] = (),
    case: SpeedCase = CASE,
) -> dict[str, Any]:
    with torch.inference_mode():
        return measure(case, HostClock(), 2, ours, peers, last, tuple(others))  # type: ignore[arg-type]


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 10**6))
def test_draws_respect_the_limits_and_depend_on_seed_and_index_alone(seed: int, index: int) -> None:
    case = draw_case(seed, index)
    assert case == draw_case(seed, index)
    assert case.flops <= MOST_FLOPS
    assert case.bytes <= MOST_BYTES
    assert 1 <= case.batch <= 64
    assert 1 <= case.kv_heads <= case.heads <= 64
    assert case.heads % case.kv_heads == 0
    assert 1 <= case.rows <= 32768
    assert 1 <= case.keys <= 32768
    assert 32 <= case.dim <= 256
    assert case.data in DATA
    assert not (case.causal and (case.decode or case.rows != case.keys))
    assert not case.decode or case.rows <= 16
    assert not case.padded or case.batch > 1


def test_draws_reach_every_kind() -> None:
    cases = [draw_case(0, index) for index in range(500)]
    assert {case.data for case in cases} == set(DATA)
    kinds = {(case.decode, case.causal, case.padded) for case in cases}
    assert len(kinds) == 6  # decode, causal and full, each with and without padding
    assert any(case.rows != case.keys and not case.decode for case in cases)
    assert any(case.heads > case.kv_heads > 1 for case in cases)
    assert max(case.keys for case in cases) > 16384
    assert len({case.name for case in cases}) == 500
    assert draw_case(1, 0) != dataclasses.replace(draw_case(0, 0), name=draw_case(1, 0).name)


def test_the_bytes_of_a_case_are_those_of_its_tensors() -> None:
    x = CASE.inputs("cpu")
    assert x.mask is not None
    assert CASE.bytes == 2 * x.q.nbytes + 2 * 2 * x.k.nbytes + x.mask.nbytes  # the output, and K and V of two groups


def test_the_fastest_peer_with_a_right_answer_counts() -> None:
    peers = timed("wrong", 0.1, add=0.1), timed("slow", 4.0), timed("quick", 2.0, host_us=20), implementation("x", FP32)
    record = compare(timed("pasa-default", 1.6, host_us=45.0), Implementation("absent", "", refuse), *peers)
    assert (record["status"], record["peer"]) == ("ok", "x"), "x takes 1 ms"
    record = compare(timed("pasa-default", 1.6, host_us=45.0), Implementation("absent", "", refuse), *peers[:3])
    assert record["peer"] == "quick"
    assert record["ratio"] == pytest.approx(2.0 / 1.6)
    assert (record["us"], record["peer_us"]) == (800, 1000), "in graphs, which take half as long here"
    assert record["eager_ratio"] == pytest.approx(2.0 / 1.6)
    assert (record["host_us"], record["peer_host_us"], record["added_host_us"]) == (45, 20, 25), "of eager calls"
    assert (record["kind"], record["padded"], record["data"]) == ("prefill", True, "randn")


def test_math_is_timed_where_no_other_peer_has_a_right_answer() -> None:
    math, ours = timed("math", 8.0), timed("pasa-default", 1.6)
    assert compare(ours, timed("slow", 16.0), last=math)["peer"] == "slow"
    assert compare(ours, timed("wrong", 1.0, add=0.1), last=math)["peer"] == "math"
    record = compare(ours, timed("wrong", 1.0, add=0.1), last=Implementation("math", "", refuse))
    assert record["status"] == "no SDPA backend"
    assert "wrong: RMSE" in record["why"]
    assert "math: RuntimeError: No available kernel" in record["why"]
    assert "ratio" not in record


def test_a_wrong_answer_of_ours_has_no_ratio_and_fails() -> None:
    record = compare(timed("pasa-default", 0.1, add=0.1), timed("slow", 4.0))
    assert record["status"] == "failed gate"
    assert "ratio" not in record
    assert judge([record, *records([1.0])], 2)["checks"]["accuracy"] is False


def test_a_peer_that_writes_into_its_inputs_harms_nobody_else() -> None:
    """Story: SageAttention 1.0.6 subtracts the mean from its caller's K, and changed what came after it.

    The planted peer is right once, the first time that it reads its tensors.
    """

    def prepare(inputs: Inputs) -> dict[str, Call]:
        def attend() -> torch.Tensor:
            out = pasa.attention(*inputs.tensors, **inputs.visibility, config=FP32, backend="reference")
            inputs.k.add_(100 * torch.arange(inputs.k.shape[2])[:, None] % 7)
            inputs.q.zero_()
            inputs.v.fill_(torch.nan)
            return out

        return {"as given": Call(Timed(attend, 0.1))}

    writer, slow = Implementation("writer", "", prepare, FP32), timed("slow", 4.0)
    record = compare(timed("pasa-default", 1.6), writer, slow)
    assert (record["status"], record["peer"]) == ("ok", "slow"), "in a graph the writer gives other numbers each time"
    assert record["ratio"] == pytest.approx(4.0 / 1.6)
    assert record["rmse"] == compare(timed("pasa-default", 1.6), slow)["rmse"]
    assert compare(timed("pasa-default", 1.6), slow, others=[writer])["others"] == {"writer": None}


def test_other_packages_are_timed_beside_and_decide_nothing() -> None:
    others = timed("quicker", 0.8), timed("wrong", 0.1, add=0.1), Implementation("absent", "", absent)
    record = compare(timed("pasa-default", 1.6), timed("slow", 4.0), others=others)
    assert (record["peer"], record["ratio"]) == ("slow", pytest.approx(2.5))
    assert record["others"] == {"quicker": 400, "wrong": None, "absent": None}
    assert record["others_why"]["absent"] == "flash_attn is not installed"
    assert "RMSE" in record["others_why"]["wrong"]
    assert [each.name for each in OTHERS] == ["flash-attn-3", "flash-attn-4", "sageattention"]
    result = {"records": [record, {**record, "case": "other"}]}
    (row,) = random_report.other_table(result).rows
    assert row == ["quicker", "2", "0.500", "0.500", "0.500", "2"]
    reasons = random_report.absences(result)
    assert "absent, not timed on 2 cases: flash_attn is not installed" in reasons
    assert len(reasons) == 2


@pytest.mark.parametrize("module", ["flash_attn_interface", "flash_attn.cute", "sageattention"])
def test_packages_that_take_no_mask_refuse_padded_cases(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would answer as if there were no padding, which the gate sees on rows of padded sequences alone."""
    package = types.ModuleType(module)
    package.flash_attn_func = package.sageattn = lambda *tensors, **options: tensors[0]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.partition(".")[0], package)
    monkeypatch.setitem(sys.modules, module, package)
    names = {"flash_attn_interface": "flash-attn-3", "flash_attn.cute": "flash-attn-4", "sageattention": module}
    (implementation,) = select_implementations([names[module]])
    with pytest.raises(NotImplementedError, match="takes no mask"):
        implementation.prepare(CASE.inputs("cpu"))
    assert implementation.prepare(TINY.inputs("cpu"))


def test_host_times_are_taken_in_turns_of_random_order() -> None:
    """Story: a host slows down by 20 us between two readings that are seconds apart, and a single case failed."""
    readings: list[str] = []

    class Drifting(FakeClock):
        def host_us(self, call: Call) -> float:
            readings.append(str(call.run()))
            return float(len(readings))

    calls = {name: Call(lambda name=name: name) for name in ("a", "b")}  # type: ignore[misc]
    taken = random_run.host_times(Drifting(), calls, 8)  # type: ignore[arg-type]
    assert [len(each) for each in taken.values()] == [8, 8]
    assert {tuple(readings[i : i + 2]) for i in range(0, 16, 2)} == {("a", "b"), ("b", "a")}
    assert abs(sum(taken["a"]) - sum(taken["b"])) < 8, "what drifts hits both alike"


def test_our_default_and_the_peers_are_right_on_masks() -> None:
    """The real table runs on a CPU, where torch has its flash backend alone."""
    record = compare(DEFAULT, *PEERS)
    assert (record["status"], record["peer"]) == ("ok", "sdpa-flash")


def records(ratios: Iterable[float], added_host_us: float = 20.0) -> list[dict[str, Any]]:
    described = {"shape": "(1, 1, 1, 32) full", "kind": "decode", "padded": False, "data": "randn", "status": "ok"}
    times = {"us": 1.0, "peer_us": 1.0, "peer": "sdpa-flash", "host_us": 30.0, "peer_host_us": 10.0, "rmse": 1e-4}
    added = {"why": "", "added_host_us": added_host_us, "eager_ratio": 0.5}
    return [{"case": f"c{i}", **described, **times, **added, "ratio": x} for i, x in enumerate(ratios)]


ALL = ("every case", "accuracy", "median", "1st percentile", "minimum", "host time")
FAILING = {  # 201 ratios: the 1st percentile is that of index 2, the median that of index 100
    "median": [0.8, *[0.9] * 101, *[1.0] * 99],
    "1st percentile": [0.8, 0.89, 0.89, *[0.9] * 97, *[1.0] * 101],
    "minimum": [0.79, *[0.9] * 99, *[1.0] * 101],
}


def test_all_gates_pass_at_their_limits() -> None:
    passing = [0.8, *[0.9] * 99, *[1.0] * 101]
    assert judge(records(passing), 201) == {"passed": True, "checks": dict.fromkeys(ALL, True)}


@pytest.mark.parametrize("name", FAILING)
def test_each_gate_of_the_ratios_fails_alone(name: str) -> None:
    verdict = judge(records(FAILING[name]), 201)
    assert not verdict["passed"]
    assert verdict["checks"] == {each: each != name for each in ALL}


def test_host_time_of_a_single_case_fails_alone() -> None:
    verdict = judge([*records([1.0] * 9), *records([1.0], added_host_us=20.1)], 10)
    assert verdict["checks"] == {each: each != "host time" for each in ALL}


def test_a_case_that_is_left_fails_alone() -> None:
    verdict = judge(records([1.0] * 9), 10)
    assert verdict["checks"] == {each: each != "every case" for each in ALL}


def test_no_ratio_at_all_fails() -> None:
    assert not judge([], 0)["passed"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run small cases on a fake clock, where ours is the fastest; return the list of the cases that are measured.

    The fourth call is stopped from the keyboard.
    """
    measured: list[str] = []
    calls = iter(range(10**6))

    def measure_small(case: SpeedCase, clock: FakeClock, rounds: int) -> dict[str, Any]:
        if next(calls) == 3:
            raise KeyboardInterrupt
        measured.append(case.name)
        tiny = dataclasses.replace(TINY, name=case.name)
        return measure(tiny, clock, rounds, timed(DEFAULT.name, 1.6), [timed("flash", 2.0)], others=())  # type: ignore[arg-type]

    monkeypatch.setattr(random_run, "CudaClock", FakeClock)
    monkeypatch.setattr(random_run, "measure", measure_small)
    monkeypatch.setattr(recorded, "layers", list)
    return measured


def test_a_stopped_run_goes_on_where_it_was(small: list[str], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        random_run.run_random(cases=6, seed=7, folder=tmp_path)
    assert small == [f"random-7-{i}" for i in range(3)]
    result = random_run.run_random(cases=6, seed=7, folder=tmp_path)
    assert small == [f"random-7-{i}" for i in range(6)], "none runs twice"
    assert [each["case"] for each in result["records"]] == small
    assert result["gate"]["passed"]
    assert json.loads((tmp_path / "cases.json").read_text(encoding="utf-8"))["identity"]["seed"] == 7
    with pytest.raises(ValueError, match=r"holds another run \(seed was 7 and is 8\): choose another folder"):
        random_run.run_random(cases=6, seed=8, folder=tmp_path)


def test_no_case_begins_after_the_last_minute(small: list[str], tmp_path: Path) -> None:
    result = random_run.run_random(cases=3, minutes=0.0, folder=tmp_path)
    assert small == []
    assert not result["gate"]["checks"]["every case"]
    result = random_run.run_random(cases=2, minutes=9.0, folder=tmp_path)
    assert small == ["random-0-0", "random-0-1"]
    assert result["gate"]["passed"]
    result = random_run.run_random(cases=3, minutes=0.0, folder=tmp_path)
    assert "2 of 3 cases of seed 0 are done." in random_report.report(result)[0]
    assert not result["gate"]["passed"]


def test_a_case_that_breaks_the_device_is_not_run_again(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record is written before the device is asked whether it still works; the next process goes on behind it."""
    with monkeypatch.context() as broken:
        broken.setattr(torch, "ones", lambda *sizes, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            random_run.run_random(cases=3, folder=tmp_path)
    assert small == ["random-0-0"]
    random_run.run_random(cases=2, folder=tmp_path)
    assert small == ["random-0-0", "random-0-1"]


def test_the_command_fails_where_ours_is_slower(small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_run, "LEAST_RATIO", 1.26)
    result = random_run.run_random(cases=1)
    assert result["records"][0]["ratio"] == pytest.approx(1.25)
    assert not result["gate"]["passed"]


def test_slow_cases_are_shown_by_name(tmp_path: Path) -> None:
    shown = [
        *records([1.2, 0.94, 0.7]),
        {**records([1.0])[0], "case": "d", "status": "no SDPA backend", "why": "because"},
    ]
    del shown[3]["ratio"]
    result = {
        "records": shown,
        "settings": {"cases": 5, "seed": 0},
        "gate": judge(shown, 5),
        "environment": {"commit": None},
        "rounds": 3,
    }
    assert [row[0] for row in random_report.slow_table(result).rows] == ["c2", "c1"]
    ratios = {row[0]: row[1:] for row in random_report.ratio_table(result).rows}
    assert ratios["all"] == ratios["decode"] == ["3", "0.940", "0.705", "0.700", "2"]
    assert ratios["prefill"] == ["0", "-", "-", "-", "0"]
    text = random_run.EXPERIMENT.markdown(result)
    assert "FAILED: every case, median, 1st percentile, minimum. 4 of 5 cases" in text
    assert "because" in text
    assert "| c1 | (1, 1, 1, 32) full | decode | randn | 0.940 | 0.500 |" in text
    assert [path.name for path in random_run.EXPERIMENT.save(result, tmp_path)] == ["random.json", "random.md"]
