"""Plant each mutant in a copy of the sources, and run the tests that must notice it.

`python -m tests.mutants.run` runs all mutants, `--sample` one for every family of kernels, and `--only TEXT`
those whose description or file contains the text. Two processes run at a time. A mutant that its tests do not
notice survives; the command then prints it and fails. Tests that cannot run, that hang, or that pass nowhere
prove nothing, so the command fails then too. The test suite itself shows that they pass without the mutant.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

from tests.mutants.batches import BATCHES
from tests.mutants.decoding import DECODING
from tests.mutants.fp16 import FP16
from tests.mutants.fused import FUSED
from tests.mutants.hopper import HOPPER
from tests.mutants.host import HOST
from tests.mutants.kernels import KERNELS
from tests.mutants.mutant import ROOT, Mutant
from tests.mutants.paged import PAGED
from tests.mutants.reference import REFERENCE
from tests.mutants.speed import SPEED
from tests.mutants.streams import STREAMS

ALL = [*KERNELS, *DECODING, *HOPPER, *PAGED, *BATCHES, *FUSED, *FP16, *STREAMS, *SPEED, *HOST, *REFERENCE]
# The first mutant of each of these files is in the sample: one kernel of every family, and the choice of
# backends.
SAMPLED = [
    f"ops/attention/triton/{name}.py"
    for name in ("prefill/kernel", "short/kernel", "decode/kernel", "decode/paged_kernel", "backward/kernel")
]
SAMPLED += ["ops/attention/sdpa/backend.py", "ops/registry.py", "ops/backends.py"]
PROCESSES = 2
LIMIT = 300  # seconds for the tests of one mutant, ten times what they need
FOLDERS = ("pasa", "ops", "eval", "tests")
# Loaded once, before processes fork; not Triton, because TRITON_INTERPRET has to be set before.
HEAVY = ("torch", "hypothesis", "pytest")
FAILED = 1  # pytest's exit status if a test failed; others mean that tests were not found, or could not be read
CRASHED = 70  # not a status of pytest


def copy_tree(folder: Path) -> None:
    """Copy the sources so that `pasa.ops` is found below the folder and nowhere else."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("results"))
    for name in ("ops", "eval"):
        (folder / "pasa" / name).symlink_to(folder / name)
    for name in ("ascend_c", "pyproject.toml", "README.md"):
        (folder / name).symlink_to(ROOT / name)


def run_tests(folder: Path, tests: tuple[str, ...]) -> None:
    """Run tests in a copy of the sources, as a process of its own, and exit with pytest's status."""
    import pytest

    for name in [name for name in sys.modules if name.partition(".")[0] in ("pasa", "tests")]:
        del sys.modules[name]  # of the checkout
    sys.path[:] = [str(folder), *(path for path in sys.path if Path(path).resolve() != ROOT)]
    os.chdir(folder)
    status = CRASHED
    with (folder / "output.txt").open("w") as output, redirect_stdout(output), redirect_stderr(output):
        try:
            status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--tb=line", *tests])
            if not str(sys.modules["pasa"].__file__).startswith(str(folder)):
                raise RuntimeError(f"the tests imported {sys.modules['pasa'].__file__}, not the copy in {folder}")
        except BaseException:
            traceback.print_exc()
            status = CRASHED
    os._exit(int(status))


class Running(NamedTuple):
    """Hold a mutant whose tests are running."""

    mutant: Mutant
    folder: tempfile.TemporaryDirectory[str]
    process: multiprocessing.process.BaseProcess
    began: float


def start(mutant: Mutant) -> Running:
    """Plant a fault in a copy of the sources, and fork a process for its tests."""
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name)
    copy_tree(path)
    mutant.apply(path)
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(path, mutant.tests))
    process.start()
    return Running(mutant, folder, process, time.monotonic())


def verdict(running: Running) -> str:
    """Return the verdict of the tests, and delete the copy."""
    status = running.process.exitcode
    output = Path(running.folder.name, "output.txt")
    said = output.read_text(encoding="utf-8")[-1500:] if output.exists() else ""
    running.folder.cleanup()
    if status == FAILED:
        return "noticed"
    if status == 0:
        return "SURVIVED"
    return f"COULD NOT RUN (exit status {status}): {said}"


def run(mutants: Iterable[Mutant]) -> Iterator[tuple[Running, str]]:
    """Run mutants, `PROCESSES` at a time, and yield each with its verdict as it ends."""
    queue = list(reversed(list(mutants)))
    running: list[Running] = []
    while queue or running:
        while queue and len(running) < PROCESSES:
            running.append(start(queue.pop()))
        wait([one.process.sentinel for one in running], timeout=5)
        for one in list(running):
            if one.process.is_alive() and time.monotonic() - one.began < LIMIT:
                continue
            if late := one.process.is_alive():
                one.process.kill()
            one.process.join()
            running.remove(one)
            said = verdict(one)
            yield one, f"TOOK MORE THAN {LIMIT} s" if late else said


def main() -> int:
    """Run the mutants that the command line names; return 1 if one is not noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", action="store_true", help="one of every family of kernels")
    parser.add_argument("--only", default="", help="those whose words or file hold this text")
    options = parser.parse_args()
    mutants = [next(m for m in ALL if m.file == file) for file in SAMPLED] if options.sample else ALL
    chosen = [m for m in mutants if options.only in m.what or options.only in m.file]
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    sys.dont_write_bytecode = True
    for name in HEAVY:
        importlib.import_module(name)
    wrong = 0
    for one, said in run(chosen):
        wrong += said != "noticed"
        seconds = time.monotonic() - one.began
        print(f"{said} {seconds:5.0f} s  {one.mutant.file}: {one.mutant.what}", flush=True)
    print(f"{len(chosen) - wrong} of {len(chosen)} mutants noticed")
    return int(wrong > 0 or not chosen)


if __name__ == "__main__":
    sys.exit(main())
