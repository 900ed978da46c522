"""Hooks of a scaled model: they scale its inputs and outputs, and run its FP32 islands."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from pasa.fp16.editing import Models, module_at
from pasa.fp16.planning import Plan
from pasa.fp16.tracing import float_leaves


def hook_entries(
    models: Models, plan: Plan, known: Mapping[str, set[str]], returned: Mapping[str, set[str]]
) -> Iterable[Any]:
    """Scale what enters and restore what leaves the outermost modules; refuse tensors that the sample did not hold.

    Parameters
    ----------
    known, returned : dict of str to set of str
        Paths of the floating-point inputs and outputs of each outermost module, as the trace saw them.
    """
    for name in plan.inputs:
        module = module_at(models, name)
        title = name or type(module).__name__
        inputs = _Inputs(title, module, plan.inputs[name], known.get(name, set()))
        yield module.register_forward_pre_hook(inputs, with_kwargs=True)
        yield module.register_forward_hook(_Outputs(title, plan.outputs.get(name, {}), returned.get(name, set())))


class _Inputs:
    """Scales the inputs of an outermost module, and refuses calls that its powers of two do not fit."""

    def __init__(self, name: str, module: torch.nn.Module, powers: dict[str, int], known: set[str]) -> None:
        self.name, self.powers, self.known = name, powers, known
        kinds = inspect.Parameter
        parameters = inspect.signature(module.forward).parameters.values()  # read once: it costs 50 us
        self.positional = [each.name for each in parameters if each.kind <= kinds.POSITIONAL_OR_KEYWORD]
        self.named = {each.name for each in parameters if each.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)}
        self.rest = [each.name for each in parameters if each.kind == kinds.VAR_POSITIONAL]
        self.others = [each.name for each in parameters if each.kind == kinds.VAR_KEYWORD]
        first = {parameter.dtype: parameter for parameter in module.parameters() if parameter.is_floating_point()}
        self.dtypes = [(parameter, dtype) for dtype, parameter in first.items()]

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._check(module)
        paths = [self._by_position(index) for index in range(len(args))]
        keys = {name: self._by_name(name) for name in kwargs}
        for path, value in (*zip(paths, args, strict=True), *((keys[name], kwargs[name]) for name in kwargs)):
            self._check_argument(path, value)
        if not self.powers:
            return None
        if torch.compiler.is_compiling():
            return self._scaled(paths, args, keys, kwargs)
        with _disable_current_modes():  # a trace takes what comes in for an input, and not for a product
            return self._scaled(paths, args, keys, kwargs)

    def _scaled(self, paths: list[str], args: Any, keys: dict[str, str], kwargs: Any) -> tuple[Any, Any]:
        scaled = tuple(_times(value, path, self.powers, -1) for path, value in zip(paths, args, strict=True))
        return scaled, {name: _times(value, keys[name], self.powers, -1) for name, value in kwargs.items()}

    def _by_position(self, index: int) -> str:
        """Return the path of a positional argument, as a trace names it."""
        if index < len(self.positional):
            return f"[{self.positional[index]!r}]"
        return f"[{self.rest[0]!r}][{index - len(self.positional)}]" if self.rest else f"[{index}]"

    def _by_name(self, name: str) -> str:
        return f"[{name!r}]" if name in self.named or not self.others else f"[{self.others[0]!r}][{name!r}]"

    def _check_argument(self, path: str, value: Any) -> None:
        for leaf, _ in float_leaves(value, path):
            if leaf not in self.known and not _harmless(leaf):
                raise ValueError(
                    f"to_fp16: {self.name} was scaled for calls without {leaf}, which would have to be scaled too: "
                    "undo, and pass a sample that holds it"
                )

    def _check(self, module: torch.nn.Module) -> None:
        """Refuse an adapter, a changed dtype and training."""
        if has_adapters(module):
            raise RuntimeError(
                f"to_fp16: an adapter was loaded into {self.name} after it was scaled, and writes unscaled values: "
                "undo, load (or merge) the adapter, then call to_fp16 again"
            )
        for parameter, dtype in self.dtypes:
            if parameter.dtype != dtype:
                raise RuntimeError(
                    f"to_fp16: parameters of {self.name} changed from {dtype} to {parameter.dtype} after it was "
                    "scaled: move it by to(device) alone, without half(), float() or a dtype"
                )
        if module.training and torch.is_grad_enabled():
            raise RuntimeError(
                f"to_fp16: {self.name} is in training mode, and gradients of scaled parameters are scaled: call "
                "eval(), or undo and train the original"
            )


def _harmless(path: str) -> bool:
    """Return whether a tensor under this name is never added to a tensor that may be scaled."""
    return any(part in path for part in ("mask", "past_key_values", "cache", "position_embeddings", "timestep"))


def has_adapters(module: torch.nn.Module) -> bool:
    """Return whether an adapter of PEFT is loaded; adapters that were there before the trace were merged or refused."""
    return bool(getattr(module, "_hf_peft_config_loaded", False) or getattr(module, "peft_config", None))


def _times(value: Any, path: str, powers: dict[str, int], sign: int) -> Any:
    """Return nested containers with the tensors at some paths times their powers of two."""
    if not any(each.startswith(path) for each in powers):
        return value
    if isinstance(value, Tensor):
        factor = 2.0 ** (sign * powers.get(path, 0))
        return value.float() * factor if sign > 0 else value * factor
    if isinstance(value, Mapping):
        items = {key: _times(item, f"{path}[{key!r}]", powers, sign) for key, item in value.items()}
        return items if type(value) is dict else type(value)(**items)
    if isinstance(value, (list, tuple)):
        parts = [_times(item, f"{path}[{index}]", powers, sign) for index, item in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


class _Outputs:
    """Multiplies hidden states that leave a model back, in FP32, because FP16 could not hold them."""

    def __init__(self, name: str, powers: dict[str, int], known: set[str]) -> None:
        self.name, self.powers, self.known = name, powers, known

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return None
        for path, _ in float_leaves(output, ""):
            if path not in self.known and ("hidden_state" in path or (path[1].isdigit() and path.count("[") > 1)):
                raise ValueError(
                    f"to_fp16: {self.name} returned {path}, which it did not on the sample, so its power of two is "
                    "not known: undo, and pass a sample with the same arguments (output_hidden_states, return_dict)"
                )
        return _times(output, "", self.powers, 1) if self.powers else None


def hook_islands(models: Models, plan: Plan) -> Iterable[Any]:
    """Run the modules that stay in FP32 on FP32 inputs, and round what they return to FP16."""
    for name in plan.islands:
        module = module_at(models, name)
        yield module.register_forward_pre_hook(_widen, with_kwargs=True)
        yield module.register_forward_hook(_narrow)


def _widen(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map_only(Tensor, lambda each: each.float() if each.dtype == torch.float16 else each, (args, kwargs))


def _narrow(module: torch.nn.Module, args: Any, output: Any) -> Any:
    return tree_map_only(Tensor, lambda each: each.half() if each.dtype == torch.float32 else each, output)
