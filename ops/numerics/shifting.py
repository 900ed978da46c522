"""Build shifting matrices and their inverses, and find the beta that a rounded matrix has (PASA, 2.2, 2.3, A-C).

M = scale (I - (beta/n) J) removes the share beta of the mean of each block of n keys. Rounding its two distinct
entries changes beta. With M_r = scale (a I - b J) the rounded matrix, S' = S M_r and "mean" the row mean:

    mean(S') = scale (a - b n) mean(S),     scale S = S' / a + b n / (a (a - b n)) mean(S')          (Eq. 23, 24)
    S' + f mean(S') - scale S = -(1 - a)/a (S' - mean(S')) + (1 + f - 1/(a - b n)) mean(S')

The first term has zero mean and no f in it. So the error is least, and the row mean exact, where
the second term vanishes: f = 1/(a - b n) - 1, which is b n / (a (a - b n)) + (1 - a)/a of Eq. 20 in
one term. Hence only the row sum of M_r counts: f is the invariance of ``effective = 1 - rowsum(M_r)
/ scale``, the beta that the rounded matrix has. (The share (1 - a)/a left in the first term is the
relative rounding error of the diagonal, which no f removes.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from pasa.ops.numerics.formats import get_format, round_to

TOLERANCE = 1e-8
"""Relative change of beta at which the iteration stops (appendix C, `tol`)."""

ITERATIONS_PER_KEY = 64
"""The iteration may take this many times n steps.

While the rounded diagonal stays constant, the map is linear with slope (n-1)/n. So the change
shrinks by e in n steps, and n ln(1/TOLERANCE) = 18.4 n steps are enough. The diagonal may change on
the way; the most steps seen over all formats and n <= 2048 are 33 n.
"""

TABLE_3_STARTS = (0.9, 1 - 2**-4, 1 - 2**-5, 1 - 2**-6, 0.99, 0.999)
"""The initial values of the paper's table 3."""


class NoOptimalBetaError(ValueError):
    """Signal that the rounded shifting matrix has no usable inverse: the format is too coarse for beta, n and scale."""


class OptimalBeta(NamedTuple):
    """Hold a beta that its own rounded shifting matrix reproduces.

    Attributes
    ----------
    beta : float
        The value to build the matrix from.
    invariance : float
        Factor of the row mean in the recovery, f(beta) of Eq. 20; equals beta / (1 - beta) within the tolerance.
    iterations : int
        Steps of the fixed-point iteration; 0 for beta = 0.
    """

    beta: float
    invariance: float
    iterations: int


@dataclass(frozen=True)
class BetaRow:
    """Hold one row of the paper's table 3; NaN where the format is too coarse for the start value.

    Attributes
    ----------
    start : float
        The initial beta.
    invariance, practical_invariance : float
        Inva = beta / (1 - beta) and Inva_1 = f(beta) at the start.
    relative_error : float
        |Inva - Inva_1| / Inva. The printed percentages have this denominator (3.23 % at 0.99; the
        other one gives 3.13 %). They were computed from Inva_1 cut to four digits. Unrounded they
        are 3.24 % there, and 3.21 % at 0.999.
    optimised : float
        The fixed point of the iteration.
    optimised_invariance, optimised_practical_invariance : float
        Inva and Inva_1 at the fixed point.
    """

    start: float
    invariance: float
    practical_invariance: float
    relative_error: float
    optimised: float
    optimised_invariance: float
    optimised_practical_invariance: float


def shifting_matrix(n: int, beta: float, *, scale: float = 1.0, dtype: torch.dtype = torch.float16) -> Tensor:
    """Build M = scale (I - (beta/n) J) with every entry rounded once from FP64 (Eq. 10).

    Parameters
    ----------
    n : int
        Keys in the block.
    beta : float
        Share of the mean that is removed, in [0, 1]. At 1 the mean goes entirely and M has no inverse.
    scale : float
        Folded into the entries; 1/sqrt(d) in the paper.
    dtype : torch.dtype
        One of the dtypes in `FORMATS`.

    Returns
    -------
    Tensor
        Shape (n, n), symmetric: fl(scale (1 - beta/n)) on the diagonal, -fl(scale beta/n) elsewhere. For n = 1 the
        mean is the key itself and M is the number fl(scale (1 - beta)).

    Raises
    ------
    ValueError
        On a bad argument, or if `scale` carries an entry beyond the range of the format.
    TypeError
        If `beta` or `scale` is not a number.

    Examples
    --------
    >>> keys = torch.tensor([[30.5], [30.0], [29.5], [30.0]])
    >>> (pasa.shifting_matrix(4, 0.9375) @ keys.half()).flatten()  # a sixteenth of the mean, 30, is left
    tensor([2.3750, 1.8750, 1.3750, 1.8750], dtype=torch.float16)
    """
    _check(n, beta, scale, singular_allowed=True)
    diagonal, off_diagonal = _rounded_entries(n, beta, scale, dtype)
    matrix = torch.full((n, n), -off_diagonal, dtype=torch.float64)
    matrix.fill_diagonal_(diagonal)
    return matrix.to(dtype)


