"""Runs cases through arithmetics: a record of errors and gates for each case, seed, overflow mode and arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import pasa
from pasa.eval.accuracy.rmse.cases import ARITHMETICS, COMPETITOR, GATED, NAIVE, Arithmetic, Case
from pasa.eval.accuracy.rmse.gates import Record, judge, why
from pasa.eval.kit import output
from pasa.eval.kit.error_metrics import measure_errors
from pasa.ops.numerics.formats import Overflow

DECIDING = "ab"  # (c) compares with FP32 scores: shown, but no measure of whether FP16 attention is right
Job: TypeAlias = tuple[Case, int, Overflow]  # case, seed, overflow mode
UNKNOWN_SCORES = dict.fromkeys(
    ("nonfinite_share", "saturated_share", "touched_rows", "rescued_share", "max_before", "max_after"), 0.0
)
"""What a backend that keeps its scores to itself says of them."""


def compare(
    jobs: Sequence[Job],
    arithmetics: Sequence[Arithmetic] = ARITHMETICS,
    progress: output.Report = output.silent,
    device: torch.device | str = "cpu",
    gated: str = GATED,
) -> dict[str, Any]:
    """Measure every job with every arithmetic.

    Returns
    -------
    dict
        ``seeds``; the legend ``arithmetics``; ``gate``, the verdict on the arithmetic `gated`; ``records``, one per
        job and arithmetic.
    """
    records: list[Record] = []
    for done, (case, seed, mode) in enumerate(jobs):
        progress(done, len(jobs), f"{case.name}, seed {seed}, {mode}")
        q, k, v = (x.to(device) for x in case.tensors(seed))
        golden = golden_by_head(q, k, v)
        measured = {each.name: measure(each, q, k, v, golden, mode) for each in arithmetics}
        for name, errors in measured.items():
            gates = judge(errors, measured[NAIVE], measured[COMPETITOR])
            head = {"case": case.name, "seed": seed, "overflow": mode, "arithmetic": name}
            records.append(head | errors | gates)
            del records[-1]["absolute_rmse"]  # `rmse` in other units
    progress(len(jobs), len(jobs), "done")
    return {
        "seeds": list(dict.fromkeys(seed for _, seed, _ in jobs)),
        "arithmetics": {arithmetic.name: arithmetic.what for arithmetic in arithmetics},
        "gate": verdict(records, gated),
        "records": records,
    }


def golden_by_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return FP64 attention, one head at a time: scores of all heads at once would need gigabytes."""
    heads = range(q.shape[1])
    return torch.cat([pasa.golden_attention(*(x[:, h : h + 1] for x in (q, k, v)))[0] for h in heads], 1)


def measure(arithmetic: Arithmetic, q: Tensor, k: Tensor, v: Tensor, golden: Tensor, overflow: Overflow) -> Record:
    """Return errors and stored scores of one arithmetic; the scores are shares of all scores, rows and tiles.

    ``scores_max_before`` is the largest |q.k|, ``scores_max_after`` the largest stored value in its tile's own units.
    """
    config, scores = dataclasses.replace(arithmetic.config, overflow=overflow), UNKNOWN_SCORES
    if arithmetic.backend == "torch":
        out = scaled_dot_product_attention(q.float(), k.float(), v.float())
    elif arithmetic.backend == "reference":
        with pasa.record_diagnostics() as entries:
            out = pasa.attention(q, k, v, config=config, backend="reference")
        counts, pairs = entries[0], q.shape[:3].numel() * k.shape[2]
        nonfinite, saturated = float(counts.nonfinite.sum()) / pairs, float(counts.saturated.sum()) / pairs
        scores = {
            "nonfinite_share": nonfinite,
            "saturated_share": saturated,
            "touched_rows": touched_rows(q, k, v, config) if nonfinite or saturated else 0.0,
            "rescued_share": float(counts.rescued_tiles.sum() / counts.tiles.sum()),
            "max_before": float(counts.max_score_before.max()),
            "max_after": float(counts.max_score_after.max()),
        }
    else:
        out = pasa.attention(q, k, v, config=config, backend=arithmetic.backend)
    errors = dataclasses.asdict(measure_errors(out, golden))
    return errors | {f"scores_{name}": value for name, value in scores.items()}


def touched_rows(q: Tensor, k: Tensor, v: Tensor, config: pasa.PasaConfig) -> float:
    """Return the share of query rows with a score stored as infinity, NaN or +/-65504.

    Diagnostics count per head, so every row is made a head of its own (grouped queries over the same keys).
    """
    rows = q.flatten(1, 2).unsqueeze(2)
    with pasa.record_diagnostics() as entries:
        pasa.attention(rows, k, v, config=dataclasses.replace(config, block_q=1), backend="reference")
    return float(((entries[0].nonfinite + entries[0].saturated) > 0).double().mean())


def verdict(records: Sequence[Record], gated: str = GATED) -> dict[str, Any]:
    """Return every gate that the gated arithmetic failed; `passed` is about the deciding gates alone."""
    judged = [each for each in records if each["arithmetic"] == gated]
    failures = [{name: each[name] for name in ("case", "seed", "overflow")} | {"why": why(each)} for each in judged]
    return {
        "arithmetic": gated,
        "passed": not any(set(each["failed_gates"]) & set(DECIDING) for each in judged),
        "failures": [each for each in failures if each["why"]],
    }
