"""Three ways to choose what a layer's logits are divided by before they are rounded to E4M3, behind one interface."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from pasa import concentration
from pasa.ops.numerics.formats import E4M3_MAX
from pasa.power_iteration import PowerIteration

HISTORY, ETA, INITIAL = 16, 0.9, 1.0
"""Delayed scaling as the paper runs it (appendix G): steps remembered, margin, and what the history starts with."""


@dataclass(frozen=True)
class LayerWeights:
    """Weights of the logits: q and k projections (Hq * D, d), (Hkv * D, d) with the norm's gain folded in."""

    query: Tensor
    key: Tensor
    heads: int
    kv_heads: int

    @property
    def head_dim(self) -> int:
        """Return D."""
        return self.query.shape[0] // self.heads


class Scaling:
    """One layer's scale factor from step to step; without state unless a method keeps some."""

    def scale(self, weights: LayerWeights, largest: float) -> float:
        """Return the divisor of this step's logits; `largest` is max|S| of this step, which `Current` alone may use."""
        raise NotImplementedError

    def observe(self, largest: float) -> None:
        """Take in max|S| after the step."""

    def reset(self) -> None:
        """Lose all state, as a resumed run does."""


class Delayed(Scaling):
    """max(history) / (448 eta), as FP8 training does; it misses weights that change faster than its history."""

    def __init__(self) -> None:
        self.reset()

    def scale(self, weights: LayerWeights, largest: float) -> float:
        """Return the scale of past steps."""
        return max(self.history) / (E4M3_MAX * ETA)

    def observe(self, largest: float) -> None:
        """Remember the step."""
        self.history.append(largest)

    def reset(self) -> None:
        """Forget the history, which is not part of a checkpoint."""
        self.history = deque([INITIAL], maxlen=HISTORY)


class Current(Scaling):
    """max|S| / 448: never overflows, and needs the whole score matrix before its first element can be rounded."""

    def scale(self, weights: LayerWeights, largest: float) -> float:
        """Return the scale of the logits themselves."""
        return max(largest, torch.finfo(torch.float32).tiny) / E4M3_MAX


class Geometry(Scaling):
    """alpha * |M| d / sqrt(D) / (0.8 * 448), |M| by power iteration on the weights of this very step.

    per_head: |M| of the worst head, which bounds every head. Otherwise of the sum over heads, as the paper has it; a
    head may exceed that, since heads can cancel in the sum.
    """

    def __init__(self, alpha: float, *, per_head: bool = True) -> None:
        self.alpha, self.per_head = alpha, per_head
        self.power: PowerIteration | None = None
        self.bound = math.nan  # B_max of the last step, for auto-alpha

    def scale(self, weights: LayerWeights, largest: float) -> float:
        """Return the scale of the weights."""
        if self.power is None:
            generator = torch.Generator().manual_seed(0)
            self.power = PowerIteration(weights.heads, weights.kv_heads, per_head=self.per_head, generator=generator)
        norm = float(self.power.update(weights.query, weights.key).max())
        self.bound = norm * weights.query.shape[1] / math.sqrt(weights.head_dim)
        return concentration.geometry_scale(self.alpha * self.bound)

    def reset(self) -> None:
        """Start from random vectors again, with 5 steps."""
        self.power = None


class AutoAlpha(Geometry):
    """`Geometry` whose alpha is set from what a burn-in used of the bound (algorithm 4), then frozen."""

    def __init__(self, alpha: float) -> None:
        super().__init__(alpha)
        self.slack: list[float] = []

    def observe(self, largest: float) -> None:
        """Collect the slack ratio of this step."""
        self.slack.append(largest / self.bound)

    def calibrate(self) -> None:
        """End the burn-in."""
        if self.slack:
            self.alpha = concentration.auto_alpha(self.slack)
