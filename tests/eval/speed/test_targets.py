"""Targets against records."""

from typing import Any

import pytest

from pasa.eval.kit.stored import stored
from pasa.eval.speed.cases import CASES
from pasa.eval.speed.targets import PORTABLE, TARGETS, judge, judge_targets


def record(name: str, how: str = "eager", **fields: Any) -> dict[str, Any]:
    return {"case": "qwen2-8k", "implementation": name, "how": how, **fields}


def test_the_default_and_the_portable_kernel_count_and_no_peer() -> None:
    records = [
        record("pasa", to_cudnn=1.12, to_flash=2.5),
        record("triton-fp32", to_cudnn=9.0),
        record("pasa-portable", to_cudnn=0.8),
    ]
    judged = [(e["kernel"], e["field"], e["value"], e["by"], e["verdict"]) for e in judge_targets(records)]
    assert judged == [
        ("ours", "to_cudnn", 1.12, "pasa", "stretch"),
        ("ours", "to_flash", 2.5, "pasa", "must"),
        ("portable", "to_cudnn", 0.8, "pasa-portable", "missed"),
        ("portable", "to_flash", None, None, "not measured"),
    ]
    assert {each["verdict"] for each in judge_targets([record("sdpa-cudnn")])} == {"not measured"}


def test_targets_are_those_of_the_stored_run() -> None:
    result = stored("speed")
    keys = ("case", "how", "kernel", "field", "must", "stretch", "by", "verdict")
    old, new = (
        [[e[key] for key in keys] for e in each] for each in (result["targets"], judge_targets(result["records"]))
    )
    assert old == new
    assert {case for case, _ in (*TARGETS, *PORTABLE)} <= {case.name for case in CASES}


@pytest.mark.parametrize(
    ("field", "value", "verdict"),
    [("to_cudnn", 1.0, "must"), ("to_cudnn", 0.999, "missed"), ("to_floor", 1.0, "must"), ("to_floor", 1.01, "missed")],
)
def test_limits_are_inclusive_and_a_floor_is_from_below(field: str, value: float, verdict: str) -> None:
    assert judge(field, value, 1.0) == verdict
