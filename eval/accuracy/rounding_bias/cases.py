"""Rows whose weight is shared by repeated maxima, and rows whose weight is not: scores, values and gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

import pasa
from pasa.ops.attention.spec.repeated_maxima import EPSILON
from pasa.ops.numerics.formats import round_to

Place = Literal["quotient", "product"]

KEYS, BLOCK_K = 64, 32
AT: dict[str, tuple[int, ...]] = {
    "random": (),
    "one": (3,),
    "two": (3, 17),
    "near": (3, 17),
    "blocks": (3, 49),
    "three": (3, 9, 17),
    "four": (3, 9, 17, 25),
    "five": (3, 9, 17, 25, 29),
    "six": (3, 9, 17, 25, 29, 30),
    "seven": (3, 9, 17, 25, 27, 29, 30),
}
"""Keys that hold the maximum; "near": all but the first are up to `EPSILON` below it."""
TAIL_SCALE = {"smaller": 0.125, "mixed": 0.125, "same": 1.0, "larger": 8.0}
# Values of one binade share a grid, so the mean of n of them is a multiple of an n-th of the spacing that rounds it.
ONE_BINADE = (1.0, 2.0)
# Nats by which the other keys lie below the maximum: together they move an output by less than a tenth of a spacing.
BELOW = {"bf16": (10.0, 13.0), "fp16": (12.0, 15.0)}
LARGEST_MAXIMUM = 6.0  # |r_m|, up to which the published rule keeps its weights in FP16


@dataclass(frozen=True)
class Case:
    """A kind of rows.

    `maxima` says how the row's weight is shared (a key of `AT`; "random": scores N(0, 4), no tie), `tail` how large the
    values of the other keys are ("mixed": of either sign), `values` how |v| of the maxima is drawn ("normal", or
    "one binade"), and `one_signed` whether a column's values have one sign. In the places of rounding `gated` BF16 must
    meet the bounds for repeated maxima, because the remainder has one sign there. The quotient weighs it against the
    maxima, so any smaller tail is one; the product does not.
    """

    maxima: str
    tail: str
    values: str = "normal"
    one_signed: bool = True
    gated: tuple[Place, ...] = ()

    @property
    def name(self) -> str:
        """Name the case uniquely."""
        spread = "" if self.values == "normal" else f", {self.values}"
        return f"{self.maxima}, {self.tail} tail{spread}" + ("" if self.one_signed else ", symmetric V")


CASES = (
    *(Case(maxima, "smaller", gated=("quotient", "product")) for maxima in ("two", "near", "blocks")),
    *(Case(maxima, "mixed", gated=("quotient",)) for maxima in ("two", "near", "blocks")),
    Case("two", "same"),
    Case("two", "larger"),
    Case("two", "smaller", one_signed=False),
    Case("three", "smaller"),
    Case("four", "smaller"),
    Case("one", "smaller"),
    Case("random", "same"),
    Case("random", "same", one_signed=False),
    *(Case(maxima, "smaller", "one binade") for maxima in ("three", "four", "five", "six", "seven")),
)
CONTROLS = ("one", "random")  # nothing repeats: nothing may change


@dataclass(frozen=True)
class Rows:
    """Independent rows: each has its own keys and values, since rows that share values share their rounding errors.

    `scores` (R, KEYS) and `values` (R, KEYS, D) are FP32, the values rounded to the output's format. `grad` (R, D) is
    dO in FP64, of the sign of its column's values where they have one: the correlation of the paper's figure 5.
    """

    scores: Tensor
    values: Tensor
    grad: Tensor

    def exact(self) -> Tensor:
        """Return O (R, D) in FP64: the golden attention over keys that pick the scores out of the queries."""
        rows = len(self.scores)
        keys = torch.eye(KEYS).expand(1, rows, KEYS, KEYS)
        queries, values = self.scores.view(1, rows, 1, KEYS), self.values.unsqueeze(0)
        return pasa.golden_attention(queries, keys, values, scale=1.0)[0][0, :, 0]


def make_rows(case: Case, fmt: str, rows: int, dim: int, generator: torch.Generator) -> Rows:
    """Return rows of a case for outputs of the format; r_m is uniform in +/-[1, 6]."""

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=generator)

    magnitude = torch.randn(rows, KEYS, dim, generator=generator).abs()
    column = torch.randn(rows, 1, dim, generator=generator).sign()
    each_sign = torch.randn(rows, KEYS, dim, generator=generator).sign()
    signs = column.expand_as(each_sign).clone() if case.one_signed else each_sign
    grad = column.squeeze(1) * torch.randn(rows, dim, generator=generator).abs()
    if case.maxima == "random":
        return Rows(2 * torch.randn(rows, KEYS, generator=generator), round_to(signs * magnitude, fmt), grad.double())
    at = list(AT[case.maxima])
    top = uniform(1, LARGEST_MAXIMUM, rows, 1) * torch.randn(rows, 1, generator=generator).sign()
    scores = top - uniform(*BELOW[fmt], rows, KEYS)
    scores[:, at] = top.expand(-1, len(at))
    if case.maxima == "near":
        scores[:, at[1:]] -= uniform(0, EPSILON, rows, len(at) - 1)
    if case.values != "normal":
        magnitude[:, at] = uniform(*ONE_BINADE, rows, len(at), dim)
    tail = torch.ones(KEYS, dtype=torch.bool)
    tail[at] = False
    magnitude[:, tail] *= TAIL_SCALE[case.tail]
    if case.tail == "mixed":
        signs[:, tail] = each_sign[:, tail]
    return Rows(scores, round_to(signs * magnitude, fmt), grad.double())
