"""The command `pasa bench npu-model-310p`: a roofline model of the kernels for the Ascend 310P; see README.md.

Modelled, not measured. A kernel runs on the CPU twin of the core, which counts what each engine does
for a tile. Documented rates turn counts into times; cycles of vector calls are those of an Atlas A2.
"""

from __future__ import annotations

import json
import platform
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from pasa.eval.kit import output
from pasa.eval.kit.experiment import Experiment, gate
from pasa.eval.kit.tables import Table
from pasa.eval.npu import decoding_310p
from pasa.eval.npu.roofline import cycles_of
from pasa.eval.npu.run import ASCEND_C, FLAGS

SOURCE, RATES = (Path(__file__).with_name(name) for name in ("counts_310p.cpp", "rates_310p.json"))
NOTE = "Modelled, not measured: no NPU has run the kernel. No cycles of this chip's vector calls are published."
DIMS, FEW, MANY = (64, 128, 256), 8, 40  # blocks: their difference is free of what a tile costs once
ROWS, KEYS = 64, 128  # of a tile
FACTORS = (0.7, 1.3)  # of every rate but the clock, one at a time
Record = dict[str, Any]


def run_model(progress: output.Report = output.silent) -> Record:
    """Model an Ascend310P3: what a tile spends on the CPU twin over documented rates, in prefill and decoding.

    Not measured.

    OSError without g++ or the Ascend C sources, or if the twin reports a fault.
    """
    published: Record = json.loads(RATES.read_text(encoding="utf-8"))
    rates = {name: float(each["value"]) for name, each in published["rates"].items()}
    works, blocks, passes = count(progress)
    tiles = [predict(dim, work, rates) | {"work": work} for dim, work in works.items()]
    decoding = [decoding_310p.predict(each, rates, engine_cycles, varied(rates)) for each in blocks]
    whole = {each["dim"]: each["ns"] for each in decoding if each["rows"] == ROWS}
    choices = [
        decoding_310p.choose(each, tile["ns"], whole[each["dim"]], rates, engine_cycles)
        for each, tile in zip(passes, tiles, strict=True)
    ]
    products = all(e["work"]["macs"] == ROWS * (KEYS * (2 * e["dim"] + 16) + 2 * e["dim"]) for e in tiles)
    peak = 2e-12 * rates["cube"] * rates["clock"] * rates["cores"]
    checks = {
        "multiplications are two products, the row sums and two anchor rows": products,
        "decoding reads each key and value once": all(map(decoding_310p.reads_keys_once, decoding)),
    }
    modelled = {"peak_tflops": peak, "tiles": tiles, "decoding": decoding, "choices": choices}
    return {"note": NOTE, "gate": gate(checks)} | modelled | published


def count(progress: output.Report) -> tuple[dict[int, Record], list[Record], list[Record]]:
    """Return the counters of a tile (64 queries, 128 keys) by head dimension, of decoding, and of launches before."""
    if not (ASCEND_C.exists() and SOURCE.exists()):
        raise OSError(f"{ASCEND_C} is missing, as it is from an installed package: clone the repository and run there")
    flags = [*FLAGS, *(["-mf16c"] if platform.machine() == "x86_64" else [])]
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "counts")
        command = ["g++", *flags, f"-I{ASCEND_C}", f"-I{ASCEND_C / 'twin'}", str(SOURCE), "-o", program]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"g++ cannot build {SOURCE} against {ASCEND_C}: {done.stderr[:200]}")
        works = {}
        for number, dim in enumerate(DIMS):
            progress(number, len(DIMS), f"D = {dim}")
            few, many = (_work(program, "attend", dim, blocks) for blocks in (FEW, MANY))
            works[dim] = {name: (many[name] - few.get(name, 0)) / (MANY - FEW) for name in many}
        work = partial(_work, program)
        return works, decoding_310p.count(work), decoding_310p.count_passes(work)


