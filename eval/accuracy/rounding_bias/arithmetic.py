"""The arms, the two places where attention rounds its output, and the bias of an output. Emulated on a CPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pasa.eval.accuracy.rounding_bias.cases import BLOCK_K, KEYS, Place, Rows
from pasa.ops.attention.options import AttentionOptions
from pasa.ops.attention.spec.attention import OnlineSoftmax
from pasa.ops.attention.spec.repeated_maxima import EPSILON, bounded_shift, published_shift, repeats
from pasa.ops.attention.spec.scores import Block, ScoreTile
from pasa.ops.numerics.formats import FORMATS, Format, round_to

ARMS = ("nearest", "published", "ours", "stochastic")
RULES = {"nearest": "safe", "published": "unbiased_paper", "ours": "unbiased", "stochastic": "safe"}
PLACES: dict[Place, str] = {
    "quotient": "O / l is rounded once: `OnlineSoftmax` of the reference, P in FP16",
    "product": "O is rounded once before it is divided by l, P is in the format too (the paper's setting)",
}
Z_95 = 1.959964  # of a normal distribution
NOTHING = torch.zeros(0)


def output(rows: Rows, fmt: str, place: Place, arm: str, generator: torch.Generator) -> Tensor:
    """Return O (R, D) in FP32 as one of `ARMS` leaves it, of format `fmt`; the stochastic arm takes the generator."""
    if place == "product":
        return _product(rows, FORMATS[fmt], arm, generator)
    if arm == "stochastic":
        return round_to(quotient(rows, "fp32", "safe"), fmt, "stochastic", generator=generator)
    return quotient(rows, fmt, RULES[arm])


def quotient(rows: Rows, fmt: str, rule: str) -> Tensor:
    """Return O / l, rounded to the format by the operator's own softmax; every row is a head of its own."""
    count, _, dim = rows.values.shape
    options = AttentionOptions(precision="fp32", softmax=rule)
    softmax = OnlineSoftmax(torch.zeros(1, count, 1, 1, dim), options, FORMATS[fmt])
    for index, start in enumerate(range(0, KEYS, BLOCK_K)):
        scores = rows.scores[:, start : start + BLOCK_K].view(1, count, 1, 1, -1)
        block = Block(index, NOTHING, NOTHING, None, None, softmax.maximum, 0)
        softmax.add(ScoreTile(scores, scores), block, rows.values[:, start : start + BLOCK_K].unsqueeze(0))
    return softmax.finish(0.0)[0].view(count, dim)


def _product(rows: Rows, target: Format, arm: str, generator: torch.Generator) -> Tensor:
    """Sum in FP32, with P and the sum over all keys in the format, and weights relative to the running maximum.

    l sums the rounded P. The quotient is not rounded, so that this place alone is measured.
    """
    maximum = torch.full_like(rows.scores[:, :1], -torch.inf)
    total, out = torch.zeros_like(maximum), torch.zeros_like(rows.values[:, 0])
    for start in range(0, KEYS, BLOCK_K):
        scores, values = (x[:, start : start + BLOCK_K] for x in (rows.scores, rows.values))
        top = scores.amax(-1, keepdim=True)
        raised = torch.maximum(maximum, top + _shift(arm, scores, top, maximum))
        keep, weights = torch.exp(maximum - raised), round_to(torch.exp(scores - raised), target)
        out = keep * out + (weights.unsqueeze(-2) @ values).squeeze(-2)
        total, maximum = keep * total + weights.sum(-1, keepdim=True), raised
    return round_to(out, target, "stochastic" if arm == "stochastic" else "nearest", generator=generator) / total


def _shift(arm: str, scores: Tensor, top: Tensor, before: Tensor) -> Tensor | float:
    if arm == "published":
        return published_shift(scores, top)
    if arm == "ours":
        return bounded_shift(repeats(scores, top) | ((top - before).abs() <= EPSILON), top)
    return 0.0


def spacing(x: Tensor, fmt: str) -> Tensor:
    """Return the distance between the values of the format around `x`, FP64."""
    target = FORMATS[fmt]
    exponent = torch.frexp(x.double().abs()).exponent - 1
    return torch.exp2((exponent.clamp(min=1 - target.bias) - target.mantissa_bits).double())


def measure(out: Tensor, exact: Tensor, grad: Tensor, fmt: str) -> dict[str, float]:
    """Measure errors of O (R, D) against FP64, in spacings; columns of a row share its weights: rows are the sample.

    ``bias`` is the signed error of O, positive away from zero; ``delta_bias`` that of delta = rowsum(dO * O), over
    rowsum(|dO| * spacing); ``rms`` is of the errors of O. A spacing is at least that of an eighth of the row's root
    mean square: beside 0, where it vanishes, the error is not of this rounding but of P's.
    """
    size = exact.square().mean(-1, keepdim=True).sqrt()
    unit = spacing(torch.maximum(exact.abs(), size / 8), fmt)
    error = (out.double() - exact) / unit
    bias, interval = mean_of((error * exact.sign()).mean(-1))
    delta, delta_interval = mean_of((grad * unit * error).sum(-1) / (grad.abs() * unit).sum(-1))
    rms = float(error.square().mean().sqrt())
    return {"bias": bias, "interval": interval, "rms": rms, "delta_bias": delta, "delta_interval": delta_interval}


def mean_of(rows: Tensor) -> tuple[float, float]:
    """Return the mean of independent numbers, and half of its 95 % confidence interval."""
    return float(rows.mean()), Z_95 * float(rows.std()) / math.sqrt(len(rows))
