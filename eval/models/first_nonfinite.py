"""Finds the first module of a running model that turns finite inputs into NaN or infinity."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch


class NonFiniteWatch:
    """Context manager: watches every module of some models until the first one fails.

    Parameters
    ----------
    models : mapping of str to torch.nn.Module
        Their names begin the names of their modules; a model alone may have the name "".
    stop : bool, default False
        Leave the context at the first module that fails, in place of running on to the end.

    Attributes
    ----------
    first : dict or None
        ``module``, its ``kind`` (class), the ``call`` of its model (from 1: the denoising step, for a UNet), and
        ``origin``: True if its inputs were finite. A module that only hands on what it was given is named for want
        of a better one, when the values come from code outside of all modules. None if all was finite.
    """

    def __init__(self, models: Mapping[str, torch.nn.Module], *, stop: bool = False) -> None:
        self._models, self._stop = models, stop
        self._calls = dict.fromkeys(models, 0)
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.first: dict[str, Any] | None = None

    def __enter__(self) -> NonFiniteWatch:
        for model_name, model in self._models.items():
            self._hooks.append(model.register_forward_pre_hook(self._counter(model_name)))
            for path, module in model.named_modules():
                name = ".".join(part for part in (model_name, path) if part) or type(module).__name__
                self._hooks.append(module.register_forward_hook(self._checker(model_name, name), with_kwargs=True))
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        for hook in self._hooks:
            hook.remove()
        return isinstance(error, _FoundError)

    def _counter(self, model_name: str) -> Any:
        def count(module: torch.nn.Module, args: Any) -> None:
            self._calls[model_name] += 1

        return count

    def _checker(self, model_name: str, name: str) -> Any:
        def check(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if (self.first is not None and self.first["origin"]) or is_finite(output):
                return
            origin = is_finite((args, kwargs))
            if origin or self.first is None:
                call = self._calls[model_name]
                self.first = {"module": name, "kind": type(module).__name__, "call": call, "origin": origin}
            if origin and self._stop:
                raise _FoundError(name)

        return check


class _FoundError(Exception):
    """Ends a run that has shown what it was for."""


def models_of(model_or_pipeline: Any) -> dict[str, torch.nn.Module]:
    """The models of a diffusers pipeline by name; a model alone has the name ""."""
    if isinstance(model_or_pipeline, torch.nn.Module):
        return {"": model_or_pipeline}
    parts = model_or_pipeline.components.items()
    return {name: part for name, part in parts if isinstance(part, torch.nn.Module)}


def is_finite(value: Any) -> bool:
    """Tell whether every floating-point tensor in nested containers is finite."""
    extremes = (extreme for tensor in _tensors(value) for extreme in tensor.aminmax())  # NaN propagates
    return all(math.isfinite(extreme) for extreme in extremes)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.numel():
            yield value.detach()
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
