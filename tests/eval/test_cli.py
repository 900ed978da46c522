"""The command line: what it prints, where, and with which exit status."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import pasa
from pasa.eval import cli
from pasa.eval.commands import app
from pasa.eval.kit.options import TRANSFORMERS, finish

RUNNER = CliRunner()
TINY = ["bench", "rmse", "--heads", "1", "--seq", "130"]


def run(*arguments: str) -> Any:
    return RUNNER.invoke(app, arguments)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must exit with 2 and one line on stderr; return the line, and stdout before it."""

    def refuse(*arguments: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            cli.main(arguments)
        shown = capsys.readouterr()
        assert (stopped.value.code, len(shown.err.splitlines())) == (2, 1)
        return shown.out + shown.err

    return refuse


def test_help_names_every_command_and_no_other() -> None:
    shown = run("--help").output
    places = [
        shown.index(f" {name} ")
        for name in ("doctor", "check-device", "demo", "predict", "diagnose", "to-fp16", "bench", "eval")
    ]
    assert places == sorted(places), "what a user needs first stands first"
    assert "longbench" not in shown


def test_the_version_and_the_package_as_a_command() -> None:
    assert run("--version").output == f"pasa {pasa.__version__}\n"
    done = subprocess.run([sys.executable, "-m", "pasa", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"pasa {pasa.__version__}\n"


def test_files_are_written_although_nobody_reads_what_is_shown(tmp_path: Path) -> None:
    """Story: `pasa ... --output-dir DIR | head` ended before the files were written."""

    def closed(result: Any, console: Any) -> None:
        raise BrokenPipeError

    result = {"value": 1}
    with pytest.raises(BrokenPipeError):
        finish(result, str(tmp_path / "x.json"), tmp_path, closed, lambda _, folder: (folder / "y").touch())
    assert json.loads((tmp_path / "x.json").read_text()) == result
    assert (tmp_path / "y").exists()


def test_beta_prints_table_3_as_the_paper_does() -> None:
    shown = run("bench", "beta").output
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
    result = json.loads(run("bench", "beta", "--json", "-").output)
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


@pytest.mark.parametrize(
    ("options", "made"),
    [
        ([], {"rmse.json", "rmse.md", "rmse_uniform.png", "rmse_hybrid.png"}),
        (["--resonance", "--seeds", "0"], {"resonance.json", "resonance.md"}),
        (["--large-bias", "--seeds", "0"], {"large_bias.json", "large_bias.md"}),
        (["--sides", "--seeds", "0,1"], {"sides.json", "sides.md"}),
    ],
)
def test_json_file_and_output_folder(tmp_path: Path, options: list[str], made: set[str]) -> None:
    done = run(*TINY, *options, "--json", str(tmp_path / "deep" / "x.json"), "--output-dir", str(tmp_path / "all"))
    assert not isinstance(done.exception, (ValueError, KeyError))
    result = json.loads((tmp_path / "deep" / "x.json").read_text())
    assert result["note"] == "emulated NPU arithmetic on CPU; not run on an NPU"
    assert {path.name for path in (tmp_path / "all").iterdir()} == made


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["bench", "rmse", "--heads", "0"], "heads=0"),
        (["bench", "rmse", "--heads", "many"], "many"),
        (["bench", "rmse", "--seeds", "0,x"], "'x'"),
        (["bench", "rmse", "--seeds", "-1"], "seeds=-1"),
        (["bench", "rmse", "--resonance", "--seq", "0"], "seq=0"),
        (["bench", "rmse", "--resonance", "--large-bias"], "--large-bias"),
        (["bench", "gradients", "--seed", "-1"], "seed=-1"),
        (["bench", "gradients", "--rounds", "0"], "rounds=0"),
        (["bench", "unbiased", "--rounds", "0"], "rounds=0"),
        (["bench", "unbiased"], "timing needs a CUDA device"),
        (["eval", "bias", "--rows", "1023"], "rows=1023"),
        (["eval", "bias", "--seed", "-1"], "seed=-1"),
        (["bench", "speed"], "CUDA"),
        (["bench", "speed", "--case", "nonsense"], "nonsense"),
        (["bench", "video"], "CUDA"),
        (["bench", "ring"], "torchrun"),
        (["bench", "rmse", "--json", "."], "'.' is a folder"),
        (["bench", "rmse", "--output-dir", __file__], "test_cli.py' is a file"),
        (["diagnose", "--offset", "nan"], "offset=nan"),
        (["check-device", "--device", "cuda:9"], "device='cuda:9' is not here: choose among cpu"),
        (["bench", "video", "--rounds", "0"], "rounds=0"),
        (["bench", "speed", "--rounds", "0"], "rounds=0"),
        (["bench", "speed", "--device", "tpu"], "device='tpu' has no clock"),
        (["bench", "speed", "--device", "cuda:1"], "device='cuda:1' has no clock"),
        (["bench", "speed", "--device", "npu:9"], "device='npu:9' is not here: choose among cpu"),
        (["bench", "watch", "--device", "cpu"], "device='cpu' has no clock"),
        (["bench", "beta", "--block", "0"], "0"),
        (["demo", "--new-tokens", "0"], "new_tokens=0"),
        (["eval", "video", "--model", "nowhere"], "'nowhere'"),
        (["eval", "video", "--height", "100"], "height=100"),
        (["eval", "video", "--dtype", "int8"], "'int8'"),
        (["eval", "longbench", "--precisions", "fp32,int4"], "'int4'"),
        (["eval", "longbench", "--data", "nowhere"], "'nowhere'"),
        (["eval", "longbench", "--model", "nowhere"], "'nowhere'"),
        (["eval", "longbench", "--data", ".", "--tokens", "500"], "tokens=[500] is of the offline set"),
        (["bench", "model"], "there is no accelerator here: try --config tiny"),
        (["bench", "watch"], "timing needs a CUDA device"),
        (["bench", "whole-model"], "timing needs a CUDA device"),
        (["bench", "whole-model", "--turns", "0"], "turns=0"),
        (["bench", "whole-model", "--subjects", "llama"], "'llama' is not one of gemma-3-4b"),
        (["eval", "whole-model", "--device", "cuda:9"], "device='cuda:9' is not here: choose among cpu"),
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
        (["predict", "--model", "/nowhere"], "'/nowhere' is not a folder"),
        (["demo", "--model", "Qwen/Qwen2-7B"], "hf download Qwen/Qwen2-7B --local-dir Qwen2-7B"),
        (["diagnose", "--model", "Qwen/Qwen2-7B"], "hf download Qwen/Qwen2-7B --local-dir Qwen2-7B"),
        (["eval", "video", "--model", "org/svd"], "hf download org/svd --local-dir svd"),
        (["predict", "--model", "/nowhere", "--delta", "2"], "delta=2.0 is not a probability between 0 and 1"),
        (["predict", "--model", ".", "--offset", "3"], "--offset is for the built-in models"),
        (["predict", "--paper-tables", "--model", "x"], "--model is no option of --paper-tables"),
        (["check-device", "--quick"], "--quick needs --npu: add it"),
        (["eval", "fuzz", "--cases", "0"], "cases=0"),
        (["bench", "soak", "--jobs", "0"], "jobs=0"),
        (["bench", "soak", "--only", "-1"], "only=-1"),
        (["bench", "soak", "--backend", "abacus"], "'abacus'"),
        (["bench", "soak", "--backend", "npu"], "backend npu cannot run here"),
        (["diagnose", "--frames", "two"], "two"),
        (["diagnose", "--model", "tiny", "--dtype", "int8"], "'int8'"),
        (["--bogus"], "--bogus"),
        (["bench", "rmse", "--seq", "9" * 12, "--heads", "1"], "not enough memory ("),
        (["predict", "--model", "Qwen/Qwen2-7B"], "hf download Qwen/Qwen2-7B --local-dir Qwen2-7B"),
        (["predict", "--model", "gpt2"], "hf download gpt2 --local-dir gpt2"),
        (["demo", "--model", "gpt2"], "hf download gpt2 --local-dir gpt2"),
        (["demo", "--offset", "many"], "'many' is not a number"),
        (["predict", "--delta", "x"], "'x' is not a number"),
        (["predict", "--model", __file__], "test_cli.py' is a file: pass the folder that holds config.json"),
        (["predict", "--model", ".", "--seq-len", "9" * 400], "... is not between 1 and 2147483647"),
        (["demo", "--prompt", "a\udcff", "--model", "nowhere"], "is not UTF-8 text (letter 1)"),
        (["bench", "beta", "--json", "x", "--output-dir", "x/y"], "--json 'x' is a file, and --output-dir 'x/y' needs"),
        (["diagnose", "--prompt", "a\udcff"], "is not UTF-8 text (letter 1)"),
        (["eval", "ppl", "--text", "/nowhere.txt"], "/nowhere.txt: No such file or directory"),
    ],
)
def test_bad_input_is_one_line_that_names_the_value(
    arguments: list[str], value: str, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = refused(*arguments)
    assert line.startswith("pasa: "), "nothing on stdout"
    assert value in line


@pytest.mark.parametrize("command", [["diagnose"], ["demo"], ["eval", "ppl"], ["eval", "longbench"]])
@pytest.mark.parametrize(("file", "fault"), [(None, "no config.json"), ("config.json", "has no tokenizer")])
def test_a_wrong_folder_is_refused_before_packages_are_asked_for(
    command: list[str],
    file: str | None,
    fault: str,
    refused: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Story: a user installed the essays that a missing prompt needs, and only then read that the folder was wrong."""
    monkeypatch.setattr("pasa.eval.kit.embedded_model.TEXTS", ("not-installed", "1"))
    monkeypatch.setattr("pasa.eval.models.longbench.prompts.SOURCE", ("not-installed", "1"))
    if file:
        (tmp_path / file).write_text("{}")
    assert fault in refused(*command, "--model", str(tmp_path))


def test_a_folder_in_the_place_of_a_file_is_refused_before_the_run(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: after a run of minutes, `os.replace` found that predict.json was a folder."""
    monkeypatch.setattr("pasa.eval.kit.experiment.Experiment.measure", lambda *_, **__: pytest.fail("the run started"))
    (tmp_path / "beta.md").mkdir()
    assert "beta.md': it is a folder; move it" in refused("bench", "beta", "--output-dir", str(tmp_path))


def test_a_full_disk_names_the_file(refused: Callable[..., str]) -> None:
    """Story: "[Errno 28] No space left on device" did not say where."""
    assert "/dev/full: No space left on device" in refused("bench", "beta", "--json", "/dev/full")


def test_a_variable_that_cannot_be_used_is_named(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: RANK=x ended with "invalid literal for int() with base 10"."""
    monkeypatch.setenv("RANK", "x")
    assert "the environment variable RANK='x' cannot be used" in refused("bench", "beta")


@pytest.mark.parametrize("option", [[], ["--json", "-"]])
def test_a_reader_that_has_gone_is_no_failed_check(option: list[str]) -> None:
    """Story: `pasa doctor | head -1` exited with 1, as if a check had failed."""
    command = [sys.executable, "-m", "pasa.eval.cli", "bench", "beta", *option]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 141)


def test_a_place_that_cannot_be_written_is_refused_before_the_run(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: a video of hours ended with "Not a directory" and no result."""
    monkeypatch.setattr("pasa.eval.kit.experiment.Experiment.measure", lambda *_, **__: pytest.fail("the run started"))
    for option in ("--json", "--output-dir"):
        assert "test_cli.py' is not a folder" in refused("demo", option, f"{__file__}/x")


def test_unwritable_json_is_one_line(refused: Callable[..., str]) -> None:
    refused("bench", "beta", "--json", f"{__file__}/x.json")


@pytest.mark.parametrize(
    ("package", "command", "extra"),
    [("diffusers", ["eval", "video"], "video"), ("transformers", ["demo"], "eval")],
)
def test_a_missing_package_names_its_extra(
    package: str, command: list[str], extra: str, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert refused(*command) == f"pasa: {package} is not installed; run, in the checkout: pip install '.[{extra}]'\n"


def test_diagnose_writes_what_it_says(tmp_path: Path) -> None:
    sizes = ["--model", "tiny", "--height", "32", "--width", "32", "--frames", "2", "--steps", "1"]
    done = run("diagnose", *sizes, "--json", "-", "--output-dir", str(tmp_path))
    assert done.exit_code == 0
    assert json.loads(done.stdout)["summary"]["modules_beyond"] == 4
    assert {path.name for path in tmp_path.iterdir()} == {f"diagnose.{kind}" for kind in ("html", "json", "md", "svg")}


def test_console_script_runs_as_a_process() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pasa.eval.cli", "bench", "beta", "--json", "-"], capture_output=True, check=True
    )
    assert json.loads(done.stdout)["format"] == "fp16"


BUILD_MODELS = "demo,diagnose,predict,eval video,eval longbench,eval ppl,eval fp8,eval zoo,bench model,bench video"


@pytest.mark.parametrize("command", [*BUILD_MODELS.split(","), "bench watch", "bench whole-model"])
def test_an_older_transformers_is_named_by_version(
    command: str, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    """Story: with 4.54.1, in which models can be patched, `pasa demo` died of "dtype is not JSON serializable"."""
    monkeypatch.setattr("transformers.__version__", "4.54.1")
    needs = "needs transformers 5.0 or newer, and 4.54.1 is installed: pip install 'transformers>=5.0'"
    assert refused(*command.split()) == f"pasa: pasa {command} {needs}\n"


def test_other_commands_do_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", "4.54.1")
    for arguments in (["bench", "beta", "--json", "-"], ["predict", "--paper-tables", "--json", "-"]):
        with pytest.raises(SystemExit) as stopped:
            cli.main(arguments)
        assert stopped.value.code == 0


def test_setup_asks_for_the_transformers_that_the_commands_need() -> None:
    text = (Path(cli.__file__).parents[1] / "setup.py").read_text("utf-8")
    assert f'EVAL = [*EVAL, "transformers>={".".join(map(str, TRANSFORMERS))}"]' in text
