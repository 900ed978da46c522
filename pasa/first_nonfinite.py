"""Finds the first module of a running model that turns finite inputs into NaN or infinity."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch


class NonFiniteWatch:
    """Context manager that watches every module of some models until the first one fails.

    The name of a model begins the names of its modules; a model alone may have the name "". With `stop`, the context is
    left at the first module that fails. `first` is None if all was finite. Else it has the ``module``, its ``kind``
    (class), the ``call`` of its model (from 1: the denoising step, for a UNet), and ``origin``, True if the inputs of
    the module were finite. Values from code outside of all modules have no origin: then the first module that hands
    them on is named.
    """

    def __init__(self, models: Mapping[str, torch.nn.Module], *, stop: bool = False) -> None:
        named: object = models
        if not isinstance(named, Mapping):
            kind = type(named).__name__
            raise TypeError(f"NonFiniteWatch: {kind} is no map of models by name: for one model pass {{'': model}}")
        for name, model in models.items():
            if not isinstance(model, torch.nn.Module) or isinstance(model, torch.jit.ScriptModule):
                raise TypeError(
                    f"NonFiniteWatch: {name!r} is a {type(model).__name__}, not a torch.nn.Module with hooks"
                )
        self._models, self._stop = models, stop
        self._calls = dict.fromkeys(models, 0)
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.first: dict[str, Any] | None = None

    def __enter__(self) -> NonFiniteWatch:
        self.first, self._calls = None, dict.fromkeys(self._models, 0)
        for model_name, model in self._models.items():
            self._hooks.append(model.register_forward_pre_hook(partial(self._count, model_name)))
            for path, module in model.named_modules():
                name = ".".join(part for part in (model_name, path) if part) or type(module).__name__
                check = partial(self._check, model_name, name)
                self._hooks.append(module.register_forward_hook(check, with_kwargs=True))
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        for hook in self._hooks:
            hook.remove()
        return isinstance(error, _StopError)

    def _count(self, model_name: str, module: torch.nn.Module, args: Any) -> None:
        self._calls[model_name] += 1

    def _check(self, model_name: str, name: str, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if (self.first is not None and self.first["origin"]) or is_finite(output):
            return
        origin = is_finite((args, kwargs))
        if origin or self.first is None:
            call = self._calls[model_name]
            self.first = {"module": name, "kind": type(module).__name__, "call": call, "origin": origin}
        if origin and self._stop:
            raise _StopError(name)


class _StopError(Exception):
    """Ends a run at the first module that fails."""


def models_of(model_or_pipeline: Any) -> dict[str, torch.nn.Module]:
    """Return the models of a diffusers pipeline by name; a model alone has the name ""."""
    if isinstance(model_or_pipeline, torch.nn.Module):
        return {"": model_or_pipeline}
    parts = model_or_pipeline.components.items()
    return {name: part for name, part in parts if isinstance(part, torch.nn.Module)}


def is_finite(value: Any) -> bool:
    """Tell whether every tensor of floating-point or complex numbers in nested containers is finite."""
    return all(math.isfinite(extreme) for tensor in _tensors(value) for extreme in tensor.aminmax())  # NaN propagates


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if (value.is_floating_point() or value.is_complex()) and not value.is_meta:
            yield from filter(torch.Tensor.numel, _numbers(value.detach()))
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


def _numbers(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the numbers of a tensor in a layout and a dtype whose extremes torch can compute."""
    if tensor.is_nested:
        yield from (each for part in tensor.unbind() for each in _numbers(part))
    elif tensor.layout == torch.sparse_coo:
        yield from _numbers(tensor._values())
    elif tensor.layout != torch.strided:
        yield from _numbers(tensor.values())
    elif tensor.is_complex():
        yield torch.view_as_real(tensor.resolve_conj())
    else:
        yield tensor.float() if tensor.element_size() == 1 else tensor  # no extremes of FP8
