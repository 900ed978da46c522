"""Run cases in several arithmetics, and judge the error of each output by the gates that README.md defines.

(a) No output is NaN or infinite, and no score was stored as infinity, NaN or +/-65504.
(b) The largest error is at most twice that of the naive arithmetic of the same precision, or of the FP32 emulation
    where the naive one overflowed.
(c) CANN's dual-benchmark standard, level L1, with the FP32 emulation as the competitor and FP64 as the truth. The
    competitor's MARE and MERE count as at least 2^-11, half a unit in the last place of FP16; its RMSE has no floor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import pasa
from pasa.eval.accuracy.rmse.cases import ARITHMETICS, COMPETITOR, GATED, NAIVE, Arithmetic, Case
from pasa.eval.kit import output
from pasa.eval.kit.error_metrics import measure_errors
from pasa.ops.numerics.formats import Overflow

Record: TypeAlias = dict[str, Any]
Job: TypeAlias = tuple[Case, int, Overflow]  # case, seed, overflow mode
RELATIVE_FLOOR = 2.0**-11  # the least MARE and MERE of the competitor in gate (c)
L1 = {"mare": 5.0, "mere": 1.5, "rmse": 1.5, "small": 2.0}  # limits of the standard; "small": errors of small values
NAIVE_FACTOR = 2.0
LIMITS = {"b": {"max_error": NAIVE_FACTOR}, "c": L1}  # largest ratios to the yardstick, by gate
SHARES = ("nonfinite_share", "scores_nonfinite_share", "scores_saturated_share")  # must be zero for gate (a)
# Gate (c) is shown, but does not decide: it compares with FP32 scores, which FP16 attention need not match.
DECIDING = "ab"
SCORES = (
    "nonfinite_share",
    "saturated_share",
    "touched_rows",
    "rescued_share",
    "flushed_share",
    "max_before",
    "max_after",
)


def compare(
    jobs: Sequence[Job],
    arithmetics: Sequence[Arithmetic] = ARITHMETICS,
    progress: output.Report = output.silent,
    device: torch.device | str = "cpu",
    gated: str = GATED,
) -> dict[str, Any]:
    """Return the ``records`` of every job with every arithmetic; the ``gate`` judges the arithmetic `gated` alone."""
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
    seeds = list(dict.fromkeys(seed for _, seed, _ in jobs))
    legend = {arithmetic.name: arithmetic.what for arithmetic in arithmetics}
    return {"seeds": seeds, "arithmetics": legend, "gate": verdict(records, gated), "records": records}


def golden_by_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return FP64 attention, one head at a time: scores of all heads at once would need gigabytes."""
    heads = zip(q.split(1, 1), k.split(1, 1), v.split(1, 1), strict=True)
    return torch.cat([pasa.golden_attention(*head)[0] for head in heads], 1)


def measure(arithmetic: Arithmetic, q: Tensor, k: Tensor, v: Tensor, golden: Tensor, overflow: Overflow) -> Record:
    """Return errors and stored scores of one arithmetic; the scores are shares of all scores, rows and tiles.

    ``scores_max_before`` is the largest |q.k|, ``scores_max_after`` the largest stored value in its tile's own units.
    """
    config = dataclasses.replace(arithmetic.config, overflow=overflow)
    scores = dict.fromkeys(SCORES, 0.0)  # stays 0 for backends without diagnostics
    if arithmetic.backend == "torch":
        out = scaled_dot_product_attention(q.float(), k.float(), v.float())
    elif arithmetic.backend == "reference":
        with pasa.record_diagnostics() as entries:
            out = pasa.attention(q, k, v, config=config, backend="reference")
        counts, pairs = entries[0], q.shape[:3].numel() * k.shape[2]
        nonfinite, saturated = float(counts.nonfinite.sum()) / pairs, float(counts.saturated.sum()) / pairs
        touched = touched_rows(q, k, v, config) if nonfinite or saturated else 0.0
        rescued, flushed = (float(x.sum() / counts.tiles.sum()) for x in (counts.rescued_tiles, counts.flushed_tiles))
        largest = float(counts.max_score_before.max()), float(counts.max_score_after.max())
        scores = dict(zip(SCORES, (nonfinite, saturated, touched, rescued, flushed, *largest), strict=True))
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


def judge(judged: Mapping[str, Any], naive: Mapping[str, Any], competitor: Mapping[str, Any]) -> Record:
    """Return the letters of the ``failed_gates``, and the ratios that (b) and (c) limit, from records of `measure`."""
    yardstick = competitor if overflowed(naive) else naive
    ratios = {
        "max_error": quotient(judged["max_error"], yardstick["max_error"]),
        "mare": quotient(judged["mare"], max(competitor["mare"], RELATIVE_FLOOR)),
        "mere": quotient(judged["mere"], max(competitor["mere"], RELATIVE_FLOOR)),
        "rmse": quotient(judged["absolute_rmse"], competitor["absolute_rmse"]),
        "small": judged["small_errors"] / max(competitor["small_errors"], 1),
    }
    failed = "a" * overflowed(judged)
    for letter, limits in LIMITS.items():
        within = all(ratios[name] <= limit for name, limit in limits.items())
        failed += letter * (not within or judged["nonfinite_share"] > 0)
    return {"failed_gates": failed} | {f"{name}_ratio": ratio for name, ratio in ratios.items()}


def overflowed(record: Mapping[str, Any]) -> bool:
    """Return whether any output is not finite, or any stored score left FP16's range."""
    return any(record[name] > 0 for name in SHARES)


def quotient(error: float, other: float) -> float:
    """Return error / other: 1 if both are equal, also at 0, and infinity if only `other` is 0."""
    if error == other:
        return 1.0
    return error / other if other else torch.inf


def verdict(records: Sequence[Record], gated: str = GATED) -> dict[str, Any]:
    """Return all failures of the gated arithmetic; ``passed`` depends on the `DECIDING` gates alone."""
    judged = [each for each in records if each["arithmetic"] == gated]
    failures = [{name: each[name] for name in ("case", "seed", "overflow")} | {"why": why(each)} for each in judged]
    return {
        "arithmetic": gated,
        "passed": not any(set(each["failed_gates"]) & set(DECIDING) for each in judged),
        "failures": [each for each in failures if each["why"]],
    }


def why(entry: Mapping[str, Any]) -> str:
    """Return which gates a record fails, with the numbers and the limits; empty when it passes all."""
    shares = [f"{name} {entry[name]:.3g}" for name in SHARES if entry[name]]
    reasons = [f"(a) {', '.join(shares)}"] if shares else []
    for letter, limits in LIMITS.items():
        ratios = {name: (entry[f"{name}_ratio"], limit) for name, limit in limits.items()}
        over = [
            f"{name} {ratio:.3g} (limit {limit:g})" for name, (ratio, limit) in ratios.items() if not ratio <= limit
        ]
        reasons += [f"({letter}) ratios {', '.join(over)}"] if over else []
    return "; ".join(reasons)
