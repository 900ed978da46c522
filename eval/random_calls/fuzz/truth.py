"""What attention has to give, in plain FP64 torch that shares nothing with the operators, and what it may err by."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pasa.eval.random_calls.soak.truth import UNIT, may_weigh, score_errors

SUBNORMAL = 2.0**-24  # FP16 cannot round finer than this
STORED = 2.0**-7  # an FP16 score within 16 nats of the maximum, relative to which it is stored: 2^-11 of it
HALF_ULP = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8 + 2.0**-11, torch.float32: 2.0**-11}
LIGHT = 20.0  # nats: what lies further below weighs e^-20 at most, less than an output's rounding
LSE_SLACK = 1e-3
FACTOR = 4.0  # times the largest error of the same-precision naive attention, on ordinary data
FP16_MAX, FP32_MAX = 65504.0, torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Truth:
    """All of (B, Hq, Sq, ...), FP64 or bool.

    Attributes
    ----------
    out, lse : Tensor
        Of the inputs with 0 for whatever is not finite.
    seen : Tensor (B, Hq, Sq, Skv)
    bad_rows, bad : Tensor (B, Hq, Sq), (B, Hq, Sq, D)
        What a NaN or infinity of the inputs must turn to NaN, in the log-sum-exp and in the output.
    low, high : Tensor (B, Hq, Sq, D)
        Range of the values that a row sees.
    products : Tensor (B, Hq, Sq)
        The largest scale sum |q_c| |k_c| of a key that the row sees and that may have weight: no scaled score of such a
        key and none of its partial sums is larger.
    sizes : Tensor (B, Hq, Sq)
        scale sum |q_c| max |k_c| over all keys, seen or not: none of their scores is larger.
    added : Tensor (B, Hq, Sq)
        The largest number that a float mask adds to a score with weight.
    scores : Tensor (B, Hq, Sq, Skv)
        Scaled, with the mask.
    values : Tensor (B, Hq, Skv, D)
    """

    out: Tensor
    lse: Tensor
    seen: Tensor
    bad_rows: Tensor
    bad: Tensor
    low: Tensor
    high: Tensor
    products: Tensor
    sizes: Tensor
    added: Tensor
    scores: Tensor
    values: Tensor

    @property
    def blind(self) -> Tensor:
        """Rows that see no key."""
        return ~self.seen.any(-1)


def visible(mask: Tensor | None, causal: bool, q: Tensor, k: Tensor) -> Tensor:
    """Who sees whom, (B, Hq, Sq, Skv); the causal band is aligned to the last row and key."""
    rows, keys = q.shape[2], k.shape[2]
    seen = torch.ones(*q.shape[:3], keys, dtype=torch.bool)
    if causal:
        seen = seen & (torch.arange(keys) <= torch.arange(rows).unsqueeze(1) + keys - rows)
    if mask is not None:
        seen = seen & (mask if mask.dtype == torch.bool else mask != -torch.inf)
    return seen


def exact(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(scale q k^T + bias) v, its log-sum-exp and its scores; 0 and -inf where bias hides all keys.

    Parameters
    ----------
    q : Tensor (B, H, Sq, D)
    k, v : Tensor (B, H, Skv, D)
    bias : Tensor (B, H, Sq, Skv)
        -inf hides a key.
    """
    scores = q @ k.mT * scale + bias
    top = scores.amax(-1, keepdim=True)
    blind = top == -torch.inf
    weights = torch.exp(scores - top.masked_fill(blind, 0.0))
    total = weights.sum(-1, keepdim=True).masked_fill(blind, 1.0)
    lse = (top + torch.log(total)).squeeze(-1)
    return weights / total @ v, lse, scores


def find_truth(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, *, naive: bool = False
) -> tuple[Truth, Tensor | None]:
    """Truth of queries (B, Hq, Sq, D) over keys (B, Hkv, Skv, D), and the output of the naive FP16 attention if asked.

    Inputs of all types are FP16 numbers first, and finite elements of a mask leave room for scores, as the operator
    says of both.
    """
    groups = q.shape[1] // k.shape[1]
    given = q.half().double(), *(x.half().double().repeat_interleave(groups, 1) for x in (k, v))
    seen = visible(mask, causal, q, k)
    wide_q, wide_k, wide_v = (torch.where(torch.isfinite(x), x, 0.0) for x in given)
    added = torch.zeros((), dtype=torch.float64)
    bad_rows = ~torch.isfinite(given[0]).all(-1) & seen.any(-1)
    bad_rows |= (seen & ~torch.isfinite(given[1]).all(-1).unsqueeze(2)).any(-1)
    if mask is not None and mask.dtype != torch.bool:
        added = mask.double()
        bad_rows |= (seen & ~torch.isfinite(added)).any(-1)
        room = FP32_MAX - 2.0**46 * scale
        added = torch.where(torch.isfinite(added), added, 0.0).clamp(-room, room)
    bias = added.expand(seen.shape).masked_fill(~seen, -torch.inf)
    out, lse, scores = exact(wide_q, wide_k, wide_v, bias, scale)
    bad = bad_rows.unsqueeze(-1) | (seen.double() @ (~torch.isfinite(given[2])).double() > 0)
    low, high = _range(wide_v, seen)
    sums = wide_q.abs() @ wide_k.abs().mT * scale
    weighs = seen & may_weigh(scores, score_errors(sums, added, q.shape[-1]))
    products = sums.where(weighs, 0.0).amax(-1)
    heaviest = added.expand(seen.shape).where(weighs, 0.0).abs().amax(-1)
    sizes = (wide_q.abs() @ wide_k.abs().amax(2, keepdim=True).mT).squeeze(-1) * scale
    truth = Truth(out, lse, seen, bad_rows, bad, low, high, products, sizes, heaviest, scores, wide_v)
    return truth, _naive(wide_q, wide_k, wide_v, bias, scale) if naive else None


