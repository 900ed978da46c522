"""The console script: what it prints, where, and with which exit status."""

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from pasa.eval import cli, doctor
from pasa.eval.commands import app
from pasa.eval.kit.options import TRANSFORMERS
from pasa.ops import envs
from pasa.ops.attention.ascend import backend as npu_backend

RUNNER = CliRunner()
TINY = ["bench", "rmse", "--heads", "1", "--seq", "130"]


def run(*arguments: str) -> Any:
    return RUNNER.invoke(app, arguments)


def test_help_names_every_command_and_no_other() -> None:
    shown = run("--help").output
    assert all(name in shown for name in ("doctor", "beta", "bench", "diagnose", "eval", "demo", "predict"))
    assert "longbench" not in shown


def test_beta_prints_table_3_as_the_paper_does() -> None:
    shown = run("beta").output
    table = shown[: shown.index("sqrt(64)")]
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in table.splitlines() if line[:1] == "│"]
    assert rows == [
        ["0.9", "9.000", "8.971", "0.32 %", "0.899708", "8.971"],
        ["1-2^-4", "15.00", "15.00", "0.00 %", "0.937500", "15.00"],
        ["1-2^-5", "31.00", "31.25", "0.81 %", "0.968994", "31.25"],
        ["1-2^-6", "63.00", "63.50", "0.79 %", "0.984497", "63.50"],
        ["0.99", "99.00", "102.2", "3.23 %", "0.990311", "102.2"],
        ["0.999", "999.0", "1031", "3.20 %", "0.999031", "1031"],
    ]


def test_beta_shows_the_matrix_in_use_for_three_head_dims() -> None:
    result = json.loads(run("beta", "--json", "-").output)
    assert [table["head_dim"] for table in result["tables"]] == [None, 64, 80, 128]
    plain, *_, folded = ([row["optimised"] for row in table["rows"]] for table in result["tables"])
    assert plain != folded, "1/sqrt(128) is no power of two: it moves the fixed point"


def test_doctor_reports_reasons_and_passes_its_own_check() -> None:
    result = run("doctor", "--json", "-")
    found = json.loads(result.output)
    assert result.exit_code == 0
    assert found["self_check"]["passed"]
    assert found["self_check"]["max_score_before"] > 65504
    assert {status["name"] for status in found["backends"]} >= {"reference", "triton", "npu"}
    assert all(status["reason"] for status in found["backends"])
    assert "PASA_CACHE_DIR" in found["variables"]


def test_doctor_shows_what_is_in_brackets() -> None:
    """Story: the table took "pip install '.[npu]'" for markup and showed "pip install '.'"."""
    found = doctor.run_doctor()
    found["backends"] = [{"name": "npu", "available": False, "reason": "try pip install '.[npu]'", "serves": []}]
    shown = StringIO()
    doctor.render(found, Console(file=shown, width=200))
    assert "pip install '.[npu]'" in shown.getvalue()


def test_doctor_says_whether_the_ascend_c_kernels_are_built() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PASA_ASCEND_LIBRARY", "/no/such/library.so")
        npu_backend.library_error.cache_clear()
        found = doctor.ascend_c()
    npu_backend.library_error.cache_clear()
    assert doctor.ascend_c_line(found) == (
        "cannot run: there is no /no/such/library.so: "
        f"build it with {envs.ascend_build_script()} where CANN is installed; "
        "an NPU here would be served by the reference, slowly"
    )
    assert doctor.ascend_c_line({"library": "/there.so", "why_not": None}) == "built: /there.so"


def test_json_to_stdout_is_alone_there() -> None:
    result = run(*TINY, "--json", "-")
    assert json.loads(result.stdout)["experiment"] == "rmse"


def test_json_file_and_output_folder(tmp_path: Path) -> None:
    run(*TINY, "--json", str(tmp_path / "deep" / "result.json"), "--output-dir", str(tmp_path / "all"))
    result = json.loads((tmp_path / "deep" / "result.json").read_text())
    assert result["note"] == "emulated NPU arithmetic on CPU; not run on an NPU"
    made = {path.name for path in (tmp_path / "all").iterdir()}
    assert made == {"rmse.json", "rmse.csv", "rmse.md", "rmse_uniform.png", "rmse_hybrid.png"}


