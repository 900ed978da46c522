"""policy="auto": patch what the weights say can overflow, leave the rest on its own attention, and watch it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from pasa.patching import components_of
from pasa.patching.guard import Guard
from pasa.patching.handle import PatchHandle, PatchReport
from pasa.patching.onlookers import patched_modules
from pasa.prediction import Prediction, predict_overflow
from pasa.prediction.checkpoint import Live
from pasa.prediction.families import Layer, find_layers, supported
from pasa.prediction.predict import sources_of
from pasa.prediction.table import PATCHED

Host = Callable[[Callable[[str, torch.nn.Module], bool]], PatchHandle]
_UNPATCHED: weakref.WeakKeyDictionary[Any, PatchHandle] = weakref.WeakKeyDictionary()
"""Handles of models that needed no patch; not by id(), which the next model may have once this one is gone."""


def patch(root: Any, host: Host) -> PatchHandle:
    """Patch what is predicted to overflow, or cannot be predicted, with the function that patches by a policy.

    Raises
    ------
    NotImplementedError, ValueError
        As :func:`pasa.predict_overflow`; as `host`.
    """
    prediction = predict_overflow(root)
    marked, predicted = set(prediction.modules(*PATCHED)), set(prediction.modules())
    chosen: list[str] = []
    declined: list[str] = []

    def policy(name: str, module: torch.nn.Module) -> bool:
        needed = name in marked or name not in predicted
        (chosen if needed else declined).append(name)
        return needed

    try:
        handle = host(policy)
    except NotImplementedError:
        if chosen or not declined:
            raise
        handle = _without_patch(root, declined)  # nothing was chosen, which is all that the host complains of
    if not handle.guarded:
        handle.watch(Guard(_layers(root, declined), handle), _reasons(prediction, declined))
    return handle


def _without_patch(root: Any, declined: list[str]) -> PatchHandle:
    """A handle on a model that keeps all of its attention; ValueError where another handle has patched some of it."""
    for name, _, _ in patched_modules(components_of(root)):
        raise ValueError(f"patch_pipeline: {name} is already patched; call unpatch() on that handle first")
    known = _UNPATCHED.get(root)
    if known is not None and known.active:
        return known
    report = PatchReport(
        f"policy auto: {type(root).__name__}", (), tuple((name, "") for name in dict.fromkeys(declined))
    )
    handle = PatchHandle(report, lambda: None)
    _UNPATCHED[root] = handle
    return handle


def leaves_alone(root: Any) -> bool:
    """Whether a handle is in force that patched nothing."""
    handle = _UNPATCHED.get(root)
    return handle is not None and handle.active


def _layers(root: Any, names: list[str]) -> dict[str, tuple[Layer, torch.nn.Module]]:
    """The layers of these modules, with the model that their tensor names are of."""
    found: dict[str, tuple[Layer, torch.nn.Module]] = {}
    for prefix, source in sources_of(root).items():
        if isinstance(source, Live) and supported(source.config):
            found |= {prefix + layer.name: (layer, source.model) for layer in find_layers(source)}
    return {name: found[name] for name in dict.fromkeys(names)}


def _reasons(prediction: Prediction, names: list[str]) -> dict[str, str]:
    """Why each module was left alone: the verdict on its worst head."""
    worst = {row.module: row for row in reversed(prediction.rows)}
    return {
        name: f"predicted {row.verdict}: |q.k| up to {row.probable:,.0f}, for any input {row.proven:,.0f}"
        for name, row in ((name, worst[name]) for name in names)
    }