def _naive(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Q K^T summed in FP32 and stored in FP16 before it is scaled, P in FP16, P V in FP32: what is said to overflow."""
    q, k, v = q.float(), k.float(), v.float()
    scores = (q @ k.mT).half().float() * scale + bias.float()
    top = scores.amax(-1, keepdim=True)
    blind = top == -torch.inf
    weights = torch.exp(scores - top.masked_fill(blind, 0.0))
    total = weights.sum(-1, keepdim=True).masked_fill(blind, 1.0)
    return (weights.half().float() @ v / total).half().double()


def _range(v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest value (B, H, Sq, D) among the keys that a row sees; 0 if there is none."""
    low = v.unsqueeze(2).masked_fill(~seen.unsqueeze(-1), torch.inf).amin(3)
    high = v.unsqueeze(2).masked_fill(~seen.unsqueeze(-1), -torch.inf).amax(3)
    none = ~seen.any(-1, keepdim=True)
    return low.masked_fill(none, 0.0), high.masked_fill(none, 0.0)


@dataclass(frozen=True)
class Arithmetic:
    """What of a call its bound depends on.

    Attributes
    ----------
    fp16_scores : bool
        Score tiles are stored in FP16 (reference and Ascend C); FP32 in the Triton kernels.
    stores : int
        How often an output is rounded to FP16 on the way: 1, and 2 for every block with accumulate="fp16".
    dtype : torch.dtype
        Of the output.
    drawn : bool
        Outputs may be rounded by lot: an error of a whole spacing in place of half of one.
    """

    fp16_scores: bool
    stores: int
    dtype: torch.dtype
    drawn: bool


def judge(truth: Truth, out: Tensor, lse: Tensor, how: Arithmetic) -> dict[str, float]:
    """Measured over allowed: at most 1 passes; for the first three, counts of which none is allowed.

    README.md derives what is allowed.
    """
    out, lse = out.double(), lse.double()
    seen, good, judged = ~truth.blind, ~truth.bad, ~truth.blind & ~truth.bad_rows
    eps = score_errors(truth.products, truth.added, truth.out.shape[-1])
    eps = eps + (STORED if how.fp16_scores else 2.0**-14)
    largest = torch.maximum(truth.low.abs(), truth.high.abs())
    rounding = HALF_ULP[how.dtype] * (1 + how.drawn) + how.stores * 2.0**-11
    slack = (truth.seen.shape[-1] * UNIT + rounding) * largest + (1 + how.stores) * SUBNORMAL
    allowed = torch.expm1(2 * eps).clamp(max=1.0).unsqueeze(-1) * (truth.high - truth.low) + slack
    outside = torch.maximum(truth.low - out, out - truth.high).clamp(min=0)
    low, high = heavy_range(truth, eps)
    astray = torch.maximum(low - out, out - high).clamp(min=0)
    lse_allowed = LSE_SLACK + 4 * UNIT * truth.lse.abs() + eps
    return {
        "nan": float((~torch.isnan(out) & truth.bad & seen.unsqueeze(-1)).sum()
                     + (~torch.isnan(lse) & truth.bad_rows & seen).sum()),
        "finite": float((~torch.isfinite(out) & good).sum() + (~torch.isfinite(lse) & judged).sum()),
        "blind": float((out[~seen] != 0).sum() + (lse[~seen] != -torch.inf).sum()),
        "range": worst(outside, slack, good),
        "heavy": worst(astray, slack + truth.seen.shape[-1] * math.exp(-LIGHT) * (truth.high - truth.low), good),
        "error": worst((out - truth.out).abs(), allowed, good),
        "lse": worst((lse - truth.lse).abs(), lse_allowed, judged),
    }  # fmt: skip


def heavy_range(truth: Truth, eps: Tensor) -> tuple[Tensor, Tensor]:
    """Range of the values whose scores, each off by eps, may still be within `LIGHT` nats of the largest."""
    top = truth.scores.amax(-1, keepdim=True)
    return _range(truth.values, truth.seen & (truth.scores >= top - 2 * eps.unsqueeze(-1) - LIGHT))


def against_naive(truth: Truth, naive: Tensor, out: Tensor, how: Arithmetic) -> float:
    """Largest error over `FACTOR` times the naive attention's and the roundings of the output; 0 where naive fails."""
    good = ~truth.bad
    if not bool(torch.isfinite(naive[good]).all()) or not bool(good.any()):
        return 0.0
    largest = float(torch.maximum(truth.low.abs(), truth.high.abs()).max())
    rounding = HALF_ULP[how.dtype] * (1 + how.drawn) + how.stores * 2.0**-11
    ours, theirs = (float((x.double() - truth.out).abs().where(good, 0.0).max()) for x in (out, naive))
    return ours / (FACTOR * theirs + rounding * largest + SUBNORMAL)


def worst(errors: Tensor, allowed: Tensor, where: Tensor) -> float:
    """The largest ratio; an error of 0 is 0 whatever is allowed, one that is NaN is infinite."""
    ratios = (errors / allowed).where(errors != 0, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return float(ratios.where(where, 0.0).max()) if ratios.numel() else 0.0
