"""The accuracy gate of the speed benchmark: a call whose output is wrong gets no time (eval/speed/README.md: Gate).

Attention that keeps unshifted scores in FP32 is allowed their rounding error too. A tensor core adds D / 16 partial
sums, and each addition errs by up to one unit in the last place of the score (2^-23 of it). On unbiased data this
allows almost nothing; where scores reach 9,000 it allows 9e-3. The limit of the log-sum-exp includes this allowance for
every implementation, because a log-sum-exp is as large as the scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import pasa
from pasa.eval.kit.error_metrics import MMA_DEPTH, measure_errors
from pasa.eval.speed.cases import Inputs, SpeedCase

FACTOR = 2.0  # a call may err by so many times the emulation's error
RMSE_FLOOR = 2.0**-11  # relative; half a unit in the last place of FP16
LSE_BOUND = 1e-3  # nats
FP32_SPACING = 2.0**-23
# Up to so many scores, or elements of the expanded keys (0.5 GB in FP64), all rows are compared; above, samples.
ALL_BELOW = 2**26
SAMPLED_HEADS, SAMPLED_ROWS = 4, 128


@dataclass(frozen=True)
class Verdict:
    """Errors of a call beside their limits; `why` is empty if the call passed, so that its time may be shown."""

    rmse: float
    rmse_limit: float
    lse_error: float | None
    nonfinite: int
    why: str


def sampled_pairs(case: SpeedCase) -> list[int]:
    """Return indices of (batch, head): all of them if the case is small, else a few spread over their range.

    The emulation takes padded sequences one at a time, so only a few are compared.
    """
    pairs = case.batch * case.heads
    if not case.padded and pairs * case.keys * max(case.rows, case.dim) <= ALL_BELOW:
        return list(range(pairs))
    count = min(SAMPLED_HEADS, pairs)
    return sorted({round(index * (pairs - 1) / max(count - 1, 1)) for index in range(count)})


def sampled_pieces(case: SpeedCase, pairs: int) -> list[tuple[slice, slice]]:
    """Return the rows to compare in each of `pairs` heads, and the keys they see: all, or first, middle and last."""
    size = SAMPLED_ROWS
    if pairs * case.keys * case.rows <= ALL_BELOW or case.rows <= 3 * size:
        starts, size = [0], case.rows
    else:
        starts = [0, case.rows // 2 - size // 3, case.rows - size]
    shift = case.keys - case.rows if case.causal else case.keys
    return [(slice(start, start + size), slice(min(case.keys, start + size + shift))) for start in starts]


class Gate:
    """The accuracy gate of one case: computes its FP64 output once, and each emulation once."""

    def __init__(self, case: SpeedCase, inputs: Inputs) -> None:
        self.case, self.inputs = case, inputs
        self.pairs = torch.tensor(sampled_pairs(case), device=inputs.q.device)
        self.pieces = sampled_pieces(case, len(self.pairs))
        golden = [pasa.golden_attention(*self._cut(*piece), **self._visibility(*piece)) for piece in self.pieces]
        # (pairs, 1, rows, D) and (pairs, 1, rows), like the outputs compared
        self.golden, self.golden_lse = (torch.cat(part, 2) for part in zip(*golden, strict=True))
        # Rows of padding see no key. Their outputs are never read, so nobody is judged by them.
        self.padding = self.golden_lse == -torch.inf
        self.golden_lse.masked_fill_(self.padding, 0.0)
        # The share of the output's rows that are compared, and the largest rounding error of an unshifted FP32 score.
        self.share = self.golden_lse.numel() / (case.batch * case.heads * case.rows)
        self.resolution = math.ceil(case.dim / MMA_DEPTH) * FP32_SPACING * float(self.golden_lse.abs().max())
        self._emulated: dict[pasa.PasaConfig, tuple[float, float]] = {}

    def _cut(self, rows: slice, visible: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sampled heads, each as a batch entry: (pairs, 1, rows or keys, D)."""
        # A pair is batch * heads + head, so this is batch * kv_heads + kv_head.
        heads = self.pairs // (self.case.heads // self.case.kv_heads)
        k, v = (x.flatten(0, 1)[heads, None, visible] for x in (self.inputs.k, self.inputs.v))
        return self.inputs.q.flatten(0, 1)[self.pairs, None, rows], k, v

    def _visibility(self, rows: slice, visible: slice) -> dict[str, Any]:
        """Return the causality of a piece and its part of the mask (pairs, 1, rows, keys)."""
        mask, case = self.inputs.mask, self.case
        if mask is None:
            return {"is_causal": case.causal}
        return {"attn_mask": mask.expand(-1, 1, case.rows, -1)[self.pairs // case.heads][:, :, rows, visible]}

    def sampled(self, x: Tensor) -> Tensor:
        """Select the compared rows of an output (B, Hq, Sq, ...), in the layout of `golden`."""
        chosen = x.flatten(0, 1)[self.pairs, None]
        return torch.cat([chosen[:, :, rows] for rows, _ in self.pieces], 2)

    def _errors(self, out: Tensor, lse: Tensor | None) -> tuple[float, float]:
        """Return the relative RMSE of sampled rows, and the largest error of their log-sum-exp (NaN without one)."""
        out = out.masked_fill(self.padding.unsqueeze(-1), 0.0)
        if lse is None:
            return measure_errors(out, self.golden).rmse, math.nan
        worst = float((lse.double().masked_fill(self.padding, 0.0) - self.golden_lse).abs().max())
        return measure_errors(out, self.golden).rmse, worst

    def emulated(self, config: pasa.PasaConfig) -> tuple[float, float]:
        """Return the errors of the reference backend on the sampled rows."""
        if config not in self._emulated:
            options = {"return_lse": True, "config": config, "backend": "reference"}
            visible = [self._visibility(*piece) | options for piece in self.pieces]
            made = [
                pasa.attention(*self._cut(*piece), **each) for piece, each in zip(self.pieces, visible, strict=True)
            ]
            out, lse = (torch.cat(part, 2) for part in zip(*made, strict=True))
            self._emulated[config] = self._errors(out, lse)
        return self._emulated[config]

    def judge(
        self, out: Tensor, lse: Tensor | None, emulation: pasa.PasaConfig, *, shifted: bool, limit: float | None = None
    ) -> Verdict:
        """Compare an output (B, Hq, Sq, D) with FP64, by the limits in the docstring of this module.

        The error of the `emulation` sets the limits; `limit` replaces that of the RMSE. A `shifted` implementation
        removes a common bias of the keys before it forms scores, so it is not allowed the rounding of large ones.
        """
        expected = (self.case.batch, self.case.heads, self.case.rows, self.case.dim)
        if tuple(out.shape) != expected:
            raise ValueError(f"output has shape {tuple(out.shape)}, expected {expected}")
        if self.inputs.mask is not None:
            padding = ~self.inputs.mask.any(-1)
            out = out.masked_fill(padding.unsqueeze(-1), 0.0)
            lse = None if lse is None else lse.masked_fill(padding, 0.0)
        # An emulation that overflows has NaN or infinity as its error, and allows none.
        model_rmse, model_lse = (x if math.isfinite(x) else 0.0 for x in self.emulated(emulation))
        nonfinite = sum(int((~torch.isfinite(x)).sum()) for x in (out, lse) if x is not None)
        rmse, lse_error = self._errors(self.sampled(out), None if lse is None else self.sampled(lse))
        allowed = max(FACTOR * model_rmse, RMSE_FLOOR) + (0.0 if shifted else self.resolution)
        rmse_limit = allowed if limit is None else limit
        lse_limit = max(FACTOR * model_lse, LSE_BOUND) + self.resolution
        reasons = [f"{nonfinite} values are not finite"] if nonfinite else []
        if not rmse <= rmse_limit:
            reasons.append(f"RMSE {rmse:.2e}, limit {rmse_limit:.2e}")
        if lse is not None and not lse_error <= lse_limit:
            reasons.append(f"LSE off by {lse_error:.2e}, limit {lse_limit:.2e}")
        return Verdict(rmse, rmse_limit, None if lse is None else lse_error, nonfinite, "; ".join(reasons))
