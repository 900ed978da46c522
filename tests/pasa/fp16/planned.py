"""Plans of models, plans applied without a change of precision, and distances between results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pasa.fp16 import editing, factors
from pasa.fp16.conversion import Conversion
from pasa.fp16.planning import Plan


def planned(model: Any, run: Callable[[Any], object]) -> Plan:
    """Return the powers of two for a model, which is left as it was; `run` calls the model."""
    conversion = Conversion({"": model}, lambda: run(model), 4.0)
    try:
        conversion.plan_and_convert()
    finally:
        conversion.restore()
    return conversion.plan


def scale(model: torch.nn.Module, plan: Plan) -> None:
    """Scale a model in its own precision."""
    for name, tensor in editing.named_tensors({"": model}):
        tensor.data = editing.scaled(name, tensor.data, plan)
    editing.scale_constants({"": model}, plan)
    for name, power in plan.epilogues.items():
        epilogue = factors.Epilogue()
        epilogue.factor = 2.0**-power
        model.get_submodule(name).register_forward_hook(epilogue)
    list(factors.hook_prologues(dict(model.named_modules()), plan.prologues, plan.entries))


def distance(result: Tensor, truth: Tensor) -> float:
    """Return the largest difference, relative to the largest value; infinite if the result holds NaN."""
    ratio = ((result.double() - truth.double()).abs().max() / truth.double().abs().max()).item()
    return math.inf if math.isnan(ratio) else ratio


def largest_distance(results: Mapping[str, Tensor], truths: Mapping[str, Tensor]) -> float:
    """Return the largest distance of tensors of the same names."""
    assert results.keys() == truths.keys()
    return max(distance(results[name], truth) for name, truth in truths.items())


def psnr(result: Tensor, truth: Tensor) -> float:
    """Return the peak signal-to-noise ratio in dB."""
    difference = (result.double() - truth.double()).square().mean().item()
    return 10 * math.log10((truth.max() - truth.min()).item() ** 2 / max(difference, 1e-300))
