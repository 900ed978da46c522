"""Describe query and key projections by the sizes that bounds on scores need, rounding errors included."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pasa.roundings import ELEMENT_UNITS, FP16_HALF_STEP, MEAN_UNITS, RELATIVE, constant_level, unevenness


@dataclass(frozen=True)
class Norm:
    """The norm before an attention layer: the layer's input is x = gain * n + shift with |n| <= radius.

    Attributes
    ----------
    radius : float
        sqrt(d) for RMSNorm and LayerNorm. Outputs reach this length only if epsilon is negligible.
    gain, shift : Tensor (d,), optional
    centred : bool
        True if the elements of n sum to zero (LayerNorm). The vector of ones is then orthogonal to n, so the
        projections' component along it is removed.
    eps : float
        Epsilon of a centred norm, added to the variance.
    """

    radius: float
    gain: Tensor | None = None
    shift: Tensor | None = None
    centred: bool = False
    eps: float = 1e-5


@dataclass(frozen=True)
class Projection:
    """One projection with the norm before it folded in, per head: n -> A n + offset.

    Sizes of A are kept, but not A itself, which is as large as the weight.

    Attributes
    ----------
    gram : Tensor (H, D, D), FP64
        A Aᵀ, whose largest eigenvalue is ``|A|^2``.
    offset : Tensor (H, D), FP64
        Projection of the norm's shift, plus the bias.
    hidden : Tensor (H,), FP64
        Length to add to |A n + offset| before relative rounding errors are applied. In q, the products with the vector
        of ones and with the shift may cancel. The elements of x are rounded independently, so their errors do not
        cancel.
    absolute : Tensor (H,), FP64
        Length that the absolute parts of FP16's roundings (2^-25 each) can add to q, before later roundings enlarge it.
        It is at most 2^-25 times | |A| 1 | + | |W| 1 | + 3 sqrt(D). Here 1 is the vector of ones, and |A| holds the
        magnitudes of the elements of A. The first term is for the elements of n, which reach q through the gain and
        the weights. The second is for the elements of x, which reach q through the weights alone. The third is for an
        element of q: one part when it is computed, and two in its rotation (two products; a sum of FP16 numbers has
        none).
    uneven : Tensor (H,), FP64
        Length that the FP32 roundings within a centred norm can add to q of a row that is not constant.
    level : float
        Largest element that a centred norm makes of a constant row; 0 if the norm is not centred. Then q is
        level A 1 + offset.
    ones : Tensor (H, D), FP64
        A 1, before the vector of ones is removed from A.
    level_hidden : Tensor (H,), FP64
        Like `hidden`, for a constant row.
    radius : float
        Largest length of n.
    fan_in : int
        d, the number of elements of n.
    """

    gram: Tensor
    offset: Tensor
    hidden: Tensor
    absolute: Tensor
    uneven: Tensor
    level: float
    ones: Tensor
    level_hidden: Tensor
    radius: float
    fan_in: int

    @property
    def slack(self) -> float:
        """Return a bound on the relative rounding error of an eigenvalue of `gram`.

        Forming A Aᵀ in FP64 errs by at most d eps trace(A Aᵀ), and the trace is at most D times the norm. A symmetric
        eigensolver errs by a few D eps of the norm.
        """
        dim = self.gram.shape[-1]
        return 2.0 * dim * (self.fan_in + 10 * dim) * torch.finfo(torch.float64).eps


def project(weight: Tensor, bias: Tensor | None, heads: int, norm: Norm) -> Projection:
    """Return the projection that the bounds need, with the norm before it and its bias folded in.

    Parameters
    ----------
    weight : Tensor (H * D, d)
        Weight in the layout of `torch.nn.Linear`, of any floating dtype; it is converted without rounding.
    bias : Tensor (H * D,), optional
    heads : int
        H, the number of heads.
    norm : Norm
        The norm of the input.
    """
    weight = weight.detach()
    folded = weight.to("cpu", torch.float64, copy=True).unflatten(0, (heads, -1))  # some accelerators lack FP64
    offset = folded.new_zeros(folded.shape[:2])
    hidden = folded.new_zeros(heads)
    absolute = _reach_of_ones(folded) + 3.0 * math.sqrt(folded.shape[1])
    if norm.shift is not None:
        shift = norm.shift.detach().to(folded)
        offset = offset + folded @ shift
        hidden = hidden + (folded.abs() @ shift.abs()).norm(dim=-1)
    if bias is not None:
        offset = offset + bias.detach().to(folded).unflatten(0, (heads, -1))
    if norm.gain is not None:
        folded.mul_(norm.gain.detach().to(folded))
    reach = _reach_of_ones(folded)
    absolute = FP16_HALF_STEP * (absolute + reach)
    ones, level, uneven, level_hidden = folded.sum(-1), 0.0, torch.zeros_like(hidden), hidden
    if norm.centred:
        common, level = ones.norm(dim=-1), constant_level(norm.eps)  # an error of the mean moves all elements alike
        separate = ELEMENT_UNITS + RELATIVE * (MEAN_UNITS + ELEMENT_UNITS)  # of single elements, and of later roundings
        uneven = unevenness(weight.shape[1]) * (MEAN_UNITS * common + separate * reach)
        level_hidden = level * reach + hidden
        hidden = hidden + norm.radius / math.sqrt(weight.shape[1]) * common
        folded.sub_(ones[..., None] / weight.shape[1])
    gram, size = folded @ folded.mT, weight.shape[1]
    return Projection(gram, offset, hidden, absolute, uneven, level, ones, level_hidden, norm.radius, size)


def _reach_of_ones(weight: Tensor) -> Tensor:
    """Return a bound (H,) on |W e| for all e with elements |e_i| <= 1: the length of the vector of row sums of |W|."""
    sums: Tensor = torch.linalg.vector_norm(weight, 1, dim=-1)  # makes no copy of the weights
    longest: Tensor = sums.norm(dim=-1)
    return longest
