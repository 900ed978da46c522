"""`pasa bench ring` in two processes on the CPU, as its README starts it on GPUs."""

import json
import os
import subprocess
import sys

import pytest

from pasa.eval.kit.stored import stored
from pasa.eval.speed.ring import run

LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def test_two_processes_measure_and_one_speaks(tmp_path):
    command = ["-m", "pasa.eval.cli", "bench", "ring", "--tokens", "517", "--rounds", "1"]
    wide = os.environ | {"COLUMNS": "200"}  # the table in one piece
    done = subprocess.run(
        [*LAUNCH, *command, "--output-dir", str(tmp_path)], capture_output=True, text=True, timeout=120, env=wide
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("517 tokens") == 1
    result = json.loads((tmp_path / "ring.json").read_text())
    assert [each["offset"] for each in result["records"]] == [0, 131072]
    assert result["settings"]["ranks"] == len(result["records"][0]["ring_peak_bytes"]) == 2
    assert result["gate"]["passed"]
    assert all(0 < each["ring_rmse"] < 2**-10 for each in result["records"])
    assert "ring of 2" in (tmp_path / "ring.md").read_text()


@pytest.mark.parametrize(
    ("field", "value", "passes"),
    [
        ("ring_rmse", 1.4e-4, True),
        ("ring_max_error", 3e-3, False),
        ("ring_rmse", 1.5e-4, False),
        ("not_finite", 1e-9, False),
    ],
)
def test_the_gate_fails_what_errs_more(field, value, passes):
    good = {"one_max_error": 1e-3, "ring_max_error": 2e-3, "one_rmse": 1e-4, "ring_rmse": 1.4e-4}
    assert run._passes(good | {"golden_max": 1.0, "not_finite": 0.0} | {field: value}) == passes


def test_the_table_shows_the_fullest_device():
    result = stored("ring")
    result["records"][0] |= {"one_peak_bytes": 2**31, "ring_peak_bytes": [2**29, 2**30]}
    assert [row[2] for row in run.table(result).rows[:2]] == ["2.00", "1.00"]
