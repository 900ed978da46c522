"""Every metric against numbers worked out by hand, and every gate against an arithmetic that has to fail it."""

import dataclasses
import math

import pytest
import torch

from pasa.eval.accuracy.rmse.metrics import Errors, Measured, Scores, judge, l1_ratios, measure_errors

CLEAN = Scores(0.0, 0.0, 0.0, 0.0, 100.0, 10.0)
GOOD = Errors(1e-4, 1e-4, 1e-4, 1.0, 1e-3, 0.0, mare=1e-3, mere=6e-4, absolute_rmse=1e-4, small_errors=10)


def test_errors_by_hand() -> None:
    golden = torch.tensor([[3.0, -4.0], [0.0, 12.0]], dtype=torch.float64)
    out = torch.tensor([[3.0, -4.5], [0.0, 12.0]])
    found = measure_errors(out, golden)
    assert found.rmse == pytest.approx(0.5 / 13)
    assert found.rmse_finite_rows == found.rmse
    assert found.relative_l1 == pytest.approx(0.5 / 19)
    assert found.cosine == pytest.approx((9 + 18 + 144) / (math.sqrt(9 + 20.25 + 144) * 13))
    assert found.max_error == 0.5
    assert found.nonfinite_share == 0
    assert found.mare == pytest.approx(0.5 / 4)
    assert found.mere == pytest.approx(0.5 / 4 / 3), "the golden 0 is below 2^-11: not among the large values"
    assert found.absolute_rmse == pytest.approx(0.5 / math.sqrt(3))
    assert found.small_errors == 0


def test_small_values_are_counted_by_absolute_error() -> None:
    golden = torch.tensor([[0.0, 2.0**-12, 2.0**-12, 1.0]], dtype=torch.float64)
    out = golden + torch.tensor([[2.0**-16, 2.0**-15, -(2.0**-15), 0.0]], dtype=torch.float64)
    found = measure_errors(out, golden)
    assert found.small_errors == 2, "2^-16 itself is allowed"
    assert found.mare == 0


def test_rows_with_nan_are_left_out_but_shown() -> None:
    golden = torch.ones(4, 2, dtype=torch.float64)
    out = torch.tensor([[1.0, 1.0], [math.nan, 1.0], [math.inf, math.inf], [1.0, 2.0]])
    found = measure_errors(out, golden)
    assert math.isnan(found.rmse)
    assert found.nonfinite_share == 3 / 8
    assert found.rmse_finite_rows == pytest.approx(1 / 2)
    assert found.max_error == 1


def test_all_nan_leaves_nothing_to_measure() -> None:
    found = measure_errors(torch.full((2, 2), math.nan), torch.ones(2, 2, dtype=torch.float64))
    assert found.nonfinite_share == 1
    assert math.isnan(found.rmse_finite_rows)
    assert math.isnan(found.max_error)


def test_l1_ratios_by_hand() -> None:
    own = dataclasses.replace(GOOD, mare=4e-3, mere=3e-4, absolute_rmse=3e-4, small_errors=15)
    ratios = l1_ratios(own, dataclasses.replace(GOOD, mere=1e-4))
    assert ratios["mare"] == pytest.approx(4)
    assert ratios["mere"] == pytest.approx(3e-4 / 2**-11), "the competitor's mean is taken as at least 2^-11"
    assert ratios["rmse"] == pytest.approx(3)
    assert ratios["small"] == 1.5
    assert l1_ratios(own, dataclasses.replace(GOOD, small_errors=0))["small"] == 15


def test_equal_arithmetics_pass_everything() -> None:
    gates = judge(Measured(GOOD, CLEAN), Measured(GOOD, CLEAN), Measured(GOOD, CLEAN))
    assert gates.failed == ""
    perfect = dataclasses.replace(GOOD, max_error=0.0, mare=0.0, mere=0.0, absolute_rmse=0.0, small_errors=0)
    assert judge(Measured(perfect, CLEAN), Measured(perfect, CLEAN), Measured(perfect, CLEAN)).failed == ""


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        ({"max_error": 2.1e-3}, "b"),
        ({"max_error": 1.9e-3}, ""),
        ({"mare": 5.1e-3}, "c"),
        ({"mere": 9.1e-4}, "c"),
        ({"absolute_rmse": 1.6e-4}, "c"),
        ({"small_errors": 21}, "c"),
        ({"nonfinite_share": 1e-6, "rmse": math.nan}, "abc"),
    ],
)
def test_each_limit_catches_what_is_beyond_it(change: dict[str, float], failed: str) -> None:
    own = Measured(dataclasses.replace(GOOD, **change), CLEAN)
    assert judge(own, Measured(GOOD, CLEAN), Measured(GOOD, CLEAN)).failed == failed


def test_saturated_scores_fail_gate_a_without_any_nan() -> None:
    own = Measured(GOOD, dataclasses.replace(CLEAN, saturated_share=1e-7))
    assert judge(own, Measured(GOOD, CLEAN), Measured(GOOD, CLEAN)).failed == "a"


def test_an_overflowed_naive_arithmetic_is_no_yardstick() -> None:
    """Story: in saturate mode the naive output is finite and wrong; 2 x its error would let anything pass."""
    damaged = Measured(dataclasses.replace(GOOD, max_error=50.0), dataclasses.replace(CLEAN, saturated_share=0.01))
    own = Measured(dataclasses.replace(GOOD, max_error=1.0), CLEAN)
    assert "b" in judge(own, damaged, Measured(GOOD, CLEAN)).failed
