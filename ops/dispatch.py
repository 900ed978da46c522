"""Calls of torch.ops.pasa.* at less cost to the host.

The dispatcher takes a third of the host's time of a short call, and what torch puts round a custom operator that is
differentiated several times as much. Both serve tracing and compiling, modes, vmap, subclasses, tensors without data or
with a sign to come, and profilers; a call that none of them sees runs the implementation at once, in an
`autograd.Function` where a gradient is wanted. torch.func.grad, which torch has not for custom operators, takes the
latter too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._library.custom_ops import CustomOpDef
from torch.autograd import forward_ad

_functions: dict[CustomOpDef, type[torch.autograd.Function]] = {}


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Autocast would change the arithmetic that the options state; it is rarely on, and turning it off is not free."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def refuse_tangents(tensors: tuple[Any, ...]) -> None:
    """NotImplementedError for a tensor with a tangent: torch's custom operators would drop it, as if it were 0."""
    if forward_ad._current_level < 0:
        return
    if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError("pasa attention has no forward-mode derivative, only gradients (backward)")


@cache
def tensors_of(op: CustomOpDef) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Return a function that picks the tensors, and None for those left out, from all arguments of an operator."""
    schema = enumerate(op._opoverload._schema.arguments)
    return itemgetter(*(place for place, argument in schema if "Tensor" in str(argument.type)))


def shorten(op: CustomOpDef, remember: Callable[..., Any], gradient: Callable[..., Any]) -> None:
    """Let `call` differentiate an operator by what it gave to `register_autograd`."""

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(*arguments: Any) -> Any:
            # below torch.func.grad a mode may still have to see the call
            return op(*arguments) if _is_observed(tensors_of(op)(arguments)) else op._init_fn(*arguments)

        setup_context = staticmethod(remember)
        backward = staticmethod(gradient)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
            """Of a gradient: torch's loop over the operator."""
            found = torch.func.vmap(op, in_dims)(*arguments)
            return found, (0,) * len(found)

    _functions[op] = Direct


def call(op: CustomOpDef, *arguments: Any) -> Any:
    """Return what the operator returns, by the shortest way that shows the call to whoever has to see it.

    Takes all arguments of the operator, in order: their places tell which are tensors.

    Raises
    ------
    NotImplementedError
        For a tensor with a tangent (forward-mode differentiation).
    """
    if torch.compiler.is_compiling():
        return op(*arguments)
    tensors = tensors_of(op)(arguments)
    refuse_tangents(tensors)
    transform: Any = torch._C._functorch.peek_interpreter_stack()
    if transform is not None:
        grad = transform.key() == TransformType.Grad and op in _functions
        return _functions[op].apply(*arguments) if grad else op(*arguments)
    if _is_observed(tensors):
        return op(*arguments)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return _functions[op].apply(*arguments) if op in _functions else op(*arguments)
    return op._init_fn(*arguments)


def _is_observed(tensors: tuple[Any, ...]) -> bool:
    c = torch._C
    if c._len_torch_dispatch_stack() or c._len_torch_function_stack() or c._get_tracing_state() is not None:
        return True
    if c._autograd._profiler_enabled():
        return True
    for x in tensors:
        if type(x) is Tensor:
            if x.is_meta or x.is_neg() or x._is_zerotensor():
                return True
        elif x is not None:
            return True
    return False
