"""Operands of ATen operators: which of them hold values, and what an operator that is not homogeneous does to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from pasa.fp16.exponents import Form
from pasa.fp16.tracks import Track

if TYPE_CHECKING:
    from pasa.fp16.tracing import Tracer
    from pasa.fp16.tracks import Operation


def holds_values(tensor: Tensor) -> bool:
    """Return whether a tensor holds real or complex numbers, and not whole ones."""
    return tensor.is_floating_point() or tensor.is_complex()


def floats(*operands: Any) -> list[Tensor]:
    """Return the operands that hold values."""
    return [leaf for leaf in tree_leaves(operands) if isinstance(leaf, Tensor) and holds_values(leaf)]


def track_of(form: Form | None) -> Track:
    """Return the track of a tensor with one exponent; None stands for zeros, which have every exponent."""
    return Track(None if form is None else (form,))


def pinned(tracer: Tracer, operation: Operation, args: Any, kwargs: Any) -> Track:
    """Make all exponents 0: the operator is not homogeneous, or has no rule."""
    for tensor in floats(args, kwargs):
        tracer.pin(tracer.track(tensor), f"feeds {operation.name}")
    result = tracer.equations.unknown(operation.name)
    tracer.equate(result, {}, f"adds or reads a result of {operation.name}")
    return Track((result,))
