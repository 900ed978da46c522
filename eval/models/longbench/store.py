"""Keeps what a run leaves on disk, so that a run that was killed goes on where it stopped.

    settings.json                            what every part was made with
    .lock.<n>                                held by process n while it runs
    parts/<precision>/<dataset>.<n>.jsonl    a line per item as it is answered, by process n; with times
    predictions/<precision>/<dataset>.jsonl  the finished data set in LongBench's own form, in the order of the data

A line counts if it is whole: a killed process leaves at most one that is not, the last, which is cut off before
anything is appended. Items are answered in batches, which are formed from the data alone. An incomplete batch is
answered again as a whole, so that the padding, and with it every rounding, is that of a run that was never stopped.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Line = dict[str, Any]
PUBLISHED = ("pred", "answers", "all_classes", "length")
"""Fields of a prediction that the published scorer reads."""
GROWS = "data"
"""The group of settings to which names may be added; in all others they must be the same."""


class Store:
    """The folder of one run.

    `settings` (groups of names and JSON-able values) must be the same for a run to go on, except that names may be
    added to the group `GROWS`. Others are refused with a ValueError that names every difference.
    """

    def __init__(self, folder: Path, settings: dict[str, dict[str, Any]]) -> None:
        self.folder = folder
        file = folder / "settings.json"
        settings = json.loads(json.dumps(settings))
        if file.is_file():
            stored = json.loads(file.read_text(encoding="utf-8"))
            if changes := list(_changes(stored, settings)):
                raise ValueError(
                    f"{folder} holds a run with other settings ({'; '.join(changes)}): choose another folder"
                )
            settings[GROWS] = {**stored[GROWS], **settings[GROWS]}
        folder.mkdir(parents=True, exist_ok=True)
        _replace(file, json.dumps(settings, indent=1, ensure_ascii=False) + "\n")

    def lines(self, precision: str, dataset: str) -> dict[int, Line]:
        """Return the whole lines of all processes, by index; the first one of each counts.

        A broken line that is not the last of its file is a ValueError with file and line, and nothing is changed.
        """
        lines: dict[int, Line] = {}
        for part in sorted((self.folder / "parts" / precision).glob(f"{dataset}.*.jsonl")):
            rows = part.read_bytes().split(b"\n")
            for number, row in enumerate(rows[:-1], 1):  # after the last line break there is nothing, or a torn line
                try:
                    line = json.loads(row)
                except ValueError as error:
                    place = f"{part}, line {number}"
                    raise ValueError(f"{place}: broken ({error}); delete the line to have it made again") from error
                lines.setdefault(line["index"], line)
        return lines

    def append(self, precision: str, dataset: str, process: int, lines: Sequence[Line]) -> None:
        """Add lines to the file of a process; they are on disk when this returns."""
        part = self.folder / "parts" / precision / f"{dataset}.{process}.jsonl"
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab+") as stream:
            stream.seek(0)
            stream.truncate(stream.read().rfind(b"\n") + 1)  # cuts off a torn line
            stream.write(_rows(lines).encode())
            stream.flush()
            os.fsync(stream.fileno())

    def finish(self, precision: str, dataset: str, lines: Sequence[Line]) -> Path:
        """Write the predictions of a data set that is complete, whole or not at all."""
        file = self.folder / "predictions" / precision / f"{dataset}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        _replace(file, _rows([{name: line[name] for name in (*PUBLISHED, "index", "broken")} for line in lines]))
        return file


@contextmanager
def exclusive(folder: Path, process: int) -> Iterator[None]:
    """Make the folder, and lock it; ValueError where another run is at work."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".lock.{process}").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run is at work in {folder}: wait for it, or choose another folder") from None
        yield


def _changes(stored: dict[str, Any], settings: dict[str, Any]) -> Iterator[str]:
    for key, group in settings.items():
        old = stored.get(key, {})
        names = old.keys() & group.keys() if key == GROWS else old.keys() | group.keys()
        for name in sorted(names):
            if old.get(name) != group.get(name):
                yield f"{key}.{name} was {old.get(name)!r} and is {group.get(name)!r}"


def _rows(lines: Sequence[Line]) -> str:
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _replace(file: Path, text: str) -> None:
    """Write beside the file and rename, so that a reader sees the old one or the new one."""
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, file)
