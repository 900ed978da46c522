"""A case comes from the seed and its index alone; what kinds of case there are; how a failing one is made smaller."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

Params = dict[str, Any]
"""Plain values that JSON holds: what a case is made of. "fault" names what is wrong with the call, None if nothing."""
Arguments = dict[str, Any]
Measures = dict[str, float]
COUNTS = (
    "shape",
    "nan",
    "finite",
    "blind",
    "same",
    "diagnosed",
    "cache",
    "anchors",
)  # none is allowed; of others a ratio of 1
FAULTY = 0.3  # share of the cases that a kind with faults draws with one
SHRINKS = 200  # attempts
SEED = "data_seed"


@dataclass(frozen=True)
class Fault:
    """One way to call wrongly, and the documented answer.

    Attributes
    ----------
    spoil : callable
        Changes the arguments, in place.
    error : type
        What must be raised.
    message : str
        Regular expression that its text must hold: it names the argument or its value.
    """

    spoil: Callable[[Arguments, Random], None]
    error: type[Exception]
    message: str


@dataclass(frozen=True)
class Kind:
    """One part of the API.

    Attributes
    ----------
    draw : callable
        Parameters of a valid case.
    run : callable
        Calls and judges: measured over allowed, or counts for `COUNTS`. Spoils the arguments if the case has a fault.
    share : int
        How often it is drawn, beside the others.
    simplest : mapping
        Value of each parameter that says least, for shrinking.
    faults : mapping
    """

    draw: Callable[[Random], Params]
    run: Callable[[Params], Measures]
    share: int
    simplest: Mapping[str, Any] = field(default_factory=dict)
    faults: Mapping[str, Fault] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One call to be judged."""

    seed: int
    index: int
    kind: str
    params: Params

    @property
    def name(self) -> str:
        """For `--replay`."""
        return f"{self.seed}:{self.index}"

    def __str__(self) -> str:
        return f"{self.name} {self.kind} {json.dumps(self.params)}"


@dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Attributes
    ----------
    verdict : str
        "correct", "refused" (a documented error, as it must), "absent" (its backend cannot run here), or a finding:
        "wrong", "raised", "accepted".
    why : str
        Of a finding.
    measures : dict
    """

    verdict: str
    why: str = ""
    measures: Measures = field(default_factory=dict)

    @property
    def finding(self) -> bool:
        """Whether the package has to be mended."""
        return self.verdict in ("wrong", "raised", "accepted")


class AbsentError(Exception):
    """The backend of a case cannot run here."""


def draw_case(kinds: Mapping[str, Kind], seed: int, index: int) -> Case:
    """Case `index` of a seed."""
    rng = Random(f"fuzz {seed} {index}")
    name = rng.choices(list(kinds), [kind.share for kind in kinds.values()])[0]
    kind = kinds[name]
    fault = rng.choice(list(kind.faults)) if kind.faults and rng.random() < FAULTY else None
    params = kind.draw(rng) | {"fault": fault, SEED: rng.getrandbits(48)}
    return Case(seed, index, name, json.loads(json.dumps(params)))  # as a replay and a stored result have it


def spoil(kind: Mapping[str, Fault], params: Params, arguments: Arguments) -> None:
    """Make the mistake that the case asks for."""
    if params["fault"] is not None:
        kind[params["fault"]].spoil(arguments, Random(params[SEED]))


def run_case(kinds: Mapping[str, Kind], case: Case) -> Outcome:
    """Call, judge, and hold an exception against the documented ones."""
    kind = kinds[case.kind]
    fault = kind.faults.get(case.params["fault"] or "")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is warned of is documented; other tests read it
            measures = kind.run(case.params)
    except AbsentError as error:
        return Outcome("absent", str(error))
    except Exception as error:  # an undocumented one is what the fuzzer is for
        said = f"{type(error).__name__}: {error}"
        if fault is None:
            return Outcome("raised", said)
        if isinstance(error, fault.error) and re.search(fault.message, str(error)):
            return Outcome("refused")
        return Outcome("raised", f"{said} in place of {fault.error.__name__} {fault.message!r}")
    if fault is not None:
        return Outcome("accepted", f"{case.params['fault']} was not refused")
    broken = [name for name, value in measures.items() if not value <= (0.0 if name in COUNTS else 1.0)]
    if broken:
        return Outcome("wrong", ", ".join(f"{name} {measures[name]:.4g}" for name in broken), measures)
    return Outcome("correct", measures=measures)


def shrink(kinds: Mapping[str, Kind], case: Case) -> Case:
    """A simpler case with the same verdict, one parameter after another; the case itself if there is none."""
    verdict, attempts = run_case(kinds, case).verdict, 0
    moved = True
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
    """Changes of one parameter: to its simplest value at once, and of a number half the way there."""
    for name, least in simplest.items():
        value = params.get(name)
        if value == least:
            continue
        yield name, least
        if type(value) is int and type(least) is int and value - least > 1:
            yield name, least + (value - least) // 2
            yield name, value - 1
