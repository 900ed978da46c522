"""The output of every command: the machine's description, JSON, files, and progress on stderr."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from pasa.ops import envs

NOTE = "emulated NPU arithmetic on CPU; not run on an NPU"
SECONDS_BETWEEN_LINES = 60  # of progress, where there is no terminal: a run of a day fills no log
Report: TypeAlias = Callable[[int, int, str], None]  # progress: done, total, what comes next
WRITTEN: list[Path] = []  # complete files of the command that runs, for the message of one that is stopped
MESSAGE_LETTERS = 300  # of an error's message in a result; some messages quote a whole program
RECORD_DIGITS = 4  # significant digits in a table of records: errors are not known better from one seed to the next


def error_line(error: BaseException) -> str:
    """Return the class and the message of an error in one line."""
    text = " ".join(str(error).split())[:MESSAGE_LETTERS]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def silent(done: int, total: int, label: str) -> None:
    """Report no progress."""


def environment() -> dict[str, Any]:
    """Return processor, threads, versions, and the commit when this is a checkout."""
    import torch

    import pasa

    return {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pasa": pasa.__version__,
        "commit": commit(),
    }


def processor() -> str:
    """Return the processor's name; Linux gives platform.processor() nothing, and /proc/cpuinfo all."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {os.cpu_count()} cores"
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """Return the commit of the checkout that holds this file, with "-dirty" if it differs; None outside of one."""
    here = Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def jsonable(value: Any, digits: int = 17) -> Any:
    """Return plain containers: NaN and infinity, which JSON lacks, become None; numbers are rounded to the digits."""
    if isinstance(value, dict):
        return {str(key): jsonable(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item, digits) for item in value]
    if isinstance(value, float):
        rounded = float(f"{value:.{digits}g}")
        return (int(rounded) if rounded.is_integer() else rounded) if math.isfinite(value) else None
    return value


def to_json(result: dict[str, Any], *, ascii_only: bool = False) -> str:
    """Return JSON text with one line per record, so that stored results can be read and compared.

    With `ascii_only`, escapes stand for all other letters, so that a terminal of any encoding can show the text.
    """
    lines = []
    for key, value in jsonable(result).items():
        if key == "records":
            records = jsonable(value, RECORD_DIGITS)
            rows = ",\n  ".join(json.dumps(row, ensure_ascii=ascii_only, separators=(",", ":")) for row in records)
            lines.append(f' "{key}": [\n  {rows}\n ]')
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=ascii_only)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_json(path: Path) -> Any:
    """Return what a JSON file holds; a ValueError names a file that cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} holds no JSON ({error}): delete it, or name another file or folder") from error


def read_text(path: Path) -> str:
    """Return a file as text; a ValueError names a file that is no UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}): convert it, or name another file") from error


def write_text(path: Path, text: str) -> None:
    """Write a file, making its folder. A reader sees the whole text or nothing, whenever the process is stopped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # a device or a pipe cannot be replaced
        _write(path, text, path)
        return
    with tempfile.TemporaryDirectory(prefix=".pasa-", dir=path.resolve().parent) as scratch:
        whole = Path(scratch, path.name)
        _write(whole, text, path)
        move_file(whole, path)


def _write(place: Path, text: str, path: Path) -> None:
    """Write text at a place; the error of a full disk names `path`, as the system's names no file."""
    try:
        place.write_text(text, encoding="utf-8", errors="backslashreplace")  # a prompt or path may be no UTF-8
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def move_file(source: Path, path: Path) -> None:
    """Put a complete file at its place, in one step, and list it in `WRITTEN`."""
    os.replace(source, path.resolve())
    WRITTEN.append(path)


def check_target(path: Path, *, folder: bool) -> None:
    """Raise OSError if no file can be written at a path, or into it if it is a folder; create nothing."""
    place = path if folder else path.parent
    while not (place.exists() or place.is_symlink()):
        place = place.parent
    if not place.is_dir():
        raise NotADirectoryError(f"cannot write {str(path)!r}: {str(place)!r} is not a folder; name another place")
    if not os.access(place, os.W_OK | os.X_OK) or (path.exists() and not os.access(path, os.W_OK)):
        denied = path if path.exists() else place
        raise PermissionError(f"cannot write {str(path)!r}: no permission to write {str(denied)!r}; name another place")


@contextmanager
def progress_bar(title: str) -> Iterator[Report]:
    """Show a progress bar on stderr, as a callback; where that is no terminal, a plain line a minute.

    Of several processes the first alone shows it.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        title,
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        "{task.fields[label]}",
    )
    console, shown = Console(stderr=True), time.monotonic()
    first, has_bar = envs.read("RANK") == 0, console.is_terminal and not console.is_dumb_terminal
    with Progress(*columns, console=console, transient=True, disable=not (first and has_bar)) as bar:
        task = bar.add_task(title, label="", total=None)

        def report(done: int, total: int, label: str) -> None:
            nonlocal shown
            bar.update(task, completed=done, total=total, label=label)
            if first and not has_bar and time.monotonic() - shown >= SECONDS_BETWEEN_LINES:
                shown = time.monotonic()
                print(f"{title}: {done}/{total} {label}", file=sys.stderr, flush=True)

        yield report
