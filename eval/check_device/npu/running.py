"""Run the build and the stages, each in processes of its own, with a log and a time limit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pasa.ops import envs

STAGE = "pasa.eval.check_device.npu.stages"
SHOWN_ERRORS = 5  # of a compiler
ERROR = re.compile(r"\berror\b", re.IGNORECASE)
WARNING = re.compile(r"\bwarning\b", re.IGNORECASE)
Record = dict[str, Any]


def build(logs: Path, limit_s: float) -> Record:
    """Build the kernels; return the time, the number of warnings and the first errors."""
    log = logs / "build.log"
    started = time.perf_counter()
    environment = {"BUILD": str(logs.parent / "build")} | envs.for_command(PYTHON=sys.executable)
    with log.open("w", encoding="utf-8") as file:
        command = ["bash", str(envs.ascend_build_script())]
        why = _finish(subprocess.Popen(command, env=environment, stdout=file, stderr=file), limit_s)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.strip() for line in lines if ERROR.search(line)][:SHOWN_ERRORS]
    warnings = sum(WARNING.search(line) is not None for line in lines)
    detail = f"{warnings} lines with warnings" if why is None else "; ".join([why, *(errors or lines[-1:])])
    return {
        "stage": "build", "name": "build", "verdict": "passed" if why is None else "FAILED", "detail": detail,
        "seconds": round(time.perf_counter() - started, 1), "warnings": warnings, "errors": errors,
    }  # fmt: skip


def run_stage(name: str, device: str, quick: bool, logs: Path, limit_s: float) -> list[Record]:
    """Run a stage; return the records of its checks.

    If its process dies or exceeds the limit, the check that ran is noted as failed. After a death, the checks behind it
    run in another process.
    """
    records: list[Record] = []
    end = time.perf_counter() + limit_s
    while True:
        lines, why = _run_process(name, device, quick, len(records), logs, end - time.perf_counter())
        done = [line for line in lines if "name" in line]
        records += [{"stage": name} | line for line in done]
        if why is None:
            return records
        started = [line["starts"] for line in lines if "starts" in line]
        running = started[-1] if len(started) > len(done) else "start"
        records.append({"stage": name, "name": running, "verdict": "FAILED", "detail": why})
        if running == "start" or time.perf_counter() >= end:
            return records


def _run_process(
    name: str, device: str, quick: bool, skip: int, logs: Path, limit_s: float
) -> tuple[list[Record], str | None]:
    """Run the checks of a stage behind the first `skip`; return its lines, and why it did not end well."""
    stem = re.sub(r"\W+", "_", name)
    output = logs / f"{stem}.jsonl"
    command = [sys.executable, "-m", STAGE, name, device, "quick" if quick else "full", str(skip)]
    with (logs / f"{stem}.log").open("a", encoding="utf-8") as log, output.open("w+", encoding="utf-8") as file:
        why = _finish(subprocess.Popen(command, stdout=file, stderr=log), limit_s)
        file.seek(0)
        lines = [_parsed(line) for line in file]
    output.unlink()
    return [line for line in lines if line], why


def _parsed(line: str) -> Record:
    """Return the record in a line; what else a process prints, such as a warning of torch_npu, gives an empty one."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _finish(process: subprocess.Popen[bytes], limit_s: float) -> str | None:
    """Wait for a process, and end it at the limit; return why it did not end well."""
    try:
        status = process.wait(max(limit_s, 1.0))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"not done after {limit_s:.0f} s"
    return None if status == 0 else f"the process ended with status {status}"
