"""`pasa check-device --npu` with the mocks of CANN and torch_npu and the kernels on the CPU twin: its whole report."""

import json
import os
import subprocess
import sys
import zipfile

import pytest

from pasa.eval.check_device.npu import archive, probes_310p, run, running, stages
from pasa.eval.check_device.npu.probes import PROBES
from tests.ascend_c.twin_build import build_environment


@pytest.fixture(scope="module")
def checked(npu_library, tmp_path_factory):
    """Return exit status, output and archive of a quick run; the build goes on where that of the library ended."""
    folder = tmp_path_factory.mktemp("check")
    environment = build_environment(npu_library.parent) | {"FAKE_DEVIATION": "vendor_lse", "COLUMNS": "120"}
    command = [sys.executable, "-m", "pasa.eval.cli", "check-device", "--npu", "--quick", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--output-dir", "out"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done, folder / "out"


def test_the_whole_report_is_made_and_names_what_deviates(checked):
    """The device is the twin, but the vendor's log-sum-exp has another shape; there are no times of an NPU here."""
    done, folder = checked
    assert done.returncode == 1, done.stderr[-3000:]
    result = json.loads((folder / "npu.json").read_text())
    verdicts = {(each["stage"], each["name"]): each["verdict"] for each in result["records"]}
    assert set(result["gate"]["checks"]) == {"build", *stages.STAGES}
    assert verdicts["build", "build"] == verdicts["smoke", "load"] == stages.PASSED
    assert [name for stage, name in verdicts if stage == "probes"] == list(PROBES)
    expected = {"vendor's log-sum-exp": stages.DEVIATES, "chip": stages.HARMLESS}
    for name in PROBES:
        assert verdicts["probes", name] == expected.get(name, stages.PASSED), name
    assert sum(stage == "paper's cases" for stage, _ in verdicts) == 30
    assert {name for name, passed in result["gate"]["checks"].items() if not passed} == {"speed", "probes"}
    assert "the log-sum-exp has one number a row, in nats" in (folder / "npu.md").read_text()
    assert "Ran on an NPU" in done.stdout


def test_the_archive_holds_report_and_logs_without_names(checked):
    _, folder = checked
    with zipfile.ZipFile(folder / run.ARCHIVE) as file:
        texts = {name: file.read(name).decode() for name in file.namelist()}
    assert {"report.md", "report.json", "logs/build.log", "logs/probes.log"} <= texts.keys()
    assert json.loads(texts["report.json"])["records"]
    for name in archive.private_names():
        assert not [each for each, text in texts.items() if archive.without_names(text, {name: ""}) != text], name


def test_without_torch_npu_there_is_no_report(tmp_path):
    """Story: it told of deviations of a device that was not there, and asked for the report."""
    command = [sys.executable, "-m", "pasa.eval.cli", "check-device", "--npu", "--output-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("no NPU here: torch_npu is not installed (docs/ascend.md)")
    assert not list(tmp_path.iterdir())


def test_private_names_are_replaced_as_words():
    names = {"node7": "HOST", "/home/ada": "~", "ada": "USER"}
    text = "node7: /home/ada/x.py, adapter, ada@node7.lan, node77, /data/ada/"
    assert archive.without_names(text, names) == "HOST: ~/x.py, adapter, USER@HOST.lan, node77, /data/USER/"


# ---- failures


def test_a_build_that_fails_is_told_with_its_first_errors(tmp_path, monkeypatch):
    script = tmp_path / "build.sh"
    script.write_text(
        "echo 'a.h:1: warning: unused'\nfor i in 1 2 3 4 5 6; do echo \"a.h:$i: error: no $i\"; done\nexit 1\n"
    )
    monkeypatch.setattr(running.envs, "ascend_build_script", lambda: script)
    record = running.build(tmp_path, 60.0)
    assert record["verdict"] == stages.FAILED
    assert record["warnings"] == 1
    assert record["errors"] == [f"a.h:{i}: error: no {i}" for i in range(1, 6)]
    assert record["detail"].startswith("the process ended with status 1; a.h:1: error: no 1")


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """Return the records of a stage whose process runs a given program; argument 4 is the number of checks to skip."""

    def run_stage(program, limit_s=60.0):
        (tmp_path / "made_up_stage.py").write_text(program)
        monkeypatch.setattr(running, "STAGE", "made_up_stage")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        return running.run_stage("one", "cpu", True, tmp_path, limit_s)

    return run_stage


SURVIVING = """
import json, os, sys
for name in "abcd"[int(sys.argv[4]):]:
    print(json.dumps({"starts": name}), flush=True)
    if name in "bd":
        os.abort()
    print(json.dumps({"name": name, "verdict": "passed", "detail": ""}), flush=True)
"""


def test_a_check_that_kills_its_process_fails_and_the_next_ones_run(stage):
    records = stage(SURVIVING)
    assert [(each["name"], each["verdict"]) for each in records] == [
        ("a", "passed"), ("b", "FAILED"), ("c", "passed"), ("d", "FAILED")
    ]  # fmt: skip
    assert records[1]["detail"] == "the process ended with status -6"


def test_a_stage_that_does_not_start_or_does_not_end_is_told(stage):
    assert stage("import sys; sys.exit(3)") == [
        {"stage": "one", "name": "start", "verdict": "FAILED", "detail": "the process ended with status 3"}
    ]
    (record,) = stage("import json, time\nprint(json.dumps({'starts': 'a'}), flush=True)\ntime.sleep(60)", 2.0)
    assert (record["name"], record["verdict"]) == ("a", "FAILED")
    assert record["detail"].startswith("not done after ")


def test_without_a_library_other_stages_run_and_say_why(monkeypatch):
    """Nothing is built: the kernels' probes fail with the reason, and those of torch_npu go on."""
    why = "there is no library"
    monkeypatch.setattr(stages.npu_backend, "library_error", lambda: why)
    checks = stages.probe("cpu", True)
    with pytest.raises(NotImplementedError, match=why):
        checks["Fill"]()
    assert checks["alignment"]()["verdict"] in (stages.PASSED, stages.DEVIATES)
    assert stages.smoke("cpu", True)["load"]() == {"verdict": stages.FAILED, "detail": why}


def test_times_are_shown_beside_the_model(monkeypatch):
    case = stages.speed.cases(True)[0]
    record = {"stage": "speed", "name": case.name, "verdict": "passed", "detail": "", "ms": {"pasa": 0.2, "sdpa": 0.3}}
    result = {"records": [record | {"model_ms": stages.speed.predicted(case.name)}]}
    (table,) = run.times(result)
    assert list(table.header) == ["shape", "pasa", "sdpa", "pasa, modelled"]
    assert table.rows[0][:3] == [case.name, "0.200", "0.300"]
    assert " to " in table.rows[0][3]


def test_a_310p_gets_the_probes_and_the_calls_of_its_own_kernels(npu_310p, deviate):
    """Its times stand beside no model, because that is of an Atlas A2."""
    deviate("")
    assert list(stages.probe("cpu", True)) == list(probes_310p.PROBES)
    assert stages.probe("cpu", True)["UB to L1"]()["verdict"] == stages.PASSED
    assert [check()["verdict"] for check in stages.smoke("cpu", True).values()] == [stages.PASSED] * 2
    assert stages.speed.predicted(stages.speed.cases(True)[0].name) is None


def test_turns_time_what_runs_and_keep_what_does_not_apart():
    import torch

    def fails():
        raise RuntimeError("no kernel")

    times, failures = stages.speed.run_in_turns({"pasa": lambda: None, "other": fails}, torch.device("cpu"))
    assert list(times) == ["pasa"]
    assert len(times["pasa"]) == stages.speed.TURNS
    assert failures == {"other": "RuntimeError: no kernel"}
