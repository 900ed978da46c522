"""Model of an Ascend 910B3: counts of the kernels on the CPU twin, lines fitted to them, predictions for the cases."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pasa.eval.kit import output
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.stored import RESULTS
from pasa.eval.npu import rates, report, twin
from pasa.eval.npu import roofline as model
from pasa.eval.npu.precision_variants import Fit, allocations, fit, substitutions
from pasa.eval.npu.twin import Twin
from pasa.eval.speed.cases import PLAIN_CASES, SpeedCase

NOTE = "model, not measured: twin counts over published rates; nothing was run on an NPU"
BLOCKS = (2, 3, 4, 6, 8, 16)
DIMS = (128, 64)
KERNELS = {"paper": (0, 0), "exact": (1, 0), "exact wide": (1, 1)}  # exact, wide
TILES_A_BLOCK = 2  # two lanes
RESIDUAL_LIMIT = 0.005  # of a line to any count
ROUNDING_KEYS = (1280, 8192)
ROUNDINGS = {"to nearest": 0, "unbiased, no row leans": 1, "unbiased, all rows lean": 2}  # as counts.cpp numbers them
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
    """Model an Ascend 910B3: what the Ascend C kernels spend on the CPU twin over published rates. Not measured.

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
    predicted = predict(counts, plans, shares)
    lines = {name: [dataclasses.asdict(line) for line in each] for name, each in substitutions(128).items()}
    return {
        "schema": 1,
        "experiment": "npu_model",
        "note": NOTE,
        "gate": {"passed": max(predicted["fit_residuals"].values()) < RESIDUAL_LIMIT},
        "environment": output.environment(),
        "duration_s": round(time.perf_counter() - begun, 1),
        "rates": rates.load()["rates"],
        "cycles_per_repeat": rates.cycle_source(),
        "scenarios": {name: each.what for name, each in model.SCENARIOS.items()},
        "substitutions": lines,
        "shares": shares,
        "claims": CLAIMS,
        "peak_tflops": model.peak_flops() * 1e-12,
        "cases": [{"name": case.name, "shape": case.shape, "flops": case.flops} for case in CASES],
        "plans": plans,
        "counts": counts,
        "roundings": roundings,
        **predicted,
    }


def count(built: Twin, progress: output.Report | None = None) -> list[dict[str, Any]]:
    """Return the counters of every kernel, head dimension and number of blocks; keys are shifted in one way alone."""
    kernels = [("attend", name) for name in KERNELS] + [("shift", "paper"), ("shift", "exact")]
    jobs = list(itertools.product(kernels, DIMS, BLOCKS))
    records = []
    for done, ((what, name), dim, blocks) in enumerate(jobs):
        if progress:
            progress(done, len(jobs), f"{what} {name}, D = {dim}, {blocks} blocks")
        exact, wide = KERNELS[name]
        work = built.work(what, exact, dim, blocks, wide)
        records.append({"kernel": what, "name": name, "dim": dim, "blocks": blocks, "work": work})
    return records


def count_roundings(built: Twin) -> list[dict[str, Any]]:
    """Return the vector time of one task (two query tiles) by rounding of its outputs, microseconds of a core."""
    records = []
    for name, dim, keys in itertools.product(("paper", "exact"), DIMS, ROUNDING_KEYS):
        us = {}
        for how, number in ROUNDINGS.items():
            work = built.work("attend", KERNELS[name][0], dim, keys // 128, 0, number)
            us[how] = 1e6 * model.engine_times(work, model.MAIN)["vector"]
        records.append({"kernel": name, "dim": dim, "keys": keys, "vector_us": us})
    return records


def plan(built: Twin, case: SpeedCase) -> dict[str, int]:
    """Return tasks and score tiles of the busiest group, as the kernel deals them."""
    sizes = (case.batch, case.heads, case.kv_heads, case.rows, case.keys, case.dim, int(case.causal))
    return built.ask("plan", *sizes)


def stored_shares() -> dict[str, float]:
    """Return the share of tiles that the exact recovery keeps in FP32, mean over seeds, from the stored RMSE runs."""
    shares = {}
    for stem, case in SHARE_CASES:
        run = json.loads((RESULTS["rmse"].parent / f"{stem}.json").read_text(encoding="utf-8"))
        key = (case, "pasa-exact", "inf")
        chosen = [each for each in run["records"] if (each["case"], each["arithmetic"], each["overflow"]) == key]
        shares[case] = round(sum(each["scores_rescued_share"] for each in chosen) / len(chosen), 4)
    return shares


def fits_of(counts: Sequence[Mapping[str, Any]], kernel: str, dim: int) -> dict[str, Fit]:
    """Return a fit for each counted kernel, against tiles, or blocks for the pass over the keys."""
    per_block = TILES_A_BLOCK if kernel == "attend" else 1
    chosen = [each for each in counts if each["kernel"] == kernel and each["dim"] == dim]
    names = dict.fromkeys(each["name"] for each in chosen)
    return {name: fit([(per_block * e["blocks"], e["work"]) for e in chosen if e["name"] == name]) for name in names}


def predict(
    counts: Sequence[Mapping[str, Any]], plans: Mapping[str, Mapping[str, int]], shares: Mapping[str, float]
) -> dict[str, Any]:
    """Return what follows from the counts: residuals of the fits, times per tile, and one record per prediction."""
    attend = {dim: fits_of(counts, "attend", dim) for dim in DIMS}
    shift = {dim: fits_of(counts, "shift", dim) for dim in DIMS}
    ways = {dim: allocations(attend[dim], dim, sorted({0.0, 1.0, *shares.values()})) for dim in DIMS}
    tiles = [
        {
            "dim": dim,
            "allocation": name,
            "ns": {engine: 1e9 * s for engine, s in model.engine_times(way.per_tile, model.MAIN).items()},
            "vector_ns": {part: 1e9 * s for part, s in model.vector_parts(way.per_tile).items()},
        }
        for dim in DIMS
        for name, way in ways[dim].items()
    ]
    records = [
        record
        for case in CASES
        for scenario in model.SCENARIOS
        for record in model.predict_case(case, scenario, ways[case.dim], shift[case.dim], plans[case.name])
    ]
    residuals = {f"{name}, D = {dim}": each.residual for dim in DIMS for name, each in attend[dim].items()}
    return {"fit_residuals": residuals, "tiles": tiles, "records": records}


EXPERIMENT = Experiment(
    name="npu-model",
    run=run_npu_model,
    report=report.report,
    appendix=report.appendix,
    title="A model of an Ascend 910B3",
)
