"""Attention of the training experiment: a forward pass that rounds where the arm says, the flash backward pass.

Emulated: every value is an FP32 tensor; products accumulate in FP32. The arms round

    Q, K, V, scores S, weights P-bar = exp(S - m)    to the arm's format,
    "product":  P-bar V to the format, then its quotient by l = rowsum(P-bar)     (the setting of arXiv:2510.04212)
    "quotient": (P-bar V) / l, once                                                (what our kernels do)

and all else is FP32, the backward pass too: of the gradients, delta = rowsum(dO * O) alone sees the rounded O (its
claim 1). What FP32 makes of the same scores is computed beside it; the difference is what is recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pasa.ops.attention.spec.repeated_maxima import bounded_shift, published_shift, repeats
from pasa.ops.numerics.dither import round_unbiased
from pasa.ops.numerics.formats import get_format, round_to

Place = Literal["product", "quotient"]
Rule = Literal["safe", "unbiased_paper", "unbiased"]


@dataclass(frozen=True)
class Arm:
    """One training run: the place of its roundings, and its rule for repeated maxima. `fmt` "fp32" rounds nothing."""

    name: str
    title: str
    place: Place
    rule: Rule
    fmt: str


ARMS = (
    Arm("fp32", "FP32", "quotient", "safe", "fp32"),
    Arm("product", "P V rounded, nearest", "product", "safe", "bf16"),
    Arm("product-published", "P V rounded, published rule", "product", "unbiased_paper", "bf16"),
    Arm("product-ours", "P V rounded, bounded shift", "product", "unbiased", "bf16"),
    Arm("quotient", "O / l rounded, nearest", "quotient", "safe", "bf16"),
    Arm("quotient-ours", "O / l rounded, leaning rows drawn", "quotient", "unbiased", "bf16"),
    Arm("fp16-published", "P V rounded, published rule, FP16", "product", "unbiased_paper", "fp16"),
    Arm("fp16-ours", "P V rounded, bounded shift, FP16", "product", "unbiased", "fp16"),
)


@dataclass(frozen=True)
class Forward:
    """One forward pass. Rows are (B, H, S, 1); outputs (B, H, S, D); shares (B, H, S, S), softmax in FP32."""

    out: Tensor
    exact: Tensor  # shares times values, in FP32: O of the same rounded inputs and scores
    shares: Tensor
    tied: Tensor
    lost: Tensor  # rows whose weights have all underflowed


class Record:
    """Errors and repeated maxima of one layer's attention in one step."""

    def __init__(self) -> None:
        self.tied = self.lost = self.output_bias = 0.0
        self.delta_error = self.delta_size = torch.zeros(0)  # (H,): sums over batch and rows
        self.query_error = self.query_gradient = torch.zeros(0)  # dQ's error by Eq. 1, and dQ: (B, H, S, D)


def attend(q: Tensor, k: Tensor, v: Tensor, arm: Arm) -> Forward:
    """Attend causally; q, k, v (B, H, S, D) are FP32 tensors that hold values of the arm's format."""
    fmt = get_format(arm.fmt)
    hidden = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
    scores = round_to(q @ k.mT * q.shape[-1] ** -0.5, fmt).masked_fill(hidden, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    tied = repeats(scores, top)
    shift: Tensor | float = 0.0  # where O / l is rounded once, a factor on the row cancels
    if arm.rule == "unbiased_paper":
        shift = published_shift(scores, top)
    elif arm.rule == "unbiased" and arm.place == "product":
        shift = bounded_shift(tied, top)
    weights = round_to(torch.exp(scores - (top + shift)), fmt)
    total = weights.sum(-1, keepdim=True)
    product = weights @ v
    if arm.place == "product":
        out = round_to(round_to(product, fmt) / total, fmt)
    else:
        out = (round_unbiased if arm.rule == "unbiased" else round_to)(product / total, fmt)
    shares = torch.softmax(scores, -1)
    return Forward(out, shares @ v, shares, tied, total == 0)


class RoundedAttention(torch.autograd.Function):
    """`attend`, and the flash backward pass in FP32 with delta = rowsum(dO * O) of the rounded O."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, arm: Arm, record: Record) -> Tensor:
        """Round the inputs (B, H, S, D), FP32, which the backward pass passes straight through, and attend."""
        q, k, v = (round_to(x, arm.fmt) for x in (q, k, v))
        done = attend(q, k, v, arm)
        record.tied, record.lost = float(done.tied.float().mean()), float(done.lost.sum())
        record.output_bias = output_bias(done)
        ctx.save_for_backward(q, k, v, done.shares, done.out, done.exact)
        ctx.record = record
        return done.out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Return dQ, dK, dV; record delta's error, and dQ's by Eq. 1: -scale diag(delta - its FP32 value) P K."""
        q, k, v, shares, out, exact = ctx.saved_tensors
        [grad] = grads
        scale, record = q.shape[-1] ** -0.5, ctx.record
        delta, right = ((grad * each).sum(-1, keepdim=True) for each in (out, exact))
        scores_grad = shares * (grad @ v.mT - delta) * scale
        query_grad = scores_grad @ k
        record.delta_error, record.delta_size = ((each.sum((0, 2, 3))) for each in (delta - right, right.abs()))
        record.query_error, record.query_gradient = (right - delta) * scale * (shares @ k), query_grad
        return query_grad, scores_grad.mT @ q, shares.mT @ grad, None, None


def output_bias(done: Forward) -> float:
    """Return the mean relative error of tied rows' outputs, away from zero: 0 without a one-sided error."""
    error = ((done.out - done.exact) * done.exact.sign()).sum(-1, keepdim=True)
    size = done.exact.abs().sum(-1, keepdim=True)[done.tied].sum()
    return float(error[done.tied].sum() / size) if size > 0 else 0.0
