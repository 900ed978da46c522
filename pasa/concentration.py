"""The rank-aware concentration of attention scores, which bounds them far below their worst case; and FP8's scale.

The source is S. M. Emadi, "Rank-Aware Spectral Bounds on Attention Logits for Stable Low-Precision Training": gamma,
alpha and B_alpha are its equations (12), (13) and (8). :mod:`pasa.geometry` holds the bounds that contain alpha.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pasa.ops.numerics.formats import E4M3_MAX

FP8_MARGIN = 0.8
"""The part of E4M3's range to which a predicted bound is mapped; eta_fp8 in the paper's section 3.4."""


def typicality(head_dim: int, heads: int, seq_len: int, delta: float) -> float:
    """Return gamma > 1 with gamma - 1 - ln(gamma) = (2/d_h) ln(2 N L / delta), equation (12).

    Parameters
    ----------
    head_dim, heads, seq_len : int
        d_h; N, the number of heads of all layers together; L.
    delta : float
        Accepted probability of an overflow anywhere in the model.
    """
    _check(head_dim=head_dim, heads=heads, seq_len=seq_len, delta=delta)
    target = 2.0 / head_dim * log_ratio(2 * heads * seq_len, delta)
    gamma = 1.0 + math.sqrt(2.0 * target) + target  # above the root (Laurent & Massart), so Newton's method descends
    while True:
        lower = gamma - (gamma - 1.0 - math.log(gamma) - target) / (1.0 - 1.0 / gamma)
        if gamma - lower <= 1e-12 * gamma:
            return gamma
        gamma = lower


def log_ratio(count: int, delta: float) -> float:
    """Return ln(count / delta). The ratio itself overflows FP64 for a tiny delta, and Newton's method never ended."""
    return math.log(count) - math.log(delta)


def minimum_alpha(hidden: int, head_dim: int, heads: int, seq_len: int, delta: float) -> float:
    """Return alpha_min of equation (13): all |S| stay below alpha_min * B_max with probability 1 - delta.

    This holds for inputs whose directions are uniform on the sphere in `hidden` dimensions. Trained models meet this
    assumption about data only roughly.
    """
    gamma = typicality(head_dim, heads, seq_len, delta)
    return math.sqrt(2.0 * gamma * head_dim) / hidden * math.sqrt(log_ratio(4 * heads * seq_len**2, delta))


def concentration_gain(hidden: int, head_dim: int, gamma: float) -> float:
    """Return the ratio of the exponents of the rank-aware and the rank-agnostic tail bound: d / (gamma d_h)."""
    return hidden / (gamma * head_dim)


def auto_alpha(slack: Sequence[float], *, quantile: float = 0.9999, kappa: float = 1.0) -> float:
    """Return alpha from observed slack ratios max|S| / B_max: their quantile times kappa (section 3.5).

    This alpha is not guaranteed: it holds only for data like those that were observed.
    """
    if not slack:
        raise ValueError("auto_alpha: no slack ratio was observed")
    if not 0.0 < quantile <= 1.0 or not kappa >= 1.0:
        raise ValueError(f"auto_alpha: quantile={quantile} must be in (0, 1] and kappa={kappa} at least 1")
    return float(torch.tensor(slack, dtype=torch.float64).quantile(quantile)) * kappa


def geometry_scale(bound: float, *, margin: float = FP8_MARGIN) -> float:
    """Return the divisor of scores before they are rounded to E4M3, equation (15): bound / (margin * 448)."""
    return bound / (margin * E4M3_MAX)


def _check(*, head_dim: int, heads: int, seq_len: int, delta: float) -> None:
    for name, value in (("head_dim", head_dim), ("heads", heads), ("seq_len", seq_len)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta={delta} is not a probability between 0 and 1")
