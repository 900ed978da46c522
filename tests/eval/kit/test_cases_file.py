"""A file of cases: what is done stays done, whatever stops the run, and two runs do not mix."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pasa.eval.kit import cases_file
from pasa.eval.kit.cases_file import CasesFile
from pasa.eval.kit.output import silent

MACHINE = {"device": "H200", "commit": "abc", "threads": 2}
NAMES = ("a", "b", "c")


def fill(file: CasesFile, names: Any = NAMES, minutes: float | None = None, **options: Any) -> list[str]:
    """Measure cases; return which ones were measured now."""
    measured: list[str] = []

    def measure(name: str) -> dict[str, Any]:
        measured.append(name)
        return {"name": name}

    records = file.fill(names, measure, minutes, silent, **options)
    assert [each["name"] for each in records] == [name for name in names if name in file.records]
    return measured


def test_cases_that_are_there_are_not_measured_again(tmp_path: Path) -> None:
    assert fill(CasesFile(tmp_path, {"seed": 0}, MACHINE), ("a", "c")) == ["a", "c"]
    assert fill(CasesFile(tmp_path, {"seed": 0}, MACHINE)) == ["b"]
    assert fill(CasesFile(tmp_path, {"seed": 0}, MACHINE)) == []
    assert fill(CasesFile(None, {"seed": 0}, MACHINE)) == ["a", "b", "c"], "without a folder nothing is kept"


def test_no_case_begins_after_the_minutes_since_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock starts with the file, because checks come before the first case."""
    now = iter([0.0, 59.0, 59.9, 60.0])
    monkeypatch.setattr(cases_file.time, "monotonic", lambda: next(now))
    assert fill(CasesFile(None, {}, MACHINE), minutes=1.0) == ["a", "b"]


def test_a_case_after_which_the_check_fails_is_done(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        fill(CasesFile(tmp_path, {}, MACHINE), check=lambda: 1 // 0)
    assert fill(CasesFile(tmp_path, {}, MACHINE)) == ["b", "c"]


@pytest.mark.parametrize(
    ("settings", "machine", "message"),
    [
        ({"seed": 1}, MACHINE, "seed was 0 and is 1"),
        ({"seed": 0}, MACHINE | {"device": "H100"}, "device was 'H200' and is 'H100'"),
        ({"seed": 0}, MACHINE | {"commit": "abc-dirty"}, "commit was 'abc' and is 'abc-dirty'"),
    ],
)
def test_another_run_is_refused(tmp_path: Path, settings: Any, machine: Any, message: str) -> None:
    fill(CasesFile(tmp_path, {"seed": 0}, MACHINE))
    CasesFile(tmp_path, {"seed": 0}, MACHINE | {"threads": 8})
    with pytest.raises(ValueError, match=rf"holds another run \({message}\): choose another folder"):
        CasesFile(tmp_path, settings, machine)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "cases.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"cases\.json holds no JSON"):
        CasesFile(tmp_path, {}, MACHINE)


KILLED = """
import os, signal, sys
from pathlib import Path
from pasa.eval.kit.cases_file import CasesFile
from pasa.eval.kit.output import silent

def measure(name):
    if name == "c":
        os.kill(os.getpid(), signal.SIGKILL)
    return {"name": name}

CasesFile(Path(sys.argv[1]), {}, {"device": "H200"}).fill(("a", "b", "c"), measure, None, silent)
"""


def test_a_killed_process_loses_the_case_that_it_was_at(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(json.loads((tmp_path / "cases.json").read_text(encoding="utf-8"))["cases"]) == ["a", "b"]
    assert fill(CasesFile(tmp_path, {}, {"device": "H200"})) == ["c"]
