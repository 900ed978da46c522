"""Hardware counters of the kernels behind a case, by Nsight Compute: what bounds a time that misses its target.

    python -m pasa.eval.speed.counters paper decode-1x32k --output-dir eval/speed/results

Every kernel runs alone with cold caches, so times add up to more than a call takes in which kernels overlap.
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pasa.eval import cli
from pasa.eval.kit import output
from pasa.eval.kit.device import describe
from pasa.eval.kit.tables import markdown
from pasa.eval.speed.cases import select_cases
from pasa.eval.speed.implementations import CUDNN, PLAIN, select_implementations

WARM_CALLS = 3
STALL = "smsp__average_warps_issue_stalled_"
STALLS = {
    "memory": "long_scoreboard",
    "barrier": "barrier",
    "shared memory": "short_scoreboard",
    "instruction cache": "no_instruction",
    "constant cache": "imc_miss",
    "fixed latency": "wait",
    "tensor core": "gmma",
}
METRICS = {  # each with the factor to its unit; ncu --print-units base gives bytes and nanoseconds
    "us": ("gpu__time_duration.sum", 1e-3),
    "DRAM MB": ("dram__bytes_read.sum", 1e-6),
    "DRAM %": ("dram__throughput.avg.pct_of_peak_sustained_elapsed", 1.0),
    "L2 MB": ("lts__t_bytes.sum", 1e-6),
    "tensor %": ("sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed", 1.0),
    "SMs busy %": ("sm__cycles_active.avg.pct_of_peak_sustained_elapsed", 1.0),
    "registers": ("launch__registers_per_thread", 1.0),
    "instructions M": ("smsp__inst_executed.sum", 1e-6),
}
NOTE = """
One call of each case, every kernel alone with cold caches, clocks as they are. `DRAM MB` read; `tensor %`: share
of the time in which the tensor cores work; `SMs busy %`: in which a multiprocessor has a warp; means over all of them.
"""


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
    """Return one record per kernel of a call; NotImplementedError without ncu, or where it may not read counters."""
    if shutil.which("ncu") is None:
        raise NotImplementedError("ncu, of Nsight Compute, is not on the PATH")
    metrics = [name for name, _ in METRICS.values()]
    metrics += [f"{STALL}{name}_per_issue_active.ratio" for name in STALLS.values()]
    command = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
    command += ["--profile-from-start", "off", "--metrics", ",".join(metrics)]
    command += [sys.executable, "-m", "pasa.eval.speed.counters", case, "--one", implementation]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    table = done.stdout[done.stdout.find('"ID"') :]
    if done.returncode or not table.startswith('"ID"'):
        raise NotImplementedError(f"ncu: {(done.stdout + done.stderr).strip()[-400:]}")
    names, _, *rows = csv.reader(io.StringIO(table))
    if not rows:
        raise NotImplementedError(f"ncu saw no kernel of {implementation} on {case}")
    return [record(dict(zip(names, row, strict=True)), case, implementation) for row in rows]


def record(row: dict[str, str], case: str, implementation: str) -> dict[str, Any]:
    """Return a line of ncu's table in our units, with the three largest reasons for which a warp waits."""
    stalls = {why: number(row[f"{STALL}{name}_per_issue_active.ratio"]) for why, name in STALLS.items()}
    largest = sorted(stalls, key=lambda why: -stalls[why])[:3]
    return {
        "case": case,
        "by": implementation,
        "kernel": row["Kernel Name"].partition("(")[0][:40],
        **{name: number(row[metric]) * factor for name, (metric, factor) in METRICS.items()},
        "waits for (warps an issue)": ", ".join(f"{why} {stalls[why]:.1f}" for why in largest),
    }


def number(text: str) -> float:
    """Return a number of ncu, which groups thousands; NaN where it has none."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return float("nan")


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if all kernels were read."""
    parser = argparse.ArgumentParser(description="Nsight Compute counters of the kernels of some cases")
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--one", metavar="IMPLEMENTATION", help=argparse.SUPPRESS)
    parser.add_argument("--output-dir", type=Path)
    options = parser.parse_args(arguments)
    if options.one:
        run_case(options.cases[0], options.one)
        return 0
    records = [line for case in options.cases for name in ("pasa", CUDNN) for line in profile(case, name)]
    shown = [[f"{x:.3g}" if isinstance(x, float) else str(x) for x in line.values()] for line in records]
    table = markdown(list(records[0]), shown)
    print(table)
    if options.output_dir:
        machine = describe(torch.device("cuda", torch.cuda.current_device()))
        where = ", ".join(f"{machine[key]}" for key in ("device", "commit"))
        versions = ", ".join(f"{key} {machine[key]}" for key in ("driver", "torch", "triton", "cudnn"))
        output.write_json({"environment": machine, "records": records}, str(options.output_dir / "counters.json"))
        text = f"# Counters of Nsight Compute\n\n{where}; {versions}.\n{NOTE}\n{table}\n"
        output.write_text(options.output_dir / "counters.md", text)
    return 0


if __name__ == "__main__":
    cli.leave(main)
