"""Exponents of tensors while a model is traced, and how views of a tensor carry the exponents of its parts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pasa.fp16.exponents import Form

if TYPE_CHECKING:
    from pasa.fp16.tracing import Tracer

Cut = tuple[int, int, int]
"""Part of a dimension: start, stop and step."""


@dataclass
class Track:
    """The exponent of a tensor, shared by all views of it.

    Attributes
    ----------
    forms : tuple of Form, or None
        A single exponent, or one for each of `cuts`. None for a tensor of zeros, which has every exponent.
    cuts : tuple of (start, stop, step), or None
        Parts of dimension `dim` that have exponents of their own.
    dim : int
        That dimension, counted from the end. For a parameter without parts: where its dimension -2 is now.
    parameter : str or None
        The parameter that this tensor is a view or cast of.
    weights : tuple of (str, bool)
        Parameters that the last dimension comes from, if it can be cut: each with whether that is their dimension -2.
    constant : bool
        True if neither a parameter nor an input took part.
    producer : int
        Index of the operation that made it; -1 if none did.
    origin : str or None
        Path of the module that returned it, if it is a constant that a module computes.
    offset : bool
        True if it is the sum of a parameter and a number.
    """

    forms: tuple[Form, ...] | None
    cuts: tuple[Cut, ...] | None = None
    dim: int = -1
    parameter: str | None = None
    weights: tuple[tuple[str, bool], ...] = ()
    constant: bool = False
    producer: int = -1
    origin: str | None = None
    offset: bool = False


@dataclass
class Operation:
    """One operation of a traced forward pass.

    Attributes
    ----------
    name : str
        Name of the ATen operator.
    module : str
        Path of the innermost module that was running.
    sources : tuple of int
        Operations that made its operands.
    forms : tuple of Form
        Exponents of its result, one for each part; empty if the result is not in the model's precision.
    peaks : Tensor or None
        Largest magnitude of the result, one for each part.
    scores : bool
        True if the result goes into a softmax, with no product of matrices in between.
    """

    name: str
    module: str
    sources: tuple[int, ...]
    forms: tuple[Form, ...] = ()
    peaks: Tensor | None = None
    scores: bool = False


@dataclass(frozen=True)
class Constant:
    """A number that a module adds to a tensor and keeps in an attribute: the epsilon of a norm."""

    module: str
    attribute: str


def cut_at(tracer: Tracer, track: Track, name: str, args: Any, kwargs: Any) -> list[Track] | None:
    """Return the exponents of the parts that a split or slice of the last dimension shows, or None.

    A part of a fused product that has no exponent of its own yet is noted in ``tracer.wanted``, for the next trace.
    """
    tensor: Tensor = args[0]
    shown = _parts(tensor, name, args)
    if shown is None or track.dim != -1 or track.parameter:
        return None
    if track.cuts is None:
        for weight, transposed in track.weights:
            tracer.wanted.setdefault(weight, (-2 if transposed else -1, set()))[1].update(shown)
        return None
    forms = dict(zip(track.cuts, track.forms or (), strict=True))
    if any(part not in forms for part in shown):
        return None
    return [Track((forms[part],)) for part in shown]


def _parts(tensor: Tensor, name: str, args: Any) -> list[Cut] | None:
    """Return the parts (start, stop, step) of the last dimension that a split or slice shows, or None."""
    last, size = tensor.ndim - 1, tensor.shape[-1]
    if name == "split_with_sizes" or name == "split":
        if (args[2] if len(args) > 2 else 0) % tensor.ndim != last:
            return None
        sizes = args[1] if isinstance(args[1], (list, tuple)) else [args[1]] * (size // args[1])
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return [(start, start + width, 1) for start, width in zip(starts, sizes, strict=True)]
    if name == "slice":
        if (args[1] if len(args) > 1 else 0) % tensor.ndim != last:
            return None
        start, stop, step = slice(*args[2:5]).indices(size)
        whole = (start, stop, step) == (0, size, 1)
        return None if whole else [(start, stop, step)]
    return None


def moved(track: Track, name: str, args: Any, kwargs: Any, out: Tensor) -> Track | None:
    """Return the exponent of a view with its parts where they are now, or None if they are no longer one dimension."""
    tensor: Tensor = args[0]
    dim, count = track.dim, tensor.ndim
    if name in ("t", "transpose", "swapaxes"):
        first, second = (0, 1) if name == "t" else (args[1] % count, args[2] % count)
        swapped = {first - count: second - count, second - count: first - count}
        dim = swapped.get(dim, dim) if count > 1 else dim
    elif name == "permute":
        dim = [each % count for each in args[1]].index(dim + count) - count
    elif name in ("select", "unbind", "squeeze", "unsqueeze"):
        place = args[1] if len(args) > 1 else 0
        if isinstance(place, int) and place % (count + (name == "unsqueeze")) > count + dim:
            return None
    elif name in ("slice", "split", "split_with_sizes", "narrow"):
        place = args[2] if name.startswith("split") and len(args) > 2 else args[1] if name in ("slice", "narrow") else 0
        if place % count == count + dim and out.shape[dim] != tensor.shape[dim]:
            return None
    if name in ("select", "unbind") and (args[1] if len(args) > 1 else 0) % count == count + track.dim:
        return None
    if -dim > out.ndim or out.shape[dim] != tensor.shape[track.dim]:
        return None
    if name in ("view", "_unsafe_view", "_reshape_alias") and out.shape[dim:] != tensor.shape[dim:]:
        return None
    return replace(track, dim=dim, constant=False) if track.cuts or dim == track.dim or track.parameter else None
