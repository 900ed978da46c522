"""Check a plan: run the scaled model, and compare what it computes with what the original computed."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pasa.fp16.planning import Peak, Plan, peaks_of
from pasa.fp16.tracing import Tracer

OFFSET_TOLERANCE = 0.05
"""Relative difference of peaks, in BF16, where a parameter with an offset is rounded to FP32; elsewhere it is 0."""


def confirm(plan: Plan, tracer: Tracer, scaled: Tracer) -> None:
    """Check that every peak of the scaled model is that of the original times its power of two, bit for bit.

    An epsilon that is wrong may show in no peak. So each that was scaled must be the number that the scaled model adds.
    """
    for place in plan.constants.keys() & (tracer.constants.keys() - scaled.constants.keys()):
        raise RuntimeError(
            f"to_fp16: {place.module or 'the model'} does not read its {place.attribute} anew, so it cannot be scaled: "
            f"let its forward pass read self.{place.attribute}"
        )
    tolerance = OFFSET_TOLERANCE if plan.offsets else 0.0
    before, after = _by_place(plan.peaks), _by_place(peaks_of(scaled, 1.0))
    for run, peak in before.items():
        expected = math.ldexp(peak.value, -plan.exponent(peak.form))
        measured = after[run].value if run in after else math.nan
        if not abs(measured - expected) <= tolerance * expected:
            raise RuntimeError(
                f"to_fp16: {peak.module or 'the model'} ({peak.operation}) does not follow the powers of two: "
                f"{measured:.6g} instead of {expected:.6g}; the model is unchanged, please report it"
            )


def _by_place(peaks: Iterable[Peak]) -> dict[tuple[str, str, int], Peak]:
    """Return peaks by module, operator, and how often that operator has run there; without changes of dtype."""
    counts: dict[tuple[str, str], int] = {}
    placed = {}
    for peak in peaks:
        if peak.operation != "_to_copy":  # there is none where a parameter is FP32 already
            count = counts[peak.module, peak.operation] = counts.get((peak.module, peak.operation), -1) + 1
            placed[peak.module, peak.operation, count] = peak
    return placed
