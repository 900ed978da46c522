"""Scores that are not computed: they follow what a host does with them from one product to the next."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pasa.patching.transformers_masks import both, without_lowest

MASKED_OUT = -1e4  # a score that a host replaces by this number or a lower one is masked out
Shape = tuple[int, ...]
Attend = Callable[..., Tensor]


@dataclass(eq=False)
class Scores:
    """Scores scale * q.k + bias that are not computed, or their softmax.

    Attributes
    ----------
    q, k : Tensor (*batch, Lq or Lk, D)
    dtype : torch.dtype
        The dtype that the host's tensor would have.
    batch : tuple of int
        The leading dimensions that the host's tensor would have; those of `q` have the same number of elements.
    scale : float
    bias, visible : Tensor, optional
        A float and a bool mask (True = keep) that broadcast to the scores, with the leading dimensions `base`.
    base : tuple of int
    weights : bool
        True: this is the softmax of the scores.
    uses : list of str
        Not empty once the host has computed these scores for another purpose.
    """

    q: Tensor
    k: Tensor
    dtype: torch.dtype
    batch: Shape
    base: Shape
    scale: float = 1.0
    bias: Tensor | None = None
    visible: Tensor | None = None
    weights: bool = False
    uses: list[str] = field(default_factory=list)  # shared by all that come from one product

    @property
    def shape(self) -> torch.Size:
        """Return the shape that the host's tensor would have."""
        return torch.Size((*self.batch, self.q.shape[-2], self.k.shape[-2]))

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one dimension of it, as a Tensor does."""
        return self.shape if dim is None else self.shape[dim]

    def __getattr__(self, name: str) -> Any:
        """Return a method or attribute that a Tensor has; methods are followed where that is possible."""
        if name in FOLLOWED:
            return _method(name, self)
        if name in ("device", "requires_grad", "is_cuda"):
            return getattr(self.q, name)
        if not hasattr(Tensor, name):  # a hook asks whether the result of a dropout has it
            raise AttributeError(f"a tensor has no attribute {name!r}")
        return getattr(self.computed(), name)

    def __matmul__(self, values: Any) -> Any:
        """Return the product with the values, which the mode of a running forward turns into attention."""
        factor: Any = self
        return torch.matmul(factor, values)

    def __getitem__(self, index: Any) -> Tensor:
        """Return a part of the tensor that the host would have computed."""
        return self.computed()[index]

    def computed(self) -> Tensor:
        """Return the tensor that the host would have computed.

        Raises
        ------
        NotImplementedError
            These are weights, which the host uses for more than the product with the values.
        """
        if self.weights:
            raise NotImplementedError("attention weights are used in a way that PASA cannot follow")
        self.uses.append("computed")
        with torch._C.DisableTorchFunction():  # the mode would make scores of this product again
            return self._computed()

    def _computed(self) -> Tensor:
        scores = torch.matmul(self.q, self.k.transpose(-1, -2)) * self.scale
        scores = scores.reshape(*self.base, *scores.shape[-2:])
        if self.bias is not None:
            scores = scores + self.bias
        if self.visible is not None:
            scores = scores.masked_fill(~self.visible, torch.finfo(scores.dtype).min)
        return scores.reshape(self.shape).to(self.dtype)

    def attend(self, values: Tensor, function: Attend) -> Tensor:
        """Return attention over values (*batch, Lk, D) by a function with the signature of SDPA."""
        if self.uses:  # the host's scores may have overflowed
            raise NotImplementedError("scores are used in a way that PASA cannot follow")
        heads: Shape = self.base if len(self.base) == 2 else (math.prod(self.base[:-1]), self.base[-1])
        mask = self.visible if self.bias is None else self.bias
        if self.bias is not None and self.visible is not None:
            mask = both(self.bias, self.visible)
        if mask is not None:
            mask = _moved(mask, self.base, heads)
        dtype = torch.promote_types(torch.promote_types(self.q.dtype, self.k.dtype), values.dtype)
        q, k, v = (x.reshape(*heads, *x.shape[-2:]).to(dtype) for x in (self.q, self.k, values))
        out = function(q, k, v, attn_mask=mask, scale=self.scale)
        return out.reshape(*self.batch, *out.shape[-2:]).to(values.dtype)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let torch's functions take scores; the mode of a running forward handles them."""
        raise NotImplementedError("scores of a patched module were used after its forward had ended")


