"""Builds models small, the same way for transformers and for diffusers, and finds inputs that they accept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from pasa.eval.models.zoo.inputs import Inputs
from pasa.eval.models.zoo.judging import line

MOST_PARAMETERS = 60_000_000
REPAIRS = 8  # of one candidate for the inputs


def first_that_runs(
    levels: Sequence[str], make: Callable[[str], Any], accepted: Callable[[Any], tuple[Inputs | None, str]]
) -> tuple[Any, Inputs] | str:
    """Return the smallest model that can be built and run, with its inputs, or why the smallest level has none."""
    reasons = []
    for level in levels:
        try:
            model = make(level)
        except Exception as error:
            reasons.append(f"{level}: {type(error).__name__}: {line(error)[:150]}")
            continue
        inputs, why = accepted(model)
        if inputs is not None:
            return model, inputs
        reasons.append(f"{level}: {why}")
    return reasons[0]


def small(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Build a model of FP32 weights that attention matters to.

    Raises
    ------
    ValueError
        If it has more than `MOST_PARAMETERS`.
    """
    torch.manual_seed(0)
    with torch.device("meta"):
        size = sum(each.numel() for each in make().parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size // 1_000_000} million parameters")
    return spread(make().float().eval())


def spread(model: torch.nn.Module) -> torch.nn.Module:
    """Give weights a size at which attention matters.

    Common initial values are so small, or zero (gates, layer scales, adaptive norms), that an output is nearly its
    input, whatever attention does. Matrices are drawn to keep the RMS of what they multiply.
    """
    for each in model.parameters():
        if not each.is_floating_point():
            continue
        if each.ndim > 1:
            each.data.normal_(std=(each.numel() / each.shape[0]) ** -0.5)
        else:
            each.data.add_(0.1 * torch.randn_like(each))
    return model


def accepted(
    model: Any,
    candidates: Iterable[Inputs],
    describe: Callable[[Inputs], str],
    repaired: Callable[[Inputs, str], Inputs | None] = lambda inputs, message: None,
) -> tuple[Inputs | None, list[str]]:
    """Return the first candidate that the model runs on, mended where an error says how, and why others failed."""
    reasons: list[str] = []
    torch.manual_seed(0)
    for candidate in candidates:
        inputs: Inputs | None = candidate
        for _ in range(REPAIRS):
            if inputs is None:
                break
            try:
                with torch.no_grad():
                    model(**inputs)
                return inputs, reasons
            except Exception as error:
                reasons.append(f"{describe(inputs)}: {type(error).__name__}: {line(error)[:120]}")
                inputs = repaired(inputs, str(error))
    return None, reasons or ["no inputs are known for its forward"]
