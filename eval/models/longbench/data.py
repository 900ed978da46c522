"""Reads LongBench's JSON lines from a folder or the published zip, and names file and line of anything wrong.

Everything is read and checked before anything is computed.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from pasa.eval.models.longbench import metrics
from pasa.eval.models.longbench.tasks import SUFFIX, Task, find_task


@dataclass(frozen=True)
class Item:
    """One question."""

    index: int  # place in the file, from 0
    context: str
    input: str
    answers: list[str]  # references; the best one counts
    length: int  # in words or characters, as the data say
    all_classes: list[str] | None  # of a classification


def load_items(
    source: str, datasets: Sequence[str] | None = None, *, extended: bool = False, limit: int | None = None
) -> dict[str, list[Item]]:
    """Read and check data sets, the first `limit` items of each.

    `source` is a folder of ``<dataset>.jsonl``, or a zip that holds such files. `datasets` are names; by default all
    that the source has, those of LongBench-E if `extended`, else the others. What is missing is a FileNotFoundError. An
    unknown data set, and a broken line or field, with file and line, is a ValueError.
    """
    files = _open(source)
    if datasets is None:
        for name in files:
            _named(f"{source}: {name}.jsonl", find_task, name)
        datasets = [name for name in files if name.endswith(SUFFIX) == extended]
    items = {}
    for name in datasets:
        task = find_task(name)
        if name not in files:
            raise FileNotFoundError(f"{source} has no {name}.jsonl; it has {', '.join(files) or 'none'}")
        items[name] = list(_read(files[name](), f"{source}/{name}.jsonl", task))[:limit]
        if not items[name]:
            raise ValueError(f"{source}: no items in {name}.jsonl")
    if not items:
        names = f"*{SUFFIX}.jsonl" if extended else f"*.jsonl (*{SUFFIX}.jsonl with --e)"
        raise ValueError(f"{source}: no items; looked for {names}")
    return items


def digest(items: Sequence[Item]) -> str:
    """Return 16 digits of the items' SHA-256, which are equal for two runs on the same questions."""
    text = json.dumps([asdict(item) for item in items], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _open(source: str) -> dict[str, Callable[[], bytes]]:
    """Return a function for each data set that reads its file, in the order of their names."""
    path = Path(source)
    if path.is_dir():
        return {file.stem: file.read_bytes for file in sorted(path.glob("*.jsonl"))}
    if path.is_file() and zipfile.is_zipfile(path):
        archive = zipfile.ZipFile(path)
        names = [PurePosixPath(name) for name in sorted(archive.namelist()) if name.endswith(".jsonl")]
        return {name.stem: partial(archive.read, str(name)) for name in names if "__MACOSX" not in name.parts}
    raise FileNotFoundError(f"data {source!r} is neither a folder of JSON lines nor a zip of them")


def _named(place: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what the function returns; a ValueError gets the place before its message."""
    try:
        return function(*arguments)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _read(text: bytes, file: str, task: Task) -> Iterator[Item]:
    for number, line in enumerate(text.split(b"\n"), 1):
        if line.strip():
            yield _named(f"{file}, line {number}", _item, line, number - 1, task)


def _item(line: bytes, index: int, task: Task) -> Item:
    try:
        row = json.loads(line.decode("utf-8"))
    except (json.JSONDecodeError, RecursionError) as error:  # RecursionError: too many brackets
        raise ValueError(f"broken JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"a line must be an object, not {type(row).__name__}")
    fields = {name: _field(row, name, *form) for name, form in FIELDS.items()}
    json.dumps(fields, ensure_ascii=False).encode()  # refuses a surrogate without its other half
    item = Item(index, **fields)
    name = row.get("dataset", task.name)
    if find_task(str(name)) is not task:
        raise ValueError(f"dataset {name!r} in the file of {task.name}")
    if task.metric == "classification" and not item.all_classes:
        raise ValueError("all_classes is empty, and this is a classification")
    if task.metric.startswith("retrieval"):
        for answer in item.answers:
            metrics.METRICS[task.metric]("", answer, ())  # refuses a reference without a paragraph
    return item


def _strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "context": (lambda value: isinstance(value, str), "a string"),
    "input": (lambda value: isinstance(value, str), "a string"),
    "answers": (_strings, "a list of strings"),
    "length": (lambda value: type(value) is int and value >= 0, "a number from 0 on"),
    "all_classes": (lambda value: value is None or _strings(value), "a list of strings"),
}


def _field(row: dict[str, Any], name: str, fits: Callable[[Any], bool], form: str) -> Any:
    if name not in row:
        raise ValueError(f"field {name!r} is missing")
    if not fits(row[name]):
        raise ValueError(f"field {name!r} must be {form}, not {row[name]!r:.60}")
    return row[name]