def _moved(mask: Tensor, before: Shape, after: Shape) -> Tensor:
    """Return a mask that broadcasts to (*before, Lq, Lk) with the leading dimensions `after` in their place."""
    if before == after:
        return mask
    leading = (1,) * (len(before) + 2 - mask.ndim) + tuple(mask.shape[:-2])
    if set(leading) == {1}:
        return mask.reshape(*(1 for _ in after), *mask.shape[-2:])
    return mask.expand(*before, *mask.shape[-2:]).reshape(*after, *mask.shape[-2:])


def _at_batch(scores: Scores) -> Scores:
    """Return the scores with masks that have the leading dimensions of `batch`."""
    bias, visible = (None if x is None else _moved(x, scores.base, scores.batch) for x in (scores.bias, scores.visible))
    return replace(scores, base=scores.batch, bias=bias, visible=visible)


def _by_head(scores: Scores, factor: Any) -> bool:
    """Return whether a factor is a tensor with a number for each head, and the scores are products so far."""
    if not isinstance(factor, Tensor) or factor.numel() == 1 or scores.weights:
        return False
    plain = scores.bias is None and scores.visible is None and scores.base == scores.batch
    return plain and 2 < factor.ndim <= len(scores.shape) and tuple(factor.shape[-2:]) == (1, 1)


# ---- functions that scores are followed through; each returns NotImplemented where it cannot


def scaled(power: int) -> Callable[..., Any]:
    """Return the function that multiplies scores by a factor (power 1), or divides them by it (power -1)."""

    def apply(first: Any, second: Any, **kwargs: Any) -> Any:
        swapped = not isinstance(first, Scores)
        scores, factor = (second, first) if swapped else (first, second)
        if _by_head(scores, factor) and not (kwargs or (swapped and power < 0)):
            q = scores.q.reshape(*scores.batch, *scores.q.shape[-2:])
            return replace(scores, q=q * factor if power > 0 else q / factor)
        single = isinstance(factor, (int, float)) or (isinstance(factor, Tensor) and factor.numel() == 1)
        if scores.weights or not single or kwargs or (swapped and power < 0):
            return NotImplemented
        factor = float(factor) ** power
        bias = None if scores.bias is None else scores.bias * factor
        return replace(scores, scale=scores.scale * factor, bias=bias)

    return apply


def added(sign: int) -> Callable[..., Any]:
    """Return the function that adds a bias to scores (sign 1), or subtracts it (sign -1)."""

    def apply(first: Any, second: Any, **kwargs: Any) -> Any:
        swapped = not isinstance(first, Scores)
        scores, bias = (second, first) if swapped else (first, second)
        bias = bias.computed() if isinstance(bias, Scores) else bias
        if isinstance(bias, (int, float)) and bias == 0:
            return scores
        if scores.weights or not isinstance(bias, Tensor) or kwargs or (swapped and sign < 0):
            return NotImplemented
        if bias.ndim > len(scores.shape) or bias.ndim < 2 or not bias.is_floating_point():
            return NotImplemented
        scores, bias = _at_batch(scores), without_lowest(bias if sign > 0 else -bias)
        return replace(scores, bias=bias if scores.bias is None or bias is None else scores.bias + bias)

    return apply


def _masked_fill(scores: Any, mask: Any, value: Any) -> Any:
    if not isinstance(scores, Scores) or mask.ndim < 2:
        return NotImplemented
    keep, value = ~mask.bool(), float(value)
    if scores.weights:  # keys that are masked out have the weight 0 already
        known = scores.visible
        return scores if value == 0 and known is not None and torch.equal(known, keep) else NotImplemented
    if value > MASKED_OUT:
        return NotImplemented
    scores = _at_batch(scores)
    return replace(scores, visible=keep if scores.visible is None else scores.visible & keep)


