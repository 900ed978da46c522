"""Splits the time of our default mode: the pass over the keys and the main loop; in decoding, reading K and V alone."""

from __future__ import annotations

import importlib
from typing import Any

from pasa.eval.kit.timing import Call, Clock, interleave, summary
from pasa.eval.speed.cases import Inputs, SpeedCase

BLOCK = 128  # keys per anchor
WHOLE, PREPASS, MAIN, READING = "whole", "pre-pass", "main loop", "reading"


def anchors(inputs: Inputs) -> Any:
    """Norms and anchors of every block of keys: what is known before a query is looked at."""
    backend: Any = importlib.import_module("pasa.ops.attention.triton.anchors")
    return backend.find_anchors(inputs.k, inputs.v, BLOCK, check_values=inputs.causal)


def prepass(inputs: Inputs) -> Call:
    """The pass over the keys alone."""
    return Call(lambda: anchors(inputs).norms)


def reading(inputs: Inputs) -> Call:
    """K and V read once by a kernel that does nothing else."""
    module: Any = importlib.import_module("pasa.eval.speed.reading")  # Triton is an extra
    call: Call = module.reader(inputs.k, inputs.v)
    return call


PARTS = {PREPASS: prepass}
DECODING = {READING: reading}


def split(case: SpeedCase, inputs: Inputs, whole: Call, clock: Clock, rounds: int) -> dict[str, Any]:
    """Milliseconds of the whole call and of its parts, in CUDA graphs: without what the host adds.

    Returns
    -------
    dict
        ``case``, ``in_graph``, ``whole``, ``why`` something could not be timed and is None; ``pre-pass`` and ``main
        loop``: the rest; for decoding ``reading`` instead, which is no part of the whole but its bound.
    """
    calls, reasons, parts = {WHOLE: whole}, [], DECODING if case.decode else PARTS
    for name, make in parts.items():
        try:
            part = make(inputs)
            part.run()
        except Exception as error:  # a part that cannot run alone has no time; the whole has one
            reasons.append(f"{name}: {one_line(error)}")
        else:
            calls[name] = part
    in_graph = True
    try:
        timed = {name: clock.graph(call) for name, call in calls.items()}
    except Exception as error:  # then with the host's share
        timed, in_graph = calls, False
        reasons.append(f"not in a graph: {one_line(error)}")
    try:
        times, _ = interleave(clock, timed, rounds)
    except Exception as error:  # the records of the case stand
        times = {}
        reasons.append(f"while timed: {one_line(error)}")
    found = {name: summary(taken)["median_ms"] for name, taken in times.items()}
    split_up = {name: found.get(name) for name in (WHOLE, *parts)}
    if not case.decode:
        split_up[MAIN] = found[WHOLE] - found[PREPASS] if found.keys() >= {WHOLE, PREPASS} else None
    return {"case": case.name, "in_graph": in_graph, **split_up, "why": "; ".join(reasons)}


def one_line(error: BaseException) -> str:
    """Kind and text of an exception, short enough for a table."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
