"""A declaration becomes a command: its options, its variants, its files and its exit status."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from pasa.eval.kit.device import origin
from pasa.eval.kit.exits import stop
from pasa.eval.kit.experiment import Experiment, add_command, verdict
from pasa.eval.kit.tables import Table


def run_main(
    rounds: Annotated[int, "Rounds to time."] = 5,
    seeds: Annotated[Sequence[int], "Seeds."] = (0,),
    names: Annotated[list[str] | None, "Names."] = None,
    quick: Annotated[bool, "Less."] = False,
    progress: Any = None,
) -> dict[str, Any]:
    """Measure it.

    More words.
    """
    progress(0, 1, "it")
    value = [rounds, list(seeds), names, quick]
    return {"gate": {"passed": rounds > 0, "failures": ["no round"]}, "value": value, "third": 1 / 3, "records": [{}]}


def run_other(rounds: Annotated[int, "Rounds."] = 7, progress: Any = None) -> dict[str, Any] | None:
    """Measure another."""
    return {"value": rounds} if rounds < 100 else None


def report(result: dict[str, Any]) -> list[Table | str]:
    return [Table("Title", ["a", "b"], [["[x]", str(result["value"])]], "note"), "said"]


MAIN = Experiment("main", run_main, report, "Title", variants=(Experiment("the-other", run_other, report, "Other"),))


def command(*arguments: str, experiment: Experiment = MAIN) -> Any:
    app, group = typer.Typer(), typer.Typer(name="bench")
    add_command(group, experiment)
    app.add_typer(group)
    app.command("second")(lambda: None)
    return CliRunner().invoke(app, ["bench", "main", *arguments], terminal_width=200)


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ([], [5, [0], None, False]),
        (["--rounds", "2", "--seeds", "3,4", "--names", "a, b", "--quick"], [2, [3, 4], ["a", "b"], True]),
        (["--the-other"], 7),
        (["--the-other", "--rounds", "5"], 5),
    ],
)
def test_options_are_the_parameters_of_what_runs(arguments: list[str], value: Any) -> None:
    """An option that is not set takes the default of the chosen variant, not that of the main experiment."""
    result = json.loads(command(*arguments, "--json", "-").stdout)
    assert result["value"] == value
    assert result["experiment"] == ("the-other" if "--the-other" in arguments else "main")
    assert {"environment", "duration_s"} <= set(result)


def test_defaults_are_those_of_the_parameters() -> None:
    plain = dataclasses.replace(MAIN, variants=())
    assert json.loads(command("--json", "-", experiment=plain).stdout)["value"] == [5, [0], None, False]
    assert "[default: 5]" in command("--help", experiment=plain).output


def test_what_is_wrong_is_refused_by_name() -> None:
    assert str(command("--the-other", "--seeds", "1").exception) == "--seeds is no option of --the-other"
    assert "'x' is not an integer" in command("--rounds", "x").output


def test_help_is_the_first_line_of_each_docstring() -> None:
    shown = command("--help").output
    assert all(part in shown for part in ("Measure it.", "--the-other", "Measure another.", "Rounds to time."))
    assert "More words" not in shown


def test_files_and_exit_status(tmp_path: Any) -> None:
    """Markdown shows the numbers of the stored JSON, and a table with the title of the page gets no second heading."""
    assert command("--rounds", "0", "--output-dir", str(tmp_path)).exit_code == 1
    assert command("--the-other", "--output-dir", str(tmp_path)).exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{name}.{suffix}" for name in ("main", "the_other") for suffix in ("json", "md")
    }
    table = "| a | b |\n| --- | ---: |\n| [x] | 7 |\n\nnote\n\nsaid\n"
    assert (tmp_path / "the_other.md").read_text() == f"# Other\n\n## Title\n\n{table}"
    assert (tmp_path / "main.md").read_text().startswith("# Title\n\n| a | b |")


def test_a_process_without_a_result_shows_and_writes_nothing(tmp_path: Any) -> None:
    done = command("--the-other", "--rounds", "100", "--output-dir", str(tmp_path))
    assert (done.exit_code, done.stdout, list(tmp_path.iterdir())) == (0, "", [])


def test_brackets_are_shown() -> None:
    """Story: the terminal took "pip install '.[npu]'" for markup, and showed "pip install '.'"."""
    assert "[x]" in command().output


def test_verdict_and_origin() -> None:
    failed = {"gate": {"passed": False, "failures": ["a: 3", "b: 4"]}}
    assert verdict(failed, "All hold.", "FAILED") == "FAILED:\n  a: 3\n  b: 4"
    assert verdict({"gate": {"passed": True}}, "All hold.", "FAILED") == "All hold."
    machine = {"processor": "CPU, 2 cores", "torch": "2", "pasa": "0.1", "commit": None, "triton": None}
    result = {"note": "emulated", "environment": machine}
    assert origin(result) == "Emulated (CPU, 2 cores; torch 2, pasa 0.1, commit unknown)."
    on_gpu = machine | {"device": "H200", "power_limit_w": "700", "driver": "580", "triton": "3", "commit": "abc"}
    said = origin({"environment": on_gpu})
    assert said == "(H200, 700 W, driver 580, CPU, 2 cores; torch 2, triton 3, pasa 0.1, commit abc)."


def test_a_table_of_records_shows_fields_formats_and_what_functions_make():
    records = [{"name": "a", "ms": 1.234, "share": 0.5}, {"name": "b", "ms": None}]
    columns = {"case": "name", "ms": ("ms", ".2f"), "half": lambda each: f"{each.get('share', 0) * 2:g}"}
    table = Table.of("T", records, columns, "note")
    assert table.markdown().splitlines()[2:] == ["| a | 1.23 | 1 |", "| b | - | 0 |"]
    assert list(table.header) == ["case", "ms", "half"]


STORED = ["out/main.json", "out/main.md", "out/a.png"]


@pytest.mark.parametrize(("drawn", "written"), [(0, STORED[:2]), (1, STORED), (None, [])])
@pytest.mark.parametrize("resume", ["", "start again to go on"])
def test_a_command_that_is_stopped_names_its_complete_files(tmp_path, monkeypatch, drawn, written, resume):
    """Story: Ctrl-C left half of a picture behind, and the line on stderr named no file."""

    def stop(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    def draw(result: dict[str, Any], folder: Path) -> list[Path]:
        (folder / "a.png").write_text("half")
        return [folder / "a.png"] if drawn else stop()

    monkeypatch.chdir(tmp_path)
    if drawn is None:
        monkeypatch.setattr(Experiment, "measure", stop)
    monkeypatch.setattr(Experiment, "show", stop)
    done = command("--output-dir", "out", experiment=dataclasses.replace(MAIN, figures=draw, resume=resume))
    kept = f"complete: {', '.join(written)}{f'; {resume}' if resume else ''}" if written else "nothing was written"
    assert (done.exit_code, done.stderr) == (130, f"pasa: stopped; {kept}\n")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")) == sorted(written)


def test_many_complete_files_are_counted(capsys):
    assert stop([Path(name) for name in "abcde"]) == 130
    assert capsys.readouterr().err == "pasa: stopped; complete: a, b, c and 2 more\n"
