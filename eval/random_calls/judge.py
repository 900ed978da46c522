"""Bounds on the result of one random call.

Every measure is an error divided by the error that is allowed: above 1, the bound is broken. README.md derives the
bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pasa.eval.random_calls.cases import Measures
from pasa.eval.random_calls.summation_error import MMA_DEPTH
from pasa.eval.random_calls.truth import LIGHT, STORED, UNIT, Truth

HALF_ULP = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-11}  # FP32 holds FP16 numbers
SUBNORMAL = 2.0**-24  # the spacing of the smallest FP16 numbers
LSE_SLACK = 1e-3  # nats, allowed to every log-sum-exp
NAIVE_FACTOR, EMULATED_FACTOR = 4.0, 2.0  # times the error of the naive attention, and of the emulation
RMSE_SLACK = 2.0**-13  # of the norm of the true output
# `order.find_moved` lets the errors of two keys that compete for a row's maximum differ by 4 d, where d bounds the
# error of one score. The standard deviation of each is at most 2/3 d, so in the RMS they differ by sqrt(2) * 2/3 d.
# That is 0.24 of what is allowed.
RMSE_MOVED = 0.25
WHAT = {  # the bounds of kernels, in the order in which they are shown
    "shape": "outputs with a wrong shape or dtype",
    "nan": "NaN of the inputs that is missing where a row sees it, or appears elsewhere",
    "finite": "NaN or infinity that no input explains",
    "blind": "fully masked rows: outputs that are not 0, log-sum-exps that are not -inf",
    "repeat": "elements that differ when the call is repeated",
    "range": "distance of an output from the range of the values that its row sees",
    "heavy": "the same for the values whose keys may have weight",
    "error": "error against FP64, over the bound that holds for any data",
    "lse": "error of the log-sum-exp, over the bound that holds for any data",
    "lse-ordinary": "the same on ordinary data, over the error of adding D products in FP32",
    "emulated-max": "largest error, over twice that of the reference emulation and the effect of FP32 scores",
    "emulated-rmse": "the same for the RMSE",
    "emulated-lse": "published recovery: error of the log-sum-exp, over twice that of the emulation",
}


@dataclass(frozen=True)
class Arithmetic:
    """The properties of a call's arithmetic on which its bounds depend."""

    dtype: torch.dtype  # of the output
    stores: int = 1  # roundings of an output to FP16: one, and two more for every key block that is accumulated in FP16
    drawn: bool = False  # stochastic rounding: outputs may err by a whole spacing, not by half of one
    summed: bool = False  # scores are FP32 sums of ordinary numbers, so D additions bound the error of a log-sum-exp

    @property
    def rounding(self) -> float:
        """Return the relative error that its roundings may leave in an output."""
        return HALF_ULP[self.dtype] * (1 + self.drawn) + self.stores * 2.0**-11


def count_faults(truth: Truth, out: Tensor, lse: Tensor) -> Measures:
    """Count the values that are wrong in any arithmetic: misplaced or missing NaN, infinity, fully masked rows."""
    good, judged = ~truth.bad, ~truth.fully_masked & ~truth.bad_rows
    return {
        "nan": float((~torch.isnan(out) & truth.bad).sum() + (~torch.isnan(lse) & truth.bad_rows).sum()),
        "finite": float((~torch.isfinite(out) & good).sum() + (~torch.isfinite(lse) & judged).sum()),
        "blind": float((out[truth.fully_masked] != 0).sum() + (lse[truth.fully_masked] != -torch.inf).sum()),
    }