def inverse_shifting_matrix(n: int, beta: float, *, scale: float = 1.0) -> Tensor:
    """Invert the unrounded shifting matrix (Theorem 2.1 with lambda = beta/n; the condition is lambda n != 1).

    Parameters
    ----------
    n, beta, scale
        As in `shifting_matrix`, beta below 1.

    Returns
    -------
    Tensor
        Shape (n, n), FP64: (I + beta / (n (1 - beta)) J) / scale.

    Raises
    ------
    ValueError
        On a bad argument; beta = 1 is singular.
    """
    _check(n, beta, scale)
    identity = torch.eye(n, dtype=torch.float64)
    return (identity + invariance(beta) / n) / scale


def invariance(beta: float) -> float:
    """Return the factor beta / (1 - beta) by which the shifted row mean restores the true one (Eq. 14).

    Raises
    ------
    ValueError
        Unless 0 <= beta < 1.
    """
    _check_beta(beta)
    return beta / (1.0 - beta)


def practical_invariance(beta: float, n: int, *, scale: float = 1.0, dtype: torch.dtype = torch.float16) -> float:
    """Return the factor f(beta) that recovers the mean behind the rounded matrix (Eq. 20, 21; derived above).

    Parameters
    ----------
    beta, n, scale, dtype
        As in `shifting_matrix`, beta below 1.

    Returns
    -------
    float
        Below -1 where rounding makes the matrix remove more than the whole mean. At beta = 0 it is 0 only if the
        format holds `scale` exactly.

    Raises
    ------
    ValueError
        On a bad argument.
    NoOptimalBetaError
        If the rounded matrix is singular (a `ValueError` too).
    """
    _check(n, beta, scale)
    effective = _effective_beta(beta, n, scale, dtype)
    if effective == 1.0:
        raise NoOptimalBetaError(f"rounded to {dtype}, the matrix of beta={beta!r}, n={n}, scale={scale!r} is singular")
    return effective / (1.0 - effective)


def optimal_beta(beta0: float, n: int, *, scale: float = 1.0, dtype: torch.dtype = torch.float16) -> OptimalBeta:
    """Solve beta / (1 - beta) = f(beta) by fixed-point iteration in FP64 (Eq. 16, 22).

    Parameters
    ----------
    beta0 : float
        The start, in [0, 1). From 0 the result is 0: no shift, hence nothing to recover.
    n, scale, dtype
        As in `shifting_matrix`. Each combination has its own fixed points, so solve for the matrix
        that is used.

    Returns
    -------
    OptimalBeta
        The fixed point, its invariance and the number of steps.

    Raises
    ------
    ValueError
        On a bad argument.
    NoOptimalBetaError
        If the iteration leaves (0, 1), or does not converge within `ITERATIONS_PER_KEY` n steps.

    Notes
    -----
    The iteration cannot cycle. A larger beta gives an off-diagonal entry no smaller and a diagonal entry no larger,
    since rounding is monotone; so the step beta -> effective beta is monotone, and the orbit of a monotone map runs
    in one direction. It takes finitely many values, hence it ends: in a fixed point, or outside (0, 1).

    FP16 with a scale that is no power of two has no fixed point near 1 for some n (d = 128: 0.984375 fails at n = 186
    and 383-390); from 0.9375 every n <= 512 has one (d <= 256). Without it `practical_invariance` still recovers.

    Examples
    --------
    >>> pasa.optimal_beta(0.99, 128)
    OptimalBeta(beta=0.99031066..., invariance=102.20629..., iterations=2)
    """
    _check(n, beta0, scale)
    if beta0 == 0.0:
        return OptimalBeta(0.0, 0.0, 0)
    return _solve(float(beta0), n, float(scale), get_format(dtype).dtype)


