"""Projections as the bounds see them: the norm before, the weights of each head, and what roundings add."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pasa.roundings import ELEMENT_UNITS, FP16_HALF_STEP, MEAN_UNITS, RELATIVE, constant_level, unevenness


@dataclass(frozen=True)
class Norm:
    """What is known of an attention layer's input: x = gain * n + shift with |n| <= radius.

    Attributes
    ----------
    radius : float
        sqrt(d) for RMSNorm and LayerNorm; they reach it only where their epsilon does not matter.
    gain, shift : Tensor (d,), optional
    centred : bool
        The elements of n sum to zero (LayerNorm): what the projections do to the direction of ones is of no account.
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
    """One projection with all that precedes it folded in, per head: n -> A n + offset. Small: A itself is not kept.

    Attributes
    ----------
    gram : Tensor (H, D, D), FP64
        A Aᵀ, whose largest eigenvalue is ``|A|^2``.
    offset : Tensor (H, D), FP64
    hidden : Tensor (H,), FP64
        Length that A n + offset has not, and what rounding works on has: the products with the direction of ones and
        with the shift may cancel, but the roundings of the elements of x do not know of each other.
    absolute : Tensor (H,), FP64
        Length that the absolute parts of FP16's roundings (2^-25 each) can add to q, before later roundings enlarge it.
        That of an element of n reaches q through the gain and the weights, that of an element of x through the weights;
        an element of q has one, and its rotation two (two products; a sum of FP16 numbers has none). So it is at most
        2^-25 times | |A| 1 | + | |W| 1 | + 3 sqrt(D), where 1 is the vector of ones and |A| has the magnitudes of A.
    uneven : Tensor (H,), FP64
        Length that the FP32 roundings within a centred norm can add to q of a row that is not constant.
    level : float
        Largest element that a centred norm makes of a constant row, 0 without one: then q is level A 1 + offset.
    ones : Tensor (H, D), FP64
        A 1, with the direction of ones.
    level_hidden : Tensor (H,), FP64
        What later roundings work on in such a row besides the length of q.
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
        """Bound on the relative rounding error of an eigenvalue of `gram`.

        Forming A Aᵀ in FP64 errs by at most d eps trace(A Aᵀ) and a symmetric eigensolver by a few D eps of the norm;
        the trace is at most D times the norm.
        """
        dim = self.gram.shape[-1]
        return 2.0 * dim * (self.fan_in + 10 * dim) * torch.finfo(torch.float64).eps


def project(weight: Tensor, bias: Tensor | None, heads: int, norm: Norm) -> Projection:
    """Fold the norm before a projection, and its bias, into what the bounds need.

    Parameters
    ----------
    weight : Tensor (H * D, d)
        As of `torch.nn.Linear`; any floating dtype, read exactly.
    bias : Tensor (H * D,), optional
    heads : int
        H.
    norm : Norm
        Of the input.
    """
    weight = weight.detach()
    folded = weight.to("cpu", torch.float64, copy=True).unflatten(0, (heads, -1))  # not every accelerator has FP64
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
        common, level = ones.norm(dim=-1), constant_level(norm.eps)  # an error of the mean is one of all elements
        separate = ELEMENT_UNITS + RELATIVE * (MEAN_UNITS + ELEMENT_UNITS)  # element by element, later ones included
        uneven = unevenness(weight.shape[1]) * (MEAN_UNITS * common + separate * reach)
        level_hidden = level * reach + hidden
        hidden = hidden + norm.radius / math.sqrt(weight.shape[1]) * common
        folded.sub_(ones[..., None] / weight.shape[1])
    gram, size = folded @ folded.mT, weight.shape[1]
    return Projection(gram, offset, hidden, absolute, uneven, level, ones, level_hidden, norm.radius, size)


def _reach_of_ones(weight: Tensor) -> Tensor:
    """Return the longest W e for errors |e| <= 1 of the elements, (H,): the length of the sums of magnitudes."""
    sums: Tensor = torch.linalg.vector_norm(weight, 1, dim=-1)  # without a copy of the weights
    longest: Tensor = sums.norm(dim=-1)
    return longest
