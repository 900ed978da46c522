"""Where Q and K share a large bias, a 16-bit score tile can be nearer to FP64 than FP32 attention is."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pasa.eval.accuracy.rmse.cases import ARITHMETICS, BIAS_CASES, COMPETITOR, GATED, NAIVE
from pasa.eval.accuracy.rmse.metrics import Errors, measure_errors
from pasa.eval.accuracy.rmse.run import Job, Progress, Record, check, flat, golden_by_head, run_jobs, wrap

SDPA = "sdpa-fp32"
COMPARED = (COMPETITOR, NAIVE, "pasa-paper", GATED)


def run_large_bias(
    heads: int | None = None,
    seq: int | None = None,
    seeds: Sequence[int] = tuple(range(12)),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Compare with FP32 attention where Q and K share a large bias (N(0, 1) + b on 16 of 128 channels).

    Parameters
    ----------
    heads, seq : int, optional
        In place of those of the cases.
    seeds : sequence of int
    progress : callable, optional

    Returns
    -------
    dict
        As `run.run_rmse`, with the table ``ratios`` of `bias_ratios`. Records of "sdpa-fp32" are those of
        torch's scaled_dot_product_attention on FP32 tensors.

    Raises
    ------
    ValueError
        On a size below 1, or if there is no seed.
    """
    check(seeds, heads=heads, seq=seq)
    started = time.perf_counter()
    first = BIAS_CASES[0].shape
    shape = (first[0], heads or first[1], seq or first[2], first[3])
    jobs: list[Job] = [(dataclasses.replace(case, shape=shape), seed, "inf") for case in BIAS_CASES for seed in seeds]
    wanted = [each for each in ARITHMETICS if each.name in COMPARED]
    records = run_jobs(jobs, wanted, progress)
    for case, seed, mode in jobs:
        q, k, v = case.tensors(seed)
        errors = _sdpa_errors(q, k, v)
        head = {"case": case.name, "seed": seed, "overflow": mode, "arithmetic": SDPA}
        records.append(head | flat(errors))
    what = {"shape": list(shape), "seeds": list(seeds), "cases": [{"name": c.name} for c in BIAS_CASES]}
    return wrap("large-bias", started, what | {"ratios": bias_ratios(records)}, records)


def _sdpa_errors(q: Tensor, k: Tensor, v: Tensor) -> Errors:
    out = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float())
    return measure_errors(out, golden_by_head(q, k, v))


def bias_ratios(records: Sequence[Record]) -> list[Record]:
    """Per case: RMSE of each arithmetic pooled over the seeds, its ratio to the two FP32 ones, and the worst seed's."""
    rows = []
    for case in dict.fromkeys(each["case"] for each in records):
        rmse: dict[str, dict[int, float]] = {}
        for each in records:
            if each["case"] == case:
                rmse.setdefault(each["arithmetic"], {})[each["seed"]] = each["rmse"]
        row: Record = {"case": case} | {name: _pooled(by_seed.values()) for name, by_seed in rmse.items()}
        for other in (COMPETITOR, SDPA):
            worst = max(_quotient(value, rmse[other][seed]) for seed, value in rmse[GATED].items())
            row |= {f"pooled_to_{other}": _quotient(row[GATED], row[other]), f"worst_to_{other}": worst}
        rows.append(row)
    return rows


def _pooled(values: Iterable[float]) -> float:
    """Root of the mean square."""
    return math.sqrt(statistics.fmean(value * value for value in values))


def _quotient(own: float, other: float) -> float:
    """own / other; no error on either side is a draw."""
    if own == other:
        return 1.0
    return own / other if other else float("inf")
