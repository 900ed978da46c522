"""Errors of one output against FP64, and the three gates they have to pass.

The gates are fixed before anything is measured, and none is ours:

(a) No output is NaN or infinite, and no score was stored as infinity, NaN or +/-65504.
(b) max error <= 2 x max error of the naive arithmetic of the same precision where that one did not overflow, else of
    the FP32 emulation (the criterion of FlashAttention's tests, without its additive term).
(c) CANN's dual-benchmark standard for floating-point operators, level L1, with the FP32 emulation as the competitor
    and FP64 as the truth. Over |golden| >= 2^-11: MARE ratio <= 5, MERE ratio <= 1.5, RMSE ratio <= 1.5, where
    MARE = max, MERE = mean of |o - g| / (|g| + 1e-7) and RMSE = sqrt(mean (o - g)^2). Below 2^-11: the count of
    |o - g| > 2^-16 is at most twice the competitor's (taken as at least 1). The competitor's MARE and MERE count as at
    least 2^-11, half a unit in the last place of FP16, as in CANN's own attention tests; its RMSE has no floor (there
    it is 2^-11 in absolute terms, which would pass anything where outputs are small).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SMALL_VALUE, SMALL_ERROR = 2.0**-11, 2.0**-16  # FP16 row of the standard's small-value table
RELATIVE_FLOOR = 2.0**-11
DIVISION_GUARD = 1e-7
L1 = {"mare": 5.0, "mere": 1.5, "rmse": 1.5, "small": 2.0}
NAIVE_FACTOR = 2.0


@dataclass(frozen=True)
class Errors:
    """Errors of an output (B, H, S, D) against the golden one.

    Attributes
    ----------
    rmse : float
        ||O - G|| / ||G||, Eq. 19; NaN if any output is not finite.
    rmse_finite_rows : float
        The same over the rows without a NaN or infinity, so that damage short of NaN shows; NaN if there is none.
    relative_l1 : float
        sum |O - G| / sum |G| over the same rows; so are `cosine` and `max_error`.
    cosine : float
        <O, G> / (||O|| ||G||).
    max_error : float
        max |O - G|.
    nonfinite_share : float
        Share of the output elements that are NaN or infinite.
    mare, mere, absolute_rmse : float
        The standard's metrics over |golden| >= 2^-11.
    small_errors : int
        Its error count below that.
    """

    rmse: float
    rmse_finite_rows: float
    relative_l1: float
    cosine: float
    max_error: float
    nonfinite_share: float
    mare: float
    mere: float
    absolute_rmse: float
    small_errors: int


def measure_errors(out: Tensor, golden: Tensor) -> Errors:
    """Compare `out` with FP64 `golden`, both (..., D)."""
    out, golden = out.double().flatten(0, -2), golden.flatten(0, -2)
    finite = torch.isfinite(out)
    rows = finite.all(-1)
    difference, kept = out[rows] - golden[rows], golden[rows]
    error = difference.abs()
    large = kept.abs() >= SMALL_VALUE
    relative = (error / (kept.abs() + DIVISION_GUARD))[large]
    share = float((~finite).double().mean())
    rmse = _ratio(difference.norm(), kept.norm())
    return Errors(
        rmse=torch.nan if share else rmse,
        rmse_finite_rows=rmse,
        relative_l1=_ratio(error.sum(), kept.abs().sum()),
        cosine=_ratio((out[rows] * kept).sum(), out[rows].norm() * kept.norm()),
        max_error=_largest(error),
        nonfinite_share=share,
        mare=_largest(relative),
        mere=float(relative.mean()),
        absolute_rmse=float(error[large].square().mean().sqrt()),
        small_errors=int((error[~large] > SMALL_ERROR).sum()),
    )


def _largest(x: Tensor) -> float:
    return float(x.max()) if x.numel() else torch.nan


def _ratio(numerator: Tensor, denominator: Tensor) -> float:
    """NaN where no row is finite."""
    return float(numerator / denominator)


@dataclass(frozen=True)
class Scores:
    """What the stored scores did, as shares of all scores, rows and tiles.

    Attributes
    ----------
    nonfinite_share, saturated_share : float
        Scores stored as infinity or NaN, and as +/-65504.
    touched_rows : float
        Rows with at least one such score.
    rescued_share : float
        Tiles that were kept in FP32.
    max_before, max_after : float
        Largest |q.k|, and largest stored value in the tile's own units.
    """

    nonfinite_share: float
    saturated_share: float
    touched_rows: float
    rescued_share: float
    max_before: float
    max_after: float

    @property
    def overflowed(self) -> bool:
        """Whether any score left FP16's range."""
        return self.nonfinite_share > 0 or self.saturated_share > 0


@dataclass(frozen=True)
class Gates:
    """Verdicts, and the numbers they rest on (each against its limit)."""

    a: bool
    b: bool
    c: bool
    max_error_ratio: float
    ratios: dict[str, float]

    @property
    def failed(self) -> str:
        """Letters of the gates that failed; empty when all passed."""
        return "".join(letter for letter in "abc" if not getattr(self, letter))


@dataclass(frozen=True)
class Measured:
    """One arithmetic on one case."""

    errors: Errors
    scores: Scores


def judge(own: Measured, naive: Measured, competitor: Measured) -> Gates:
    """Apply the three gates of this module's docstring."""
    clean = own.errors.nonfinite_share == 0
    yardstick = naive if not naive.scores.overflowed and naive.errors.nonfinite_share == 0 else competitor
    factor = _over(own.errors.max_error, yardstick.errors.max_error)
    ratios = l1_ratios(own.errors, competitor.errors)
    return Gates(
        a=clean and not own.scores.overflowed,
        b=clean and factor <= NAIVE_FACTOR,
        c=clean and all(ratios[name] <= limit for name, limit in L1.items()),
        max_error_ratio=factor,
        ratios=ratios,
    )


def l1_ratios(own: Errors, competitor: Errors) -> dict[str, float]:
    """The standard's four ratios; each must stay within `L1`."""
    return {
        "mare": _over(own.mare, max(competitor.mare, RELATIVE_FLOOR)),
        "mere": _over(own.mere, max(competitor.mere, RELATIVE_FLOOR)),
        "rmse": _over(own.absolute_rmse, competitor.absolute_rmse),
        "small": own.small_errors / max(competitor.small_errors, 1),
    }


def _over(own: float, other: float) -> float:
    """own / other, where no error on either side is a draw."""
    if own == other:
        return 1.0
    return own / other if other else torch.inf
