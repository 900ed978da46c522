"""Every metric against numbers worked out by hand, and every gate against an arithmetic that has to fail it."""

import math

import pytest
import torch

from pasa.eval.accuracy.rmse.gates import judge, l1_ratios
from pasa.eval.kit.error_metrics import measure_errors

GOOD = {
    "max_error": 1e-3,
    "nonfinite_share": 0.0,
    "mare": 1e-3,
    "mere": 6e-4,
    "absolute_rmse": 1e-4,
    "small_errors": 10,
}
GOOD |= {"scores_nonfinite_share": 0.0, "scores_saturated_share": 0.0}


def test_errors_by_hand() -> None:
    golden = torch.tensor([[3.0, -4.0], [0.0, 12.0]], dtype=torch.float64)
    out = torch.tensor([[3.0, -4.5], [0.0, 12.0]])
    found = measure_errors(out, golden)
    assert found.rmse == pytest.approx(0.5 / 13)
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
    assert found.max_error == 1


def test_all_nan_leaves_nothing_to_measure() -> None:
    found = measure_errors(torch.full((2, 2), math.nan), torch.ones(2, 2, dtype=torch.float64))
    assert found.nonfinite_share == 1
    assert math.isnan(found.rmse)
    assert math.isnan(found.max_error)


def test_l1_ratios_by_hand() -> None:
    own = GOOD | {"mare": 4e-3, "mere": 3e-4, "absolute_rmse": 3e-4, "small_errors": 15}
    ratios = l1_ratios(own, GOOD | {"mere": 1e-4})
    assert ratios["mare"] == pytest.approx(4)
    assert ratios["mere"] == pytest.approx(3e-4 / 2**-11), "the competitor's mean is taken as at least 2^-11"
    assert ratios["rmse"] == pytest.approx(3)
    assert ratios["small"] == 1.5
    assert l1_ratios(own, GOOD | {"small_errors": 0})["small"] == 15


PERFECT = {"max_error": 0.0, "mare": 0.0, "mere": 0.0, "absolute_rmse": 0.0, "small_errors": 0}


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        ({}, ""),
        ({"max_error": 2.1e-3}, "b"),
        ({"max_error": 1.9e-3}, ""),
        ({"mare": 5.1e-3}, "c"),
        ({"mere": 9.1e-4}, "c"),
        ({"absolute_rmse": 1.6e-4}, "c"),
        ({"small_errors": 21}, "c"),
        ({"nonfinite_share": 1e-6}, "abc"),
        ({"scores_saturated_share": 1e-7}, "a"),
    ],
)
def test_each_limit_catches_what_is_beyond_it(change: dict[str, float], failed: str) -> None:
    """Saturated scores fail (a) without any NaN. No error on either side is a draw."""
    assert judge(GOOD | change, GOOD, GOOD)["failed_gates"] == failed
    assert judge(GOOD | PERFECT, GOOD | PERFECT, GOOD | PERFECT)["failed_gates"] == ""


def test_an_overflowed_naive_arithmetic_is_no_yardstick() -> None:
    """Story: in saturate mode the naive output is finite and wrong; 2 x its error would let anything pass."""
    damaged = GOOD | {"max_error": 50.0, "scores_saturated_share": 0.01}
    assert "b" in judge(GOOD | {"max_error": 1.0}, damaged, GOOD)["failed_gates"]
