"""Runs the table of cases through the arithmetics and applies the gates."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

import pasa
from pasa.eval.accuracy.rmse.cases import (
    ARITHMETICS,
    COMPETITOR,
    GATED,
    NAIVE,
    PAPER_CASES,
    SHAPE,
    Arithmetic,
    Case,
    RandomCase,
)
from pasa.eval.accuracy.rmse.metrics import L1, NAIVE_FACTOR, Errors, Measured, Scores, judge, measure_errors
from pasa.eval.kit.output import NOTE, environment
from pasa.ops.numerics.formats import OVERFLOWS, Overflow

SCHEMA = 1
DECIDING = "ab"  # (c) compares with FP32 scores: shown, but no measure of whether FP16 attention is right
Progress: TypeAlias = Callable[[int, int, str], None]
Record: TypeAlias = dict[str, Any]
Job: TypeAlias = tuple[Case, int, Overflow]  # case, seed, overflow mode


def run_rmse(
    heads: int = SHAPE[1],
    seq: int = SHAPE[2],
    dim: int = SHAPE[3],
    seeds: Sequence[int] = (0,),
    overflow: str = "both",
    cases: Sequence[RandomCase] = PAPER_CASES,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure every arithmetic on the paper's random cases.

    Parameters
    ----------
    heads, seq, dim : int
        Shape (1, heads, seq, dim); the paper's is (1, 16, 1280, 128).
    seeds : sequence of int
    overflow : str
        "inf", "saturate", or "both": "inf" everywhere, and "saturate" as well on the cases of table 4.
    cases : sequence of RandomCase
    progress : callable, optional
        Called with (done, total, what comes next).

    Returns
    -------
    dict
        JSON-able: ``records`` (one per case, seed, overflow mode and arithmetic), ``gate`` (the verdict on the
        default arithmetic), what was run, where and for how long.

    Raises
    ------
    ValueError
        On a size below 1, no seed, or an unknown overflow mode.
    """
    check(seeds, heads=heads, seq=seq, dim=dim)
    modes = overflow_modes(overflow)
    started = time.perf_counter()
    sized = [dataclasses.replace(case, shape=(1, heads, seq, dim)) for case in cases]
    jobs: list[Job] = [
        (case, seed, mode)
        for case in sized
        for seed in seeds
        for mode in modes
        if len(modes) == 1 or mode == "inf" or case.paper_nan_share is not None
    ]
    records = run_jobs(jobs, ARITHMETICS, progress)
    table = [dataclasses.asdict(case) | {"name": case.name} for case in sized]
    what = {"shape": [1, heads, seq, dim], "seeds": list(seeds), "overflow": overflow, "cases": table}
    return wrap("rmse", started, what, records)


def check(seeds: Sequence[int], **sizes: int | None) -> None:
    """ValueError if there is no seed, or naming the first size below 1; a size of None is the default."""
    if not seeds:
        raise ValueError(f"seeds={seeds!r} names no seed")
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} is not a positive integer")


def overflow_modes(wanted: str) -> tuple[Overflow, ...]:
    """The modes that "inf", "saturate" or "both" names; ValueError for anything else."""
    modes = OVERFLOWS if wanted == "both" else tuple(mode for mode in OVERFLOWS if mode == wanted)
    if not modes:
        raise ValueError(f"overflow={wanted!r} is not one of {(*OVERFLOWS, 'both')}")
    return modes


def wrap(
    experiment: str,
    started: float,
    what: dict[str, Any],
    records: list[Record],
    arithmetics: Sequence[Arithmetic] = ARITHMETICS,
    gated: str = GATED,
) -> dict[str, Any]:
    """Add what every result carries: the note, the machine, the duration, the legend and the verdict."""
    return {
        "schema": SCHEMA,
        "experiment": experiment,
        "note": NOTE,
        "environment": environment(),
        "duration_s": round(time.perf_counter() - started, 1),
        **what,
        "arithmetics": {arithmetic.name: arithmetic.what for arithmetic in arithmetics},
        "gate": verdict(records, gated),
        "records": records,
    }


def run_jobs(
    jobs: Sequence[Job],
    arithmetics: Sequence[Arithmetic],
    progress: Progress | None = None,
    device: torch.device | str = "cpu",
) -> list[Record]:
    """One record per job (case, seed, overflow mode) and arithmetic, gates applied."""
    records: list[Record] = []
    for done, (case, seed, mode) in enumerate(jobs):
        if progress is not None:
            progress(done, len(jobs), f"{case.name}, seed {seed}, {mode}")
        q, k, v = (x.to(device) for x in case.tensors(seed))
        golden = golden_by_head(q, k, v)
        measured = {each.name: measure(each, q, k, v, golden, mode) for each in arithmetics}
        head = {"case": case.name, "seed": seed, "overflow": mode}
        records += [head | record(name, measured) for name in measured]
    if progress is not None:
        progress(len(jobs), len(jobs), "done")
    return records


