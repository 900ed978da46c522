"""gamma and alpha agree with their equations and with the paper's tables."""

from __future__ import annotations

import math

import pytest

from pasa import concentration


@pytest.mark.parametrize(
    ("hidden", "head_dim", "heads", "gamma", "gain", "alpha"),
    [
        (1600, 64, 1200, "2.985", 8, "0.0735"),  # printed: 2.98 and 0.074
        (4096, 128, 1024, "2.26", 14, "0.035"),
        (5120, 128, 1600, "2.27", 18, "0.028"),  # printed: 2.28
        (8192, 128, 5120, "2.30", 28, "0.018"),  # printed: 2.32
    ],
)
def test_tables_2_and_3(hidden, head_dim, heads, gamma, gain, alpha):
    """gamma solves equation (12) to FP64 accuracy, and values agree with the paper's printed digits.

    Three printed values of gamma and one of alpha differ in their last digit.
    """
    solved = concentration.typicality(head_dim, heads, 1024, 1e-6)
    assert solved - 1 - math.log(solved) == pytest.approx(2 / head_dim * math.log(2 * heads * 1024 / 1e-6), rel=1e-12)
    assert f"{solved:.{len(gamma) - 2}f}" == gamma
    assert round(concentration.concentration_gain(hidden, head_dim, solved)) == gain
    least = concentration.minimum_alpha(hidden, head_dim, heads, 1024, 1e-6)
    assert f"{least:.{len(alpha) - 2}f}" == alpha


def test_auto_alpha_is_a_quantile_times_kappa():
    ratios = [0.001 * i for i in range(1001)]
    assert concentration.auto_alpha(ratios) == pytest.approx(0.9999, rel=1e-12)
    assert concentration.auto_alpha(ratios, quantile=0.5, kappa=2.0) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="no slack ratio"):
        concentration.auto_alpha([])
    with pytest.raises(ValueError, match=r"kappa=0\.5"):
        concentration.auto_alpha([1.0], kappa=0.5)


@pytest.mark.parametrize(("name", "value"), [("delta", 0.0), ("delta", 1.5), ("seq_len", 0), ("heads", 0)])
def test_bad_settings_are_refused_by_name(name, value):
    given = {"head_dim": 64, "heads": 12, "seq_len": 128, "delta": 1e-6, name: value}
    with pytest.raises(ValueError, match=f"{name}={value}"):
        concentration.typicality(**given)


def test_a_tiny_probability_ends():
    """Story: 1e-320 made the ratio of the union bound infinite, and Newton's method ran for ever."""
    assert concentration.typicality(64, 1200, 1024, 1e-320) > concentration.typicality(64, 1200, 1024, 1e-300) > 1
    assert concentration.minimum_alpha(1600, 64, 1200, 2**31, 1e-320) > 0