@pytest.mark.parametrize(
    ("option", "stem", "figures"),
    [("--resonance", "resonance", 3), ("--large-bias", "large_bias", 0), ("--sides", "sides", 0)],
)
def test_other_experiments_are_stored_whole(tmp_path: Path, option: str, stem: str, figures: int) -> None:
    """Story: the CSV of --large-bias met a column that only the records of torch's own attention had."""
    result = run(*TINY, option, "--seeds", "0", "--output-dir", str(tmp_path))
    assert not isinstance(result.exception, (ValueError, KeyError))
    made = {path.name for path in tmp_path.iterdir()}
    assert {f"{stem}.json", f"{stem}.csv", f"{stem}.md"} <= made
    assert len([name for name in made if name.endswith(".png")]) == figures


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["bench", "rmse", "--heads", "0"], "heads=0"),
        (["bench", "rmse", "--heads", "many"], "many"),
        (["bench", "rmse", "--seeds", "0,x"], "'x'"),
        (["bench", "rmse", "--seeds", "-1"], "'-1'"),
        (["bench", "rmse", "--overflow", "wrap"], "'wrap'"),
        (["bench", "rmse", "--resonance", "--seq", "0"], "seq=0"),
        (["bench", "rmse", "--resonance", "--large-bias"], "--large-bias"),
        (["bench", "rmse", "--sides", "--overflow", "inf"], "--overflow"),
        (["bench", "speed"], "CUDA"),
        (["bench", "speed", "--case", "nonsense"], "nonsense"),
        (["bench", "video"], "CUDA"),
        (["bench", "ring"], "torchrun"),
        (["bench", "ring", "--heads", "28"], "'28'"),
        (["bench", "rmse", "--json", "."], "'.' is a folder"),
        (["bench", "rmse", "--output-dir", __file__], "test_cli.py' is a file"),
        (["diagnose", "--offset", "nan"], "offset=nan"),
        (["bench", "video", "--rounds", "0"], "rounds=0"),
        (["bench", "speed", "--rounds", "0"], "rounds=0"),
        (["bench", "speed", "--implementation", "foo"], "foo"),
        (["beta", "--block", "0"], "0"),
        (["demo", "--new-tokens", "0"], "new_tokens=0"),
        (["eval", "video", "--model", "nowhere"], "'nowhere'"),
        (["eval", "video", "--height", "100"], "height=100"),
        (["eval", "video", "--dtype", "int8"], "'int8'"),
        (["eval", "longbench", "--precisions", "fp32,int4"], "'int4'"),
        (["eval", "longbench", "--data", "nowhere"], "'nowhere'"),
        (["eval", "longbench", "--model", "nowhere"], "'nowhere'"),
        (["eval", "longbench", "--tokens", "1k"], "'1k'"),
        (["eval", "longbench", "--output-dir", __file__], "test_cli.py' is a file"),
        (["eval", "longbench", "--data", ".", "--tokens", "500"], "tokens=[500] is of the offline set"),
        (["bench", "model"], "there is no accelerator here: try --config tiny"),
        (["bench", "watch"], "try --small"),
        (["bench", "predict"], "try --small"),
        (["bench", "predict", "--turns", "0"], "turns=0"),
        (["bench", "watch", "--turns", "0"], "turns=0"),
        (["eval", "longbench", "--batch-size", "0"], "batch_size=0"),
        (["eval", "ppl", "--precisions", "fp32-base", "--offsets", "0"], "'fp32-base'"),
        (["eval", "ppl", "--stride", "0"], "stride=0"),
        (["eval", "ppl", "--model", "nowhere"], "'nowhere'"),
        (["diagnose", "--model", "nowhere"], "'nowhere'"),
        (["diagnose", "--model", "tiny", "--prompt", "x"], "prompt='x'"),
        (["diagnose", "--frames", "2"], "frames=2"),
        (["demo", "--offset", "nan"], "offset=nan"),
        (["demo", "--max-prompt-tokens", "0"], "max_prompt_tokens=0"),
        (["predict", "--prompt", "hi"], "prompt='hi'"),
        (["eval", "fuzz", "--replay", "0:3", "--seed", "0"], "replay='0:3'"),
        (["diagnose", "--frames", "two"], "two"),
        (["diagnose", "--model", "tiny", "--dtype", "int8"], "'int8'"),
        (["--bogus"], "--bogus"),
    ],
)
def test_bad_input_is_one_line_that_names_the_value(
    arguments: list[str], value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    shown = capsys.readouterr()
    assert stopped.value.code == 2
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert value in shown.err


def test_unwritable_json_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["beta", "--json", str(tmp_path / "file" / "x.json")])
    assert stopped.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_missing_extra_tells_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "pasa.eval.commands")
    monkeypatch.delattr("pasa.eval.commands", raising=False)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["beta"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "pasa: typer is not installed; run, in the checkout: pip install '.[eval]'\n"


def test_missing_extra_of_one_command_is_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["eval", "video"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "pasa: diffusers is not installed; run, in the checkout: pip install '.[video]'\n"


def test_eval_video_writes_what_it_says(tmp_path: Path) -> None:
    sizes = ["--height", "32", "--width", "32", "--frames", "2", "--steps", "1"]
    done = run("eval", "video", *sizes, "--json", str(tmp_path / "x.json"), "--output-dir", str(tmp_path / "all"))
    result = json.loads((tmp_path / "x.json").read_text())
    assert done.exit_code == (0 if result["gate"]["passed"] else 1)
    assert result["runs"]["fp16"]["nonfinite_frames"] == 2
    assert (tmp_path / "all" / "video.mp4").is_file()


@pytest.mark.parametrize("passed", [True, False])
def test_diagnose_writes_what_it_says(passed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a model that PASA breaks is exit status 1."""
    from pasa.eval.models.diagnose import run as module

    own = module.collect
    monkeypatch.setattr(module, "collect", lambda *parts: own(*parts) | {"gate": {"passed": passed}})
    sizes = ["--model", "tiny", "--height", "32", "--width", "32", "--frames", "2", "--steps", "1"]
    done = run("diagnose", *sizes, "--json", "-", "--output-dir", str(tmp_path))
    assert done.exit_code == int(not passed)
    assert json.loads(done.stdout)["summary"]["modules_beyond"] == 4
    assert {path.name for path in tmp_path.iterdir()} == {f"diagnose.{kind}" for kind in ("html", "json", "md", "png")}


def test_console_script_runs_as_a_process() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pasa.eval.cli", "beta", "--json", "-"], capture_output=True, check=True
    )
    assert json.loads(done.stdout)["format"] == "fp16"


def test_gate_failure_is_exit_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    from pasa.eval.accuracy.rmse import run as module

    failure = [{"case": "c", "seed": 0, "overflow": "inf", "why": "(a) nonfinite_share 1"}]
    monkeypatch.setattr(
        module, "verdict", lambda records, gated: {"arithmetic": "pasa-exact", "passed": False, "failures": failure}
    )
    result = run(*TINY)
    assert result.exit_code == 1
    assert "pasa-exact FAILS" in result.output
    assert "(a) nonfinite_share 1" in result.output


BUILD_MODELS = "demo,diagnose,predict,eval video,eval longbench,eval ppl,eval fp8,eval zoo,bench model,bench video"


@pytest.mark.parametrize("command", [*BUILD_MODELS.split(","), "bench watch"])
def test_an_older_transformers_is_told_by_version(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Story: with 4.54.1, in which models can be patched, `pasa demo` died of "dtype is not JSON serializable"."""
    monkeypatch.setattr("transformers.__version__", "4.54.1")
    with pytest.raises(SystemExit) as stopped:
        cli.main(command.split())
    assert stopped.value.code == 2
    needs = "needs transformers 5.0 or newer, and 4.54.1 is installed: pip install 'transformers>=5.0'"
    assert capsys.readouterr().err == f"pasa: pasa {command} {needs}\n"


def test_no_transformers_is_told_by_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["demo"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("pasa: transformers is not installed; run, in the checkout: pip install")


def test_other_commands_do_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", "4.54.1")
    for arguments in (["beta", "--json", "-"], ["predict", "--paper-tables", "--json", "-"]):
        with pytest.raises(SystemExit) as stopped:
            cli.main(arguments)
        assert stopped.value.code == 0


def test_setup_asks_for_the_transformers_that_the_commands_need() -> None:
    text = (Path(cli.__file__).parents[1] / "setup.py").read_text("utf-8")
    assert f'EVAL = [*EVAL, "transformers>={".".join(map(str, TRANSFORMERS))}"]' in text