def _where(condition: Any, scores: Any, value: Any) -> Any:
    return _masked_fill(scores, ~condition, value) if isinstance(scores, Scores) else NotImplemented


def _maximum(scores: Any, lowest: Any = None, *_: Any, **kwargs: Any) -> Any:
    """Return the scores, because hosts raise only scores that are masked out to the lowest number."""
    constant = isinstance(scores, Scores) and isinstance(lowest, Tensor) and lowest.numel() == 1 and not kwargs
    return scores if constant and float(lowest) <= MASKED_OUT else NotImplemented


def _softmax(scores: Any, dim: int | None = None, *_: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    if dim not in (-1, len(scores.shape) - 1) or scores.weights:
        return NotImplemented
    return replace(scores, weights=True, dtype=dtype or scores.dtype)


def _dropout(scores: Any, p: float = 0.5, training: bool = True, *_: Any, **kwargs: Any) -> Any:
    if training and p:
        raise NotImplementedError(f"dropout={p} on attention weights is not supported; call model.eval()")
    return scores


def _cast(scores: Any, *args: Any, **kwargs: Any) -> Any:
    targets = [each for each in (*args, *kwargs.values()) if isinstance(each, (torch.dtype, Tensor, Scores))]
    return replace(scores, dtype=getattr(targets[0], "dtype", targets[0])) if targets else scores


def _reshaped(scores: Any, *sizes: Any) -> Any:
    shape = list(sizes[0] if isinstance(sizes[0], (tuple, list)) else sizes)
    if -1 in shape:
        shape[shape.index(-1)] = -math.prod(scores.shape) // math.prod(shape)
    if tuple(shape[-2:]) != tuple(scores.shape[-2:]):
        return NotImplemented
    return replace(scores, batch=tuple(shape[:-2]))


def _same(scores: Any, *_: Any, **kwargs: Any) -> Any:
    return scores


FOLLOWED: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__", "__imul__", "mul_"), scaled(1)),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__", "__itruediv__", "div_"), scaled(-1)),
    **dict.fromkeys(("add", "__add__", "__radd__", "__iadd__", "add_"), added(1)),
    **dict.fromkeys(("sub", "__sub__", "__isub__"), added(-1)),
    **dict.fromkeys(("masked_fill", "masked_fill_"), _masked_fill),
    **dict.fromkeys(("max", "maximum"), _maximum),
    **dict.fromkeys(("view", "reshape"), _reshaped),
    **dict.fromkeys(("to", "type", "type_as"), _cast),
    **dict.fromkeys(("contiguous", "clone"), _same),
    "float": lambda scores: _cast(scores, torch.float32),
    "half": lambda scores: _cast(scores, torch.float16),
    "where": _where,
    "softmax": _softmax,
    "dropout": _dropout,
}
"""Functions and methods of torch, by name, through which `Scores` are followed."""


def follow(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of a function on scores, or NotImplemented where they cannot be followed."""
    result = FOLLOWED[name](*args, **kwargs)
    if name.endswith("_") and not name.startswith("__"):
        if not isinstance(result, Scores):
            raise NotImplementedError(f"scores of a patched module were changed in place by {name}")
        vars(args[0]).update(vars(result))
        return args[0]
    return result


def _method(name: str, scores: Scores) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = follow(name, (scores, *args), kwargs)
        return getattr(scores.computed(), name)(*without_scores(args), **kwargs) if result is NotImplemented else result

    return call


def without_scores(value: Any) -> Any:
    """Return the arguments of a call with every `Scores` computed."""
    if isinstance(value, Scores):
        return value.computed()
    if isinstance(value, dict):
        return {name: without_scores(each) for name, each in value.items()}
    return type(value)(without_scores(each) for each in value) if type(value) in (tuple, list) else value


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, other: _method(name, self)(other)


for _name in ("__mul__", "__rmul__", "__truediv__", "__add__", "__radd__", "__sub__"):
    setattr(Scores, _name, _operator(_name))
