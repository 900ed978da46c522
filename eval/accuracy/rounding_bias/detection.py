"""Triggers for stochastic rounding: the rows that each flags, the bias that it leaves, and its cost in error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pasa.eval.accuracy.rounding_bias.arithmetic import quotient
from pasa.eval.accuracy.rounding_bias.cases import Case, Rows, make_rows
from pasa.eval.accuracy.rounding_bias.statistics import measure
from pasa.ops.attention.spec.repeated_maxima import repeats
from pasa.ops.numerics.dither import is_structured, round_stochastic
from pasa.ops.numerics.formats import round_to

DIM = 128  # twice the columns that the operator looks at
LOOKED_AT = (32, 64, DIM)
TRIGGERS = ("never", "always", "two scores within 1e-3", *(f"leaning, {columns} columns" for columns in LOOKED_AT))
CASES = (
    *(Case(maxima, "smaller") for maxima in ("two", "near", "blocks", "three", "four", "one")),
    *(Case(maxima, "smaller", "one binade") for maxima in ("three", "six")),
    Case("random", "same"),
)


def compare_triggers(fmt: str, case: Case, rows: int, generator: torch.Generator) -> list[dict[str, Any]]:
    """Return a record for each trigger; every row is D = 128 wide and O / l is rounded once."""
    data = make_rows(case, fmt, rows, DIM, generator)
    exact, out = data.exact(), quotient(data, "fp32", "safe")
    nearest, drawn = round_to(out, fmt), round_stochastic(out, fmt)
    records = []
    for name, flagged in zip(TRIGGERS, triggered(data, out, fmt), strict=True):
        bias = measure(torch.where(flagged, drawn, nearest), exact, data.grad, fmt)
        records.append(
            {
                "case": case.name,
                "format": fmt,
                "trigger": name,
                "drawn": float(flagged.double().mean()),
                "bias": bias.out.value,
                "interval": bias.out.interval(),
                "rms": bias.rms,
            }
        )
    return records


def triggered(rows: Rows, out: Tensor, fmt: str) -> Iterator[Tensor]:
    """Yield for each of `TRIGGERS` which rows (R, 1) it flags; `out` is O / l in FP32."""
    yield torch.zeros(len(out), 1, dtype=torch.bool)
    yield torch.ones(len(out), 1, dtype=torch.bool)
    yield repeats(rows.scores, rows.scores.amax(-1, keepdim=True))
    for columns in LOOKED_AT:
        yield is_structured(out, fmt, columns)
