"""Builds models small, the same way for transformers and for diffusers, and finds inputs that they accept."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from pasa.eval.kit.output import error_line

MOST_PARAMETERS = 60_000_000
REPAIRS = 8  # of one candidate for the inputs
FIELDS: dict[str, Any] = json.loads(Path(__file__).with_name("fields.json").read_text(encoding="utf-8"))
"""How fields are made small, by patterns of their names (``caps``; null keeps a field), and the fields that single
architectures need beside that: configurations of transformers by model type, constructors of diffusers by class, and
components of pipelines by patterns of the pipeline and of the component."""
Inputs = dict[str, Any]


def first_that_runs(
    levels: Sequence[str],
    make: Callable[[str], Any],
    candidates: Callable[[Any], Iterable[Inputs]],
    repaired: Callable[[Inputs, str], Inputs | None] = lambda inputs, message: None,
) -> tuple[Any, Inputs] | str:
    """Return the smallest model that can be built and run, with its inputs, or why the smallest level has none.

    Inputs are the first candidate that the model accepts, repaired where an error says how.
    """
    reasons = []
    for level in levels:
        try:
            model = make(level)
        except Exception as error:
            reasons.append(f"{level}: {error_line(error)[:150]}")
            continue
        torch.manual_seed(0)
        for candidate in candidates(model):
            inputs: Inputs | None = candidate
            for _ in range(REPAIRS):
                if inputs is None:
                    break
                try:
                    with torch.no_grad():
                        model(**inputs)
                    return model, inputs
                except Exception as error:
                    reasons.append(f"{level}: {', '.join(inputs)}: {error_line(error)[:150]}")
                    inputs = repaired(inputs, str(error))
    return reasons[0] if reasons else "no inputs are known for its forward"


def small(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Build a model of FP32 weights that attention matters to; refuse one of more than `MOST_PARAMETERS`.

    Common initial values are so small, or zero (gates, layer scales, adaptive norms), that an output is nearly its
    input, whatever attention does. So matrices are drawn anew, to keep the RMS of what they multiply.
    """
    torch.manual_seed(0)
    with torch.device("meta"):
        size = sum(each.numel() for each in make().parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size // 1_000_000} million parameters")
    model = make().float().eval()
    for each in model.parameters():
        if each.is_floating_point() and each.ndim > 1:
            each.data.normal_(std=(each.numel() / each.shape[0]) ** -0.5)
        elif each.is_floating_point():
            each.data.add_(0.1 * torch.randn_like(each))
    return model


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    """Return what a function takes by name."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    known = inspect.signature(function).parameters
    return {name: each for name, each in known.items() if name != "self" and each.kind not in kinds}


def required(known: dict[str, inspect.Parameter]) -> list[str]:
    """Return the names of parameters without a default."""
    return [name for name, each in known.items() if each.default is inspect.Parameter.empty]


def cap(name: str, rules: Sequence[tuple[str, Any]], **named: int) -> float:
    """Return the largest value that the first rule for a field allows; a rule may have the name of a value."""
    value = next((cap for pattern, cap in rules if re.search(pattern, name)), None)
    return math.inf if value is None else named.get(value, value)


def find(config: Any, *names: str, default: int) -> int:
    """Return the first of these fields that is a number, in the configuration or one below it."""
    parts = [config, *(part for part in vars(config).values() if hasattr(part, "to_dict"))]
    for name in names:
        for part in parts:
            value = getattr(part, name, None)
            value = value[-1] if isinstance(value, (list, tuple)) and value else value
            if type(value) is int:
                return value
    return default
