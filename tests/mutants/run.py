"""Plant each mutant in a copy of the sources and run the tests that are to notice it.

`python -m tests.mutants.run` runs all, `--sample` some of every kind, `--only TEXT` those whose
words hold the text. Two processes. A mutant that its tests do not notice survives; then the command
prints it and fails. Tests that cannot run, that hang, or that pass nowhere prove nothing, and fail
likewise. That they pass without the mutant is what the suite says.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.host import HOST
from tests.mutants.kernels import KERNELS
from tests.mutants.mutant import ROOT, Mutant
from tests.mutants.paged import PAGED

ALL = [*KERNELS, *PAGED, *HOST]
SAMPLE = 13  # every 13th
PROCESSES = 2
LIMIT = 240  # seconds for the tests of one mutant, ten times what they take
FOLDERS = ("pasa", "ops", "eval", "tests")
FAILED = 1  # pytest's exit status where a test failed; others say that tests were not found, or could not be read


def copy_tree(folder: Path) -> None:
    """Copy the sources, so laid out that `pasa.ops` is found below the folder and nowhere else."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in ("ops", "eval"):
        (folder / "pasa" / name).symlink_to(folder / name)
    for name in ("ascend_c", "pyproject.toml", "README.md"):
        (folder / name).symlink_to(ROOT / name)


def run(mutant: Mutant) -> str | None:
    """Return what is wrong: None if a test fails with the mutant."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_tree(folder)
        mutant.apply(folder)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=line", *mutant.tests]
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
            )
        except subprocess.TimeoutExpired:
            return f"its tests took more than {LIMIT} s"
    if done.returncode == FAILED:
        return None
    if done.returncode == 0:
        return "SURVIVED"
    return (
        f"its tests could not run (pytest's exit status {done.returncode}): {done.stdout[-1000:]}{done.stderr[-1000:]}"
    )


def judged(mutant: Mutant) -> tuple[Mutant, str | None, float]:
    """Run a mutant and time it."""
    began = time.monotonic()
    return mutant, run(mutant), time.monotonic() - began


def main() -> int:
    """Run the mutants that the command line names; return 1 if one is not noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", action="store_true", help=f"every {SAMPLE}th")
    parser.add_argument("--only", default="", help="those whose words or file hold this text")
    given = parser.parse_args()
    chosen = [m for m in ALL[:: SAMPLE if given.sample else 1] if given.only in m.what or given.only in m.file]
    wrong = 0
    with ThreadPoolExecutor(PROCESSES) as pool:
        for mutant, found, seconds in pool.map(judged, chosen):
            wrong += found is not None
            print(
                f"{'noticed' if found is None else found:10} {seconds:5.0f} s  {mutant.file}: {mutant.what}", flush=True
            )
    print(f"{len(chosen) - wrong} of {len(chosen)} mutants noticed")
    return int(wrong > 0 or not chosen)


if __name__ == "__main__":
    sys.exit(main())
