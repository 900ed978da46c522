"""Merge the outputs of chunks of keys by their log-sum-exps (LSE) and the frames of these LSEs."""

from __future__ import annotations

import torch
from torch import Tensor


def frame_scores(q: Tensor, shift: Tensor, scale: float) -> Tensor:
    """Return what a frame adds to the scores of rows: scale * q.f, in FP64.

    q has shape (B, Hq, R, D), the frame (B, Hkv, 1, D), the result (B, Hq, R).
    """
    rows = q.double().unflatten(1, (shift.shape[1], -1))
    scores: Tensor = (rows @ shift.unsqueeze(2).mT).squeeze(-1).flatten(1, 2) * scale
    return scores


def frame_gradient(of_lse: Tensor, shift: Tensor, scale: float) -> Tensor:
    """Return what a frame adds to the gradient of q, scale * f times the gradient of the LSE: (B, Hq, R, D), FP32."""
    rows = of_lse.unflatten(1, (shift.shape[1], -1)).unsqueeze(-1)
    gradient: Tensor = (rows * (scale * shift).float().unsqueeze(2)).flatten(1, 2)
    return gradient


class Merge:
    """Weighted mean of the outputs of chunks, in FP32, to be rounded once.

    The weights are exp(LSE - largest LSE so far) over their sum. So the result is always a mean
    within the range of the values, even if the LSEs are inexact. Its error is at most the largest
    of the chunks' errors, plus one rounding, plus the error of the LSEs times the range of the
    values.

    Parameters
    ----------
    q : Tensor (B, Hq, S, D)
        Gives shape and device.
    wide : bool
        Whether LSEs are compared in FP64, because the frames of chunks differ (frames.py).
    """

    def __init__(self, q: Tensor, wide: bool = False) -> None:
        self.out = q.new_zeros(q.shape, dtype=torch.float32)
        self.top = q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float64 if wide else torch.float32)
        self.sum = torch.zeros_like(self.top, dtype=torch.float32)

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Add the result of a chunk: output (B, Hq, R, D), LSE (B, Hq, R). Each row must see some key of the chunk."""
        old = self.top[:, :, rows]
        top = torch.maximum(old, lse)
        keep, new = torch.exp(old - top).float(), torch.exp(lse - top).float()
        self.top[:, :, rows] = top
        self.sum[:, :, rows].mul_(keep).add_(new)
        self.out[:, :, rows].mul_(keep.unsqueeze(-1)).addcmul_(out, new.unsqueeze(-1))

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return the output in FP32, and the LSE in the dtype in which LSEs were compared. Call it once, at the end."""
        return self.out.div_(self.sum.unsqueeze(-1)), self.top + torch.log(self.sum)
