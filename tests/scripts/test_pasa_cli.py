"""The console script: its settings before torch is loaded, and how it ends when it is stopped from the keyboard."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pasa_cli
import pytest
import typer
from rich.console import Console

from pasa.eval import cli
from pasa.eval.kit.options import finish


def test_threads_of_the_console_script_sleep_while_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: with spinning threads a call of the emulation took ten times as long on a busy machine."""
    seen: list[str | None] = []
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(cli, "main", lambda: seen.append(os.environ.get("OMP_WAIT_POLICY")))
    pasa_cli.main()
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    pasa_cli.main()
    assert seen == ["PASSIVE", "ACTIVE"]


def test_the_package_as_a_command_starts_again_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: `python -m pasa` had loaded torch, with threads that spin, before it could say that they should not."""
    started: list[tuple[list[str], str | None]] = []
    monkeypatch.setattr(os, "execv", lambda path, line: started.append((line, os.environ.get("OMP_WAIT_POLICY"))))
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-W", "ignore", "-m", "pasa", "doctor"])
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    pasa_cli.restart()
    assert started == []
    monkeypatch.delenv("OMP_WAIT_POLICY")
    pasa_cli.restart()
    pasa_cli.restart()
    assert started == [([sys.executable, "-W", "ignore", "-m", "pasa", "doctor"], "PASSIVE")]


def test_no_color_means_no_escape_even_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: rich left bold, dim and the moves of a bar in place, 24 lines of them in `pasa --help`."""
    for name in ("TERM", "COLUMNS", "LINES", "OMP_WAIT_POLICY", "TQDM_DISABLE"):
        monkeypatch.setenv(name, {"TERM": "xterm", "COLUMNS": "97"}.get(name, "25"))
    shown: list[str] = []

    def show() -> None:
        console = Console(file=io.StringIO(), force_terminal=True)
        console.print("[bold red]text[/]")
        shown.append(f"{console.file.getvalue()}{console.width}")  # type: ignore[attr-defined]

    monkeypatch.setattr(cli, "main", show)
    for value in ("", "1"):
        monkeypatch.setenv("NO_COLOR", value)
        pasa_cli.main()
    assert ("\x1b" in shown[0], shown[1]) == (True, "text\n97")


def test_a_name_that_is_no_text_is_shown_and_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Story: with an output of ASCII, or a folder whose name is no UTF-8, a result ended as "codec can't encode"."""
    result = {"model": "é\udcff"}
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr(cli, "main", lambda: None)
    pasa_cli.main()
    with pytest.raises(typer.Exit):
        finish(result, "-", None, lambda *_: None, lambda *_: None)
    with pytest.raises(typer.Exit):
        finish(result, str(tmp_path / "x.json"), None, lambda *_: print(result), lambda *_: None)
    text = shown.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert json.loads(text[: text.index("}") + 1]) == json.loads((tmp_path / "x.json").read_text()) == result


@pytest.mark.parametrize("place", ["pasa.eval.cli", "pasa.eval.commands", "pasa.eval.commands.app"])
def test_a_stop_from_the_keyboard_is_one_line_at_any_time(
    place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Story: Ctrl-C within the seconds in which torch loads showed a traceback of nineteen lines."""

    class Stops:
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt

    def stop(**options: Any) -> None:
        raise typer.Abort

    if place.endswith("app"):
        monkeypatch.setattr(place, stop)
    else:
        monkeypatch.setitem(sys.modules, place, Stops())  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "argv", ["pasa", "doctor"])
    with pytest.raises(SystemExit) as stopped:
        pasa_cli.main()
    assert (stopped.value.code, capsys.readouterr().err) == (130, "pasa: stopped; nothing was written\n")


@pytest.mark.parametrize("then", [lambda: None, lambda: int("half of numpy")])
def test_a_stop_that_a_module_catches_is_no_less_a_stop(
    then: Callable[[], object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Story: Ctrl-C while modules loaded was caught by one of them, and the command ran on; numpy could not load."""

    class Catches:
        def __getattr__(self, name: str) -> Any:
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            then()
            return lambda: pytest.fail("the command ran")

    monkeypatch.setitem(sys.modules, "pasa.eval.cli", Catches())  # type: ignore[arg-type]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as stopped:
            pasa_cli.main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert (stopped.value.code, capsys.readouterr().err) == (130, "pasa: stopped; nothing was written\n")


def test_a_stop_while_a_command_loads_its_library_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Story: transformers takes seconds to load, and Ctrl-C then ended `pasa demo` without a word."""

    def stop(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pasa.eval.kit.experiment.needs_models", stop)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["demo"])
    assert (stopped.value.code, capsys.readouterr().err) == (130, "pasa: stopped; nothing was written\n")


def test_a_stop_after_the_end_does_not_change_the_exit_status() -> None:
    """Story: Ctrl-C while Python unloaded torch ended a command that had passed with status -2."""
    code = "import atexit, os, signal; from pasa.eval.kit.exits import leave\n"
    code += "atexit.register(os.kill, os.getpid(), signal.SIGINT); leave(lambda: 1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
