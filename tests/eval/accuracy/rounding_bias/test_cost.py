"""Tied rows are tied, and wrong outputs are found and not timed: interpreted kernels, and a clock without a device."""

from __future__ import annotations

import pytest
import torch

import pasa
from pasa.eval.accuracy.rounding_bias import cost
from pasa.eval.accuracy.rounding_bias.arithmetic import spacing
from pasa.eval.kit import output
from pasa.eval.speed.cases import SpeedCase
from pasa.ops.numerics.dither import round_stochastic, round_unbiased
from tests.eval.speed.fakes import FakeClock
from tests.inputs import DEVICE

TINY = SpeedCase("tiny", 1, 4, 2, 70, 96, 64)
CAUSAL = SpeedCase("tiny-causal", 1, 2, 1, 97, 97, 80, causal=True)
JOBS = ((TINY, "fp16"), (CAUSAL, "fp16"))  # the interpreter cuts BF16 off where it should round to nearest


@pytest.fixture(scope="module")
def records():
    clock = FakeClock()
    clock.device = torch.device(DEVICE)
    return cost.measure(JOBS, clock, 3, lambda *_: None)


@pytest.mark.parametrize("fmt", cost.DTYPES)
def test_tied_rows_are_a_half_and_a_positive_remainder(fmt):
    """Below a tenth of a spacing, not the same in every row; FP64 weighs what the scores say."""
    inputs = cost.make_inputs(TINY, "tied", fmt, torch.device("cpu"))
    half = inputs.v[:, :, :2].double().mean(2, keepdim=True).repeat_interleave(2, 1)
    golden = pasa.golden_attention(inputs.q, inputs.k, inputs.v)[0].double()
    remainder = (golden - half) / spacing(half, fmt)
    assert remainder.min() > 0
    assert remainder.max() < 0.1
    assert remainder[0, :, :, 0].unique().numel() > 50


@pytest.mark.parametrize(("data", "limit", "at_limit"), [("random", 1.03, False), ("tied", 1.08, True)])
def test_targets(data, limit, at_limit):
    assert [cost.met(data, ratio) for ratio in (limit - 1e-4, limit, limit + 1e-4)] == [True, at_limit, False]


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


@pytest.mark.parametrize("data", cost.DATA)
def test_bf16_is_judged_in_its_own_spacings(data):
    """Outputs of FP64, rounded both ways."""
    inputs = cost.make_inputs(TINY, data, "bf16", torch.device("cpu"))
    golden = pasa.golden_attention(inputs.q, inputs.k, inputs.v)[0].float()
    record = cost.judge(TINY, inputs, data, golden.bfloat16(), round_unbiased(golden, "bf16").bfloat16())
    assert record["why"] == ""
    assert record["drawn"] is None if data == "random" else record["drawn"] > 0.9


def moved(safe, unbiased, golden):
    """Return 2.5 spacings of error in one value: the RMSE does not show it."""
    wrong = unbiased.clone()
    wrong[0, 0, 5, 3] += 2.5 * spacing(wrong[0, 0, 5, 3], "fp16")
    return safe, wrong


def with_nan(safe, unbiased, golden):
    return safe, unbiased.index_fill(3, torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.nan)


@pytest.mark.parametrize(
    ("data", "fmt", "alter", "why"),
    [
        ("tied", "fp16", lambda safe, unbiased, golden: (safe, safe), "bias +"),
        ("tied", "fp16", lambda safe, unbiased, golden: (unbiased, unbiased), "safe has no bias"),
        ("random", "fp16", moved, "spacings from safe"),
        ("tied", "fp16", moved, "spacings from FP64"),
        ("random", "fp16", with_nan, "values are not finite"),
        ("random", "fp16", lambda safe, _, golden: (safe, round_stochastic(golden, "fp16").half()), "280 rows drawn"),
        (
            "random",
            "bf16",
            lambda safe, _, golden: (golden.bfloat16(), round_stochastic(golden, "bf16").bfloat16()),
            "times safe's",
        ),
    ],
)
def test_what_is_wrong_is_named(data, fmt, alter, why):
    """Drawing every row shows in FP16 by the rows that differ from safe's, in BF16 by its error."""
    inputs = cost.make_inputs(TINY, data, fmt, torch.device(DEVICE))
    safe, unbiased = (cost.attend(inputs, config) for config in (cost.SAFE, cost.UNBIASED))
    golden = pasa.golden_attention(*(x.cpu() for x in inputs.tensors))[0].float().to(DEVICE)
    assert why in cost.judge(TINY, inputs, data, *alter(safe, unbiased, golden))["why"]


def test_wrong_outputs_are_not_timed(monkeypatch):
    monkeypatch.setattr(cost, "attend", lambda inputs, config: torch.zeros_like(inputs.q))
    clock = FakeClock()
    records = cost.measure(((TINY, "fp16"),), clock, 1, lambda *_: None)
    assert clock.log == []
    assert all("RMSE" in each["why"] and "ratio" not in each for each in records)
    assert {cost.verdict_of(each) for each in records} == {"WRONG, not timed"}


def test_ratio_is_that_of_interleaved_rounds():
    """The clock slows down from round to round: medians apart would say 1.2, pairs say 1.1."""
    times = {"safe": [[1.0, 1.0], [2.0, 2.0], [4.0, 4.0]], "unbiased": [[1.1, 1.1], [2.4, 2.4], [4.0, 4.4]]}
    expected = {"safe_ms": 2, "unbiased_ms": 2.4, "ratio": 1.1, "p20": 1.05 + 0.4 * 0.05, "p80": 1.1 + 0.6 * 0.1}
    assert cost.ratios(times) == pytest.approx(expected)


def test_coins_that_are_shared_widen_the_limit():
    """The mean of 64 distinct values has sigma 0.5 / 8; if all are one, 0.5."""
    assert cost.bias_limit(torch.arange(64.0, dtype=torch.float64)) == pytest.approx(4 * 0.5 / 8 + 2.0**-7)
    assert cost.bias_limit(torch.ones(64, dtype=torch.float64)) == pytest.approx(4 * 0.5 + 2.0**-7)


def test_what_is_shown_counts_targets_and_names_wrong_outputs(records):
    """A target that is missed does not fail the command."""
    missed = [records[0] | {"ratio": 1.25, "met": False}, *records[1:]]
    result = {"environment": output.environment(), "targets": cost.TARGETS, "gate": {"passed": True}, "records": missed}
    page = cost.EXPERIMENT.markdown(result)
    assert "1.250 | 1.000 to 1.000 | < 1.03: missed" in page
    assert "All outputs are right. 3 of 4 targets are met." in page
    assert "random rows 1.000 to 1.250 (target < 1.03), tied rows 1.000 to 1.000" in cost.summary(result)
    result["records"] = [each for each in missed if each["data"] == "random"]
    assert "tied rows not timed (target ≤ 1.08)" in cost.summary(result), "the least of no ratios stopped it"
