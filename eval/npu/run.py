"""Model of an Ascend 910B3: counts of the kernels on the CPU twin, lines fitted to them, predictions for the cases."""

from __future__ import annotations

import dataclasses
import itertools
import json
import platform
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pasa.eval.kit import output
from pasa.eval.kit.experiment import Experiment, gate
from pasa.eval.kit.stored import pick
from pasa.eval.npu import calibration, decoding, report
from pasa.eval.npu import roofline as model
from pasa.eval.npu.precision_variants import Fit, Tiles, Work, allocations, fit, substitutions
from pasa.eval.npu.shares import measure_shares
from pasa.eval.speed.cases import SpeedCase, select_cases

Record = dict[str, Any]
NOTE = "model, not measured: twin counts over calibrated rates; nothing was run on an NPU"
SOURCE = Path(__file__).resolve().parent / "counts.cpp"
ASCEND_C = SOURCE.parents[2] / "ascend_c"
FLAGS = ("-std=c++17", "-fexcess-precision=16", "-ffp-contract=off", "-O1", "-DPASA_CPU_TWIN")
BLOCKS = (6, 9, 12, 15)  # the first five make references that later ones keep, and every third moves one
DIMS = (128, 64)
# exact, and data as counts.cpp numbers them
KERNELS = {"paper": (0, 0), "exact": (1, 0), "exact wide": (1, 1), "exact anchored": (1, 2), "exact moving": (1, 3)}
FORMER = SOURCE.with_name("former.json")  # counts of the exact recovery as it was, and of its shift of keys
TILES_A_BLOCK = 2  # two query tiles
RESIDUAL_LIMIT = 0.005  # of a line to any count
ROUNDING_KEYS = (1280, 8192)
ROUNDINGS = {"to nearest": 0, "unbiased, no row leans": 1, "unbiased, all rows lean": 2}  # as counts.cpp numbers them
VARIED = tuple(name for name in model.stored_rates() if name not in ("clock", "groups", "vector cores"))
FACTORS = (0.7, 1.3)  # by which each rate of `VARIED` is changed, one at a time
CLAIMS = {
    "source": "abstract at openreview.net/forum?id=mvWQYIjDsx, against a vendor flash attention of CANN",
    "speedup": [1.2, 1.65],
    "tflops": 170.0,
}
CASES = (
    *select_cases(["paper"]),
    *(SpeedCase(f"paper-{n}k", 1, 16, 16, 1024 * n, 1024 * n, 128) for n in (4, 16, 64)),
    SpeedCase("qwen2-overflow", 1, 28, 28, 5676, 5676, 128),
    *select_cases(["qwen2-8k-full", "qwen2-8k", "qwen2-32k", "svd", "svd-2"]),
)
"""The paper's benchmark and the same longer; the paper's Qwen2 and SVD shapes; Qwen2 prefill, grouped and causal."""


