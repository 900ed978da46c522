"""Shift the softmax of rows whose maximum occurs more than once, by the published rule or by a bounded one.

Softmax does not change when all scores of a row move by the same amount, so both rules may add any
`shift` to the row's maximum. The aim is that no weight is exactly 1 in rows where two would be.
Products of such weights have only the few mantissa bits of V, and rounding their sum has a
one-sided error ("Why Low-Precision Transformer Training Fails", arXiv:2510.04212). A shift helps where P V is
rounded before it is divided by l. Otherwise the factor cancels (`numerics/dither.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pasa.ops.numerics.dither import random_bits

EPSILON = 1e-3  # in nats: scores this close to a row's maximum repeat it (section 4.1 of the paper)
BETA = 2.0  # factor of the published rule; the paper's experiments use 2 to 8
# The bounded shift is SMALLEST to SMALLEST + SPREAD nats. Weights of the maxima become exp(-0.2) to
# exp(-0.6), well inside (1/2, 1).
SMALLEST, SPREAD = 0.2, 0.4


def repeats(scores: Tensor, top: Tensor, epsilon: float = EPSILON) -> Tensor:
    """Return which rows (..., 1) have several `scores` (..., n) within `epsilon` of their maximum `top` (..., 1)."""
    return (top - scores <= epsilon).sum(-1, keepdim=True) > 1


def published_shift(scores: Tensor, top: Tensor, frame: Tensor | float = 0.0, *, beta: float = BETA,
                    epsilon: float = EPSILON) -> Tensor:  # fmt: skip
    """Return what version 2 of the paper adds to the maximum (section 4.1, Algorithm 3, lines 7 to 9).

    With r = top + frame the true maximum: (beta - 1) r where r > 0 repeats, -r where r < 0 repeats, else 0. The largest
    weight is then exp(-(beta - 1) r) or exp(r), which is 0 in FP16 from |r| = 17.4 on, and in FP32 from 104.

    Parameters
    ----------
    scores : Tensor (..., n)
        Scores of one block, minus `frame`.
    top : Tensor (..., 1)
        Maximum of each row of `scores`.
    frame : Tensor (..., 1) or float
        What was subtracted from the true scores. This rule depends on it, unlike softmax.
    """
    r = top + frame
    tied = repeats(scores, top, epsilon)
    return torch.where(tied & (r > 0), (beta - 1) * r, torch.where(tied & (r < 0), -r, 0.0))


def bounded_shift(tied: Tensor, top: Tensor) -> Tensor:
    """Return a shift of 0.2 to 0.6 nats for `tied` rows, hashed from their maximum `top` (..., 1), and 0 for others.

    A constant shift would give every such row the same rounding error, which is a bias again (appendix
    C of the paper). The shift is too small to underflow a weight, whatever the maximum, and a maximum
    of 0 is treated like any other.
    """
    bits = top.float().contiguous().view(torch.int32).long() & 0xFFFFFFFF
    picked = SMALLEST + SPREAD * 2.0**-16 * random_bits(bits).to(top.dtype)
    return torch.where(tied, picked, 0.0)
