"""Bounds on the result of one random call.

Every measure is an error divided by the error that is allowed: above 1, the bound is broken. README.md derives the
bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pasa.eval.kit.error_metrics import MMA_DEPTH
from pasa.eval.random_calls.cases import Measures
from pasa.eval.random_calls.inputs import Call
from pasa.eval.random_calls.truth import LIGHT, STORED, Part, Truth, in_pieces, prepare
from pasa.ops.numerics.formats import FP32_UNIT

HALF_ULP = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-11}  # FP32 holds FP16 numbers
SUBNORMAL = 2.0**-24  # the spacing of the smallest FP16 numbers
LSE_SLACK = 1e-3  # nats, allowed to every log-sum-exp
# A result may err by so many times the largest error of naive attention, and of the reference's emulation.
NAIVE_FACTOR, EMULATED_FACTOR = 4.0, 2.0
RMSE_SLACK = 2.0**-13  # RMS error allowed to every result, relative to the norm of the true output
# `find_moved` lets the errors of two keys that compete for a row's maximum differ by 4 d, where d bounds the
# error of one score. The standard deviation of each is at most 2/3 d, so in the RMS they differ by sqrt(2) * 2/3 d.
# That is 0.24 of what is allowed.
RMSE_MOVED = 0.25
# The kernels subtract an anchor (a block's mean key) from the keys if two conditions hold: the anchor is at least
# ANCHOR_GAIN times as long as the rest, and scores may exceed ANCHOR_LIMIT nats. The numbers are copied from
# ops/attention/triton/tile_math.py, because judging must not need Triton; a test compares the copies.
ANCHOR_GAIN, ANCHOR_LIMIT = 4.0, 2048.0
# Nats. Larger errors of a score are clamped, so that exp(2 * SCORE_ERROR_LIMIT) fits FP32. Clamping only makes the
# bound stricter.
SCORE_ERROR_LIMIT = 40.0
MOVED_LIMIT = 0.1  # the most that `find_moved` allows, relative to the range of the values that the row sees


@dataclass(frozen=True)
class Arithmetic:
    """The properties of a call's arithmetic on which its bounds depend."""

    dtype: torch.dtype  # of the output
    stores: int = 1  # roundings of an output to FP16: one, and two more for every key block that is accumulated in FP16
    stochastic: bool = False  # rounded stochastically: outputs may err by a whole ulp, not by half of one
    fp32_scores: bool = False  # scores are FP32 sums of ordinary numbers: D additions bound the error of a log-sum-exp

    @property
    def rounding(self) -> float:
        """Return the relative error that the roundings of this arithmetic may leave in an output."""
        return HALF_ULP[self.dtype] * (1 + self.stochastic) + self.stores * 2.0**-11


def count_faults(truth: Truth, out: Tensor, lse: Tensor) -> Measures:
    """Count the values that are wrong in any arithmetic: misplaced or missing NaN, infinity, fully masked rows."""
    good, judged = ~truth.bad, ~truth.fully_masked & ~truth.bad_rows
    return {
        "nan": float((~torch.isnan(out) & truth.bad).sum() + (~torch.isnan(lse) & truth.bad_rows).sum()),
        "finite": float((~torch.isfinite(out) & good).sum() + (~torch.isfinite(lse) & judged).sum()),
        "fully-masked": float((out[truth.fully_masked] != 0).sum() + (lse != truth.lse)[truth.fully_masked].sum()),
    }


def judge(truth: Truth, out: Tensor, lse: Tensor, arithmetic: Arithmetic) -> Measures:
    """Return the measures of one result: errors over allowed errors, and `count_faults`."""
    out, lse = out.double(), lse.double()
    good, judged = ~truth.bad, ~truth.fully_masked & ~truth.bad_rows
    keys, spread = truth.keys.unsqueeze(-1), truth.high - truth.low
    slack = (keys * FP32_UNIT + arithmetic.rounding) * truth.largest + (1 + arithmetic.stores) * SUBNORMAL
    beyond_range = torch.maximum(truth.low - out, out - truth.high).clamp(min=0)
    beyond_heavy = torch.maximum(truth.heavy_low - out, out - truth.heavy_high).clamp(min=0)
    allowed = torch.expm1(2 * truth.eps).clamp(max=1.0).unsqueeze(-1) * spread + slack
    lse_error = (lse - truth.lse).abs()
    measures = count_faults(truth, out, lse) | {
        "range": worst(beyond_range, slack, good),
        "heavy": worst(beyond_heavy, slack + keys * math.exp(-LIGHT) * spread, good),
        "error": worst((out - truth.out).abs(), allowed, good),
        "lse": worst(lse_error, LSE_SLACK + 4 * FP32_UNIT * truth.lse.abs() + truth.eps, judged),
    }
    if arithmetic.fp32_scores:
        additions = max(MMA_DEPTH, out.shape[-1]) * FP32_UNIT * (truth.norms + truth.added)
        measures["lse-ordinary"] = worst(lse_error, LSE_SLACK + additions, judged)
    return measures


def count_wrong_maxima(truth: Truth, top: Tensor, largest: Tensor) -> float:
    """Count largest scores (B, Hq) that are off by more than those of rows, `top`, may be, or lack a NaN."""
    slack = truth.eps + LSE_SLACK + 4 * FP32_UNIT * top.abs().nan_to_num(posinf=0.0)
    inside = ((top - slack).amax(-1) <= largest) & (largest <= (top + slack).amax(-1))
    return float((~inside).where(~truth.bad_rows.any(-1), ~largest.isnan()).sum())


