"""Implement policy="auto": patch the modules whose weights allow an overflow, and watch the others with a guard."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from pasa.patching import components_of
from pasa.patching.callbacks import patched_modules
from pasa.patching.guard import Guard
from pasa.patching.handle import PatchHandle, PatchReport
from pasa.prediction import Prediction, predict_overflow
from pasa.prediction.checkpoint import Live
from pasa.prediction.families import Layer, find_layers, supported
from pasa.prediction.predict import sources_of
from pasa.prediction.table import PATCHED

Host = Callable[[Callable[[str, torch.nn.Module], bool]], PatchHandle]
_UNPATCHED: weakref.WeakKeyDictionary[Any, PatchHandle] = weakref.WeakKeyDictionary()
"""Handles of models that needed no patch.

The keys are weak references instead of id(), because a later model may get the id of one that was freed.
"""


def patch(root: Any, host: Host) -> PatchHandle:
    """Patch the modules that are predicted to overflow or cannot be predicted, and put a guard on the others.

    Parameters
    ----------
    root : torch.nn.Module or pipeline
        The model to patch.
    host : callable
        Patches the model by the policy that it takes, and returns the handle.

    Raises
    ------
    NotImplementedError, ValueError
        From :func:`pasa.predict_overflow` or from `host`.
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
        handle = _without_patch(root, declined)  # the host raised only because no module was chosen
    if not handle.guarded:
        handle.watch(Guard(_layers(root, declined), handle), _reasons(prediction, declined))
    return handle


def _without_patch(root: Any, declined: list[str]) -> PatchHandle:
    """Return a handle on a model that stays unpatched; raise ValueError if another handle has patched part of it."""
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
    """Return whether a handle that patched none of the model's modules is in force."""
    handle = _UNPATCHED.get(root)
    return handle is not None and handle.active


def _layers(root: Any, names: list[str]) -> dict[str, tuple[Layer, torch.nn.Module]]:
    """Return the layer of each named module, with the model to which the layer's tensor names belong."""
    layers: dict[str, tuple[Layer, torch.nn.Module]] = {}
    for prefix, source in sources_of(root).items():
        if isinstance(source, Live) and supported(source.config):
            layers |= {prefix + layer.name: (layer, source.model) for layer in find_layers(source)}
    return {name: layers[name] for name in dict.fromkeys(names)}


def _reasons(prediction: Prediction, names: list[str]) -> dict[str, str]:
    """Return why each named module was left unpatched: the verdict on its worst head."""
    worst = {row.module: row for row in reversed(prediction.rows)}
    return {
        name: f"predicted {row.verdict}: |q.k| up to {row.probable:,.0f}, for any input {row.proven:,.0f}"
        for name, row in ((name, worst[name]) for name in names)
    }