@dataclass(frozen=True)
class Twin:
    """counts.cpp, built against the CPU twin."""

    program: Path

    def ask(self, what: str, *numbers: int) -> dict[str, Any]:
        """Run one case; an OSError holds the fault that the twin finds."""
        command = [str(self.program), what, *map(str, numbers)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        report: dict[str, Any] = json.loads(done.stdout)
        if not report.get("ok", True):
            raise OSError(f"the twin reports a fault in {what} {numbers}: {report['fault']}")
        return report

    def work(self, what: str, *numbers: int) -> Work:
        """Run one case and return the counters that the model uses, over all cores."""
        report = self.ask(what, *numbers)
        cube, vector = report["aic"], report["aiv"]
        return {
            "macs": cube["macs"],
            "MTE1": cube["bytes"]["MTE1"],
            "MTE2 cube": cube["bytes"]["MTE2"],
            "FIX": cube["bytes"]["FIX"],
            "MTE2 vector": vector["bytes"]["MTE2"],
            "MTE3": vector["bytes"]["MTE3"],
            "barriers": vector["syncs"].get("PipeBarrier<V>", 0),
            **{call: count["repeats"] for call, count in vector["calls"].items()},
        }


@contextmanager
def build() -> Iterator[Twin]:
    """Compile, some 10 s; the program lives as long as the context. OSError without the sources or g++."""
    for path in (SOURCE, ASCEND_C):
        if not path.exists():
            raise OSError(f"{path} is missing, as it is from an installed package: clone the repository and run there")
    flags = [*FLAGS, *(["-mf16c"] if platform.machine() == "x86_64" else [])]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "counts"
        command = ["g++", *flags, f"-I{ASCEND_C}", f"-I{ASCEND_C / 'twin'}", str(SOURCE), "-o", str(program)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"g++ cannot build {SOURCE} against {ASCEND_C}: {done.stderr[:200]}")
        yield Twin(program)


def run_npu_model(progress: output.Report = output.silent) -> Record:
    """Model an Ascend 910B3: what the Ascend C kernels spend on the CPU twin over calibrated rates. Not measured.

    OSError without g++ or the Ascend C sources, or if the twin reports a fault.
    """
    with build() as built:
        counts = count(built, progress)
        plans = {case.name: plan(built, case) for case in CASES}
        roundings = count_roundings(built)
        decoded = decoding.count(built)
    shares = measure_shares(progress)
    predicted = predict([*counts, *former_counts()], plans, shares)
    decode_records, decode_residuals = decoding.predict(decoded, fits_of(counts, "shift", decoding.DIM)["exact"])
    compared = calibration.compare()
    lines = {
        name: [{"what": what, "change": change} for what, change in each] for name, each in substitutions(128).items()
    }
    published = model.load_rates()
    checks = {
        "lines fit the counts": all(
            each < RESIDUAL_LIMIT for each in (*predicted["fit_residuals"].values(), *decode_residuals.values())
        ),
        "rates fit the measurements": calibration.within_limit(compared),
    }
    return {
        "note": NOTE,
        "gate": gate(checks),
        "rates": published["rates"],
        "cycles_per_repeat": {
            "source": published["sources"]["cost model, vector calls"],
            "fp32, fp16": published[model.CYCLES],
        },
        "calibration": compared,
        "measurements": calibration.load_measurements(),
        "substitutions": lines,
        "shares": {name: dataclasses.asdict(tiles) for name, tiles in shares.items()},
        "claims": CLAIMS,
        "peak_tflops": 2e-12 * model.rate("cube") * model.rate("clock") * model.rate("groups"),
        "cases": [{"name": case.name, "shape": case.shape, "keys": case.keys, "flops": case.flops} for case in CASES],
        "plans": plans,
        "counts": counts,
        "roundings": roundings,
        "decode_counts": decoded,
        "decode_records": decode_records,
        "decode_residuals": decode_residuals,
        **predicted,
    }


def count(built: Twin, progress: output.Report) -> list[Record]:
    """Return the counters of every kernel, head dimension and number of blocks; keys are shifted in one way alone."""
    kernels = [("attend", name) for name in KERNELS] + [("shift", "paper"), ("shift", "exact")]
    jobs = list(itertools.product(kernels, DIMS, BLOCKS))
    records = []
    for done, ((what, name), dim, blocks) in enumerate(jobs):
        progress(done, len(jobs), f"{what} {name}, D = {dim}, {blocks} blocks")
        exact, data = KERNELS[name]
        work = built.work(what, exact, dim, blocks, data)
        records.append({"kernel": what, "name": name, "dim": dim, "blocks": blocks, "work": work})
    return records


def count_roundings(built: Twin) -> list[Record]:
    """Return the vector time of one task (two query tiles) by rounding of its outputs, microseconds of a core."""
    records = []
    for name, dim, keys in itertools.product(("paper", "exact"), DIMS, ROUNDING_KEYS):
        us = {}
        for how, number in ROUNDINGS.items():
            work = built.work("attend", KERNELS[name][0], dim, keys // 128, 0, number)
            us[how] = 1e6 * model.engine_times(work)["vector"]
        records.append({"kernel": name, "dim": dim, "keys": keys, "vector_us": us})
    return records


def former_counts() -> list[Record]:
    """Return the stored counts of the exact recovery as it was, and of the pass that shifted its keys."""
    counts: list[Record] = json.loads(FORMER.read_text(encoding="utf-8"))["counts"]
    return [{"kernel": "attend", "name": "exact before"} | each for each in counts]


def plan(built: Twin, case: SpeedCase) -> dict[str, dict[str, int]]:
    """Return tasks and score tiles of the busiest group, by the number of query tiles of a task."""
    sizes = (case.batch, case.heads, case.kv_heads, case.rows, case.keys, case.dim, int(case.causal))
    return {str(lanes): built.ask("plan", int(lanes == 1), *sizes) for lanes in (1, 2)}


def fits_of(counts: Sequence[Record], kernel: str, dim: int) -> dict[str, Fit]:
    """Return a fit for each counted kernel, against tiles, or blocks for the pass over the keys."""
    per_block = TILES_A_BLOCK if kernel == "attend" else 1
    chosen = pick(counts, kernel=kernel, dim=dim)
    names = dict.fromkeys(each["name"] for each in chosen)
    lanes = {name: 1 if name in KERNELS and KERNELS[name][0] else 2 for name in names}
    return {
        name: fit([(per_block * e["blocks"], e["work"]) for e in pick(chosen, name=name)], lanes[name])
        for name in names
    }


def predict(
    counts: Sequence[Record], plans: Mapping[str, Mapping[str, Mapping[str, int]]], shares: Mapping[str, Tiles]
) -> Record:
    """Return what follows from the counts.

    That is the residuals of the fits, times per tile, one record per prediction, and for each change of a rate the
    lowest and highest ratio of each allocation to FP32 scores, and to lazy ones, over all cases.
    """
    attend = {dim: fits_of(counts, "attend", dim) for dim in DIMS}
    shift = {dim: fits_of(counts, "shift", dim) for dim in DIMS}
    ways = {dim: allocations(attend[dim], dim, shares) for dim in DIMS}
    tiles = [
        {
            "dim": dim,
            "allocation": name,
            "ns": {engine: 1e9 * s for engine, s in model.engine_times(way.per_tile).items()},
            "vector_ns": {part: 1e9 * s for part, s in model.vector_parts(way.per_tile).items()},
        }
        for dim in DIMS
        for name, way in ways[dim].items()
    ]

    def predict_cases(rates: model.Rates) -> list[Record]:
        return [
            record
            for case in CASES
            for record in model.predict_case(case, ways[case.dim], shift[case.dim], plans[case.name], rates)
        ]

    records = predict_cases(model.stored_rates())
    sensitivity = []
    for name, factor in itertools.product(VARIED, FACTORS):
        changed = predict_cases(model.changed_rates(name, factor))
        for allocation in ways[DIMS[0]]:
            chosen = pick(changed, allocation=allocation)
            ratios, to_lazy = ([each[ratio] for each in chosen] for ratio in ("ratio_overlap", "ratio_lazy"))
            sensitivity.append(
                {
                    "rate": name,
                    "factor": factor,
                    "allocation": allocation,
                    "lowest": min(ratios),
                    "highest": max(ratios),
                    "lowest_to_lazy": min(to_lazy),
                    "highest_to_lazy": max(to_lazy),
                }
            )
    residuals = {f"{name}, D = {dim}": each.residual for dim in DIMS for name, each in attend[dim].items()}
    return {"fit_residuals": residuals, "tiles": tiles, "records": records, "sensitivity": sensitivity}


EXPERIMENT = Experiment(
    "npu-model", run_npu_model, report.report, "A model of an Ascend 910B3", report.figures, appendix=report.appendix
)
