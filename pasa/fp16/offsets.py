"""Parameters to which a model adds a number, as in the ``1 + weight`` of Gemma's norms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pasa.fp16.tracks import Track

if TYPE_CHECKING:
    from pasa.fp16.tracing import Tracer

BOTH = "reads a parameter with a number added to it and without"


def offset(tracer: Tracer, track: Track, number: float) -> Track:
    """Return the exponent of a parameter plus a number; it is 0 if the parameter is read in another way too."""
    name = track.parameter or ""
    if name not in tracer.offsets:
        tracer.pin(track, "adds a number to a parameter")
        tracer.offsets[name] = tracer.equations.unknown(f"{name} + {number:g}"), number
    form, first = tracer.offsets[name]
    if name in tracer.read or number != first:
        tracer.equate(form, {}, BOTH)
    return Track((form,), offset=True)


def note_reads(tracer: Tracer, operands: Sequence[Track], results: Iterable[Track | None]) -> None:
    """Note which parameters an operation reads, but for views and casts of them, and sums with a number."""
    if any(track is not None and (track.parameter or track.offset) for track in results):
        return
    for name in {track.parameter for track in operands if track.parameter}:
        tracer.read.add(name)
        if name in tracer.offsets:
            tracer.equate(tracer.offsets[name][0], {}, BOTH)
