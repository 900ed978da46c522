"""Errors of an output against FP64, and the generator that draws the same inputs on every machine."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

SMALL_VALUE, SMALL_ERROR = 2.0**-11, 2.0**-16  # FP16 row of the standard's small-value table
DIVISION_GUARD = 1e-7
MMA_DEPTH = 16  # products that a tensor core adds in one step
PAPER_SHAPE = (1, 16, 1280, 128)  # (B, H, S, D), arXiv:2503.01873, section 3.3


def generator(seed: int, *labels: str) -> torch.Generator:
    """Return a generator whose state depends on `seed` and `labels` alone."""
    digest = hashlib.sha256("/".join([str(seed), *labels]).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


@dataclass(frozen=True)
class Errors:
    """Errors of an output (B, H, S, D) against the golden one, over the rows without a NaN or infinity.

    `rmse` is ||O - G|| / ||G||, Eq. 19, or NaN if any output is not finite; `max_error` is max |O - G|;
    `nonfinite_share` is the share of the output that is NaN or infinite; `mare`, `mere` and `absolute_rmse` are the
    standard's metrics over |golden| >= 2^-11, and `small_errors` its error count below that.
    """

    rmse: float
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
    return Errors(
        rmse=torch.nan if share else float(difference.norm() / kept.norm()),
        max_error=_largest(error),
        nonfinite_share=share,
        mare=_largest(relative),
        mere=float(relative.mean()),
        absolute_rmse=float(error[large].square().mean().sqrt()),
        small_errors=int((error[~large] > SMALL_ERROR).sum()),
    )


def _largest(x: Tensor) -> float:
    return float(x.max()) if x.numel() else torch.nan
