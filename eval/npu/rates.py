"""Rates of an Ascend 910B3 as published, out of ``rates.json``: each with its source, and what is inferred in it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

CYCLES = "cycles of a repeat of 256 bytes, FP32 and FP16"


@cache
def load() -> dict[str, Any]:
    """Return the file; a rate has ``value``, ``unit``, ``source`` and ``inferred``."""
    data: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    for each in data["rates"].values():
        each["source"] = data["sources"][each["source"]]
    return data


def rate(name: str) -> float:
    """Return the value of a rate in its unit."""
    return float(load()["rates"][name]["value"])


def cycles_of(call: str) -> float:
    """Return the cycles of a repeat of a call such as ``"Add float"``; KeyError without a published rate."""
    name, _, dtype = call.partition(" ")
    return float(load()[CYCLES][name][0 if dtype == "float" else 1])


def cycle_source() -> dict[str, Any]:
    """Return the cycles of all vector calls and their source, in the form that is stored with a result."""
    return {"source": load()["sources"]["cost model, vector calls"], "fp32, fp16": load()[CYCLES]}
