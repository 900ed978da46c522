"""Finds modules that return values beyond FP16's range, in a run of a wider dtype."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pasa.eval.models.diagnose.streams import REMEDY
from pasa.ops.numerics.formats import FP16_MAX


@contextmanager
def module_peaks(models: Mapping[str, torch.nn.Module]) -> Iterator[dict[str, float]]:
    """Collect the largest finite magnitude that each module returns, in the order in which modules first return."""
    peaks: dict[str, float] = {}

    def keep(name: str, module: torch.nn.Module, args: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.layout == torch.strided and leaf.numel():
                peak = float(leaf.detach().abs().amax()) if not leaf.is_meta else 0.0
                if math.isfinite(peak):
                    peaks[name] = max(peak, peaks.get(name, 0.0))

    hooks = [
        module.register_forward_hook(partial(keep, ".".join(filter(None, (prefix, path))) or type(model).__name__))
        for prefix, model in models.items()
        for path, module in model.named_modules()
    ]
    try:
        yield peaks
    finally:
        for hook in hooks:
            hook.remove()


def beyond_fp16(peaks: Mapping[str, float]) -> dict[str, Any] | None:
    """Return the first module that returns values beyond 65504, its peak, and how many do; None if none does."""
    beyond = [(name, peak) for name, peak in peaks.items() if peak > FP16_MAX]
    return {"module": beyond[0][0], "peak": beyond[0][1], "modules": len(beyond)} if beyond else None


def advice(beyond: Mapping[str, Any] | None) -> str:
    """Return a sentence on modules that attention cannot help; empty if there are none."""
    if not beyond:
        return ""
    count = beyond["modules"]
    return (
        f"Values that {count} module{'s' * (count > 1)} return{'s' * (count == 1)} pass 65504, first those of "
        f"{beyond['module']} ({beyond['peak']:,.0f}): run {REMEDY}. Attention that cannot overflow does not "
        "change them."
    )
