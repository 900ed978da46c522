"""Call torch.ops.pasa.* with less launch overhead on the host.

torch's dispatcher costs a third of a short call's host time; its autograd wrapper for custom
operators costs several times that. Both exist for tracing and compiling, modes, vmap, tensor
subclasses, meta tensors, tensors with a lazy negation or of lazy zeros, and profilers. A call that
concerns none of these runs the implementation directly, inside an `autograd.Function` if a gradient
is needed, and repeats what it did for the same geometry (ops/plans.py). torch.func.grad also takes
the `autograd.Function`, because torch does not support it for custom operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._library.custom_ops import CustomOpDef
from torch.autograd import forward_ad

from pasa.ops import plans
from pasa.ops.plans import tensors_of

_functions: dict[CustomOpDef, type[torch.autograd.Function]] = {}  # for torch.func.grad, which needs `setup_context`
_short_functions: dict[CustomOpDef, type[torch.autograd.Function]] = {}


def refuse_tangents(tensors: tuple[Any, ...]) -> None:
    """Raise NotImplementedError for a tensor with a tangent, which torch's custom operators would silently drop."""
    if forward_ad._current_level < 0:
        return
    if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError("pasa attention has no forward-mode derivative, only gradients (backward)")


def shorten(op: CustomOpDef, remember: Callable[..., Any], gradient: Callable[..., Any]) -> None:
    """Let `call` differentiate an operator by the functions that were passed to `register_autograd`."""

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(*arguments: Any) -> Any:
            # below torch.func.grad a mode may still need to see the call
            tensors = tensors_of(op)(arguments)
            return op(*arguments) if _is_observed(tensors) else plans.run(op, arguments, tensors)

        setup_context = staticmethod(remember)
        backward = staticmethod(gradient)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
            """Map a gradient over a batch by torch's loop over the operator."""
            grads = torch.func.vmap(op, in_dims)(*arguments)
            return grads, (0,) * len(grads)

    class Short(torch.autograd.Function):
        """Take the tensors of a call, then all of its arguments in one tuple.

        For each call of a function with `setup_context`, torch binds the arguments to a signature, and it looks at
        every argument for a wrapper of torch.func. Both take as long as the launches of a call.
        """

        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            *tensors, arguments = inputs
            results = plans.run(op, arguments, tuple(tensors))
            remember(ctx, arguments, results)
            return results

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            tensors = len(ctx.needs_input_grad) - 1  # the first arguments of an operator
            return *gradient(ctx, *grads)[:tensors], None

    _functions[op], _short_functions[op] = Direct, Short


def repeat(op: CustomOpDef, tensors: tuple[Tensor | None, ...], *others: Any, alone: bool) -> Any:
    """Return what `call` returns if it would repeat a plan, in less time; otherwise None.

    Takes the tensors among the arguments of the operator in one tuple, and then its other arguments. None stands for a
    result without elements, and with `alone` perhaps for every result but the first.
    """
    if torch.compiler.is_compiling() or not _is_plain(tensors):
        return None
    plan = plans.known(op, others, tensors)
    return None if plan is None else plan.run(tensors, alone=alone)


def call(op: CustomOpDef, *arguments: Any) -> Any:
    """Return what the operator returns, by the shortest path on which every mode and profiler still sees the call.

    Takes all arguments of the operator in order, because their positions tell which are tensors.

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
    if _needs_gradient(tensors):
        return _short_functions[op].apply(*tensors, arguments) if op in _functions else op(*arguments)
    return plans.run(op, arguments, tensors)


def _is_plain(tensors: tuple[Any, ...]) -> bool:
    """Return whether nothing but the implementation concerns a call: no gradient, transform, mode or profiler."""
    if _needs_gradient(tensors) or forward_ad._current_level >= 0:
        return False
    return torch._C._functorch.peek_interpreter_stack() is None and not _is_observed(tensors)


def _needs_gradient(tensors: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)


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
