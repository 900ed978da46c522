"""The ratios to reach, held against what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pasa.eval.speed.cases import PORTABLE_TARGETS, SpeedCase, Target
from pasa.eval.speed.implementations import OURS, PORTABLE

Record = dict[str, Any]
CUDNN_FIELD, FLASH_FIELD, FLOOR_FIELD = "to_cudnn", "to_flash", "to_floor"


def judge_targets(cases: Sequence[SpeedCase], records: Sequence[Record]) -> list[Record]:
    """One entry per target: the best of the eligible implementations that passed the gate, and its verdict.

    Returns
    -------
    list of dict
        ``case``, ``how``, ``kernel`` ("ours" or "portable"), ``field`` of the record, ``must``, ``stretch``, ``value``,
        ``by`` and ``verdict``: "stretch", "must", "missed" or "not measured".
    """
    found = []
    for case in cases:
        for how, target in (("eager", case.eager), ("graph", case.graph)):
            own = [each for each in records if each["case"] == case.name and each["how"] == how]
            found += _compare(case.name, how, "ours", target, [each for each in own if each["implementation"] in OURS])
            if how == "eager" and target.cudnn is not None:
                portable = [each for each in own if each["implementation"] in PORTABLE]
                found += _compare(case.name, how, "portable", PORTABLE_TARGETS.get(case.dim, Target()), portable)
    return found


def _compare(case: str, how: str, kernel: str, target: Target, records: Sequence[Record]) -> list[Record]:
    wanted = (
        (CUDNN_FIELD, target.cudnn, target.stretch),
        (FLASH_FIELD, target.flash, None),
        (FLOOR_FIELD, target.floor, None),
    )
    head = {"case": case, "how": how, "kernel": kernel}
    return [
        head | {"field": field, "must": must, "stretch": stretch} | best(field, must, stretch, records)
        for field, must, stretch in wanted
        if must is not None
    ]


def best(field: str, must: float, stretch: float | None, records: Sequence[Record]) -> Record:
    """Value, implementation and verdict; a time over the floor is the better the lower, all else the higher."""
    measured = [(each[field], each["implementation"]) for each in records if each.get(field) is not None]
    if not measured:
        return {"value": None, "by": None, "verdict": "not measured"}
    lower = field == FLOOR_FIELD
    value, by = (min if lower else max)(measured)
    if stretch is not None and value >= stretch:
        return {"value": value, "by": by, "verdict": "stretch"}
    met = value <= must if lower else value >= must
    return {"value": value, "by": by, "verdict": "must" if met else "missed"}