def against_naive(truth: Truth, naive: Tensor, out: Tensor, arithmetic: Arithmetic) -> float:
    """Return the largest error of `out` over the allowed error: four times that of naive attention, and the roundings.

    Return 0 if naive attention itself gives NaN or infinity, because it then sets no limit.
    """
    good = ~truth.bad
    if not bool(torch.isfinite(naive[good]).all()) or not bool(good.any()):
        return 0.0
    ours, theirs = (float((x.double() - truth.out).abs().where(good, 0.0).max()) for x in (out, naive))
    return ours / (NAIVE_FACTOR * theirs + arithmetic.rounding * float(truth.largest.max()) + SUBNORMAL)


Result = tuple[Tensor, Tensor]
"""Output (B, Hq, Sq, D) and log-sum-exp (B, Hq, Sq)."""


def compare(
    truth: Truth, result: Result, emulated: Result, moved: Tensor | None, dtype: torch.dtype, paper: float | None
) -> Measures:
    """Compare a result with the reference emulation of the same arithmetic: return its errors over allowed errors.

    The allowed error is twice the emulation's error, plus the roundings, plus `moved`, which `find_moved` returns.
    `paper` is None for exact recovery. For the published recovery it is the additional error that its roundings may
    cause, relative to the largest value. Only then is the log-sum-exp compared too.
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
    whole = {2: torch.int16, 4: torch.int32}
    bits = ((x.contiguous().view(whole[x.element_size()]) for x in result) for result in (first, second))
    return float(sum(int((a != b).sum()) for a, b in zip(*bits, strict=True)))


def worst(errors: Tensor, allowed: Tensor, where: Tensor) -> float:
    """Return the largest ratio of an error to its allowed error, over the elements in `where`.

    The ratio of a zero error is 0 even where nothing is allowed; that of a NaN error is infinite.
    """
    ratios = (errors / allowed).where(errors != 0, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return float(ratios.where(where, 0.0).max()) if ratios.numel() else 0.0


# ---- how far an output may move if an FP32 sum is formed in another order


def find_moved(call: Call, truth: Truth) -> Tensor:
    """Return the error (B, Hq, Sq, D) that outputs may have because scores are FP32 sums; inputs must hold no NaN.

    With errors e_j of its scores, at most d_j, a row's output moves by sum_j p_j (exp(e_j - c) - 1) (v_j - o), where c,
    the logarithm of sum_j p_j exp(e_j), is at most that of sum_j p_j exp(d_j).
    """
    moved = in_pieces(lambda piece: {"moved": _move(piece)}, call)["moved"]
    return torch.minimum(moved, MOVED_LIMIT * (truth.high - truth.low))


def _move(call: Call) -> Tensor:
    if not call.k.shape[2]:
        return torch.zeros_like(call.q, dtype=torch.float64)
    part = prepare(call)
    weights = torch.softmax(part.scores, -1).nan_to_num(0.0)
    errors = summed_error(part, call.scale).clamp(max=SCORE_ERROR_LIMIT)
    out, v = (weights @ part.v).float(), part.v.float()
    common = (weights * errors.exp()).sum(-1, keepdim=True).clamp(min=1.0).log()
    changes = (weights * torch.expm1(errors + common)).float()
    columns = range(out.shape[-1])  # (rows, keys, D) at once is too large
    moved = [(changes * (v[..., i].unsqueeze(2) - out[..., i].unsqueeze(3)).abs()).sum(-1) for i in columns]
    return torch.stack(moved, -1).double()


def summed_error(part: Part, scale: float) -> Tensor:
    """Return the largest error d of each score, in nats, that its FP32 summation may cause: (B, Hq, Sq, Skv).

    A tensor core adds 16 products to a partial sum in one step, and truncates by at most 2 u of the result. There are
    s = D / 16 steps. If the partial sums grow evenly up to T = sum |q_c k'_c|, the errors add up to (s + 1) u T. With D
    single additions, rounded to nearest, the standard deviation is sqrt(D) / 3 u T: at most two thirds of that.
    """
    q, k, exists = part.q, part.k, part.seen.any(2).unsqueeze(-1)
    mean = k.where(exists, 0.0).sum(2, keepdim=True) / exists.sum(2, keepdim=True).clamp(min=1)
    centred = (k - mean).where(exists, 0.0)
    reach = centred.norm(dim=-1, keepdim=True).amax(2, keepdim=True)
    # Keys lie within `reach` of the mean of all keys, and so does a block's mean. It thus lies within 2 * reach of the
    # block's keys. If the condition holds, the anchors are long enough whatever the blocks. Otherwise a kernel may
    # multiply the whole keys, so the larger terms are allowed.
    anchored = mean.norm(dim=-1, keepdim=True) >= (2 * ANCHOR_GAIN + 1) * reach
    whole, rest = (q.abs() @ x.abs().mT * scale for x in (k, centred))
    terms = rest.where(anchored & (whole > ANCHOR_LIMIT), whole)
    return (-(-q.shape[-1] // MMA_DEPTH) + 1) * FP32_UNIT * terms
