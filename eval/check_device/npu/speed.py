"""Time the Ascend C kernels on an NPU beside torch_npu's attention, with the model's prediction."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pasa
from pasa.eval.check_device.npu.calls import is_310p
from pasa.eval.kit import output
from pasa.eval.kit.error_metrics import generator
from pasa.eval.kit.timing import now
from pasa.eval.npu.run import CASES
from pasa.eval.speed.cases import SpeedCase
from pasa.ops.attention.sdpa import npu

TURNS, CALLS = 7, 5  # timed turns of each implementation, in which all take part, and calls of a turn
QUICK_CASES = 3
MODEL = Path(__file__).resolve().parents[2] / "npu" / "results" / "npu_model.json"
ALLOCATION = "exact"  # of the model: no tile of N(0, 1) data is kept in FP32


def cases(quick: bool) -> list[SpeedCase]:
    """Return the shapes of the performance model."""
    return list(CASES[:QUICK_CASES] if quick else CASES)


def measure(case: SpeedCase, device: str) -> dict[str, Any]:
    """Return the milliseconds of each implementation, or why it has none, and what the model predicts for ours."""
    source = generator(0, case.name)
    sizes = (case.heads, case.rows), (case.kv_heads, case.keys), (case.kv_heads, case.keys)
    q, k, v = (torch.randn(case.batch, heads, n, case.dim, generator=source).half().to(device) for heads, n in sizes)
    calls = implementations(q, k, v, case)
    times, failures = run_in_turns(calls, torch.device(device))
    numbers = {name: statistics.median(each) for name, each in times.items()}
    detail = ", ".join(f"{name} {ms:.3f} ms" for name, ms in numbers.items())
    verdict = "FAILED" if "pasa" in failures else "passed"
    return {"verdict": verdict, "detail": detail, "ms": numbers, "failures": failures, "model_ms": predicted(case.name)}


def implementations(q: Tensor, k: Tensor, v: Tensor, case: SpeedCase) -> dict[str, Callable[[], object]]:
    """Return a call of each implementation by name."""
    import torch_npu

    scale, causal = case.dim**-0.5, case.causal
    hidden = npu.causal_mask(q.device) if causal else None
    mode = npu.TOP_LEFT_CAUSAL if causal else npu.ALL_KEYS
    infer = partial(
        torch_npu.npu_fused_infer_attention_score, q, k, v, num_heads=case.heads, num_key_value_heads=case.kv_heads,
        input_layout="BNSD", scale=scale, atten_mask=hidden, sparse_mode=mode,
    )  # fmt: skip
    return {
        "pasa": partial(pasa.attention, q, k, v, is_causal=causal, backend="npu"),
        "sdpa": partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, is_causal=causal, enable_gqa=True),
        "npu_fusion_attention": partial(
            torch_npu.npu_fusion_attention, q, k, v, case.heads, "BNSD", atten_mask=hidden, scale=scale,
            sparse_mode=mode,
        ),
        "npu_fused_infer_attention_score, high precision": partial(infer, inner_precise=0),
        "npu_fused_infer_attention_score, high performance": partial(infer, inner_precise=1),
    }  # fmt: skip


def run_in_turns(
    calls: dict[str, Callable[[], object]], device: torch.device
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return the milliseconds of each turn by name, and why a call cannot run.

    All calls run in every turn, so that a change of the clock concerns all of them.
    """
    times: dict[str, list[float]] = {}
    failures: dict[str, str] = {}
    for turn in range(TURNS + 1):
        for name, call in calls.items():
            if name in failures:
                continue
            try:
                started = now(device)
                for _ in range(CALLS):
                    call()
                taken = 1e3 * (now(device) - started) / CALLS
            except Exception as error:  # of any kind: it is what the table shows
                failures[name] = output.error_line(error)
                times.pop(name, None)
                continue
            if turn > 0:  # the first one warms up
                times.setdefault(name, []).append(taken)
    return times, failures


def predicted(case: str) -> list[float] | None:
    """Return the model's milliseconds for the kernels, from perfect overlap to none.

    Return None where it is not stored, and on a 310P, because the model is of an Atlas A2.
    """
    if is_310p():
        return None
    for record in stored_model():
        if (record["case"], record["allocation"]) == (case, ALLOCATION):
            return [record["overlap_ms"], record["none_ms"]]
    return None


@cache
def stored_model() -> list[dict[str, Any]]:
    """Return the records of the stored performance model, or none if they are not installed."""
    if not MODEL.is_file():
        return []
    records: list[dict[str, Any]] = json.loads(MODEL.read_text(encoding="utf-8"))["records"]
    return records
