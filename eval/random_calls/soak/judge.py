"""Bounds on one call, each as measured over allowed; README.md derives them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pasa.eval.random_calls.soak.cases import SoakCase
from pasa.eval.random_calls.soak.families import PAPER
from pasa.eval.random_calls.soak.order import MMA_DEPTH
from pasa.eval.random_calls.soak.truth import UNIT, Truth, score_errors

FACTOR = 2.0  # times the emulation's error
HALF_ULP = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-11}  # FP32 results are FP16 numbers
SUBNORMAL = 2.0**-24  # FP16 cannot round finer than this
LSE_SLACK = 1e-3
RMSE_SLACK = 2.0**-13
# `order.find_moved` allows for errors of two rivals for a row's maximum that differ by 4 d; they differ by sqrt(2)
# standard deviations, each at most 2/3 d: 0.24 of it in the root mean square.
RMSE_MOVED = 0.25
STORED = 2.0**-7  # an FP16 score within 16 nats of the maximum, relative to which it is stored: 2^-11 of it
COUNTS = ("shape", "nan", "finite", "blind", "repeat")  # nothing of this is allowed
WHAT = {
    "raised": "calls that raised an exception",
    "shape": "outputs of another shape or dtype",
    "nan": "NaN in the inputs that does not show where it is seen, or shows elsewhere",
    "finite": "infinite or NaN numbers that no input explains",
    "blind": "rows without a key that are not 0 and -inf",
    "repeat": "numbers that differ when the call is repeated",
    "range": "how far an output lies outside of the values that its row sees",
    "error": "error against FP64, over the bound for any data",
    "lse": "error of the log-sum-exp, over the bound for any data",
    "lse-ordinary": "the same on ordinary data, over what a sum of D numbers in FP32 may err by",
    "emulated-max": "largest error, over twice the reference emulation's and what FP32 scores may move",
    "emulated-rmse": "RMSE, likewise",
    "emulated-lse": "error of the log-sum-exp, over twice the reference emulation's (published recovery)",
}


@dataclass(frozen=True)
class Result:
    """What a call returned, as (B, Hq, Sq, D) and (B, Hq, Sq)."""

    out: Tensor
    lse: Tensor


def judge(case: SoakCase, truth: Truth, found: Result, emulation: bool) -> dict[str, float]:
    """Measured over allowed by name of `WHAT`; counts in place of ratios for `COUNTS`. At most 1, or 0, passes.

    Parameters
    ----------
    emulation : bool
        Whether the call ran on the reference, whose tiles are FP16.
    """
    out, lse = found.out.double(), found.lse.double()
    seen, good = ~truth.blind, ~truth.nan
    measures = {
        "nan": float((~torch.isnan(out) & truth.nan).sum() + (~torch.isnan(lse) & truth.nan_rows).sum()),
        "finite": float((~torch.isfinite(out) & good).sum() + (~torch.isfinite(lse) & ~truth.nan_rows & seen).sum()),
        "blind": float((out[~seen] != 0).sum() + (lse[~seen] != -torch.inf).sum()),
    }
    if case.family.recovery == PAPER:  # bounded by its inputs only: nothing else is promised
        return measures
    eps = _score_error(case, truth, emulation)
    slack = _slack(case, truth, emulation)
    outside = torch.maximum(truth.low - out, out - truth.high).clamp(min=0)
    spread = truth.high - truth.low
    allowed = torch.expm1(2 * eps).clamp(max=1.0).unsqueeze(-1) * spread + slack
    judged = seen & ~truth.nan_rows
    lse_error = (lse - truth.lse).abs()
    rounding = LSE_SLACK + 4 * UNIT * truth.lse.abs()
    measures |= {
        "range": _worst(outside, slack, good),
        "error": _worst((out - truth.out).abs(), allowed, good),
        "lse": _worst(lse_error, rounding + eps, judged),
    }
    if case.ordinary and not emulation:
        additions = max(MMA_DEPTH, case.family.dim) * UNIT * (truth.norms + truth.added)
        measures["lse-ordinary"] = _worst(lse_error, LSE_SLACK + additions, judged)
    return measures


def _score_error(case: SoakCase, truth: Truth, emulation: bool) -> Tensor:
    """What a scaled score may err by, in nats: (B, Hq, Sq)."""
    errors = score_errors(truth.products, truth.added, case.family.dim)  # products of q.k' and q.a
    return errors + (STORED if emulation else 2.0**-14)


def _slack(case: SoakCase, truth: Truth, emulation: bool) -> Tensor:
    """What rounding weights, sums and the output may move an output by: (B, Hq, Sq, D)."""
    largest = torch.maximum(truth.low.abs(), truth.high.abs())
    keys, dtype = max(case.keys), getattr(torch, case.family.dtype)
    stores = 2  # of weights, and of the output
    if emulation and case.family.accumulate == "fp16":  # the reference stores O after every block
        stores += 2 * -(-keys // case.family.block_k)
    return (keys * UNIT + (stores - 1) * 2.0**-11 + HALF_ULP[dtype]) * largest + stores * SUBNORMAL


def compare(case: SoakCase, truth: Truth, found: Result, emulated: Result, moved: Tensor | None) -> dict[str, float]:
    """The errors over those that the emulation of the same arithmetic makes; `moved` as `order.find_moved` has it, or
    None to allow for nothing of the kind."""
    moved = torch.zeros_like(truth.out) if moved is None else moved
    good, judged = ~truth.nan, ~truth.blind & ~truth.nan_rows
    if not bool((good & ~truth.blind.unsqueeze(-1)).any()):
        return {}
    own, theirs = (x.out.double().where(good, 0.0) - truth.out.where(good, 0.0) for x in (found, emulated))
    largest = float(torch.maximum(truth.low.abs(), truth.high.abs()).max())
    ulp = HALF_ULP[getattr(torch, case.family.dtype)]
    norm, extra = float(truth.out.where(good, 0.0).norm()), ulp
    paper = case.family.recovery == PAPER
    if paper:  # an FP16 score of 4 to 8 nats is off by 2^-9, and so is its weight
        blocks = -(-max(case.keys) // case.family.block_k)
        extra += 2 * 2.0**-9 + (blocks + 2) * 2.0**-11 * (case.family.accumulate == "fp16")
    allowed = FACTOR * float(theirs.abs().max()) + extra * largest + SUBNORMAL
    measures = {"emulated-max": float((own.abs() / (allowed + moved)).max())}
    if norm > 0:
        floor = RMSE_SLACK + (ulp if ulp > 2.0**-11 else 0.0) + (extra if paper else 0.0)
        allowed = FACTOR * float(theirs.norm()) + floor * norm + RMSE_MOVED * float(moved.where(good, 0.0).norm())
        measures["emulated-rmse"] = float(own.norm()) / allowed
    if paper and bool(judged.any()):
        own, theirs = ((x.lse.double() - truth.lse)[judged].abs().max() for x in (found, emulated))
        measures["emulated-lse"] = float(own) / (FACTOR * float(theirs) + LSE_SLACK + STORED)
    return measures


def failures(measures: dict[str, float]) -> list[str]:
    """Names of the bounds that do not hold; NaN holds nothing."""
    return [name for name, value in measures.items() if not value <= (0.0 if name in COUNTS else 1.0)]


def differing(first: Result, second: Result) -> float:
    """How many numbers are not the same bit for bit."""
    pairs = ((first.out, second.out), (first.lse, second.lse))
    return float(sum(int((_bits(a) != _bits(b)).sum()) for a, b in pairs))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def _worst(errors: Tensor, allowed: Tensor, where: Tensor) -> float:
    """The largest ratio; an error of 0 is 0 whatever is allowed, one that is NaN is infinite."""
    ratios = (errors / allowed).where(errors != 0, 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
    return float(ratios.where(where, 0.0).max()) if ratios.numel() else 0.0
