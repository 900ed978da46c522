"""Signed errors in spacings of the format, with confidence intervals clustered by row."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pasa.ops.numerics.formats import FORMATS

Z_95 = 1.959964  # of a normal distribution


@dataclass(frozen=True)
class Mean:
    """A mean over rows and its standard error."""

    value: float
    error: float

    def interval(self, z: float = Z_95) -> float:
        """Return half of the confidence interval."""
        return z * self.error

    def includes(self, value: float, z: float) -> bool:
        """Return whether the interval includes a value."""
        return abs(self.value - value) <= self.interval(z)


@dataclass(frozen=True)
class Bias:
    """Errors that rounding makes in rows."""

    out: Mean  # signed error of O: positive away from zero
    delta: Mean  # error of delta = rowsum(dO * O), over rowsum(|dO| * spacing)
    rms: float  # of the errors of O


def spacing(x: Tensor, fmt: str) -> Tensor:
    """Return the distance between the values of the format around `x`, FP64."""
    target = FORMATS[fmt]
    exponent = torch.frexp(x.double().abs()).exponent - 1
    return torch.exp2((exponent.clamp(min=1 - target.bias) - target.mantissa_bits).double())


def measure(out: Tensor, exact: Tensor, grad: Tensor, fmt: str) -> Bias:
    """Measure errors of O (R, D) against FP64, in spacings; columns of a row share its weights: rows are the sample.

    A spacing is at least that of an eighth of the row's root mean square: beside 0, where it vanishes, the error is not
    of this rounding but of P's.
    """
    size = exact.square().mean(-1, keepdim=True).sqrt()
    unit = spacing(torch.maximum(exact.abs(), size / 8), fmt)
    error = (out.double() - exact) / unit
    delta = (grad * unit * error).sum(-1) / (grad.abs() * unit).sum(-1)
    return Bias(mean_of((error * exact.sign()).mean(-1)), mean_of(delta), float(error.square().mean().sqrt()))


def mean_of(rows: Tensor) -> Mean:
    """Return mean and standard error of independent numbers."""
    return Mean(float(rows.mean()), float(rows.std()) / math.sqrt(len(rows)))
