"""Rules for the exponents of ATen operators: the exponent of each operator's result, given those of its operands."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from pasa.fp16.exponents import add, multiply
from pasa.fp16.norms import batch_norm, norm, weight_norm
from pasa.fp16.offsets import offset
from pasa.fp16.operands import floats, holds_values, pinned, track_of
from pasa.fp16.operators import (
    ATTENTION,
    COMPARISONS,
    COPIES,
    FILLS,
    HOMOGENEOUS,
    PRODUCTS,
    PRODUCTS_WITH_SUM,
    SCORES,
    SUMS,
    VIEWS,
    WITH_NUMBERS,
    ZEROS,
)
from pasa.fp16.tracks import Track, cut_at, keeps_places, moved

if TYPE_CHECKING:
    from pasa.fp16.tracing import Tracer
    from pasa.fp16.tracks import Operation

POWERS = {"sqrt": Fraction(1, 2), "rsqrt": Fraction(-1, 2), "reciprocal": Fraction(-1), "square": Fraction(2)}
"""Degrees of roots and powers."""

INFINITE = 1e30
"""Numbers from here on stand for infinity, as the smallest number of a dtype does in a mask."""

SMALLEST_DIVISOR = 2.0**-25
"""FP16 rounds numbers below it to 0. As a lower bound, as of the norm in `normalize`, they act on zeros alone."""


def makes_zeros(name: str, args: Any) -> bool:
    """Return whether a tensor that an operator makes is 0 everywhere, or will be written before it is read."""
    filled = args[-1] if name in FILLS and args else None
    return name in ZEROS or (isinstance(filled, (int, float)) and filled == 0)


def apply(tracer: Tracer, operation: Operation, args: Any, kwargs: Any, out: Any) -> None:
    """Add the equations of one operation, and give its results their exponents."""
    name = operation.name
    if name in VIEWS:
        _view(tracer, name, args, out)
        return
    changes = any(isinstance(leaf, Tensor) and not holds_values(leaf) for leaf in tree_leaves(out))
    track: Track | list[Track]
    if "out" in kwargs or (changes and not floats(out) and name not in COMPARISONS):
        track = pinned(tracer, operation, args, kwargs)  # written elsewhere, or made whole numbers
    else:
        track = _rule(name)(tracer, operation, args, kwargs)
    if isinstance(track, list):
        for leaf, each in zip(tree_leaves(out), track, strict=False):
            tracer.put(leaf, each)
        return
    if name.endswith("_") and isinstance(args[0], Tensor):
        track = _written(tracer, args[0], track)
    tracer.put(out, track)


def _written(tracer: Tracer, target: Tensor, track: Track) -> Track:
    """Return the exponent of memory that an operator wrote to; it is shared with all views of the same memory."""
    written = tracer.track(target)
    written.constant = False
    whole = target.untyped_storage().nbytes() == target.numel() * target.itemsize
    shared = not (written.parameter or written.cuts or written.weights)  # by all views: they are no tracks of their own
    if written.forms is None or (whole and shared):
        written.forms, written.cuts, written.dim, written.offset = track.forms, track.cuts, track.dim, False
        return written
    before, after = tracer.single(written), tracer.single(track)
    if before is not None and after is not None:
        tracer.equate(before, after, "writes to a part of a tensor")
    return written


def mask_limit(name: str) -> float:
    """Return from where on a magnitude in an operator's result is that of a mask.

    It is infinity. Only `baddbmm` adds a mask to scores that no operator before it has computed, so that their peak can
    be seen in its result alone.
    """
    return INFINITE if name == "baddbmm" else math.inf


def hold_mask(operands: Any, limit: float) -> bool:
    """Return whether a magnitude of at least `limit` is among an operator's numbers, or in its tensors."""
    leaves = tree_leaves(operands)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return any(abs(leaf) >= limit for leaf in leaves if isinstance(leaf, float)) or any(
        bool((tensor.abs() >= limit).any()) for tensor in tensors
    )


def _rule(name: str) -> Callable[[Tracer, Operation, Any, Any], Track | list[Track]]:
    """Return the rule of an operator; the rule for operators that are not known makes all exponents 0."""
    sets = {_copy: COPIES, _homogeneous: HOMOGENEOUS, _sum: SUMS, _product: PRODUCTS, _filled: ZEROS | FILLS}
    sets |= {_product_with_sum: PRODUCTS_WITH_SUM, _attention: ATTENTION, _compared: COMPARISONS}
    for rule, names in sets.items():
        if name in names:
            return rule
    return SINGLE.get(name, _power if name in POWERS else pinned)


def _numbers(*operands: Any) -> list[float]:
    """Return the numbers among operands that are not 0 and do not stand for infinity."""
    numbers = [leaf for leaf in tree_leaves(operands) if isinstance(leaf, (int, float)) and not isinstance(leaf, bool)]
    return [float(number) for number in numbers if 0 < abs(number) < INFINITE]


