"""Draw, run and shrink random cases. The seed and the index alone decide what a case is."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from pasa.eval.kit.output import error_line

SEED = "data_seed"
Params = dict[str, Any]
"""The parameters of a case, as plain values that JSON can hold."""
Measures = dict[str, float]
COUNTS = ("shape", "nan", "finite", "fully-masked", "repeat", "same", "diagnosed", "max-logits", "cache", "anchors")
"""Measures that must be 0. All others are ratios of an error to the allowed error, which must be at most 1."""
SHRINKS = 200  # attempts to make a failing case simpler
TWICE_EVERY = 20  # every 20th case may be called twice, and must then give the same bits


@dataclass(frozen=True)
class Kind:
    """A kind of case: the part of the API that it calls, such as ``attention_varlen``; how it is drawn and judged."""

    draw: Callable[[Random], Params]
    run: Callable[[Params], Measures]  # makes the call and judges it
    share: int  # relative frequency among the kinds
    simplest: Mapping[str, Any] = field(default_factory=dict)  # simplest value of each parameter, the goal of shrinking


@dataclass(frozen=True)
class Case:
    """One call to be judged."""

    seed: int
    index: int
    kind: str
    params: Params

    @property
    def name(self) -> str:
        """Return SEED:INDEX, from which the case can be drawn again."""
        return f"{self.seed}:{self.index}"


@dataclass(frozen=True)
class Outcome:
    """The result of a case: "correct", "absent" (its backend cannot run here), or a failure, "wrong" or "raised"."""

    verdict: str
    why: str = ""  # the reason, unless the verdict is "correct"
    measures: Measures = field(default_factory=dict)
    fatal: bool = False  # the device is broken, so no further case can be judged

    @property
    def failed(self) -> bool:
        """Return whether the case shows a fault of the package."""
        return self.verdict in ("wrong", "raised")


class AbsentError(Exception):
    """The backend of a case cannot run here."""


def draw_case(kinds: Mapping[str, Kind], seed: int, index: int) -> Case:
    """Return case `index` of a seed."""
    rng = Random(f"case {seed} {index}")
    name = rng.choices(list(kinds), [kind.share for kind in kinds.values()])[0]
    params = kinds[name].draw(rng) | {SEED: rng.getrandbits(48), "twice": index % TWICE_EVERY == 0}
    return Case(seed, index, name, json.loads(json.dumps(params)))  # the same types as after a reload


def run_case(kinds: Mapping[str, Kind], case: Case) -> Outcome:
    """Run a case and judge it; an exception is a failure, because drawn calls are valid."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # unit tests check the warnings
            measures = kinds[case.kind].run(case.params)
    except AbsentError as error:
        return Outcome("absent", str(error))
    except Exception as error:
        fatal = "CUDA error" in str(error) or isinstance(error, getattr(torch, "AcceleratorError", ()))
        return Outcome("raised", error_line(error), fatal=fatal)
    failed = broken(measures)
    why = ", ".join(f"{name} {measures[name]:.4g}" for name in failed)
    return Outcome("wrong" if failed else "correct", why, measures)


def broken(measures: Measures) -> list[str]:
    """Return the names of the measures beyond their bounds; a measure that is NaN counts as beyond."""
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
    """Yield changes of one parameter: to its simplest value; an integer also half the way there, and one less."""
    for name, least in simplest.items():
        value = params.get(name)
        if value == least:
            continue
        yield name, least
        if type(value) is int and type(least) is int and value - least > 1:
            yield name, least + (value - least) // 2
            yield name, value - 1
