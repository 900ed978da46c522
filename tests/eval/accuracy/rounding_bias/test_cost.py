"""Tied rows are what they are called, wrong outputs are found and not timed, and the command delivers. Kernels are
interpreted; a clock without a device stands in for a GPU."""

from __future__ import annotations

import json

import pytest
import torch

import pasa
from pasa.eval import cli
from pasa.eval.accuracy.rounding_bias import cost, cost_cases, cost_report
from pasa.eval.accuracy.rounding_bias.statistics import spacing
from pasa.eval.speed.cases import SpeedCase
from pasa.ops.numerics.dither import round_stochastic, round_unbiased
from tests.eval.speed.fakes import FakeClock
from tests.inputs import DEVICE

TINY = SpeedCase("tiny", 1, 4, 2, 70, 96, 64)
CAUSAL = SpeedCase("tiny-causal", 1, 2, 1, 97, 97, 80, causal=True)
JOBS = ((TINY, "fp16"), (CAUSAL, "fp16"))  # the interpreter cuts BF16 off where it should round to nearest


def outputs(case, data, fmt):
    inputs = cost_cases.make_inputs(case, data, fmt, torch.device(DEVICE))
    return inputs, *(cost.attend(inputs, config) for config in (cost.SAFE, cost.UNBIASED))


@pytest.fixture(scope="module")
def records():
    clock = FakeClock()
    clock.device = torch.device(DEVICE)
    return cost.measure(JOBS, clock, 3, lambda *_: None)


@pytest.fixture
def result(records):
    return {
        "experiment": "rounding-cost",
        "note": cost.NOTE,
        "environment": {"device": "none", "processor": "fake", "commit": "abc"},
        "rounds": 3,
        "duration_s": 1.0,
        "targets": {data: str(target) for data, target in cost_cases.TARGETS.items()},
        "gate": {"passed": True, "failures": []},
        "records": records,
    }


@pytest.mark.parametrize("fmt", cost_cases.DTYPES)
def test_tied_rows_are_a_half_and_a_positive_trifle(fmt):
    """Below a tenth of a spacing, not the same in every row; FP64 weighs what the scores say."""
    inputs = cost_cases.make_inputs(TINY, "tied", fmt, torch.device("cpu"))
    half = inputs.v[:, :, :2].double().mean(2, keepdim=True).repeat_interleave(2, 1)
    golden = pasa.golden_attention(inputs.q, inputs.k, inputs.v)[0].double()
    trifle = (golden - half) / spacing(half, fmt)
    assert trifle.min() > 0
    assert trifle.max() < 0.1
    assert trifle[0, :, :, 0].unique().numel() > 50


@pytest.mark.parametrize(("data", "met"), [("random", [True, False, False]), ("tied", [True, True, False])])
def test_targets(data, met):
    assert [
        cost_cases.TARGETS[data].met(ratio) for ratio in (1.0299, {"random": 1.03, "tied": 1.08}[data], 1.0801)
    ] == met


def test_right_outputs_are_timed(records):
    """Nearly every tied row is drawn (a causal row that sees one key is not), and hardly a random one."""
    assert [(each["case"], each["format"], each["data"]) for each in records] == [
        (case.name, fmt, data) for case, fmt in JOBS for data in ("random", "tied")
    ]
    for each in records:
        assert each["why"] == ""
        assert each["ratio"] == each["p20"] == each["p80"] == 1
        assert each["safe_ms"] == each["unbiased_ms"] == 0.5
        assert each["met"]
        if each["data"] == "tied":
            assert each["drawn"] > 0.9
            assert each["bias_safe"] > 0.15
        else:
            assert each["drawn"] < 0.01


def test_rounding_to_nearest_keeps_its_bias():
    inputs, safe, _ = outputs(TINY, "tied", "fp16")
    assert cost.judge(TINY, inputs, "tied", safe, safe)["why"].startswith("bias +")


@pytest.mark.parametrize("data", cost_cases.DATA)
def test_bf16_is_judged_in_its_own_spacings(data):
    """Outputs of FP64, rounded both ways."""
    inputs = cost_cases.make_inputs(TINY, data, "bf16", torch.device("cpu"))
    golden = pasa.golden_attention(inputs.q, inputs.k, inputs.v)[0].float()
    found = cost.judge(TINY, inputs, data, golden.bfloat16(), round_unbiased(golden, "bf16").bfloat16())
    assert found["why"] == ""
    assert found["drawn"] is None if data == "random" else found["drawn"] > 0.9


def test_drawing_every_row_of_bf16_is_found():
    inputs = cost_cases.make_inputs(TINY, "random", "bf16", torch.device("cpu"))
    golden = pasa.golden_attention(inputs.q, inputs.k, inputs.v)[0].float()
    found = cost.judge(TINY, inputs, "random", golden.bfloat16(), round_stochastic(golden, "bf16").bfloat16())
    assert "times safe's" in found["why"]


def test_data_without_bias_prove_nothing():
    inputs, _, unbiased = outputs(TINY, "tied", "fp16")
    assert cost.judge(TINY, inputs, "tied", unbiased, unbiased)["why"].startswith("safe has no bias")


