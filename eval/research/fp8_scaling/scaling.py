"""Three ways to choose what a layer's logits are divided by before they are rounded to E4M3, behind one interface."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pasa import concentration
from pasa.ops.numerics.formats import FORMATS
from pasa.power_iteration import PowerIteration

E4M3_MAX = FORMATS["fp8_e4m3"].max
HISTORY, ETA, INITIAL = 16, 0.9, 1.0
"""Delayed scaling as the paper runs it (appendix G): steps remembered, margin, and what the history starts with."""


@dataclass(frozen=True)
class LayerWeights:
    """What logits are made by: q and k projections (Hq * D, d), (Hkv * D, d) with the norm's gain folded in."""

    query: Tensor
    key: Tensor
    heads: int
    kv_heads: int

    @property
    def head_dim(self) -> int:
        """D."""
        return self.query.shape[0] // self.heads


class Scaling(Protocol):
    """One layer's scale factor from step to step."""

    def scale(self, weights: LayerWeights, largest: float) -> float:
        """What this step's logits are divided by; `largest` is max|S| of this step, which only `Current` may know."""
        ...

    def observe(self, largest: float) -> None:
        """Told max|S| after the step."""
        ...

    def reset(self) -> None:
        """Lose all state, as a resumed run does."""
        ...


class Delayed:
    """max(history) / (448 eta): what FP8 training does; blind to weights that change faster than its history."""

    def __init__(self) -> None:
        self.reset()

    def scale(self, weights: LayerWeights, largest: float) -> float:
        """From past steps."""
        return max(self.history) / (E4M3_MAX * ETA)

    def observe(self, largest: float) -> None:
        """Remember."""
        self.history.append(largest)

    def reset(self) -> None:
        """Forget: the history is not part of a checkpoint."""
        self.history = deque([INITIAL], maxlen=HISTORY)


class Current:
    """max|S| / 448: never overflows, and needs the whole score matrix before its first element can be rounded."""

    def scale(self, weights: LayerWeights, largest: float) -> float:
        """From the logits themselves."""
        return max(largest, torch.finfo(torch.float32).tiny) / E4M3_MAX

    def observe(self, largest: float) -> None:
        """Nothing to remember."""

    def reset(self) -> None:
        """Nothing to lose."""


class Geometry:
    """alpha * |M| d / sqrt(D) / (0.8 * 448), |M| by power iteration on the weights of this very step.

    Parameters
    ----------
    alpha : float
    per_head : bool, default True
        |M| of the worst head, which bounds every head. False: of the sum over heads, as the paper has it; a head may
        exceed that, since heads can cancel in the sum.
    seed : int
        Of the first vectors.
    """

    def __init__(self, alpha: float, *, per_head: bool = True, seed: int = 0) -> None:
        self.alpha, self.per_head, self.seed = alpha, per_head, seed
        self.power: PowerIteration | None = None
        self.bound = math.nan  # B_max of the last step, for auto-alpha

    def scale(self, weights: LayerWeights, largest: float) -> float:
        """From the weights."""
        if self.power is None:
            generator = torch.Generator().manual_seed(self.seed)
            self.power = PowerIteration(weights.heads, weights.kv_heads, per_head=self.per_head, generator=generator)
        norm = float(self.power.update(weights.query, weights.key).max())
        self.bound = norm * weights.query.shape[1] / math.sqrt(weights.head_dim)
        return concentration.geometry_scale(self.alpha * self.bound)

    def observe(self, largest: float) -> None:
        """Not told: predictive."""

    def reset(self) -> None:
        """Start from random vectors again, with 5 steps."""
        self.power = None


class AutoAlpha(Geometry):
    """`Geometry` whose alpha is set from what a burn-in used of the bound (algorithm 4), then frozen."""

    def __init__(self, alpha: float, *, kappa: float = 1.0) -> None:
        super().__init__(alpha)
        self.kappa = kappa
        self.slack: list[float] = []

    def observe(self, largest: float) -> None:
        """Collect the slack ratio of this step."""
        self.slack.append(largest / self.bound)

    def calibrate(self) -> None:
        """End the burn-in."""
        if self.slack:
            self.alpha = concentration.auto_alpha(self.slack, kappa=self.kappa)
