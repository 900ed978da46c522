"""Targets against records."""

from typing import Any

import pytest

from pasa.eval.speed.cases import SpeedCase, Target
from pasa.eval.speed.targets import best, judge_targets

CASE = SpeedCase("c", 1, 1, 1, 8, 8, 128, eager=Target(1.0, 1.2, 2.0), graph=Target(floor=1.15))


def record(name: str, how: str = "eager", **fields: Any) -> dict[str, Any]:
    return {"case": "c", "implementation": name, "how": how, **fields}


def test_the_default_and_the_portable_kernel_count_and_no_peer() -> None:
    records = [
        record("pasa", to_cudnn=1.25, to_flash=2.5),
        record("triton-fp32", to_cudnn=9.0),
        record("pasa-portable", to_cudnn=0.8, to_flash=1.5),
        record("pasa", "graph", to_floor=1.1),
    ]
    found = [(e["kernel"], e["field"], e["value"], e["by"], e["verdict"]) for e in judge_targets([CASE], records)]
    assert found == [
        ("ours", "to_cudnn", 1.25, "pasa", "stretch"),
        ("ours", "to_flash", 2.5, "pasa", "must"),
        ("portable", "to_cudnn", 0.8, "pasa-portable", "missed"),
        ("portable", "to_flash", 1.5, "pasa-portable", "must"),
        ("ours", "to_floor", 1.1, "pasa", "must"),
    ]


def test_without_a_time_nothing_is_claimed() -> None:
    verdicts = {each["verdict"] for each in judge_targets([CASE], [record("pasa", why="No available kernel")])}
    assert verdicts == {"not measured"}


@pytest.mark.parametrize(
    ("field", "value", "verdict"),
    [
        ("to_cudnn", 1.0, "must"),
        ("to_cudnn", 0.999, "missed"),
        ("to_floor", 1.0, "must"),
        ("to_floor", 1.01, "missed"),
    ],
)
def test_limits_are_inclusive_and_a_floor_is_from_below(field: str, value: float, verdict: str) -> None:
    assert best(field, 1.0, None, [record("pasa", **{field: value})])["verdict"] == verdict
