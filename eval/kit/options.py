"""Options of the commands of `pasa`, and how a result is delivered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from pasa.eval.kit import output
from pasa.eval.kit.exits import STOPPED, stop
from pasa.patching.versions import check_transformers

TRANSFORMERS = (5, 0)  # the first version that commands which load models accept, as the extra `eval` of setup.py


def needs_models(command: str) -> None:
    """Raise ImportError for an older transformers, before a command fails in the middle of something."""
    with suppress(ModuleNotFoundError):  # of which the command itself says what to install
        check_transformers(f"pasa {command}", TRANSFORMERS)


def json_target(target: str | None) -> str | None:
    """Refuse a file that cannot be written before the run, not after it."""
    if target is not None and target != "-":
        if Path(target).is_dir():
            raise typer.BadParameter(f"{target!r} is a folder")
        output.check_target(Path(target), folder=False)
    return target


def folder_target(target: Path | None) -> Path | None:
    """Refuse a folder that cannot be written before the run, not after it."""
    if target is not None:
        output.check_target(target, folder=True)
    return target


Json = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", callback=json_target, help='Write the result as JSON; "-": stdout, alone.'),
]

Minutes = Annotated[float | None, "Begin no case after so many minutes; the same command goes on from --output-dir."]


def integer(text: str | int) -> int:
    """Parse an option; typer's own message leaves out the value."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not an integer") from None


def real(text: str | float) -> float:
    """Parse an option; typer's own message leaves out the value."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number") from None


def at_least(least: int, **values: int | None) -> None:
    """Raise ValueError that names a value below `least`; None is a default."""
    for name, value in values.items():
        if value is not None and value < least:
            raise ValueError(f"{name}={value} must be at least {least}")


def words(text: str | None) -> list[str] | None:
    """Split words between commas; None for None."""
    return None if text is None else [part.strip() for part in text.split(",")]


def integers(text: str) -> list[int]:
    """Parse integers between commas."""
    return [integer(part) for part in text.split(",")]


def stages(progress: output.Report, total: int) -> Callable[[str], None]:
    """Return a callback that takes the name of each stage before it begins."""
    done = count()
    return lambda line: progress(next(done), total, line)


@contextmanager
def stoppable(resume: str = "") -> Iterator[None]:
    """End a command that is stopped from the keyboard with one line: the complete files, and how to go on from them."""
    output.WRITTEN.clear()
    try:
        yield
    except KeyboardInterrupt:
        stop(_whole_files(), resume)
        raise typer.Exit(STOPPED) from None


def _whole_files() -> list[Path]:
    return [path for path in dict.fromkeys(output.WRITTEN) if path.exists()]  # scratch files have gone


class _Console(Console):
    """A console whose closed reader is no failed check: rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        """Let the command end as one whose reader has gone."""
        raise BrokenPipeError


def finish(
    result: dict[str, Any],
    json: str | None,
    folder: Path | None,
    render: Callable[[dict[str, Any], Console], None],
    save: Callable[[dict[str, Any], Path], object],
) -> NoReturn:
    """Show the result, write it where `--json` says and into the folder, and exit with 1 where the gate failed."""
    if json == "-":  # stdout is for the JSON alone
        try:
            print(output.to_json(result, ascii_only=True), end="", flush=True)
        except BrokenPipeError:
            raise BrokenPipeError from None  # without its number, of which typer makes the status 1
    elif json is not None:
        output.write_text(Path(json), output.to_json(result))
    if folder is not None:
        save(result, folder)
    if json != "-":  # last: a reader such as head may close stdout
        render(result, _Console())
    raise typer.Exit(0 if result.get("gate", {"passed": True})["passed"] else 1)
