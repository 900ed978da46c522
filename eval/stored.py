"""The stored runs that README.md is made of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = {
    "rmse": ROOT / "eval/rmse/results/rmse.json",
    "bias": ROOT / "eval/rmse/results/large_bias.json",
    "sides": ROOT / "eval/rmse/results/sides.json",
    "rescue": ROOT / "eval/rescue/results/rescue.json",
    "kernels": ROOT / "eval/rmse/results/rmse_kernels.json",
    "speed": ROOT / "eval/speed/results/speed.json",
    "paged": ROOT / "eval/speed/results/paged/speed.json",
    "counters": ROOT / "eval/speed/results/counters.json",
    "fuzz": ROOT / "eval/fuzz/results/fuzz.json",
    "soak": ROOT / "eval/soak/results/soak.json",
    "npu_model": ROOT / "eval/npu_model/results/npu_model.json",
    "video": ROOT / "eval/video/results/video.json",
    "step": ROOT / "eval/video/results/step.json",
    "diagnose_published": ROOT / "eval/diagnose/results/published/diagnose.json",
    "diagnose_embedded": ROOT / "eval/diagnose/results/embedded/diagnose.json",
    "diagnose_tiny": ROOT / "eval/diagnose/results/tiny/diagnose.json",
    "longbench": ROOT / "eval/longbench/results/longbench.json",
    "longbench_fp16": ROOT / "eval/longbench/results/fp16_model/longbench.json",
    "throughput": ROOT / "eval/longbench/results/throughput.json",
    "perplexity": ROOT / "eval/perplexity/results/perplexity.json",
    "gradients": ROOT / "eval/gradients/results/gradients.json",
    "rounding": ROOT / "eval/rounding_bias/results/bias.json",
    "rounding_cost": ROOT / "eval/rounding_bias/results/cost.json",
    "ring": ROOT / "eval/ring/results/ring.json",
    "zoo": ROOT / "eval/zoo/results/zoo.json",
    "watching": ROOT / "eval/watching/results/watch.json",
    "predict": ROOT / "eval/predict/results/predict.json",
    "soundness": ROOT / "eval/predict/results/soundness.json",
    "auto": ROOT / "eval/predict/results/auto.json",
    "overhead": ROOT / "eval/fp8_scaling/results/overhead.json",
    "fp8": ROOT / "eval/fp8_scaling/results/fp8.json",
}


def stored(name: str) -> dict[str, Any]:
    """One stored run."""
    result: dict[str, Any] = json.loads(RESULTS[name].read_text(encoding="utf-8"))
    return result


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, numbers to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
