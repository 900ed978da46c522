"""Rules for the exponents of norms: of activations, which remove a common factor, and of weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from pasa.fp16.exponents import add, multiply
from pasa.fp16.operands import pinned, track_of
from pasa.fp16.tracks import Track

if TYPE_CHECKING:
    from pasa.fp16.tracing import Tracer
    from pasa.fp16.tracks import Operation

OTHER_EPSILON = "a norm whose epsilon is no attribute of its module"


def norm(tracer: Tracer, operation: Operation, args: Any, kwargs: Any) -> Track:
    """Give the result of a norm the exponent of its weight; scale its epsilon by twice the operand's exponent."""
    tensors = {"native_layer_norm": (2, 3, 4), "native_group_norm": (1, 2, 7), "_fused_rms_norm": (2, None, 3)}
    weight, bias, epsilon = tensors[operation.name]
    form = tracer.single(tracer.track(args[0]))
    number = args[epsilon] if len(args) > epsilon else None
    if form is not None and number != 0:
        if number is None:
            tracer.equate(form, {}, OTHER_EPSILON)
        else:
            tracer.add_number(number, multiply(form, 2), OTHER_EPSILON)
    scale = tracer.single(tracer.track(args[weight])) if isinstance(args[weight], Tensor) else {}
    if bias is not None and isinstance(args[bias], Tensor):
        tracer.equate(scale or {}, tracer.single(tracer.track(args[bias])) or {}, "adds a norm's bias")
    return track_of(scale)


def batch_norm(tracer: Tracer, operation: Operation, args: Any, kwargs: Any) -> list[Track] | Track:
    """Let a factor pass through a fixed affine map; statistics of the operand itself are those of any other norm."""
    if args[5] and args[3] is not None:
        return pinned(tracer, operation, args, kwargs)  # writes running statistics
    image, weight, bias, mean, variance = (
        tracer.single(tracer.track(each)) if isinstance(each, Tensor) else {} for each in args[:5]
    )
    if image is None:  # zeros, which follow no factor behind a sum
        return pinned(tracer, operation, args, kwargs)
    total = weight
    if args[5]:
        tracer.add_number(args[7], multiply(image, 2), OTHER_EPSILON)
    else:
        if mean is not None:
            tracer.equate(image, mean, "subtracts a running mean")
        tracer.equate(variance or {}, {}, "reads a running variance")  # scaled, FP16 would make it subnormal
        total = None if weight is None else add(image, weight)
    if isinstance(args[2], Tensor) and bias is not None:
        tracer.equate(total or {}, bias, "adds a norm's bias")
        total = total or bias
    return [track_of(total), track_of(image), track_of(multiply(image, -1))]


def weight_norm(tracer: Tracer, operation: Operation, args: Any, kwargs: Any) -> list[Track]:
    """Give a normalised weight the exponent of its length; the second result is the norm of its direction."""
    direction, length = (tracer.single(tracer.track(each)) for each in args[:2])
    return [track_of(length), track_of(direction)]
