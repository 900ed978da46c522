"""Model of an Ascend 910B3: counts of the kernels on the CPU twin, lines fitted to them, predictions for the cases.

Every number of its tables is a model's, not a measurement.
"""

from __future__ import annotations

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
from pasa.eval.kit.device import origin
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.stored import RESULTS, pick
from pasa.eval.kit.tables import Table, percent
from pasa.eval.npu import roofline as model
from pasa.eval.npu.precision_variants import Fit, Work, allocations, exact_name, fit, substitutions
from pasa.eval.speed.cases import SpeedCase, select_cases

Record = dict[str, Any]
MODEL = "Model, not measured."
VECTOR_PARTS = ("row reductions", "barriers")  # that the table of engines shows beside the whole
NOTE = "model, not measured: twin counts over published rates; nothing was run on an NPU"
SOURCE = Path(__file__).resolve().parent / "counts.cpp"
ASCEND_C = SOURCE.parents[2] / "ascend_c"
FLAGS = ("-std=c++17", "-fexcess-precision=16", "-ffp-contract=off", "-O1", "-DPASA_CPU_TWIN")
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
    flags = [*FLAGS, *(["-mf16c"] if platform.machine() == "x86_64" else [])]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "counts"
        command = ["g++", *flags, f"-I{ASCEND_C}", f"-I{ASCEND_C / 'twin'}", str(SOURCE), "-o", str(program)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"g++ cannot build {SOURCE} against {ASCEND_C}: {done.stderr[:200]}")
        yield Twin(program)


def run_npu_model(progress: output.Report = output.silent) -> Record:
    """Model an Ascend 910B3: what the Ascend C kernels spend on the CPU twin over published rates. Not measured.

    OSError without g++ or the Ascend C sources, or if the twin reports a fault.
    """
    with build() as built:
        counts = count(built, progress)
        plans = {case.name: plan(built, case) for case in CASES}
        roundings = count_roundings(built)
    shares = stored_shares()
    predicted = predict(counts, plans, shares)
    lines = {
        name: [{"what": what, "change": change} for what, change in each] for name, each in substitutions(128).items()
    }
    published = model.load_rates()
    return {
        "note": NOTE,
        "gate": {"passed": all(each < RESIDUAL_LIMIT for each in predicted["fit_residuals"].values())},
        "rates": published["rates"],
        "cycles_per_repeat": {
            "source": published["sources"]["cost model, vector calls"],
            "fp32, fp16": published[model.CYCLES],
        },
        "scenarios": {name: each.what for name, each in model.SCENARIOS.items()},
        "substitutions": lines,
        "shares": shares,
        "claims": CLAIMS,
        "peak_tflops": 2e-12 * model.rate("cube") * model.rate("clock") * model.rate("groups"),
        "cases": [{"name": case.name, "shape": case.shape, "flops": case.flops} for case in CASES],
        "plans": plans,
        "counts": counts,
        "roundings": roundings,
        **predicted,
    }


def count(built: Twin, progress: output.Report) -> list[Record]:
    """Return the counters of every kernel, head dimension and number of blocks; keys are shifted in one way alone."""
    kernels = [("attend", name) for name in KERNELS] + [("shift", "paper"), ("shift", "exact")]
    jobs = list(itertools.product(kernels, DIMS, BLOCKS))
    records = []
    for done, ((what, name), dim, blocks) in enumerate(jobs):
        progress(done, len(jobs), f"{what} {name}, D = {dim}, {blocks} blocks")
        exact, wide = KERNELS[name]
        work = built.work(what, exact, dim, blocks, wide)
        records.append({"kernel": what, "name": name, "dim": dim, "blocks": blocks, "work": work})
    return records


def count_roundings(built: Twin) -> list[Record]:
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
        chosen = pick(run["records"], case=case, arithmetic="pasa-exact", overflow="inf")
        shares[case] = round(sum(each["scores_rescued_share"] for each in chosen) / len(chosen), 4)
    return shares


