"""The accuracy gate: no time is shown of a call whose output is wrong.

A call passes when, against attention in FP64,

- its whole output and log-sum-exp are finite;
- its relative RMSE (Eq. 19) is at most twice that of the reference emulation of the same arithmetic on the same rows,
  or 2^-11, half a unit in the last place of an FP16 output;
- its log-sum-exp, where it gives one, is within 1e-3, or twice the emulation's error.

Attention that keeps scores in FP32 without a shift may err by what FP32 cannot hold: a tensor core adds D / 16 partial
sums, each with an error of up to one unit in the last place of the score (2^-23 of it). The allowance is nothing on
unbiased data and 9e-3 where scores reach 9,000. A log-sum-exp is as large as the scores, so all get it for that.

Where all rows would take too much memory, rows at the start, in the middle and at the end of four heads are compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import pasa
from pasa.eval.kit.errors import measure_errors
from pasa.eval.speed.cases import Inputs, SpeedCase

FACTOR = 2.0
RMSE_FLOOR = 2.0**-11
LSE_BOUND = 1e-3
FP32_UNIT = 2.0**-23
MMA_DEPTH = 16  # products that a tensor core adds in one step
ALL_BELOW = 2**26  # elements of the scores, or of the expanded keys, up to which every row is compared: 0.5 GB in FP64
SAMPLED_HEADS, SAMPLED_ROWS = 4, 128


@dataclass(frozen=True)
class Piece:
    """Consecutive rows, and how many keys they may see (a causal row sees none of the later ones)."""

    start: int
    stop: int
    keys: int


@dataclass(frozen=True)
class Verdict:
    """Errors of a call beside their limits; `why` is empty if the call passed."""

    rmse: float
    rmse_limit: float
    lse_error: float | None
    lse_limit: float
    nonfinite: int
    why: str

    @property
    def passed(self) -> bool:
        """Return whether a time may be shown."""
        return not self.why


@dataclass(frozen=True)
class Errors:
    """Relative RMSE, and the largest error of the log-sum-exp."""

    rmse: float
    lse: float


def sampled_pairs(case: SpeedCase) -> list[int]:
    """Return indices of (batch, head): all of them if the case is small, else a few spread over their range."""
    pairs = case.batch * case.heads
    if pairs * case.keys * max(case.rows, case.dim) <= ALL_BELOW:
        return list(range(pairs))
    count = min(SAMPLED_HEADS, pairs)
    return sorted({round(index * (pairs - 1) / max(count - 1, 1)) for index in range(count)})


def sampled_pieces(case: SpeedCase, pairs: int) -> list[Piece]:
    """Return the rows to compare of each of so many heads."""
    size = SAMPLED_ROWS
    if pairs * case.keys * case.rows <= ALL_BELOW or case.rows <= 3 * size:
        starts, size = [0], case.rows
    else:
        starts = [0, case.rows // 2 - size // 3, case.rows - size]
    shift = case.keys - case.rows if case.causal else case.keys
    return [Piece(start, start + size, min(case.keys, start + size + shift)) for start in starts]


class Gate:
    """Truth and emulations of one case, computed once each."""

    def __init__(self, case: SpeedCase, inputs: Inputs) -> None:
        self.case, self.inputs = case, inputs
        self.pairs = torch.tensor(sampled_pairs(case), device=inputs.q.device)
        self.pieces = sampled_pieces(case, len(self.pairs))
        golden = [pasa.golden_attention(*self._cut(piece), is_causal=case.causal) for piece in self.pieces]
        self.golden = torch.cat([out for out, _ in golden], 2)  # (pairs, 1, rows, D), as whatever is compared with it
        self.golden_lse = torch.cat([lse for _, lse in golden], 2)
        self._emulated: dict[pasa.PasaConfig, Errors] = {}

    @property
    def share(self) -> float:
        """Return the share of the output's rows that are compared."""
        rows = sum(piece.stop - piece.start for piece in self.pieces)
        return len(self.pairs) * rows / (self.case.batch * self.case.heads * self.case.rows)

    @property
    def resolution(self) -> float:
        """Return the largest rounding error of an unshifted FP32 score."""
        steps = math.ceil(self.case.dim / MMA_DEPTH)
        return steps * FP32_UNIT * float(self.golden_lse.abs().max())

    def _cut(self, piece: Piece) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sampled heads, each as a batch entry: (pairs, 1, rows or keys, D)."""
        keys = self.pairs // self.inputs.groups  # pairs count (batch, head) with equal groups in every batch entry
        q = self.inputs.q.flatten(0, 1)[self.pairs, None, piece.start : piece.stop]
        k, v = (x.flatten(0, 1)[keys, None, : piece.keys] for x in (self.inputs.k, self.inputs.v))
        return q, k, v

    def sampled(self, x: Tensor) -> Tensor:
        """Return the rows of an output (B, Hq, Sq, ...) that are compared, in the form of `golden`."""
        rows = x.flatten(0, 1)[self.pairs, None]
        return torch.cat([rows[:, :, piece.start : piece.stop] for piece in self.pieces], 2)

    def _errors(self, out: Tensor, lse: Tensor | None) -> Errors:
        worst = math.nan if lse is None else float((lse.double() - self.golden_lse).abs().max())
        return Errors(measure_errors(out, self.golden).rmse, worst)

    def emulated(self, config: pasa.PasaConfig) -> Errors:
        """Return the errors of the reference backend on the sampled rows."""
        if config not in self._emulated:
            options: dict[str, Any] = {"is_causal": self.case.causal, "config": config, "backend": "reference"}
            made = [pasa.attention(*self._cut(piece), return_lse=True, **options) for piece in self.pieces]
            self._emulated[config] = self._errors(*(torch.cat(part, 2) for part in zip(*made, strict=True)))
        return self._emulated[config]

    def judge(
        self, out: Tensor, lse: Tensor | None, emulation: pasa.PasaConfig, *, shifted: bool, limit: float | None = None
    ) -> Verdict:
        """Apply the gate of this module's docstring.

        Parameters
        ----------
        out : Tensor (B, Hq, Sq, D)
        lse : Tensor (B, Hq, Sq), optional
        emulation : PasaConfig
            The arithmetic to compare with.
        shifted : bool
            Whether a common bias of the keys is removed before scores are formed.
        limit : float, optional
            Of the RMSE, in place of the emulation's.
        """
        expected = (self.case.batch, self.case.heads, self.case.rows, self.case.dim)
        if tuple(out.shape) != expected:
            raise ValueError(f"output has shape {tuple(out.shape)}, expected {expected}")
        model = self.emulated(emulation)
        nonfinite = sum(int((~torch.isfinite(x)).sum()) for x in (out, lse) if x is not None)
        errors = self._errors(self.sampled(out), None if lse is None else self.sampled(lse))
        allowed = max(FACTOR * _number(model.rmse), RMSE_FLOOR) + (0.0 if shifted else self.resolution)
        rmse_limit = allowed if limit is None else limit
        lse_limit = max(FACTOR * _number(model.lse), LSE_BOUND) + self.resolution
        reasons = [f"{nonfinite} values are not finite"] if nonfinite else []
        if not errors.rmse <= rmse_limit:
            reasons.append(f"RMSE {errors.rmse:.2e}, limit {rmse_limit:.2e}")
        if lse is not None and not errors.lse <= lse_limit:
            reasons.append(f"LSE off by {errors.lse:.2e}, limit {lse_limit:.2e}")
        lse_error = None if lse is None else errors.lse
        return Verdict(errors.rmse, rmse_limit, lse_error, lse_limit, nonfinite, "; ".join(reasons))


def _number(value: float) -> float:
    """Return 0 in place of NaN: an emulation that overflows allows nothing."""
    return value if math.isfinite(value) else 0.0
