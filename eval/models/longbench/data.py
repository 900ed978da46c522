"""Reads LongBench's JSON lines from a folder, the published zip, or that zip on a hub; says what is wrong, and where.

Everything is read and checked before anything is computed.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pasa.eval.models.longbench import metrics
from pasa.eval.models.longbench.tasks import SUFFIX, Task, find_task

HUB = "hf:"
"""Prefix of a hub's data set, such as "hf:THUDM/LongBench"; `ARCHIVE` is fetched from it."""
ARCHIVE = "data.zip"
SUFFIX_OF_FILES = ".jsonl"


@dataclass(frozen=True)
class Item:
    """One question.

    Attributes
    ----------
    index : int
        Place in the file, from 0.
    context, input : str
        What the prompt is made of.
    answers : list of str
        References; the best one counts.
    length : int
        In words or characters, as the data say.
    all_classes : list of str or None
        Of a classification.
    """

    index: int
    context: str
    input: str
    answers: list[str]
    length: int
    all_classes: list[str] | None


Lines = Callable[[], Iterator[bytes]]


def load_items(
    source: str, datasets: Sequence[str] | None = None, *, extended: bool = False, limit: int | None = None
) -> dict[str, list[Item]]:
    """Read and check data sets.

    Parameters
    ----------
    source : str
        Folder of ``<dataset>.jsonl``, a zip that holds such files, or "hf:OWNER/NAME" (downloads ``data.zip``).
    datasets : sequence of str, optional
        Names; default: all that the source has, those of LongBench-E if `extended`, else the others.
    limit : int, optional
        Take the first so many items of each.

    Raises
    ------
    FileNotFoundError
        No such source, or it lacks a data set that was asked for.
    ValueError
        Unknown data set; broken line or field, or text that no file could hold, with file and line.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} is below 1")
    files = _open(source)
    for name in files if datasets is None else ():
        try:
            find_task(name)
        except ValueError as error:
            raise ValueError(f"{source}: {name}{SUFFIX_OF_FILES}: {error}") from None
    if datasets is None:
        datasets = [name for name in files if name.endswith(SUFFIX) == extended]
    found = {}
    for name in datasets:
        task = find_task(name)
        if name not in files:
            raise FileNotFoundError(f"{source} has no {name}{SUFFIX_OF_FILES}; it has {', '.join(files) or 'none'}")
        found[name] = list(_read(files[name], f"{source}/{name}{SUFFIX_OF_FILES}", task))[:limit]
    for name, items in found.items():
        if not items:
            raise ValueError(f"{source}: no items in {name}{SUFFIX_OF_FILES}")
    if not found:
        wanted = (
            f"*{SUFFIX}{SUFFIX_OF_FILES}" if extended else f"*{SUFFIX_OF_FILES} (*{SUFFIX}{SUFFIX_OF_FILES} with --e)"
        )
        raise ValueError(f"{source}: no items; looked for {wanted}")
    return found


def digest(items: Sequence[Item]) -> str:
    """SHA-256 of what was read, 16 digits: whether two runs were given the same questions."""
    text = json.dumps([asdict(item) for item in items], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _open(source: str) -> dict[str, Lines]:
    """Data set -> function that yields the lines of its file, in the order of their names."""
    if source.startswith(HUB):
        return _archive(_download(source.removeprefix(HUB)))
    path = Path(source)
    if path.is_dir():
        return {file.stem: _lines_of(file) for file in sorted(path.glob("*" + SUFFIX_OF_FILES))}
    if path.is_file() and zipfile.is_zipfile(path):
        return _archive(path)
    raise FileNotFoundError(
        f"data {source!r} is neither a folder of JSON lines nor a zip of them, nor {HUB}OWNER/NAME of a hub's data set"
    )


def _download(repository: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repository, ARCHIVE, repo_type="dataset"))
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise FileNotFoundError(
            f"{ARCHIVE} of the data set {repository!r} is not in the local cache and cannot be fetched: {error}"
        ) from error


def _lines_of(file: Path) -> Lines:
    def lines() -> Iterator[bytes]:
        with file.open("rb") as stream:
            yield from stream

    return lines


def _archive(path: Path) -> dict[str, Lines]:
    def member(name: str) -> Lines:
        def lines() -> Iterator[bytes]:
            with zipfile.ZipFile(path) as archive, archive.open(name) as stream:
                yield from stream

        return lines

    with zipfile.ZipFile(path) as archive:
        names = [PurePosixPath(name) for name in sorted(archive.namelist()) if name.endswith(SUFFIX_OF_FILES)]
    own = [name for name in names if "__MACOSX" not in name.parts]
    return {name.stem: member(str(name)) for name in own}


def _read(lines: Lines, where: str, task: Task) -> Iterator[Item]:
    for number, line in enumerate(lines(), 1):
        if not line.strip():
            continue
        try:
            yield _item(json.loads(line.decode("utf-8")), number - 1, task)
        except (json.JSONDecodeError, RecursionError) as error:  # too many brackets
            raise ValueError(f"{where}, line {number}: broken JSON ({error})") from error
        except ValueError as error:
            raise ValueError(f"{where}, line {number}: {error}") from error


def _item(row: Any, index: int, task: Task) -> Item:
    if not isinstance(row, dict):
        raise ValueError(f"a line must be an object, not {type(row).__name__}")
    fields = {name: _field(row, name) for name in ("context", "input", "answers", "length", "all_classes")}
    json.dumps(fields, ensure_ascii=False).encode()  # refuses a surrogate without its other half
    item = Item(index, **fields)
    named = row.get("dataset", task.name)
    if find_task(str(named)) is not task:
        raise ValueError(f"dataset {named!r} in the file of {task.name}")
    if task.metric == "classification" and not item.all_classes:
        raise ValueError("all_classes is empty, and this is a classification")
    if task.metric.startswith("retrieval"):
        for answer in item.answers:
            metrics.METRICS[task.metric]("", answer, ())  # refuses what holds no paragraph
    return item


def _field(row: dict[str, Any], name: str) -> Any:
    """A field of the right form."""
    if name not in row:
        raise ValueError(f"field {name!r} is missing")
    value = row[name]
    if name in ("context", "input"):
        good, wanted = isinstance(value, str), "a string"
    elif name == "length":
        good, wanted = isinstance(value, int) and not isinstance(value, bool) and value >= 0, "a number from 0 on"
    elif name == "all_classes" and value is None:
        good, wanted = True, ""
    else:
        good, wanted = isinstance(value, list) and all(isinstance(each, str) for each in value), "a list of strings"
    if not good:
        raise ValueError(f"field {name!r} must be {wanted}, not {value!r:.60}")
    return value
