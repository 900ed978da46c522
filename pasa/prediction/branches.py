"""Bounds on what a norm, an MLP and attention can return, element by element, with all roundings to FP16.

A norm's result is h = gain * n + shift with |n| <= sqrt(d), whatever its input. So W h + b is bounded row by row, and
what an MLP or attention adds to a residual stream is bounded by its weights alone. Some n reaches each row's bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pasa.geometry import spectral_norm
from pasa.projections import Norm
from pasa.roundings import (
    ELEMENT_UNITS,
    FP16_HALF_STEP,
    FP16_UNIT,
    MEAN_UNITS,
    constant_level,
    unevenness,
)

RELATIVE = (1.0 + FP16_UNIT) ** 5 - 1.0
"""Bound on the relative error that W h has before a bias is added.

Three roundings to FP16 make h: of n, of gain * n, and of the sum with the shift. The fourth is of W h. The fifth covers
the norm's own arithmetic in FP32, whose relative error is far smaller.
"""
WEIGHT_SUM = 2.0**-7
"""Largest excess over 1 of a sum of attention weights.

Each of them has a relative error of 2^-11 and an absolute one of 2^-25 in FP16; 2^17 keys add up to 0.0044.
"""


@dataclass(frozen=True)
class Affine:
    """Describe W h + b behind a norm: A n + c, with bounds on what roundings of h add.

    Attributes
    ----------
    matrix : Tensor (F, d), FP64
        A = W * gain. Behind a centred norm the direction of ones, which is orthogonal to n, is taken out.
    radius : float
        Largest length of n, sqrt(d).
    constant : Tensor (F,), FP64
        c = W shift + b.
    flat : Tensor (F,), FP64
        What a constant row adds to c: a centred norm makes rounding noise over sqrt(eps) of such a row.
    noise : Tensor (F,), FP64
        Bound on what roundings of h add to each element.
    """

    matrix: Tensor
    radius: float
    constant: Tensor
    flat: Tensor
    noise: Tensor

    @property
    def exact(self) -> Tensor:
        """Return the largest magnitude of A n for each row, (F,)."""
        return torch.maximum(self.radius * self.matrix.norm(dim=1), self.flat.abs())

    @property
    def rows(self) -> Tensor:
        """Return the largest magnitude of each element in FP16, (F,)."""
        return stored(self.exact + self.constant.abs() + self.noise)

    def length(self) -> float:
        """Return a bound on the length of W h + b in FP16."""
        small = self.matrix if self.matrix.shape[0] <= self.matrix.shape[1] else self.matrix.mT
        slack = 2.0 * len(small) * (small.shape[1] + 10 * len(small)) * torch.finfo(torch.float64).eps
        norm = float(spectral_norm(small @ small.mT, slack))
        length = max(self.radius * norm, float(self.flat.norm())) + float(self.constant.norm() + self.noise.norm())
        return min(length * (1.0 + FP16_UNIT) + FP16_HALF_STEP * math.sqrt(len(self.flat)), float(self.rows.norm()))


def stored(values: Tensor) -> Tensor:
    """Return bounds on the magnitudes of values after they are rounded to FP16."""
    return values * (1.0 + FP16_UNIT) + FP16_HALF_STEP


def normed(norm: Norm) -> Tensor:
    """Return the largest magnitude of each element of a norm's result, (d,)."""
    gain, shift = _vectors(norm)
    size = max(norm.radius, constant_level(norm.eps)) if norm.centred else norm.radius
    return (size * gain.abs() + shift.abs()) * (1.0 + RELATIVE) + 2.0 * FP16_HALF_STEP * (1.0 + gain.abs())


def affine(weight: Tensor, bias: Tensor | None, norm: Norm) -> Affine:
    """Return W h + b behind a norm.

    Parameters
    ----------
    weight : Tensor (F, d)
        Weight in the layout of `torch.nn.Linear`, of any floating dtype; it is converted without rounding.
    bias : Tensor (F,), optional
    norm : Norm
        The norm of the input, with a gain.
    """
    weight = _exact(weight)
    gain, shift = _vectors(norm)
    matrix, size = weight * gain, weight.abs()
    constant, added = weight @ shift, torch.zeros(len(weight), dtype=torch.float64)
    if bias is not None:
        added = _exact(bias)
    moved, flat = norm.radius * matrix.norm(dim=1), torch.zeros_like(constant)
    noise = RELATIVE * (size @ shift.abs()) + 2.0 * FP16_HALF_STEP * (1.0 + size @ (1.0 + gain.abs()))
    if norm.centred:
        ones, reach, level = matrix.sum(1), matrix.abs().sum(1), constant_level(norm.eps)
        noise += unevenness(matrix.shape[1]) * (MEAN_UNITS * ones.abs() + (ELEMENT_UNITS + RELATIVE) * reach)
        moved, flat = torch.maximum(moved, level * reach), level * ones
        matrix = matrix - ones[:, None] / matrix.shape[1]
    return Affine(matrix, norm.radius, constant + added, flat, noise + RELATIVE * moved)


