"""Builds counts.cpp against the CPU twin and reads what the kernels spend."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parent / "counts.cpp"
KERNELS = SOURCE.parents[2] / "ascend_c"
FLAGS = ("-std=c++17", "-fexcess-precision=16", "-ffp-contract=off", "-O1", "-DPASA_CPU_TWIN")
Work = dict[str, float]
"""Per engine: bytes by queue, "macs", "barriers", and repeats by vector call ("Add float")."""


@dataclass(frozen=True)
class Twin:
    """A built program."""

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
        """Run one case and return its counters, over all cores."""
        return work_of(self.ask(what, *numbers))


@contextmanager
def build() -> Iterator[Twin]:
    """Compile, some 10 s; the program lives as long as the context.

    Raises
    ------
    FileNotFoundError
        Without the sources or g++.
    OSError
        If g++ fails, with its first line.
    """
    for path in (SOURCE, KERNELS / "twin"):
        if not path.exists():
            raise FileNotFoundError(f"the npu-model needs a checkout with the Ascend C sources: there is no {path}")
    if shutil.which("g++") is None:
        raise FileNotFoundError("the npu-model runs the kernels on the CPU twin, and g++ to build it is not installed")
    flags = [*FLAGS, *(["-mf16c"] if platform.machine() == "x86_64" else [])]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "counts"
        command = ["g++", *flags, f"-I{KERNELS}", f"-I{KERNELS / 'twin'}", str(SOURCE), "-o", str(program)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"g++ cannot build {SOURCE.name}: {(done.stderr.splitlines() or ['no message'])[0]}")
        yield Twin(program)


def work_of(report: dict[str, Any]) -> Work:
    """Return the counters of a report that the model uses, over all cores."""
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