def golden_by_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FP64 attention, one head at a time: scores of all heads at once would need gigabytes."""
    heads = range(q.shape[1])
    return torch.cat([pasa.golden_attention(*(x[:, h : h + 1] for x in (q, k, v)))[0] for h in heads], 1)


def measure(arithmetic: Arithmetic, q: Tensor, k: Tensor, v: Tensor, golden: Tensor, overflow: Overflow) -> Measured:
    """Run one arithmetic in one overflow mode; only the reference backend tells of its scores."""
    config = dataclasses.replace(arithmetic.config, overflow=overflow)
    if arithmetic.backend != "reference":
        out = pasa.attention(q, k, v, config=config, backend=arithmetic.backend)
        return Measured(measure_errors(out, golden), Scores(0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    with pasa.record_diagnostics() as entries:
        out = pasa.attention(q, k, v, config=config, backend="reference")
    counts = entries[0]
    scores = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    nonfinite, saturated = float(counts.nonfinite.sum()) / scores, float(counts.saturated.sum()) / scores
    touched = touched_rows(q, k, v, config) if nonfinite or saturated else 0.0
    stored = Scores(
        nonfinite_share=nonfinite,
        saturated_share=saturated,
        touched_rows=touched,
        rescued_share=float(counts.rescued_tiles.sum() / counts.tiles.sum()),
        max_before=float(counts.max_score_before.max()),
        max_after=float(counts.max_score_after.max()),
    )
    return Measured(measure_errors(out, golden), stored)


def touched_rows(q: Tensor, k: Tensor, v: Tensor, config: pasa.PasaConfig) -> float:
    """Share of query rows with a score stored as infinity, NaN or +/-65504.

    Diagnostics count per head, so every row is made a head of its own (grouped queries over the same keys).
    """
    rows = q.flatten(1, 2).unsqueeze(2)
    with pasa.record_diagnostics() as entries:
        pasa.attention(rows, k, v, config=dataclasses.replace(config, block_q=1), backend="reference")
    return float(((entries[0].nonfinite + entries[0].saturated) > 0).double().mean())


def record(name: str, measured: dict[str, Measured]) -> Record:
    """Flat, JSON-able numbers of one arithmetic, judged against the naive one and the competitor."""
    own = measured[name]
    gates = judge(own, measured[NAIVE], measured[COMPETITOR])
    return {
        "arithmetic": name,
        **flat(own.errors),
        **{f"scores_{key}": value for key, value in dataclasses.asdict(own.scores).items()},
        "failed_gates": gates.failed,
        "max_error_ratio": gates.max_error_ratio,
        **{f"{key}_ratio": value for key, value in gates.ratios.items()},
    }


def flat(errors: Errors) -> Record:
    """Fields of a record; `absolute_rmse` would be `rmse` again, in other units."""
    return {name: value for name, value in dataclasses.asdict(errors).items() if name != "absolute_rmse"}


def verdict(records: Sequence[Record], gated: str = GATED) -> dict[str, Any]:
    """Every gate that the gated arithmetic failed, with its numbers; `passed` is about the deciding gates alone."""
    failures = [
        {"case": each["case"], "seed": each["seed"], "overflow": each["overflow"], "why": why(each)}
        for each in records
        if each["arithmetic"] == gated and why(each)
    ]
    passed = not any(each["arithmetic"] == gated and set(each["failed_gates"]) & set(DECIDING) for each in records)
    return {"arithmetic": gated, "passed": passed, "failures": failures}


def why(entry: Record) -> str:
    """Which gates a record fails, with the number and the limit; empty when it passes all."""
    reasons = []
    if "a" in entry["failed_gates"]:
        shares = ("nonfinite_share", "scores_nonfinite_share", "scores_saturated_share")
        reasons.append("(a) " + ", ".join(f"{name} {entry[name]:.3g}" for name in shares if entry[name]))
    if "b" in entry["failed_gates"]:
        reasons.append(f"(b) max error {entry['max_error_ratio']:.3g} x the yardstick, limit {NAIVE_FACTOR:g}")
    if "c" in entry["failed_gates"]:
        over = [f"{name} {entry[f'{name}_ratio']:.3g}" for name in L1 if not entry[f"{name}_ratio"] <= L1[name]]
        limits = "/".join(f"{limit:g}" for limit in L1.values())
        reasons.append(f"(c) ratios {', '.join(over)}, limits mare/mere/rmse/small {limits}")
    return "; ".join(reasons)
