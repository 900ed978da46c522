"""Copy Python functions so that their calls of torch's scaled_dot_product_attention run PASA, and nothing else changes.

Many processors of diffusers, and modules of transformers that compute attention themselves, call
`torch.nn.functional.scaled_dot_product_attention` between steps of their own: norms, rotary embeddings, joined streams.
A copy shares the code of such a function and looks this one name up elsewhere. So every other step stays the host's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import pasa
from pasa.patching.callbacks import Callbacks
from pasa.scaled_dot_product import attend_as_torch

if TYPE_CHECKING:
    from pasa import PasaConfig

NAME = "scaled_dot_product_attention"
_PATHS = {torch.nn.functional: (), torch.nn: ("functional",), torch: ("nn", "functional")}
"""Maps modules to the attributes that lead from them to torch.nn.functional."""


def calls_attention(function: Any) -> bool:
    """Return whether the code of a Python function calls torch's scaled_dot_product_attention."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    return code is not None and NAME in code.co_names and bool(_replaced(function, NAME))


def redirected(function: Any, attend: Callable[..., Tensor]) -> Any:
    """Return a copy of a Python function that calls `attend` for torch's scaled_dot_product_attention."""
    function = inspect.unwrap(function)
    # torch.compile reads globals from the module of this name, where the original function would be found.
    scope = {name: value for name, value in function.__globals__.items() if name != "__name__"}
    scope |= _replaced(function, attend)
    twin = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__qualname__, twin.__doc__, twin.__module__ = function.__qualname__, function.__doc__, function.__module__
    return twin


def _replaced(function: Any, attend: Any) -> dict[str, Any]:
    """Return the globals by which the function reaches scaled_dot_product_attention, with `attend` in its place."""
    code: CodeType = function.__code__
    known = {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
    replaced = {
        name: _with(value, (*path, NAME), attend)
        for name, value in known.items()
        for module, path in _PATHS.items()
        if value is module and set(path) <= set(code.co_names)
    }
    original = torch.nn.functional.scaled_dot_product_attention
    return replaced | {name: attend for name, value in known.items() if value is original}


def _with(module: ModuleType, path: tuple[str, ...], value: Any) -> ModuleType:
    """Return a copy of a module in which the attribute at the end of a path is another."""
    twin = ModuleType(module.__name__)
    vars(twin).update(vars(module))
    first, *rest = path
    setattr(twin, first, _with(getattr(module, first), tuple(rest), value) if rest else value)
    return twin


def make_attention(
    config: PasaConfig | None, backend: str | None, callbacks: Callbacks, where: str
) -> Callable[..., Tensor]:
    """Return a function with the signature of torch's scaled_dot_product_attention that runs :func:`pasa.attention`.

    Unlike `pasa.scaled_dot_product_attention`, it serves FP32 and BF16 calls too, with these settings.

    Parameters
    ----------
    config, backend
        Passed to :func:`pasa.attention`.
    callbacks : Callbacks
        Called after every call.
    where : str
        Name of the class that makes the calls, for error messages.
    """

    def attend_and_report(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        out: Tensor = pasa.attention(q, k, v, config=config, backend=backend, **how)
        callbacks.call(q, k, **how)
        return out

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p:
            raise NotImplementedError(
                f"{where}: dropout_p={dropout_p} on attention weights is not supported; call model.eval()"
            )
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return attend_as_torch(attend_and_report, query, key, value, attn_mask, is_causal, scale, enable_gqa)

    return attend
