"""Read LongBench's JSON lines from a folder; an error names the file and the line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pasa.eval.models.longbench.tasks import SUFFIX, Task, find_task

FIELDS = {"context": str, "input": str, "answers": list, "length": int, "all_classes": list | None}


@dataclass(frozen=True)
class Item:
    """One question with its references, of which the best one counts; only a classification has classes."""

    context: str
    input: str
    answers: list[str]
    length: int  # in words or characters, as the data say
    all_classes: list[str] | None


def load_items(source: str, datasets: Sequence[str] | None = None) -> dict[str, list[Item]]:
    """Read and check data sets from a folder of ``<dataset>.jsonl``.

    `datasets` are names; by default all of LongBench that the folder has, without those of LongBench-E.
    """
    files = {file.stem: file for file in sorted(Path(source).glob("*.jsonl"))}
    items = {}
    for name in [name for name in files if not name.endswith(SUFFIX)] if datasets is None else datasets:
        task = find_task(name)
        if name not in files:
            raise FileNotFoundError(f"{source} has no {name}.jsonl; it has {', '.join(files) or 'none'}")
        lines = enumerate(files[name].read_bytes().split(b"\n"), 1)
        items[name] = [_item(line, f"{files[name]}, line {number}", task) for number, line in lines if line.strip()]
    if not items or not all(items.values()):
        raise ValueError(f"data {source!r} is no folder of JSON lines, or one of its data sets is empty")
    return items


def digest(items: Sequence[Item]) -> str:
    """Return 16 digits of the items' SHA-256, which are equal for two runs on the same questions."""
    text = json.dumps([{"index": index, **asdict(item)} for index, item in enumerate(items)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _item(line: bytes, place: str, task: Task) -> Item:
    """Return the item of a line; every error is a ValueError that begins with the place."""
    try:
        row = json.loads(line.decode("utf-8"))
        _check(row, task)
    except (ValueError, RecursionError) as error:  # RecursionError: too many brackets
        raise ValueError(f"{place}: {error}") from error
    return Item(**{name: row[name] for name in FIELDS})


def _check(row: Any, task: Task) -> None:
    """Check all that is used of a line before hours of work: fields, their types, and the data set."""
    if not isinstance(row, dict):
        raise ValueError(f"a line must be an object, not {type(row).__name__}")
    for name, kind in FIELDS.items():
        if name not in row or not isinstance(row[name], kind):
            raise ValueError(
                f"field {name!r} must be {getattr(kind, '__name__', kind)}, not {row.get(name, 'missing')!r:.60}"
            )
    if not all(isinstance(each, str) for each in [*row["answers"], *(row["all_classes"] or ())]):
        raise ValueError("answers and all_classes must be lists of strings")
    json.dumps(row, ensure_ascii=False).encode()  # refuses a surrogate without its other half
    if find_task(str(row.get("dataset", task.name))) is not task:
        raise ValueError(f"dataset {row['dataset']!r} in the file of {task.name}")
