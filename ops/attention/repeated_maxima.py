"""Softmax shifts for rows that repeat their maximum: the published rule, and a bounded one.

Softmax does not see what is subtracted from all scores of a row, so either may add any `shift` to the row's maximum.
The aim is that no weight is exactly 1 where two are: products of such weights have the few mantissa bits of V alone,
and rounding their sum errs to one side ("Why Low-Precision Transformer Training Fails", arXiv:2510.04212).
It helps where P V is rounded before it is divided by l; otherwise the factor cancels (`numerics/dither.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pasa.ops.numerics.dither import lots

EPSILON = 1e-3  # of the published rule (section 4.1): scores so near their maximum repeat it
BETA = 2.0  # of its experiments; from 2 to 8
# The bounded shift in nats: weights of the maxima are exp(-0.2) to exp(-0.6), well inside of (1/2, 1).
SMALLEST, SPREAD = 0.2, 0.4


def repeats(scores: Tensor, top: Tensor, epsilon: float = EPSILON) -> Tensor:
    """Which rows (..., 1) of `scores` (..., n) have more than one within `epsilon` of their maximum `top` (..., 1)."""
    return (top - scores <= epsilon).sum(-1, keepdim=True) > 1


def published_shift(scores: Tensor, top: Tensor, frame: Tensor | float = 0.0, *, beta: float = BETA,
                    epsilon: float = EPSILON) -> Tensor:  # fmt: skip
    """What version 2 of the paper adds to the maximum (section 4.1, Algorithm 3, lines 7 to 9).

    With r = top + frame the true maximum: (beta - 1) r where r > 0 repeats, -r where r < 0 repeats, else 0. The largest
    weight is then exp(-(beta - 1) r) or exp(r), which is 0 in FP16 from |r| = 17.4 on, and in FP32 from 104.

    Parameters
    ----------
    scores : Tensor (..., n)
        Of one block, less `frame`.
    top : Tensor (..., 1)
        Their maximum.
    frame : Tensor (..., 1) or float
        What the true scores have more; unlike softmax, this rule depends on it.
    """
    r = top + frame
    tied = repeats(scores, top, epsilon)
    return torch.where(tied & (r > 0), (beta - 1) * r, torch.where(tied & (r < 0), -r, 0.0))


def bounded_shift(tied: Tensor, top: Tensor) -> Tensor:
    """0.2 to 0.6 nats where `tied`, drawn by the bits of the maximum `top` (..., 1); else 0.

    A constant would put the same rounding error on every such row, which is the bias again (appendix C of the paper).
    Never underflows, whatever the maximum; 0 is a maximum like others.
    """
    bits = top.float().contiguous().view(torch.int32).long() & 0xFFFFFFFF
    drawn = SMALLEST + SPREAD * 2.0**-16 * lots(bits).to(top.dtype)
    return torch.where(tied, drawn, 0.0)
