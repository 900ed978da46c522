"""Splits the time of our default mode: the pass over the keys and the main loop; in decoding, reading K and V alone."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from pasa.eval.kit.timing import Call, Clock, Rounds, interleave, summary
from pasa.eval.speed.cases import Inputs, SpeedCase

BLOCK = 128  # keys per anchor
WHOLE, PREPASS, MAIN, READING = "whole", "pre-pass", "main loop", "reading"


def prepass(inputs: Inputs) -> Call:
    """Return the pass over the keys alone: norms and anchors of every block, known before a query is read."""
    backend: Any = importlib.import_module("pasa.ops.attention.triton.anchor_launch")  # Triton is an extra

    def run() -> Tensor:
        norms: Tensor = backend.find_anchors(inputs.k, inputs.v, BLOCK, check_values=inputs.causal).norms
        return norms

    return Call(run)


def reading(inputs: Inputs) -> Call:
    """Return a call that reads K and V once and does nothing else."""
    module: Any = importlib.import_module("pasa.eval.speed.reading_bound")  # Triton is an extra
    call: Call = module.reader(inputs.k, inputs.v)
    return call


def split(case: SpeedCase, inputs: Inputs, whole: Call, clock: Clock, rounds: int) -> dict[str, Any]:
    """Time the whole call and its part in CUDA graphs, without what the host adds.

    Returns
    -------
    dict
        ``case``, ``in_graph``; milliseconds of ``whole``, ``pre-pass`` and ``main loop`` (the rest), or for decoding of
        ``whole`` and ``reading``, which is no part of the whole but its bound; None, with ``why``, without a time.
    """
    name, make = (READING, reading) if case.decode else (PREPASS, prepass)
    calls, reasons = {WHOLE: whole}, []
    try:
        part = make(inputs)
        part.run()
        calls[name] = part
    except Exception as error:  # a part that cannot run alone has no time; the whole has one
        reasons.append(f"{name}: {one_line(error)}")
    times: dict[str, Rounds] = {}
    try:
        times, _ = interleave(clock, {each: clock.graph(call) for each, call in calls.items()}, rounds)
    except Exception as error:  # the records of the case stand
        reasons.append(f"while timed: {one_line(error)}")
    ms: dict[str, Any] = {WHOLE: None, name: None} | {
        each: summary(taken)["median_ms"] for each, taken in times.items()
    }
    if name == PREPASS:
        ms[MAIN] = ms[WHOLE] - ms[PREPASS] if len(times) == 2 else None
    return {"case": case.name, "in_graph": True, **ms, "why": "; ".join(reasons)}


def one_line(error: BaseException) -> str:
    """Return kind and text of an exception, short enough for a table."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
