"""Read hardware counters of the kernels of a case with Nsight Compute, to find what limits their speed.

Nsight Compute runs every kernel alone, with cold caches. So the times of the kernels add up to more than the time of a
call in which kernels overlap.
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from typing import Annotated, Any

import torch
import typer

from pasa.eval.kit.device import describe, origin
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.output import Report, silent
from pasa.eval.kit.tables import Column, Table
from pasa.eval.speed.cases import select_cases
from pasa.eval.speed.implementations import CUDNN, PLAIN, select_implementations

WARM_CALLS = 3
DEFAULT = ("paper", "decode-1x32k", "decode-1x128k")
STALL = "smsp__average_warps_issue_stalled_"
STALLS = {  # what a warp waits for, and the name of the reason in Nsight Compute
    "memory": "long_scoreboard",
    "barrier": "barrier",
    "shared memory": "short_scoreboard",
    "instruction cache": "no_instruction",
    "constant cache": "imc_miss",
    "fixed latency": "wait",
    "tensor core": "gmma",
}
METRICS = {  # metric of Nsight Compute, and factor to the unit shown; --print-units base gives bytes and nanoseconds
    "us": ("gpu__time_duration.sum", 1e-3),
    "DRAM MB": ("dram__bytes_read.sum", 1e-6),
    "DRAM %": ("dram__throughput.avg.pct_of_peak_sustained_elapsed", 1.0),
    "L2 MB": ("lts__t_bytes.sum", 1e-6),
    "tensor %": ("sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed", 1.0),
    "SMs busy %": ("sm__cycles_active.avg.pct_of_peak_sustained_elapsed", 1.0),
    "registers": ("launch__registers_per_thread", 1.0),
    "instructions M": ("smsp__inst_executed.sum", 1e-6),
}
WAITS = "waits for (warps an issue)"
TITLE = "Counters of Nsight Compute"
NOTE = (
    "One call of each case, every kernel alone with cold caches, clocks not set. `DRAM MB` read; `tensor %`: share "
    "of the time in which the tensor cores work; `SMs busy %`: in which a multiprocessor has a warp; means over all of "
    "them."
)


def run_case(case: str, implementation: str) -> None:
    """Warm up, then run one call between the marks that ncu waits for."""
    inputs = select_cases([case])[0].inputs("cuda")
    call = select_implementations([implementation])[0].prepare(inputs)[PLAIN]
    with call.scope():
        for _ in range(WARM_CALLS):
            call.run()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call.run()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def profile(case: str, implementation: str) -> list[dict[str, Any]]:
    """Return one record per kernel of a call; raise NotImplementedError if ncu is not allowed to read counters."""
    metrics = [name for name, _ in METRICS.values()]
    metrics += [f"{STALL}{name}_per_issue_active.ratio" for name in STALLS.values()]
    command = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
    command += ["--profile-from-start", "off", "--metrics", ",".join(metrics)]
    command += [sys.executable, "-m", "pasa.eval.speed.counters", case, implementation]
    if shutil.which("ncu") is None:
        raise FileNotFoundError("there is no program 'ncu': install Nsight Compute, and put it in PATH")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    _, heading, table = done.stdout.partition('"ID"')
    names, _, *rows = csv.reader(io.StringIO(heading + table)) if heading else ([], [])
    if done.returncode or not rows:
        raise NotImplementedError(f"ncu counted no kernel: {(done.stdout + done.stderr).strip()[-400:]}")
    return [record(dict(zip(names, row, strict=True)), case, implementation) for row in rows]


def record(row: dict[str, str], case: str, implementation: str) -> dict[str, Any]:
    """Return the record of a line of ncu's table, in the units of `METRICS`, with the three most frequent stalls."""
    stalls = {why: number(row[f"{STALL}{name}_per_issue_active.ratio"]) for why, name in STALLS.items()}
    largest = sorted(stalls, key=lambda why: -stalls[why])[:3]
    return {
        "case": case,
        "by": implementation,
        "kernel": row["Kernel Name"].partition("(")[0][:40],
        **{name: number(row[metric]) * factor for name, (metric, factor) in METRICS.items()},
        WAITS: ", ".join(f"{why} {stalls[why]:.1f}" for why in largest),
    }


def number(text: str) -> float:
    """Parse a number of ncu, which separates thousands by commas; return NaN if the text is no number."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return float("nan")


def run_counters(
    case: Annotated[
        list[str] | None, typer.Option(help="Name of a case, repeatable (default: the paper's, and decoding).")
    ] = None,
    progress: Report = silent,
) -> dict[str, Any]:
    """Read hardware counters of the kernels behind a case, by Nsight Compute, beside SDPA's cuDNN."""
    records: list[dict[str, Any]] = []
    jobs = [(each.name, by) for each in select_cases(case or DEFAULT) for by in ("pasa", CUDNN)]
    for done, (name, by) in enumerate(jobs):
        progress(done, len(jobs), f"{name}, {by}")
        records += profile(name, by)
    return {"environment": describe(torch.device("cuda", torch.cuda.current_device())), "records": records}


def report(result: dict[str, Any]) -> list[Table | str]:
    """Return a row per kernel, and the machine."""
    columns: dict[str, Column] = {name: name for name in ("case", "by", "kernel")}
    columns |= {name: (name, ".4g") for name in METRICS}
    return [Table.of(TITLE, result["records"], columns | {WAITS: WAITS}, NOTE), origin(result)]


EXPERIMENT = Experiment(name="counters", run=run_counters, report=report, title=TITLE)

if __name__ == "__main__":
    run_case(*sys.argv[1:])