def judge(truth: Truth, out: Tensor, lse: Tensor, how: Arithmetic) -> Measures:
    """Return the measures of one result by their names in `WHAT`: errors over allowed errors, and `count_faults`."""
    out, lse = out.double(), lse.double()
    good, judged = ~truth.bad, ~truth.fully_masked & ~truth.bad_rows
    keys, spread = truth.keys.unsqueeze(-1), truth.high - truth.low
    slack = (keys * UNIT + how.rounding) * truth.largest + (1 + how.stores) * SUBNORMAL
    outside = torch.maximum(truth.low - out, out - truth.high).clamp(min=0)
    astray = torch.maximum(truth.heavy_low - out, out - truth.heavy_high).clamp(min=0)
    allowed = torch.expm1(2 * truth.eps).clamp(max=1.0).unsqueeze(-1) * spread + slack
    lse_error = (lse - truth.lse).abs()
    measures = count_faults(truth, out, lse) | {
        "range": worst(outside, slack, good),
        "heavy": worst(astray, slack + keys * math.exp(-LIGHT) * spread, good),
        "error": worst((out - truth.out).abs(), allowed, good),
        "lse": worst(lse_error, LSE_SLACK + 4 * UNIT * truth.lse.abs() + truth.eps, judged),
    }
    if how.summed:
        additions = max(MMA_DEPTH, out.shape[-1]) * UNIT * (truth.norms + truth.added)
        measures["lse-ordinary"] = worst(lse_error, LSE_SLACK + additions, judged)
    return measures


def against_naive(truth: Truth, naive: Tensor, out: Tensor, how: Arithmetic) -> float:
    """Return the largest error over what is allowed: four times the error of naive attention, and the roundings.

    Return 0 if naive attention itself gives NaN or infinity, because it then sets no limit.
    """
    good = ~truth.bad
    if not bool(torch.isfinite(naive[good]).all()) or not bool(good.any()):
        return 0.0
    ours, theirs = (float((x.double() - truth.out).abs().where(good, 0.0).max()) for x in (out, naive))
    return ours / (NAIVE_FACTOR * theirs + how.rounding * float(truth.largest.max()) + SUBNORMAL)


Result = tuple[Tensor, Tensor]
"""Output (B, Hq, Sq, D) and log-sum-exp (B, Hq, Sq)."""


def compare(
    truth: Truth, result: Result, emulated: Result, moved: Tensor | None, dtype: torch.dtype, paper: float | None
) -> Measures:
    """Compare a result with the reference emulation of the same arithmetic: return its errors over allowed errors.

    Allowed are twice the emulation's error, the roundings, and `moved`, which `order.find_moved` returns. `paper` is
    None for exact recovery. For the published recovery it is what its roundings allow beside half an ulp, relative to
    the largest value; the log-sum-exp is then compared too.
    """
    moved = torch.zeros_like(truth.out) if moved is None else moved
    good, judged = ~truth.bad, ~truth.fully_masked & ~truth.bad_rows
    if not bool((good & ~truth.fully_masked.unsqueeze(-1)).any()):
        return {}
    ours, theirs = (x[0].double().where(good, 0.0) - truth.out.where(good, 0.0) for x in (result, emulated))
    ulp, norm = HALF_ULP[dtype], float(truth.out.where(good, 0.0).norm())
    extra = ulp + (paper or 0.0)
    allowed = EMULATED_FACTOR * float(theirs.abs().max()) + extra * float(truth.largest.max()) + SUBNORMAL
    measures = {"emulated-max": float((ours.abs() / (allowed + moved)).max())}
    if norm > 0:
        floor = RMSE_SLACK + (ulp if ulp > 2.0**-11 else 0.0) + (0.0 if paper is None else extra)
        allowed = EMULATED_FACTOR * float(theirs.norm()) + floor * norm
        allowed += RMSE_MOVED * float(moved.where(good, 0.0).norm())
        measures["emulated-rmse"] = float(ours.norm()) / allowed
    if paper is not None and bool(judged.any()):
        ours, theirs = ((x[1].double() - truth.lse)[judged].abs().max() for x in (result, emulated))
        measures["emulated-lse"] = float(ours) / (EMULATED_FACTOR * float(theirs) + LSE_SLACK + STORED)
    return measures


def differing(first: Result, second: Result) -> float:
    """Count the elements whose bits differ between two results."""
    return float(sum(int((_bits(a) != _bits(b)).sum()) for a, b in zip(first, second, strict=True)))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def worst(errors: Tensor, allowed: Tensor, where: Tensor) -> float:
    """Return the largest ratio of an error to its allowed error, over the elements in `where`.

    The ratio of a zero error is 0 even where nothing is allowed; that of a NaN error is infinite.
    """
    ratios = (errors / allowed).where(errors != 0, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return float(ratios.where(where, 0.0).max()) if ratios.numel() else 0.0
