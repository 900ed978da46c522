"""Errors of one output against FP64, and the three gates they have to pass.

The gates are fixed before anything is measured, and none is ours:

(a) No output is NaN or infinite, and no score was stored as infinity, NaN or +/-65504.
(b) max error <= 2 x max error of the naive arithmetic of the same precision where that one did not overflow, else of
    the FP32 emulation (the criterion of FlashAttention's tests, without its additive term).
(c) CANN's dual-benchmark standard for floating-point operators, level L1, with the FP32 emulation as the competitor
    and FP64 as the truth. Over |golden| >= 2^-11: MARE ratio <= 5, MERE ratio <= 1.5, RMSE ratio <= 1.5, where
    MARE = max, MERE = mean of |o - g| / (|g| + 1e-7) and RMSE = sqrt(mean (o - g)^2). Below 2^-11: the count of
    |o - g| > 2^-16 is at most twice the competitor's (taken as at least 1). The competitor's MARE and MERE count as at
    least 2^-11, half a unit in the last place of FP16, as in CANN's attention tests; its RMSE has no floor (there
    it is 2^-11 in absolute terms, which would pass anything where outputs are small).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

Record: TypeAlias = dict[str, Any]
RELATIVE_FLOOR = 2.0**-11
L1 = {"mare": 5.0, "mere": 1.5, "rmse": 1.5, "small": 2.0}
NAIVE_FACTOR = 2.0


def judge(judged: Mapping[str, Any], naive: Mapping[str, Any], competitor: Mapping[str, Any]) -> Record:
    """Apply the three gates of this module's docstring.

    Parameters
    ----------
    judged, naive, competitor : mapping
        Fields of `Errors`, and `scores_nonfinite_share` and `scores_saturated_share` of the stored scores.

    Returns
    -------
    dict
        ``failed_gates`` (letters), and the ratios that they limit: ``max_error_ratio``, ``mare_ratio`` and so on.
    """
    clean = judged["nonfinite_share"] == 0
    yardstick = naive if not overflowed(naive) and naive["nonfinite_share"] == 0 else competitor
    factor = quotient(judged["max_error"], yardstick["max_error"])
    ratios = l1_ratios(judged, competitor)
    passed = {
        "a": clean and not overflowed(judged),
        "b": clean and factor <= NAIVE_FACTOR,
        "c": clean and all(ratios[name] <= limit for name, limit in L1.items()),
    }
    failed = "".join(letter for letter, held in passed.items() if not held)
    return {"failed_gates": failed, "max_error_ratio": factor} | {f"{name}_ratio": ratios[name] for name in L1}


def overflowed(record: Mapping[str, Any]) -> bool:
    """Return whether any stored score left FP16's range."""
    return bool(record["scores_nonfinite_share"] > 0 or record["scores_saturated_share"] > 0)


def l1_ratios(judged: Mapping[str, Any], competitor: Mapping[str, Any]) -> dict[str, float]:
    """Return the standard's four ratios; each must stay within `L1`."""
    return {
        "mare": quotient(judged["mare"], max(competitor["mare"], RELATIVE_FLOOR)),
        "mere": quotient(judged["mere"], max(competitor["mere"], RELATIVE_FLOOR)),
        "rmse": quotient(judged["absolute_rmse"], competitor["absolute_rmse"]),
        "small": judged["small_errors"] / max(competitor["small_errors"], 1),
    }


def quotient(error: float, other: float) -> float:
    """Return error / other, where no error on either side is a draw."""
    if error == other:
        return 1.0
    return error / other if other else torch.inf


def why(entry: Mapping[str, Any]) -> str:
    """Return which gates a record fails, with the number and the limit; empty when it passes all."""
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