def beta_table(n: int = 128, dtype: torch.dtype = torch.float16, scale: float = 1.0) -> list[BetaRow]:
    """Compute the paper's table 3 for any block size, format and scale.

    Parameters
    ----------
    n, dtype, scale
        As in `shifting_matrix`; the defaults are those of the paper, which leaves the scale out.

    Returns
    -------
    list of BetaRow
        One row for each of `TABLE_3_STARTS`.

    Raises
    ------
    ValueError
        On a bad argument.
    """
    return [_table_row(start, n, scale, dtype) for start in TABLE_3_STARTS]


def _table_row(start: float, n: int, scale: float, dtype: torch.dtype) -> BetaRow:
    ideal = invariance(start)
    practical = optimised = optimised_ideal = optimised_practical = math.nan
    try:
        practical = practical_invariance(start, n, scale=scale, dtype=dtype)
        optimised, optimised_practical, _ = optimal_beta(start, n, scale=scale, dtype=dtype)
        optimised_ideal = invariance(optimised)
    except NoOptimalBetaError:
        pass  # a row of the table, not an error: columns computed so far are kept
    error = abs(ideal - practical) / ideal
    return BetaRow(start, ideal, practical, error, optimised, optimised_ideal, optimised_practical)


@cache
def _solve(beta0: float, n: int, scale: float, dtype: torch.dtype) -> OptimalBeta:
    """Iterate beta <- f / (1 + f), which is the effective beta; cached, because ragged batches repeat their sizes."""
    where = f"from beta0={beta0!r} with n={n}, scale={scale!r}, {dtype}"
    beta = beta0
    for iteration in range(1, ITERATIONS_PER_KEY * n + 1):
        following = _effective_beta(beta, n, scale, dtype)
        if not 0.0 < following < 1.0:
            raise NoOptimalBetaError(
                f"{where} the iteration left (0, 1) at {following!r}: start lower, or use a finer format"
            )
        if abs(following - beta) < TOLERANCE * beta:
            # Not `following`: an entry may lie on the other side of a rounding boundary there.
            return OptimalBeta(beta, practical_invariance(beta, n, scale=scale, dtype=dtype), iteration)
        beta = following
    raise NoOptimalBetaError(f"{where} the iteration did not converge in {ITERATIONS_PER_KEY * n} steps")


def _effective_beta(beta: float, n: int, scale: float, dtype: torch.dtype) -> float:
    """Return 1 - rowsum(M_r) / scale, the beta of the unrounded matrix with the row sum of the rounded one."""
    diagonal, off_diagonal = _rounded_entries(n, beta, scale, dtype)
    return 1.0 - (diagonal - (n - 1) * off_diagonal) / scale


def _rounded_entries(n: int, beta: float, scale: float, dtype: torch.dtype) -> tuple[float, float]:
    """Return fl(scale (1 - beta/n)) and fl(scale beta/n), the second without its sign (Eq. 10, 21)."""
    share = beta / n
    exact = torch.tensor([scale * (1.0 - share), scale * share], dtype=torch.float64)
    diagonal, off_diagonal = round_to(exact, dtype).tolist()
    if not (math.isfinite(diagonal) and math.isfinite(off_diagonal)):
        raise ValueError(f"scale={scale!r} carries the shifting matrix beyond the range of {dtype}")
    return diagonal, off_diagonal


def _check(n: int, beta: float, scale: float, *, singular_allowed: bool = False) -> None:
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ValueError(f"n must be an integer >= 1, got {n!r}")
    for name, value in (("beta", beta), ("scale", scale)):
        if not isinstance(value, (int, float)):
            raise TypeError(f"{name}={value!r} is not a number: pass a float")
    if not 0.0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, got {scale!r}")
    if not (singular_allowed and beta == 1.0):
        _check_beta(beta)


def _check_beta(beta: float) -> None:
    if beta == 1.0:
        raise ValueError("beta=1.0 makes the shifting matrix singular: nothing can recover the mean")
    if not 0.0 <= beta < 1.0:
        raise ValueError(f"beta must lie in [0, 1), got {beta!r}")