def test_drawing_every_row_is_found():
    inputs, safe, _ = outputs(TINY, "random", "fp16")
    golden = pasa.golden_attention(inputs.q, inputs.k, inputs.v)[0].float()
    found = cost.judge(TINY, inputs, "random", safe, round_stochastic(golden, "fp16").half())
    assert found["drawn"] > 0.9
    assert "of 280 rows drawn" in found["why"]


@pytest.mark.parametrize(("data", "said"), [("random", "from safe"), ("tied", "from FP64")])
def test_two_spacings_are_too_far(data, said):
    """In one value: the RMSE does not show it."""
    inputs, safe, unbiased = outputs(TINY, data, "fp16")
    spoilt = unbiased.clone()
    spoilt[0, 0, 5, 3] += 2.5 * spacing(spoilt[0, 0, 5, 3], "fp16")
    why = cost.judge(TINY, inputs, data, safe, spoilt)["why"]
    assert said in why
    assert "RMSE" not in why


def test_values_that_are_not_finite_are_found():
    inputs, safe, unbiased = outputs(TINY, "random", "fp16")
    unbiased[0, 0, 0, 0] = torch.nan
    assert "1 values are not finite" in cost.judge(TINY, inputs, "random", safe, unbiased)["why"]


def test_wrong_outputs_are_not_timed(monkeypatch):
    monkeypatch.setattr(cost, "UNBIASED", pasa.PasaConfig(softmax="unbiased"))
    monkeypatch.setattr(cost, "attend", lambda inputs, config: torch.zeros_like(inputs.q))
    clock = FakeClock()
    found = cost.measure(((TINY, "fp16"),), clock, 1, lambda *_: None)
    assert clock.log == []
    assert all("RMSE" in each["why"] and "ratio" not in each for each in found)
    assert {cost_report.verdict_of(each) for each in found} == {"WRONG, not timed"}


def test_ratio_is_that_of_interleaved_rounds():
    """The clock slows down from round to round: medians apart would say 1.2, pairs say 1.1."""
    times = {"safe": [[1.0, 1.0], [2.0, 2.0], [4.0, 4.0]], "unbiased": [[1.1, 1.1], [2.4, 2.4], [4.0, 4.4]]}
    found = cost.ratios(times)
    assert found["ratio"] == pytest.approx(1.1)
    assert found["p20"] == pytest.approx(1.05 + 0.4 * 0.05)
    assert found["p80"] == pytest.approx(1.1 + 0.6 * 0.1)
    assert found["safe_ms"] == 2


def test_coins_that_are_shared_widen_the_limit():
    """Of 64 distinct values the mean has sigma 0.5 / 8; if all are one, 0.5."""
    apart = cost.bias_limit(torch.arange(64.0, dtype=torch.float64))
    assert apart == pytest.approx(4 * 0.5 / 8 + 2.0**-7)
    assert cost.bias_limit(torch.ones(64, dtype=torch.float64)) == pytest.approx(4 * 0.5 + 2.0**-7)


def test_the_table_is_of_both_formats_and_known_shapes():
    names = [(case.name, fmt) for case, fmt in cost_cases.CASES]
    assert len(set(names)) == len(names)
    assert {"paper", "qwen2-8k", "qwen2-8k-full", "svd", "decode-1x32k", "short"} == {name for name, _ in names}
    assert ("qwen2-8k", "bf16") in names


@pytest.mark.skipif(DEVICE == "cuda", reason="what is said without a GPU")
def test_without_a_gpu_one_line_says_so(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["bench", "unbiased"])
    assert left.value.code == 2
    assert "timing needs a CUDA device" in capsys.readouterr().err


def test_a_round_is_the_least():
    with pytest.raises(ValueError, match="rounds=0"):
        cost.run_cost(0)


def test_the_command_writes_what_it_shows(monkeypatch, tmp_path, capsys, result):
    """A target that is missed does not fail it."""
    result["records"] = [result["records"][0] | {"ratio": 1.25, "met": False}, *result["records"][1:]]
    monkeypatch.setattr(cost, "run_cost", lambda rounds, progress: result)
    with pytest.raises(SystemExit) as left:
        cli.main(["bench", "unbiased", "--json", "-", "--output-dir", str(tmp_path)])
    assert left.value.code == 0
    stored = json.loads((tmp_path / "cost.json").read_text())
    assert json.loads(capsys.readouterr().out) == stored
    text = (tmp_path / "cost.md").read_text()
    assert "1.250 | 1.000 to 1.000 | < 1.03: missed" in text
    assert "All outputs are right. 3 of 4 targets are met." in text
    assert "random rows 1.000 to 1.250 (target < 1.03), tied rows 1.000 to 1.000" in cost_report.summary(stored)


def test_a_wrong_output_exits_1_and_is_named(monkeypatch, capsys, result):
    broken = result | {"gate": {"passed": False, "failures": ["tiny, FP16, tied rows: bias +0.2500 spacings"]}}
    monkeypatch.setattr(cost, "run_cost", lambda rounds, progress: broken)
    with pytest.raises(SystemExit) as left:
        cli.main(["bench", "unbiased"])
    assert left.value.code == 1
    assert "tiny, FP16, tied rows: bias +0.2500" in capsys.readouterr().out
