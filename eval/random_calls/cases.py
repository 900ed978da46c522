"""A case comes from the seed and its index alone: kinds of case, verdicts, and how a failing case is made smaller."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

SEED = "data_seed"
Params = dict[str, Any]
"""Plain values that JSON holds: what a case is made of."""
Measures = dict[str, float]
COUNTS = ("shape", "nan", "finite", "blind", "repeat", "same", "diagnosed", "cache", "anchors")
"""Measures of which nothing is allowed; all others are ratios, of which 1 is."""
SHRINKS = 200  # attempts
TWICE_EVERY = 20  # cases: every such one may be called twice, to be compared bit for bit


@dataclass(frozen=True)
class Kind:
    """One part of the API."""

    draw: Callable[[Random], Params]
    run: Callable[[Params], Measures]  # calls and judges: measured over allowed, or counts for `COUNTS`
    share: int  # how often it is drawn, beside the others
    simplest: Mapping[str, Any] = field(default_factory=dict)  # value of each parameter that says least, for shrinking


@dataclass(frozen=True)
class Case:
    """One call to be judged."""

    seed: int
    index: int
    kind: str
    params: Params

    @property
    def name(self) -> str:
        """SEED:INDEX, from which it can be drawn again."""
        return f"{self.seed}:{self.index}"


@dataclass(frozen=True)
class Outcome:
    """The result of a case: "correct", "absent" (its backend cannot run here), or a failure, "wrong" or "raised"."""

    verdict: str
    why: str = ""  # of a failure
    measures: Measures = field(default_factory=dict)
    fatal: bool = False  # the device is broken, and judges no further case

    @property
    def failed(self) -> bool:
        """True where the package has to be mended."""
        return self.verdict in ("wrong", "raised")


class AbsentError(Exception):
    """The backend of a case cannot run here."""


def draw_case(kinds: Mapping[str, Kind], seed: int, index: int) -> Case:
    """Return case `index` of a seed."""
    rng = Random(f"case {seed} {index}")
    name = rng.choices(list(kinds), [kind.share for kind in kinds.values()])[0]
    params = kinds[name].draw(rng) | {SEED: rng.getrandbits(48), "twice": index % TWICE_EVERY == 0}
    return Case(seed, index, name, json.loads(json.dumps(params)))  # as a repetition and a stored result have it


def run_case(kinds: Mapping[str, Kind], case: Case) -> Outcome:
    """Call and judge; an exception is a failure, because drawn calls are valid."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is warned of is documented; other tests read it
            measures = kinds[case.kind].run(case.params)
    except AbsentError as error:
        return Outcome("absent", str(error))
    except Exception as error:
        fatal = "CUDA error" in str(error) or isinstance(error, getattr(torch, "AcceleratorError", ()))
        return Outcome("raised", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", fatal=fatal)
    failed = broken(measures)
    why = ", ".join(f"{name} {measures[name]:.4g}" for name in failed)
    return Outcome("wrong" if failed else "correct", why, measures)


def broken(measures: Measures) -> list[str]:
    """Return the names of the bounds that do not hold; NaN holds nothing."""
    return [name for name, value in measures.items() if not value <= (0.0 if name in COUNTS else 1.0)]


def shrink(kinds: Mapping[str, Kind], case: Case) -> Case:
    """Return a simpler case with the same verdict, one parameter after another; the case itself if there is none."""
    if not kinds[case.kind].simplest:  # a case of kernels may have broken the device
        return case
    verdict, attempts, moved = run_case(kinds, case).verdict, 0, True
    while moved and attempts < SHRINKS:
        moved = False
        for name, value in _simpler(case.params, kinds[case.kind].simplest):
            attempts += 1
            smaller = Case(case.seed, case.index, case.kind, case.params | {name: value})
            if run_case(kinds, smaller).verdict == verdict:
                case, moved = smaller, True
                break
    return case


def _simpler(params: Params, simplest: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield changes of one parameter: to its simplest value at once, and of a number half the way there."""
    for name, least in simplest.items():
        value = params.get(name)
        if value == least:
            continue
        yield name, least
        if type(value) is int and type(least) is int and value - least > 1:
            yield name, least + (value - least) // 2
            yield name, value - 1
