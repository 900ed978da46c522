"""Times every shape of attention that a model asks for, each alone, through the gate of the speed benchmark."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

import pasa
from pasa.eval.kit.attention_calls import AttentionCalls
from pasa.eval.kit.tables import Table, number
from pasa.eval.kit.timing import Clock
from pasa.eval.speed.cases import SpeedCase
from pasa.eval.speed.implementations import CUDNN, FLASH, select_implementations
from pasa.eval.speed.run import measure_case

PASA = "pasa"


def attention_shapes(model: Any, run: Any) -> list[tuple[SpeedCase, int]]:
    """Return the attention that one run of the model asks for, most work first, and how often."""
    sizes: Counter[tuple[torch.Size, torch.Size]] = Counter()

    def count(q: Tensor, k: Tensor) -> None:
        sizes[q.shape, k.shape] += 1

    with pasa.patch_pipeline(model), AttentionCalls(count):
        run()
    cases = []
    for (q, k), calls in sizes.items():
        batch, heads, rows, dim = q
        cases.append((SpeedCase(f"{batch}x{heads}x{rows}x{k[2]}x{dim}", batch, heads, k[1], rows, k[2], dim), calls))
    return sorted(cases, key=lambda each: -each[1] * each[0].flops)


def measure_attention(
    cases: list[tuple[SpeedCase, int]], clock: Clock, bandwidth: float, rounds: int
) -> list[dict[str, Any]]:
    """Return a record for every shape and implementation, on random data."""
    implementations = select_implementations([CUDNN, FLASH, PASA])
    records = []
    for case, calls in cases:
        measured, _ = measure_case(case, implementations, clock, bandwidth, rounds)
        records += [each | {"shape": case.shape, "calls": calls} for each in measured]
    return records


def table(result: dict[str, Any]) -> Table:
    """Return a row for every shape of attention, and what they take together in a step."""
    times: dict[str, dict[str, float | None]] = {}
    for each in result["attention"]:
        times.setdefault(each["shape"], {})[each["implementation"]] = each.get("median_ms")
    calls = {each["shape"]: each["calls"] for each in result["shapes"]}
    rows = [
        [shape, str(calls[shape]), *(number(ms[name], ".3f") for name in (CUDNN, FLASH, PASA)), _ratio(ms)]
        for shape, ms in times.items()
    ]
    total = {name: sum(calls[shape] * (ms[name] or 0) for shape, ms in times.items()) for name in (FLASH, PASA)}
    together = [f"{total[name]:.1f}" for name in (FLASH, PASA)]
    rows.append(["all of a step", str(sum(calls.values())), "-", *together, _ratio(total)])
    note = "Each shape alone, random data, ms of one call; (batch, heads, queries x keys, head dim)."
    return Table("Its attention", ["shape", "calls", CUDNN, FLASH, PASA, "pasa beside flash"], rows, note)


def _ratio(ms: Any) -> str:
    return f"{ms[FLASH] / ms[PASA]:.2f}" if ms[FLASH] and ms[PASA] else "-"
