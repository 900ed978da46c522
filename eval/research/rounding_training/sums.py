"""Sums over the steps of a run: what the errors of delta and of W_Q's gradient add up to, head by head."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

TINY = 1e-30  # in place of a sum that is 0, which divides


class ErrorSums:
    """Errors of delta at each step, and sums of the errors of W_Q's gradient."""

    def __init__(self) -> None:
        self.delta_errors: list[Tensor] = []  # (layers, heads) a step
        self.delta_sizes: list[Tensor] = []
        self.weight_error: Tensor | float = 0.0  # (layers, heads, D, width)
        self.weight_squares: Tensor | float = 0.0  # (layers, heads), as is the next
        self.weight_gradient: Tensor | float = 0.0

    def add_delta(self, error: Tensor, size: Tensor) -> None:
        """Add one step: the sum of delta_lp - delta_hp, and that of |delta_hp|, (layers, heads)."""
        self.delta_errors.append(error.cpu())
        self.delta_sizes.append(size.cpu())

    def add_weight(self, error: Tensor, gradient: Tensor) -> None:
        """Add one step: the error of W_Q's gradient, and the gradient, (layers, heads, D, width)."""
        self.weight_error = self.weight_error + error
        self.weight_squares = self.weight_squares + error.square().sum((-2, -1))
        self.weight_gradient = self.weight_gradient + gradient.square().sum((-2, -1))

    def accumulated(self) -> Tensor:
        """Return the sum of delta's errors so far over the root of the sum of their squares, (steps, layers, heads).

        Of errors whose signs are independent from step to step it has deviation 1; of equal ones it is sqrt(steps).
        """
        errors = torch.stack(self.delta_errors)
        return errors.cumsum(0) / errors.square().cumsum(0).sqrt().clamp(min=TINY)

    def curve(self) -> list[float]:
        """Return the root mean square of `accumulated` over heads, step by step."""
        curve: list[float] = self.accumulated().square().mean((1, 2)).sqrt().tolist()
        return curve

    def summary(self) -> dict[str, Any]:
        """Return the sums of the whole run, each (layers, heads) as a list."""
        errors, sizes = torch.stack(self.delta_errors), torch.stack(self.delta_sizes).sum(0)
        squares, gradient = (torch.as_tensor(each) for each in (self.weight_squares, self.weight_gradient))
        lengths = torch.linalg.matrix_norm(torch.as_tensor(self.weight_error))
        return {
            "delta_accumulated": self.accumulated()[-1].tolist(),
            "delta_relative": (errors.sum(0) / sizes.clamp(min=TINY)).tolist(),
            "delta_positive_steps": (errors > 0).float().mean(0).tolist(),
            "weight_accumulated": (lengths / squares.sqrt().clamp(min=TINY)).tolist(),
            "weight_relative": (squares / gradient).sqrt().tolist(),
        }


def interval(name: str, values: Tensor) -> dict[str, float]:
    """Return the mean of independent values (n,), and half of its 95 % confidence interval."""
    half = 1.96 * float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return {name: float(values.mean()), f"{name}_95": half}
