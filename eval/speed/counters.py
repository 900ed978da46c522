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
from pasa.eval.speed.cases import select_cases
from pasa.eval.speed.implementations import CUDNN, OURS, PLAIN, select_implementations

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
METRICS = {
    "us": "gpu__time_duration.sum",
    "DRAM MB": "dram__bytes_read.sum",
    "DRAM %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "L2 MB": "lts__t_bytes.sum",
    "tensor %": "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "SMs busy %": "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
    "registers": "launch__registers_per_thread",
    "instructions M": "smsp__inst_executed.sum",
}
SCALE = {"DRAM MB": 1e-6, "L2 MB": 1e-6, "instructions M": 1e-6, "us": 1e-3}  # ncu --print-units base: bytes, ns


def run_case(case: str, implementation: str) -> None:
    """Warm up, then one call between the marks that ncu waits for."""
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
    """One record per kernel of a call.

    Raises
    ------
    NotImplementedError
        Without ncu, or where it may not read counters.
    """
    if shutil.which("ncu") is None:
        raise NotImplementedError("ncu, of Nsight Compute, is not on the PATH")
    metrics = [*METRICS.values(), *(f"{STALL}{name}_per_issue_active.ratio" for name in STALLS.values())]
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
    """A line of ncu's table in our units, with the three largest reasons for which a warp waits."""
    found: dict[str, Any] = {"case": case, "by": implementation, "kernel": row["Kernel Name"].partition("(")[0][:40]}
    for name, metric in METRICS.items():
        found[name] = number(row[metric]) * SCALE.get(name, 1.0)
    stalls = {why: number(row[f"{STALL}{name}_per_issue_active.ratio"]) for why, name in STALLS.items()}
    largest = sorted(stalls, key=lambda why: -stalls[why])[:3]
    found["waits for (warps an issue)"] = ", ".join(f"{why} {stalls[why]:.1f}" for why in largest)
    return found


def number(text: str) -> float:
    """Of ncu, which groups thousands; NaN where it has none."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return float("nan")


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all kernels were read."""
    from pasa.eval.kit.tables import markdown

    parser = argparse.ArgumentParser(description="Nsight Compute counters of the kernels of some cases")
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--one", metavar="IMPLEMENTATION", help=argparse.SUPPRESS)
    parser.add_argument("--output-dir", type=Path)
    given = parser.parse_args(arguments)
    if given.one:
        run_case(given.cases[0], given.one)
        return 0
    records = [line for case in given.cases for name in (*OURS, CUDNN) for line in profile(case, name)]
    shown = [[f"{x:.3g}" if isinstance(x, float) else str(x) for x in line.values()] for line in records]
    table = markdown(list(records[0]), shown)
    print(table)
    if given.output_dir:
        found = describe(torch.device("cuda", torch.cuda.current_device()))
        where = ", ".join(f"{found[key]}" for key in ("device", "commit"))
        versions = ", ".join(f"{key} {found[key]}" for key in ("driver", "torch", "triton", "cudnn"))
        output.write_json({"environment": found, "records": records}, str(given.output_dir / "counters.json"))
        text = f"# Counters of Nsight Compute\n\n{where}; {versions}.\n{NOTE}\n{table}\n"
        output.write_text(given.output_dir / "counters.md", text)
    return 0


NOTE = """
One call of each case, every kernel alone with cold caches, clocks as they are. `DRAM MB` read; `tensor %`: share
of the time in which the tensor cores work; `SMs busy %`: in which a multiprocessor has a warp; means over all of them.
"""

if __name__ == "__main__":
    cli.leave(main)
