"""Counts on the twin, fits, and predictions for the cases."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pasa.eval.kit import output
from pasa.eval.npu import model, rates, twin
from pasa.eval.npu.allocations import Fit, allocations, combine, fit, fp16_lines, fp32_lines, partial_lines
from pasa.eval.npu.twin import Twin
from pasa.eval.speed.cases import PLAIN_CASES, SpeedCase

NOTE = "model, not measured: twin counts over published rates; nothing was run on an NPU"
BLOCKS = (2, 3, 4, 6, 8, 16)
DIMS = (128, 64)
KERNELS = {"paper": (0, 0), "exact": (1, 0), "exact wide": (1, 1)}  # exact, wide
TILES_A_BLOCK = 2  # two lanes
ROUNDING_KEYS = (1280, 8192)
ROUNDINGS = {"to nearest": 0, "unbiased, no row leans": 1, "unbiased, all rows lean": 2}  # as counts.cpp numbers them
STORED = Path(__file__).resolve().parents[1] / "accuracy" / "rmse" / "results"
SHARE_CASES = (("rmse", "uniform(0,0.5)"), ("rmse", "uniform(30,0.5)"), ("resonance", "qwen-like, 180 deg"),
               ("resonance", "svd-like, 180 deg"), ("rmse", "hybrid(20,100)"))  # fmt: skip
CLAIMS = {
    "source": "abstract at openreview.net/forum?id=mvWQYIjDsx, against a vendor flash attention of CANN",
    "speedup": [1.2, 1.65],
    "tflops": 170.0,
}

_BY_NAME = {case.name: case for case in PLAIN_CASES}
CASES = (
    _BY_NAME["paper"],
    *(SpeedCase(f"paper-{keys // 1024}k", 1, 16, 16, keys, keys, 128) for keys in (4096, 16384, 65536)),
    SpeedCase("qwen2-overflow", 1, 28, 28, 5676, 5676, 128),
    *(_BY_NAME[name] for name in ("qwen2-8k-full", "qwen2-8k", "qwen2-32k", "svd", "svd-2")),
)
"""The paper's benchmark and the same longer; the paper's Qwen2 and SVD shapes; Qwen2 prefill, grouped and causal."""


def run_npu_model(progress: output.Report | None = None) -> dict[str, Any]:
    """Count, fit and predict.

    Raises
    ------
    OSError
        Without g++ or the Ascend C sources, or if the twin reports a fault.
    """
    begun = time.perf_counter()
    with twin.build() as built:
        counts = count(built, progress)
        plans = {case.name: plan(built, case) for case in CASES}
        roundings = count_roundings(built)
    shares = stored_shares()
    result = {
        "schema": 1,
        "experiment": "npu_model",
        "note": NOTE,
        "environment": output.environment(),
        "duration_s": round(time.perf_counter() - begun, 1),
        "rates": {name: dataclasses.asdict(rate) for name, rate in rates.table().items()},
        "cycles_per_repeat": {"source": rates.PROFILES, "fp32, fp16": rates.CALLS},
        "scenarios": {name: each.what for name, each in model.SCENARIOS.items()},
        "substitutions": describe_lines(),
        "shares": shares,
        "claims": CLAIMS,
        "peak_tflops": model.peak_flops() * 1e-12,
        "cases": [{"name": case.name, "shape": case.shape, "flops": case.flops} for case in CASES],
        "plans": plans,
        "counts": counts,
        "roundings": roundings,
        **predict(counts, plans, shares),
    }
    stored: dict[str, Any] = json.loads(output.to_json(result))  # so that what is shown is what is stored
    return stored


def count(built: Twin, progress: output.Report | None = None) -> list[dict[str, Any]]:
    """Counters of every kernel, head dimension and number of blocks."""
    jobs = [
        (what, name, dim, blocks)
        for what in ("attend", "shift")
        for name in KERNELS
        for dim in DIMS
        for blocks in BLOCKS
    ]
    jobs = [job for job in jobs if job[0] == "attend" or job[1] != "exact wide"]
    found = []
    for done, (what, name, dim, blocks) in enumerate(jobs):
        if progress:
            progress(done, len(jobs), f"{what} {name}, D = {dim}, {blocks} blocks")
        exact, wide = KERNELS[name]
        work = twin.work_of(built.ask(what, exact, dim, blocks, wide))
        found.append({"kernel": what, "name": name, "dim": dim, "blocks": blocks, "work": work})
    return found


def count_roundings(built: Twin) -> list[dict[str, Any]]:
    """Vector time of one task (two query tiles) by how its outputs are rounded, microseconds of a vector core."""
    made = []
    for name, dim, keys in itertools.product(("paper", "exact"), DIMS, ROUNDING_KEYS):
        blocks = keys // 128
        works = {
            how: twin.work_of(built.ask("attend", KERNELS[name][0], dim, blocks, 0, number))
            for how, number in ROUNDINGS.items()
        }
        us = {
            how: 1e6 * model.engine_times(work, model.SCENARIOS["as written"])["vector"] for how, work in works.items()
        }
        made.append({"kernel": name, "dim": dim, "keys": keys, "vector_us": us})
    return made


def plan(built: Twin, case: SpeedCase) -> dict[str, int]:
    """Tasks and score tiles of the busiest group, as the kernel deals them."""
    sizes = (case.batch, case.heads, case.kv_heads, case.rows, case.keys, case.dim, int(case.causal))
    return built.ask("plan", *sizes)


def stored_shares() -> dict[str, float]:
    """Share of tiles that the exact recovery keeps in FP32, mean over seeds, from the stored RMSE runs."""
    found = {}
    for stem, case in SHARE_CASES:
        records = json.loads((STORED / f"{stem}.json").read_text(encoding="utf-8"))["records"]
        own = [r for r in records if (r["case"], r["arithmetic"], r["overflow"]) == (case, "pasa-exact", "inf")]
        found[case] = round(sum(r["scores_rescued_share"] for r in own) / len(own), 4)
    return found


def describe_lines() -> dict[str, list[dict[str, Any]]]:
    """The substitutions, for D = 128."""
    lines = {
        "partial, from paper": partial_lines(),
        "fp32, from partial": fp32_lines(),
        "paper-fp16, from paper": fp16_lines(128),
    }
    return {name: [dataclasses.asdict(line) for line in found] for name, found in lines.items()}


def fits_of(counts: Sequence[Mapping[str, Any]], kernel: str, dim: int) -> dict[str, Fit]:
    """A fit for each kernel that was counted, against tiles, or blocks for the pass over the keys."""
    per_block = TILES_A_BLOCK if kernel == "attend" else 1
    own = [each for each in counts if each["kernel"] == kernel and each["dim"] == dim]
    names = dict.fromkeys(each["name"] for each in own)
    return {name: fit([(per_block * e["blocks"], e["work"]) for e in own if e["name"] == name]) for name in names}


def predict(
    counts: Sequence[Mapping[str, Any]], plans: Mapping[str, Mapping[str, int]], shares: Mapping[str, float]
) -> dict[str, Any]:
    """Everything that follows from the counts: fit residuals, times per tile, and one record per prediction."""
    attend = {dim: fits_of(counts, "attend", dim) for dim in DIMS}
    shift = {dim: fits_of(counts, "shift", dim) for dim in DIMS}
    ways = {dim: allocations(attend[dim], dim, sorted({0.0, 1.0, *shares.values()})) for dim in DIMS}
    main = model.SCENARIOS["as written"]
    tiles = [
        {
            "dim": dim,
            "allocation": name,
            "ns": {engine: 1e9 * seconds for engine, seconds in model.engine_times(way.per_tile, main).items()},
            "vector_ns": {part: 1e9 * seconds for part, seconds in model.vector_parts(way.per_tile).items()},
        }
        for dim in DIMS
        for name, way in ways[dim].items()
    ]
    records = []
    for case in CASES:
        for scenario in model.SCENARIOS:
            records += predict_case(case, scenario, ways[case.dim], shift[case.dim], plans[case.name])
    residuals = {f"{name}, D = {dim}": found.residual for dim in DIMS for name, found in attend[dim].items()}
    return {"fit_residuals": residuals, "tiles": tiles, "records": records}


def predict_case(
    case: SpeedCase, scenario: str, ways: Mapping[str, Fit], shift: Mapping[str, Fit], plan: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Times of every allocation: the busiest group's attention, and the pass over the keys before it."""
    how = model.SCENARIOS[scenario]
    made: list[dict[str, Any]] = []
    for name, way in ways.items():
        work = combine((plan["tasks"], way.per_task), (plan["tiles"], way.per_tile))
        times = model.engine_times(work, how) | {"HBM": model.hbm_time(model.attention_bytes(case))}
        engine, overlap = model.bound(times)
        before = shift_times(case, how, name, shift)
        keys_pass = model.bound(before)[1] if before else 0.0
        none = model.serial(times) + (model.serial(before) if before else 0.0)
        made.append({"case": case.name, "scenario": scenario, "allocation": name, "bound": engine,
                     "overlap_ms": 1e3 * (overlap + keys_pass), "shift_ms": 1e3 * keys_pass, "none_ms": 1e3 * none,
                     "tflops": 1e-12 * case.flops / (overlap + keys_pass)})  # fmt: skip
    reference = next(each for each in made if each["allocation"] == "fp32")
    for each in made:
        each["ratio_overlap"] = reference["overlap_ms"] / each["overlap_ms"]
        each["ratio_none"] = reference["none_ms"] / each["none_ms"]
    return made


def shift_times(case: SpeedCase, how: model.Scenario, name: str, shift: Mapping[str, Fit]) -> dict[str, float]:
    """K' before attention: on the cube cores for the published recovery, on the vector cores for ours."""
    kernel = name.partition(" ")[0].removesuffix("-fp16")
    if kernel not in shift:
        return {}
    cores = int(rates.GROUPS.value * (rates.VECTORS.value if kernel == "exact" else 1))
    blocks = -(-case.batch * case.kv_heads * -(-case.keys // 128) // cores)
    work = combine((1.0, shift[kernel].per_task), (blocks, shift[kernel].per_tile))
    return model.engine_times(work, how, vectors=1.0) | {"HBM": model.hbm_time(case.kv_bytes)}