def _view(tracer: Tracer, name: str, args: Any, out: Any) -> None:
    """Give the views of a tensor its exponent, or that of the part they show."""
    track = tracer.track(args[0])
    if track.forms is None or not (track.cuts or track.parameter or track.weights):
        tracer.put(out, track)
        return
    if parts := cut_at(tracer, track, name, args):
        for tensor, part in zip(tree_leaves(out), parts, strict=True):
            tracer.put(tensor, part)
        return
    for tensor in tree_leaves(out):
        tracer.put(tensor, moved(track, name, args, tensor) or track_of(tracer.single(track)))


def _copy(tracer: Tracer, operation: Operation, args: Any, kwargs: Any) -> Track:
    """Keep the exponent of the first operand, part by part if they stay in their places."""
    track = tracer.track(args[0])
    if not keeps_places(track, operation.name, args):
        return track_of(tracer.single(track))
    parameter = track.parameter if operation.name in ("_to_copy", "index") else None
    return replace(track, parameter=parameter, constant=False)


def _homogeneous(tracer: Tracer, operation: Operation, args: Any, kwargs: Any) -> Track:
    """Keep the exponent of the first operand; a second one (of `max`) must have the same."""
    return _sum(tracer, operation, args[:2] if operation.name in ("max", "min") else args[:1], {})


def _sum(tracer: Tracer, operation: Operation, args: Any, kwargs: Any) -> Track:
    """Make the exponents of all operands equal."""
    tracks = [tracer.track(tensor) for tensor in floats(args, kwargs)]
    known = [track for track in tracks if track.forms is not None]
    numbers = _added_numbers(operation.name, args, kwargs)
    if operation.name == "add" and len(tracks) == 1 and tracks[0].parameter and numbers:
        return offset(tracer, tracks[0], numbers[0])
    partitions = {(track.cuts, track.dim) for track in known}
    if len(known) > 1 and known[0].cuts and len(partitions) == 1 and operation.name not in ("cat", "stack"):
        return _sum_of_parts(tracer, operation, known)
    forms = [form for track in known if (form := tracer.single(track)) is not None]
    if any(tracer.equations.resolve(form) for form in forms):
        for track in known:
            if track.constant:
                tracer.add_constant(track)
    for form in forms[1:]:
        tracer.equate(forms[0], form, f"{operation.name} needs one power of two")
    for number in numbers if forms else ():
        tracer.add_number(number, forms[0], f"{operation.name} with the number {number:g}")
    return track_of(forms[0] if forms else None)


def _added_numbers(name: str, args: Any, kwargs: Any) -> list[float]:
    """Return the numbers that an operator adds to a tensor, puts into it, or compares it with."""
    if name not in WITH_NUMBERS:
        return []
    named = {key: value for key, value in kwargs.items() if key != "alpha"}
    numbers = _numbers(args[WITH_NUMBERS[name] :], named)
    divisors = name.startswith("clamp_min")
    return [number for number in numbers if not (divisors and abs(number) < SMALLEST_DIVISOR)]


def _sum_of_parts(tracer: Tracer, operation: Operation, tracks: list[Track]) -> Track:
    """Make exponents equal part by part; all operands have the same parts."""
    first = tracks[0].forms or ()
    for track in tracks[1:]:
        for one, other in zip(first, track.forms or (), strict=True):
            tracer.equate(one, other, f"{operation.name} needs one power of two")
    return replace(tracks[0], parameter=None, constant=False)


def _product(tracer: Tracer, operation: Operation, args: Any, kwargs: Any) -> Track:
    """Add exponents. A matrix of weights hands its parts on to the last dimension of the result."""
    first, second = (tracer.track(each) for each in args[:2])
    elementwise = operation.name.startswith("mul")
    if elementwise and not isinstance(args[1], Tensor):
        return replace(first, parameter=None, constant=False)
    if first.forms is None or second.forms is None:
        return Track(None)
    weights = () if elementwise or not second.parameter else ((second.parameter, second.dim == -1),)
    left = tracer.single(first) or {}
    if second.cuts and second.dim == -1 and not elementwise:
        forms = tuple(add(left, form) for form in second.forms)
        return Track(forms, second.cuts, -1, weights=weights)
    return Track((add(left, tracer.single(second) or {}),), weights=weights)