def fits_of(counts: Sequence[Record], kernel: str, dim: int) -> dict[str, Fit]:
    """Return a fit for each counted kernel, against tiles, or blocks for the pass over the keys."""
    per_block = TILES_A_BLOCK if kernel == "attend" else 1
    chosen = pick(counts, kernel=kernel, dim=dim)
    names = dict.fromkeys(each["name"] for each in chosen)
    return {name: fit([(per_block * e["blocks"], e["work"]) for e in pick(chosen, name=name)]) for name in names}


def predict(counts: Sequence[Record], plans: Mapping[str, Mapping[str, int]], shares: Mapping[str, float]) -> Record:
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


def report(result: Record) -> list[Table | str]:
    """Return the tables and paragraphs of the terminal."""
    tables = [range_table(result), tile_table(result, 128), share_table(result), case_table(result, "as written")]
    return [*tables, claim(result), origin(result)]


def appendix(result: Record) -> list[Table]:
    """Return the tables that the Markdown file alone holds."""
    others = [case_table(result, scenario) for scenario in result["scenarios"] if scenario != "as written"]
    return [tile_table(result, 64), *others, rounding_table(result), *input_tables(result)]


def shown(result: Record) -> list[str]:
    """Return the allocations, the exact one without rescued tiles and with the share of a language model's shape."""
    shares = 0.0, result["shares"]["qwen-like, 180 deg"]
    return ["fp32", "partial", "paper", "paper-fp16", *map(exact_name, shares)]


def range_table(result: Record) -> Table:
    """Return the ratio to the flow with FP32 scores and the highest rate, over all cases, by scenario."""
    rows = [[name, *(_range(result, each, name) for each in result["scenarios"])] for name in shown(result)]
    what = "; ".join(f"{name}: {text}" for name, text in result["scenarios"].items())
    note = (
        f"{MODEL} Time of fp32 over that of the allocation with perfect overlap, lowest to highest of "
        f"{len(result['cases'])} cases; in brackets the most TFLOPS of a case (the cube's peak is "
        f"{result['peak_tflops']:.0f}). {what}."
    )
    return Table("Against FP32 scores", ["allocation", *result["scenarios"]], rows, note)


def _range(result: Record, scenario: str, name: str) -> str:
    chosen = pick(result["records"], scenario=scenario, allocation=name)
    ratios = [each["ratio_overlap"] for each in chosen]
    return f"{min(ratios):.2f} to {max(ratios):.2f} ({max(each['tflops'] for each in chosen):.0f})"


def case_table(result: Record, scenario: str) -> Table:
    """Return ratio and rate of each case."""
    rows = []
    for case in result["cases"]:
        chosen = {each["allocation"]: each for each in pick(result["records"], case=case["name"], scenario=scenario)}
        cells = [
            f"{each['ratio_overlap']:.2f} / {each['ratio_none']:.2f} ({each['tflops']:.0f})"
            for each in (chosen[name] for name in shown(result))
        ]
        rows.append([case["name"], case["shape"], f"{chosen['fp32']['overlap_ms']:.3g}", *cells])
    note = (
        f"{MODEL} Times as fast as fp32 with perfect overlap / with none (TFLOPS with perfect overlap). "
        "The pass over K is included."
    )
    return Table(f"Cases, {scenario}", ["case", "shape", "fp32 ms", *shown(result)], rows, note)


def tile_table(result: Record, dim: int) -> Table:
    """Return the time of each engine per score tile."""
    engines = [name for name in (*model.PIPES, *model.SHARED) if name != "HBM"]
    rows = []
    for tile in pick(result["tiles"], dim=dim):
        if tile["allocation"] in shown(result):
            slowest, longest = model.bound(tile["ns"])
            ns = [*(tile["ns"][name] for name in engines), *(tile["vector_ns"][name] for name in VECTOR_PARTS)]
            serial = sum(tile["ns"][name] for name in model.PIPES)
            rows.append([tile["allocation"], *(f"{x:.0f}" for x in ns), slowest, f"{longest:.0f}", f"{serial:.0f}"])
    note = (
        f"{MODEL} ns for 128 queries against 128 keys on one cube core and its two vector cores, D = {dim}, kernels as "
        "written. Row reductions and the gaps after barriers are parts of vector."
    )
    header = ["allocation", *engines, *VECTOR_PARTS, "bound by", "overlap", "none"]
    return Table(f"Engines per tile, D = {dim}", header, rows, note)


