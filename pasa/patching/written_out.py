"""Run PASA in modules that write attention out as product, softmax and product, without any function to replace.

While the forward of such a module runs, a `TorchFunctionMode` sees every function of torch. The product of queries and
keys becomes a `Scores`, which computes nothing. It follows scales, masks, biases and reshapes through the softmax, and
the product with the values becomes one call of :func:`pasa.attention`. A `Scores` that goes anywhere else is computed
as the host would have computed it. If a forward makes no call of PASA, it raises, so no module runs unprotected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pasa.patching.copying import reduced_as
from pasa.patching.scores import FOLLOWED, Attend, Scores, added, follow, scaled, without_scores

PRODUCTS = frozenset({"matmul", "bmm", "__matmul__", "einsum", "baddbmm"})


def _einsum(equation: Any, *operands: Any) -> tuple[Any, Any, str] | None:
    """Return both factors of an einsum as (*batch, rows, inner) and (*batch, inner, columns), and the result's axes.

    None if it is no product of matrices whose result has the axes of the batch first. The axes are letters: those of
    the product of both factors are the returned text up to its "->", and those of the einsum are behind it.
    """
    if not isinstance(equation, str):
        return None
    factors = operands[0] if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    left, _, result = equation.replace(" ", "").partition("->")
    names = left.split(",")
    if len(factors) != 2 or len(names) != 2 or "." in equation or not result:
        return None
    first, second = names
    inner = [each for each in first if each in second and each not in result]
    rows = [each for each in first if each not in second]
    columns = [each for each in second if each not in first]
    batch = [each for each in first if each in second and each in result]
    if not len(inner) == len(rows) == len(columns) == 1 or sorted(result) != sorted([*batch, *rows, *columns]):
        return None
    if isinstance(factors[0], Scores):
        if first != "".join([*batch, *rows, *inner]):
            return None
        left_factor = factors[0]
    else:
        left_factor = factors[0].permute([first.index(each) for each in (*batch, *rows, *inner)])
    right_factor = factors[1].permute([second.index(each) for each in (*batch, *inner, *columns)])
    return left_factor, right_factor, "".join([*batch, *rows, *columns]) + "->" + result


class Follower(TorchFunctionMode):
    """The mode under which the forward of one module runs.

    Parameters
    ----------
    attend : callable
        Attends, with the signature of torch's scaled_dot_product_attention.
    """

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend, self.calls = attend, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Follow scores, or call the function; torch calls this without the mode."""
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if function is torch.nn.functional.scaled_dot_product_attention:
            self.calls += 1
            return self.attend(*args, **kwargs)
        if name == "expand_as" and isinstance(args[1], Scores):  # asks only for their shape
            return args[0].expand(args[1].shape)
        result = self._product(name, args, kwargs) if name in PRODUCTS else NotImplemented
        if result is NotImplemented and name in FOLLOWED and any(isinstance(each, Scores) for each in args):
            result = follow(name, args, kwargs)
        return function(*without_scores(args), **without_scores(kwargs)) if result is NotImplemented else result

    def _product(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "baddbmm":
            return self._biased(*args, **kwargs)
        if name == "einsum":
            return self._einsum(*args)
        if kwargs or len(args) != 2:
            return NotImplemented
        first, second = args
        if isinstance(first, Scores) and isinstance(second, Tensor):
            if not first.weights or second.ndim != len(first.shape):
                return NotImplemented
            self.calls += 1
            return first.attend(second.expand(*first.batch, *second.shape[-2:]), self.attend)
        plain = all(isinstance(x, Tensor) and x.ndim > 2 and x.is_floating_point() for x in args)
        if not plain or first.ndim != second.ndim:
            return NotImplemented
        batch = tuple(torch.broadcast_shapes(first.shape[:-2], second.shape[:-2]))  # one key head may serve all
        q, k = (x.expand(*batch, *x.shape[-2:]) for x in (first, second.transpose(-1, -2)))
        return Scores(q, k, first.dtype, batch, batch)

    def _einsum(self, *args: Any) -> Any:
        factors = _einsum(*args)
        result = NotImplemented if factors is None else self._product("matmul", factors[:2], {})
        if factors is None or result is NotImplemented:
            return NotImplemented
        before, _, after = factors[2].partition("->")
        if before == after:
            return result
        result = result.computed() if isinstance(result, Scores) else result
        return result.permute([before.index(each) for each in after])

    def _biased(self, bias: Any, batch1: Any, batch2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
        scores = self._product("bmm", (batch1, batch2), {})
        return scores if scores is NotImplemented else added(1)(scaled(1)(scores, alpha), bias * beta)


def _without_weights(output: Any) -> Any:
    """Return the output of a forward with None in place of attention weights, which PASA never forms."""
    if type(output) in (tuple, list):
        return type(output)(_without_weights(each) for each in output)
    return None if isinstance(output, Scores) else output


def follow_module(module: torch.nn.Module, attend: Attend) -> Callable[[], None]:
    """Make the forward of a module run PASA, and return the function that undoes this.

    The module gets a subclass of its class. A copy of the module has the class that the module had before.
    """
    kind = type(module)
    forward = kind.forward

    def followed(self: Any, *args: Any, **kwargs: Any) -> Any:
        with Follower(attend) as follower:
            output = _without_weights(forward(self, *args, **kwargs))
        if not follower.calls:
            raise NotImplementedError(
                f"{kind.__name__}: no attention was recognised in this call; "
                "leave the module out with policy=lambda name, module: ..."
            )
        return output

    names = {
        "forward": torch.compiler.disable(followed),
        "__reduce_ex__": reduced_as(kind),
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
    }
    module.__class__ = type(kind.__name__, (kind,), names)

    def undo() -> None:
        module.__class__ = kind

    return undo
