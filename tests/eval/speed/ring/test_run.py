"""`pasa bench ring` in two processes on the CPU, as its README starts it on GPUs."""

import json
import os
import subprocess
import sys

import pytest

from pasa.eval.speed.ring import run

LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def test_two_processes_measure_and_one_speaks(tmp_path):
    command = ["-m", "pasa.eval.cli", "bench", "ring", "--tokens", "517", "--heads", "4,2", "--rounds", "1"]
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


def test_the_gate_fails_what_errs_more():
    good = {"one_max_error": 1e-3, "ring_max_error": 2e-3, "one_rmse": 1e-4, "ring_rmse": 1.4e-4}
    good |= {"golden_max": 1.0, "not_finite": 0.0}
    assert run._passes(good)
    for name, value in (("ring_max_error", 3e-3), ("ring_rmse", 1.5e-4), ("not_finite", 1e-9)):
        assert not run._passes(good | {name: value})


def test_one_process_alone_is_told_how_to_start():
    with pytest.raises(ValueError, match="start it with: torchrun"):
        run.run_ring(64)
    with pytest.raises(ValueError, match="--heads '28' --rounds 5"):
        run.run_ring(heads="28")


def test_the_table_shows_the_fullest_device():
    record = {"offset": 0.0, "passed": True, "one_s": 1.0, "ring_s": 0.5, "one_peak_bytes": 2**31}
    record |= {"ring_peak_bytes": [2**29, 2**30]}
    record |= {f"{a}_{b}": 1e-4 for a in ("one", "ring") for b in ("rmse", "max_error")}
    found = run.table(
        {
            "settings": {"tokens": 1024, "heads": [28, 4], "dim": 128, "rounds": 5, "ranks": 2},
            "records": [record],
            "gate": {"passed": True},
            "environment": {"device": "none", "torch": "2", "commit": None},
            "note": "",
        }
    )
    assert [row[2] for row in found.rows] == ["2.00", "1.00"]