@dataclass(frozen=True)
class Product:
    """Bounds on what enters an MLP's last projection: each element (F,), the length, and the sum of magnitudes."""

    rows: Tensor
    length: float
    total: float


def activated(up: Affine) -> Product:
    """Return bounds on act(W h + b) for an activation with |act(t)| <= |t|."""
    return Product(stored(up.rows), up.length() * (1.0 + FP16_UNIT) ** 2, math.inf)


def gated(gate: Affine, up: Affine) -> Product:
    """Return bounds on act(gate) * up, element by element, for an activation with |act(t)| <= |t|.

    The largest |(a.n) (b.n)| over |n| <= r is r^2 (|a| |b| + |a.b|) / 2. The sum of the magnitudes is at most the
    product of the lengths of gate and up.
    """
    rows = gate.rows * up.rows
    if not (gate.flat.any() or up.flat.any()):
        lengths = gate.matrix.norm(dim=1) * up.matrix.norm(dim=1)
        rows = rows - gate.radius**2 * (lengths - (gate.matrix * up.matrix).sum(1).abs()) / 2.0
    rows = stored(rows * (1.0 + FP16_UNIT) + FP16_HALF_STEP * up.rows)  # roundings of act(gate) and of the product
    steps = 2.0 * FP16_HALF_STEP * float((1.0 + up.rows).sum())
    total = (1.0 + FP16_UNIT) ** 2 * gate.length() * up.length() + steps
    return Product(rows, min(float(rows.norm()), math.sqrt(total * float(rows.max()))), total)


def projected(product: Product, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the largest magnitude of each element that an MLP's last projection, (d, F), makes of its input."""
    weight = _exact(weight)
    size = weight.abs()
    rows = torch.minimum(size @ product.rows, weight.norm(dim=1) * product.length)
    rows = torch.minimum(rows, size.amax(1) * product.total) if math.isfinite(product.total) else rows
    return _biased(rows, bias)


def attended(value: Affine, weight: Tensor, bias: Tensor | None, heads: int, kv_heads: int) -> Tensor:
    """Return the largest magnitude of each element of attention's result, (d,), behind its output projection.

    Attention returns, head by head, a mean of values: of the same token's or of others'. So the bounds of heads add.

    Parameters
    ----------
    value : Affine
        The values of all key heads, (Hkv * D).
    weight : Tensor (d, Hq * D)
    bias : Tensor (d,), optional
    heads, kv_heads : int
        Hq and Hkv.
    """
    weight = _exact(weight)
    dim = len(value.constant) // kv_heads
    rows = torch.zeros(len(weight), dtype=torch.float64)
    for head in range(heads):
        part = weight[:, head * dim : (head + 1) * dim]
        own = slice(head // (heads // kv_heads) * dim, (head // (heads // kv_heads) + 1) * dim)
        moved = value.radius * (part @ value.matrix[own]).norm(dim=1)
        moved = torch.maximum(moved, (part @ value.flat[own]).abs())
        rounding = value.noise[own] + 3.0 * FP16_UNIT * value.rows[own] + 2.0 * FP16_HALF_STEP
        rows += (1.0 + WEIGHT_SUM) * (moved + (part @ value.constant[own]).abs() + part.abs() @ rounding)
    return _biased(rows, bias)


def mixed(rows: list[Tensor]) -> Tensor:
    """Return the largest magnitude of each element, (d,), of a mean of experts' results by a router's weights."""
    grown = (1.0 + FP16_UNIT) ** (len(rows) + 4)  # roundings of weights, of products, and of the sum over experts
    return torch.stack(rows).amax(0) * grown + 4.0 * FP16_HALF_STEP * len(rows)


def _biased(rows: Tensor, bias: Tensor | None) -> Tensor:
    """Return bounds on a projection's result, which may be rounded before and after its bias is added."""
    return stored(rows) if bias is None else stored(stored(rows) + _exact(bias).abs())


def _vectors(norm: Norm) -> tuple[Tensor, Tensor]:
    """Return the gain and the shift of a norm in FP64, (d,) each."""
    if norm.gain is None:
        raise ValueError("a norm without a gain has no size: pass a gain of ones")
    gain = _exact(norm.gain)
    return gain, torch.zeros_like(gain) if norm.shift is None else _exact(norm.shift)


def _exact(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)