def _product_with_sum(tracer: Tracer, operation: Operation, args: Any, kwargs: Any) -> Track:
    """Add the exponents of the second and third operand, which the first must equal."""
    product = _product(tracer, replace(operation, name="mul" if "mul" in operation.name else "mm"), args[1:], kwargs)
    bias = tracer.track(args[0])
    if product.forms is None:
        return bias
    if bias.forms is None:
        return product
    if bias.parameter:
        product.weights += ((bias.parameter, False),)
    if product.cuts and product.cuts == bias.cuts and bias.dim == -1:
        return _sum_of_parts(tracer, operation, [product, bias])
    total, other = tracer.single(product) or {}, tracer.single(bias) or {}
    tracer.equate(total, other, "adds a bias")
    return Track((total,), weights=product.weights)


def _convolution(tracer: Tracer, operation: Operation, args: Any, kwargs: Any) -> Track:
    """Add the exponents of image and kernel, which the bias must equal."""
    image, kernel = (tracer.single(tracer.track(each)) for each in args[:2])
    if image is None or kernel is None:
        return Track(None)
    total = add(image, kernel)
    if isinstance(args[2], Tensor):
        tracer.equate(total, tracer.single(tracer.track(args[2])) or {}, "adds a bias")
    return track_of(total)


def _quotient(tracer: Tracer, operation: Operation, args: Any, kwargs: Any) -> Track:
    """Subtract the exponent of the divisor; a quotient that is rounded follows no factor."""
    if kwargs.get("rounding_mode"):
        return pinned(tracer, operation, args, kwargs)
    if not isinstance(args[1], Tensor):
        return replace(tracer.track(args[0]), parameter=None, constant=False)
    above, below = (tracer.single(tracer.track(each)) for each in args[:2])
    return track_of(None if above is None else add(above, below or {}, -1))


def _power(tracer: Tracer, operation: Operation, args: Any, kwargs: Any) -> Track:
    """Multiply the exponent by the degree of a power or root; a cube root, or any other inexact one, pins it."""
    degree = POWERS.get(operation.name)
    if degree is None:
        if not isinstance(args[0], Tensor) or not isinstance(args[1], (int, float)):
            return pinned(tracer, operation, args, kwargs)
        degree = Fraction(args[1]).limit_denominator(2)
        if degree != args[1]:  # no other power is computed exactly
            return pinned(tracer, operation, args, kwargs)
    form = tracer.single(tracer.track(args[0]))
    return track_of(None if form is None else multiply(form, degree))


def _vector_norm(tracer: Tracer, operation: Operation, args: Any, kwargs: Any) -> Track:
    """Keep the exponent, but for the norm of degree 0, which counts."""
    counts = len(args) > 1 and args[1] == 0
    return (pinned if counts else _homogeneous)(tracer, operation, args, kwargs)


def _attention(tracer: Tracer, operation: Operation, args: Any, kwargs: Any) -> Track:
    """Give the result of attention the exponent of its values; those of queries and keys must cancel."""
    query, key, value = (tracer.single(tracer.track(each)) for each in args[:3])
    tracer.equate(add(query or {}, key or {}), {}, "attention scores")
    for other in floats(args[3:], kwargs):
        tracer.pin(tracer.track(other), "is added to attention scores")
    return track_of(value)


def _softmax(tracer: Tracer, operation: Operation, args: Any, kwargs: Any) -> Track:
    """Make the exponent of scores 0, and mark what made them, back to the product of queries and keys."""
    behind = list(operation.sources)
    while behind:
        source = tracer.operations[behind.pop()]
        source.scores = True
        if source.name.removesuffix("_") in SCORES:
            behind += [index for index in source.sources if not tracer.operations[index].scores]
    return pinned(tracer, operation, args, kwargs)


def _compared(tracer: Tracer, operation: Operation, args: Any, kwargs: Any) -> Track:
    """Make the exponents of two compared tensors equal; the result has none."""
    _sum(tracer, operation, args[:2], {})
    return Track(({},), constant=True)


def _filled(tracer: Tracer, operation: Operation, args: Any, kwargs: Any) -> Track:
    """Give a tensor that takes only its sizes from another the exponent 0, or every exponent if it holds zeros."""
    return Track(None if makes_zeros(operation.name, args) else ({},), constant=True)


def _variance(tracer: Tracer, operation: Operation, args: Any, kwargs: Any) -> Track:
    form = tracer.single(tracer.track(args[0]))
    return track_of(None if form is None else multiply(form, 2))


SINGLE: dict[str, Callable[[Tracer, Operation, Any, Any], Track | list[Track]]] = {
    "convolution": _convolution,
    "div": _quotient,
    "div_": _quotient,
    "pow": _power,
    "var": _variance,
    "native_layer_norm": norm,
    "native_group_norm": norm,
    "_fused_rms_norm": norm,
    "native_batch_norm": batch_norm,
    "cudnn_batch_norm": batch_norm,
    "_weight_norm_interface": weight_norm,
    "_softmax": _softmax,
    "_safe_softmax": _softmax,
    "linalg_vector_norm": _vector_norm,
}