def _work(program: str, what: str, *numbers: int) -> Record:
    done = subprocess.run([program, what, *map(str, numbers)], capture_output=True, text=True, check=True)
    counted = json.loads(done.stdout)
    if not counted["report"]["ok"]:
        raise OSError(f"the twin reports a fault: {counted['report']['fault']}")
    core = counted["report"]["ai"]
    return {
        "macs": core["macs"],
        **{pipe: core["bytes"][pipe] for pipe in ("MTE1", "MTE2", "MTE3")},
        "L0C to UB": counted["L0C to UB"],
        "barriers": core["syncs"].get("PipeBarrier<V>", 0),
        **{call: each["repeats"] for call, each in core["calls"].items()},
    }


def engine_cycles(work: Record, rates: dict[str, float]) -> dict[str, float]:
    """Return the cycles of each engine for a tile; copies from L0C are the vector unit's."""
    calls = {name: number for name, number in work.items() if name.endswith((" float", " half", " uint16"))}
    vector = sum(number * cycles_of(name) for name, number in calls.items()) / rates["vector"]
    vector += work["L0C to UB"] / rates["L0C to UB"] + work["barriers"] * rates["vector barrier"]
    times = {name: work[key] / rates[name] for name, key in (("cube", "macs"), ("MTE1", "MTE1"), ("MTE3", "MTE3"))}
    return {"vector": vector, **times, "L2 read": work["MTE2"] / rates["L2 read"]}


def varied(rates: dict[str, float]) -> list[dict[str, float]]:
    """Return the rates with one of them, but for the clock, off by 30 %."""
    names = [name for name in rates if name not in ("clock", "cores")]
    return [rates | {name: factor * rates[name]} for name in names for factor in FACTORS]


def predict(dim: int, work: Record, rates: dict[str, float]) -> Record:
    """Return the times of a tile by engine, the engine that bounds it, and the speed of all cores in prefill."""
    cycles = engine_cycles(work, rates)
    ns = {name: 1e9 * each / rates["clock"] for name, each in cycles.items()}
    bound = max(ns, key=lambda name: ns[name])
    flops = 4 * ROWS * KEYS * dim * rates["cores"]
    bounds = {max(changed := engine_cycles(work, some), key=lambda each: changed[each]) for some in varied(rates)}
    return {
        "dim": dim,
        "ns": ns,
        "bound": bound,
        "bound_if_one_rate_is_off": sorted(bounds),
        "memory_ns": 1e9 * work["MTE2"] / rates["memory"] / rates["clock"],
        "tflops": 1e-3 * flops / ns[bound],
        "tflops_without_overlap": 1e-3 * flops / sum(ns.values()),
    }


def report(result: Record) -> list[Table | str]:
    """Return the times of a tile in prefill and decoding, and the rates."""
    peak = result["peak_tflops"]
    engines = list(result["tiles"][0]["ns"])
    rows = [
        [
            str(each["dim"]),
            *(f"{each['ns'][name]:.0f}" for name in engines),
            f"{each['memory_ns']:.0f}",
            f"{each['bound']} ({', '.join(each['bound_if_one_rate_is_off'])} if a rate is off by 30 %)",
            f"{each['tflops_without_overlap']:.1f} to {each['tflops']:.1f}",
            f"{100 * each['tflops'] / peak:.0f} %",
        ]
        for each in result["tiles"]
    ]
    heads = ["D", *engines, "memory, without L2", "bound by", "TFLOPS, without to with overlap", "of the peak"]
    rates = [[name, f"{e['value']} {e['unit']}", e["source"], e["inferred"]] for name, e in result["rates"].items()]
    return [
        NOTE,
        Table("A tile of 64 queries and 128 keys: nanoseconds of a core by engine", heads, rows),
        decoding_310p.table(result["decoding"]),
        decoding_310p.choices(result["choices"]),
        Table("Rates", ["rate", "value", "source", "inferred"], rates),
        *(f"{name}: {text}." for name, text in result["sources"].items()),
    ]


EXPERIMENT = Experiment("npu-model-310p", run_model, report, "A model of an Ascend310P3")
