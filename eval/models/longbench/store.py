"""What a run leaves on disk, so that one that was killed goes on where it stopped.

    settings.json                        what every part was made with
    offline/                             the questions, where they were made here
    .lock.<n>                              held by process n while it runs
    parts/<precision>/<dataset>.<n>.jsonl  a line per item as it is answered, by process n; with times
    predictions/<precision>/<dataset>.jsonl  the finished data set in LongBench's own form, in the order of the data

A line counts if it is whole: a killed process leaves at most one that is not, the last, and that is cut off before
anything is appended. Items are answered in batches, which are formed from the data alone, and a batch that is not
complete is answered again as a whole, so that the padding, and with it every rounding, is that of a run that was never
stopped.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SETTINGS, OFFLINE = "settings.json", "offline"
Line = dict[str, Any]
PUBLISHED = ("pred", "answers", "all_classes", "length")
"""Fields of a prediction that the published scorer reads."""
GROWS = "data"
"""The group of settings to which names may be added; in all others they must be the same."""
SOURCE = "source"
"""The group that says what the questions were made from: told where they differ, and otherwise free."""


def refuse_foreign(folder: Path) -> None:
    """Refuse to write questions over files that no run has put there.

    Raises
    ------
    ValueError
    """
    if (folder / OFFLINE).exists() and not (folder / SETTINGS).is_file():
        raise ValueError(f"{folder / OFFLINE} is not of a run, since {folder} has no {SETTINGS}: choose another folder")


class Store:
    """The folder of one run.

    Parameters
    ----------
    folder : Path
    settings : dict
        Two levels, JSON-able: what must be the same for a run to go on. Data sets may be added to the group `GROWS`.

    Raises
    ------
    ValueError
        The folder holds a run with other settings; every difference is named.
    """

    def __init__(self, folder: Path, settings: dict[str, dict[str, Any]]) -> None:
        self.folder = folder
        file = folder / SETTINGS
        settings = json.loads(json.dumps(settings))
        if file.is_file():
            stored = json.loads(file.read_text(encoding="utf-8"))
            _refuse_changes(stored, settings, folder)
            settings = {key: {**stored.get(key, {}), **value} for key, value in settings.items()}
        folder.mkdir(parents=True, exist_ok=True)
        _replace(file, json.dumps(settings, indent=1, ensure_ascii=False) + "\n")

    def lines(self, precision: str, dataset: str) -> dict[int, Line]:
        """Whole lines of all processes, by index; the first one of each counts.

        Raises
        ------
        ValueError
            A line other than the last of a file is broken, with file and line; nothing is changed.
        """
        found: dict[int, Line] = {}
        for part in sorted((self.folder / "parts" / precision).glob(f"{dataset}.*.jsonl")):
            for line in _read(part):
                found.setdefault(line["index"], line)
        return found

    def append(self, precision: str, dataset: str, process: int, lines: Sequence[Line]) -> None:
        """Add lines to the file of a process; they are on disk when this returns."""
        part = self.folder / "parts" / precision / f"{dataset}.{process}.jsonl"
        part.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(part)
        with part.open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            stream.flush()
            os.fsync(stream.fileno())

    def finish(self, precision: str, dataset: str, lines: dict[int, Line]) -> Path:
        """Write the predictions of a data set that is complete, whole or not at all."""
        file = self.folder / "predictions" / precision / f"{dataset}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        rows = ({name: lines[index][name] for name in (*PUBLISHED, "index", "broken")} for index in sorted(lines))
        _replace(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return file


@contextmanager
def exclusive(folder: Path, process: int) -> Iterator[Path]:
    """Make the folder, and keep it from a second run for as long as this one lives.

    Raises
    ------
    ValueError
        Another run is at work there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".lock.{process}").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run is at work in {folder}: wait for it, or choose another folder") from None
        yield folder


def batches(count: int, size: int) -> list[range]:
    """Indices 0..count-1 in the batches that are answered together."""
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def _refuse_changes(stored: dict[str, Any], settings: dict[str, Any], folder: Path) -> None:
    changes = {}
    for key, group in settings.items():
        old = stored.get(key, {})
        names = [name for name in group if name in old] if key == GROWS else {**old, **group}
        changes[key] = [
            f"{key}.{name} was {old.get(name)!r} and is {group.get(name)!r}"
            for name in names
            if old.get(name) != group.get(name)
        ]
    source = changes.pop(SOURCE, [])
    if changes.get(GROWS):
        changes[GROWS] = source or changes[GROWS]
    found = "; ".join(change for group in changes.values() for change in group)
    if found:
        raise ValueError(f"{folder} holds a run with other settings ({found}): choose another folder")


def _read(part: Path) -> Iterator[Line]:
    rows = part.read_bytes().split(b"\n")
    for number, row in enumerate(rows[:-1], 1):  # behind the last line break there is nothing, or a torn line
        try:
            line: Line = json.loads(row)
        except ValueError as error:
            raise ValueError(
                f"{part}, line {number}: broken ({error}); delete the line to have it made again"
            ) from error
        yield line


def _cut_torn_line(part: Path) -> None:
    if part.is_file():
        whole = part.read_bytes()
        kept = whole.rfind(b"\n") + 1
        if kept != len(whole):
            os.truncate(part, kept)


def _replace(file: Path, text: str) -> None:
    """Write beside the file and rename: a reader sees the old one or the new one."""
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, file)
