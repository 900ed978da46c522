"""Exponents of tensors while a model is traced, and how views of a tensor carry the exponents of its parts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pasa.fp16.exponents import Form

if TYPE_CHECKING:
    from pasa.fp16.tracing import Tracer

Cut = tuple[int, int, int]
"""Part of a dimension: start, stop and step."""
RESHAPED = ("as_strided", "diagonal", "unfold", "view_as_complex", "view_as_real")
"""Views behind which no dimension is assumed to be what it was."""


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

    def parts(self, tensor: Tensor) -> list[Tensor]:
        """Return views of the parts of a tensor that have exponents of their own, or the tensor alone."""
        if self.cuts is None:
            return [tensor]
        return [tensor.transpose(self.dim, -1)[..., slice(*cut)] for cut in self.cuts]

    def peaks(self, tensor: Tensor, *, below: float | None = None) -> Tensor:
        """Return the largest magnitude of each part of a tensor; those from `below` on are left out."""
        parts = [part if below is None else part.masked_fill(part.abs() >= below, 0) for part in self.parts(tensor)]
        return torch.stack([part.abs().amax().float() for part in parts])


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


def cut_at(tracer: Tracer, track: Track, name: str, args: Any) -> list[Track] | None:
    """Return the exponents of the parts that a split or slice of the last dimension shows, or None.

    A part of a fused product that has no exponent of its own yet is noted in ``tracer.shown``, for the next trace.
    """
    tensor: Tensor = args[0]
    shown = _parts(tensor, name, args)
    if shown is None or track.dim != -1 or track.parameter:
        return None
    if track.cuts is None:
        for weight, transposed in track.weights:
            tracer.shown.setdefault(weight, (-2 if transposed else -1, set()))[1].update(shown)
        return None
    forms = dict(zip(track.cuts, track.forms or (), strict=True))
    if any(part not in forms for part in shown):
        return None
    return [Track((forms[part],)) for part in shown]


def _parts(tensor: Tensor, name: str, args: Any) -> list[Cut] | None:
    """Return the parts (start, stop, step) of the last dimension that a split or slice shows, or None."""
    last, size = tensor.ndim - 1, tensor.shape[-1]
    if name in ("split", "split_with_sizes"):
        if (args[2] if len(args) > 2 else 0) % tensor.ndim != last:
            return None
        listed = isinstance(args[1], (list, tuple))
        bounds = accumulate(args[1], initial=0) if listed else [*range(0, size, args[1]), size]
        return [(start, stop, 1) for start, stop in pairwise(bounds)]
    if name == "slice":
        if (args[1] if len(args) > 1 else 0) % tensor.ndim != last:
            return None
        start, stop, step = slice(*args[2:5]).indices(size)
        whole = (start, stop, step) == (0, size, 1)
        return None if whole else [(start, stop, step)]
    return None


def moved(track: Track, name: str, args: Any, out: Tensor) -> Track | None:
    """Return the exponent of a view with its parts where they are now, or None if they are no longer one dimension."""
    tensor: Tensor = args[0]
    dim, count = track.dim, tensor.ndim
    place = count + dim
    if name in ("t", "transpose", "swapaxes"):
        first, second = (-2, -1) if name == "t" else (each % count - count for each in args[1:3])
        dim = {first: second, second: first}.get(dim, dim)
    elif name == "permute":
        dim = [each % count for each in args[1]].index(place) - count
    elif name in ("select", "unbind", "squeeze"):  # remove a dimension
        if not (len(args) > 1 or name == "unbind") or not isinstance(removed := (*args, 0)[1], int):
            return None
        if removed % count >= place:
            return None
    elif name == "unsqueeze":
        if args[1] % (count + 1) > place:
            return None
    elif name in RESHAPED:
        return None
    if -dim > out.ndim or out.shape[dim] != tensor.shape[track.dim]:
        return None
    if name in ("view", "_unsafe_view", "_reshape_alias") and out.shape[dim:] != tensor.shape[dim:]:
        return None
    return replace(track, dim=dim, constant=False) if track.cuts or dim == track.dim or track.parameter else None


def keeps_places(track: Track, name: str, args: Any) -> bool:
    """Return whether a copy leaves the dimension of the parts, and those behind it, in the order that they had."""
    place = args[0].ndim + track.dim
    if name == "index_select":
        return bool(args[1] % args[0].ndim < place)
    if name == "index":
        indices = [index for index in args[1] if index is not None]
        masked = sum(index.ndim - 1 for index in indices if index.dtype in (torch.bool, torch.uint8))
        return bool(len(args[1]) + masked <= place)
    return True