def share_table(result: Record) -> Table:
    """Return the cost of tiles in FP32 for the exact recovery, on the paper's shape."""
    rows = []
    for data, share in [*result["shares"].items(), ("every tile", 1.0)]:
        chosen = pick(result["records"], case="paper", allocation=exact_name(share))
        cells = [f"{each['ratio_overlap']:.2f} ({each['tflops']:.0f})" for each in chosen]
        rows.append([data, percent(share), *cells])
    note = f"{MODEL} Times as fast as fp32 on (1, 16, 1280, 128), and TFLOPS. Shares: stored RMSE runs."
    return Table("Exact recovery by its tiles in FP32", ["data", "tiles in FP32", *result["scenarios"]], rows, note)


def rounding_table(result: Record) -> Table:
    """Return what unbiased rounding adds to the vector work of a task."""
    rows = []
    for each in result["roundings"]:
        base, *longer = each["vector_us"].values()
        cells = [f"{base:.1f}", *(f"{us:.1f} ({percent(us / base - 1)})" for us in longer)]
        rows.append([each["kernel"], str(each["dim"]), str(each["keys"]), *cells])
    note = f"{MODEL} us of a vector core for two query tiles of a head, and what they are longer."
    return Table("Unbiased rounding", ["kernel", "D", "keys", *ROUNDINGS], rows, note)


def input_tables(result: Record) -> list[Table]:
    """Return how well lines fit the counts, the substitutions, and the rates with their sources."""
    fits = [[name, percent(value)] for name, value in result["fit_residuals"].items()]
    lines = [
        [name, line["what"], ", ".join(f"{key} {value:+g}" for key, value in line["change"].items())]
        for name, of_name in result["substitutions"].items()
        for line in of_name
    ]
    rates = [
        [name, f"{rate['value']:.6g}", rate["unit"], rate["source"], rate["inferred"] or "-"]
        for name, rate in result["rates"].items()
    ]
    cycles = result["cycles_per_repeat"]
    calls = "; ".join(f"{name} {fp32:g}, {fp16:g}" for name, (fp32, fp16) in cycles["fp32, fp16"].items())
    of_fits = "Of any engine's count at any number of tiles, over that count."
    of_lines = "Per score tile and group, D = 128: repeats of vector calls, bytes of queues, barriers."
    of_rates = f"Cycles of a repeat of 256 bytes in FP32, FP16: {calls}. From {cycles['source']}."
    return [
        Table("Fits", ["kernel", "largest residual"], fits, of_fits),
        Table("Substitutions", ["allocation", "what", "change"], lines, of_lines),
        Table("Rates", ["rate", "value", "unit", "source", "inferred"], rates, of_rates),
    ]


def claim(result: Record) -> str:
    """Return the published figures beside the model's."""
    claims = result["claims"]
    low, high = claims["speedup"]
    parts = [f"{_range(result, scenario, 'paper-fp16')} {scenario}" for scenario in result["scenarios"]]
    return (
        f"{MODEL} Published for PASA: {low} to {high} times as fast as a vendor attention, up to "
        f"{claims['tflops']:.0f} TFLOPS ({claims['source']}). The source names neither its chip nor the precision of "
        f"its baseline. The speed of the model's paper-fp16, as a multiple of fp32's: {'; '.join(parts)}."
    )


EXPERIMENT = Experiment("npu-model", run_npu_model, report, "A model of an Ascend 910B3", appendix=appendix)
