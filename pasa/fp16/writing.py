"""Write a scaled checkpoint shard by shard; a run that was interrupted goes on where it ended."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from pasa.fp16.checkpoint import Powers
from pasa.prediction.checkpoint import CODES, WEIGHT_FILES, Checkpoint

MANIFEST = "pasa_fp16.json"
NOTE = "FP16.md"
NOT_COPIED = (".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".pt", ".pth", ".safetensors")
"""Suffixes of weight files; of a checkpoint's other files all at its top are copied."""
TEMPORARY = ".pasa-"
"""Begin of the names of files and folders that are there only while the command runs."""
EXPERT = re.compile(r"\bexperts\.\d+\.")
"""Part of the names of tensors that transformers fuses to one for all experts of a layer."""
CHUNK = 1 << 24
"""Bytes that are hashed at once."""


def check_places(folder: Path, out: Path, *, force: bool) -> None:
    """Refuse an output folder that is the checkpoint's, or holds something else; change nothing."""
    if out.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"to-fp16: {str(out)!r} is in the original's folder, which is never changed: name another")
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"to-fp16: {str(out)!r} is a file: name a folder")
    if force or not out.is_dir() or all(path.name.startswith(TEMPORARY) for path in out.iterdir()):
        return
    if not (out / MANIFEST).is_file():
        raise FileExistsError(f"to-fp16: {str(out)!r} holds other files: name another folder, or add --force")
    if _read(out / MANIFEST).get("complete"):
        raise FileExistsError(
            f"to-fp16: {str(out)!r} holds a converted checkpoint already: name another folder, or add --force"
        )


@contextmanager
def scratch_folder(out: Path) -> Iterator[str]:
    """Make a folder in the output for tensors that transformers stores in another form, such as fused experts.

    It is removed at the end, and so is an output folder that was made for it and holds nothing else. A run that was
    killed leaves it, and the next one removes it.
    """
    place, made = out / f"{TEMPORARY}scratch", [each for each in (out, *out.parents) if not each.exists()]
    try:
        with _named(out):
            _remove(place)
            place.mkdir(parents=True)
        yield str(place)
    finally:
        _remove(place)
        with suppress(OSError):  # holds files by now
            for each in made:
                each.rmdir()


def _remove(place: Path) -> None:
    """Remove a folder if it is there."""
    if place.is_dir():
        shutil.rmtree(place)


def check_space(source: Checkpoint, folder: Path, out: Path, *, fused: int, at_once: bool) -> None:
    """Refuse a disk that has no room for the shards that are not written yet, nor for fused experts.

    Parameters
    ----------
    source : Checkpoint
    folder, out : Path
    fused : int
        Bytes of the fused experts, which are stored while a model runs.
    at_once : bool
        They are stored beside complete shards, and not before the first.

    Raises
    ------
    OSError
        The disk is too small.
    """
    place = out
    while not place.exists():
        place = place.parent
    left = [shard for shard in set(source.files.values()) if not (out / shard).is_file()]
    wide = source.dtype(min(source.files)).itemsize >= 4  # files of FP32 become half as large
    shards = sum((folder / shard).stat().st_size for shard in left) // (2 if wide else 1)
    needed = shards + fused if at_once else max(shards, fused)
    free = shutil.disk_usage(place).free
    if needed > free:
        also = f", {fused / 1e9:.3g} GB of it for fused experts while it runs" if fused else ""
        raise OSError(
            errno.ENOSPC, f"to-fp16 needs {needed / 1e9:.3g} GB{also}, and {free / 1e9:.3g} GB are free", str(out)
        )


def size_of_experts(source: Checkpoint, dtype: torch.dtype) -> int:
    """Return the bytes of all experts that transformers may fuse when it loads them in a dtype."""
    return sum(math.prod(source.shape(name)) for name in source.names if EXPERT.search(name)) * dtype.itemsize


class Writer:
    """Writes one scaled checkpoint into a folder.

    Parameters
    ----------
    source : Checkpoint
    folder, out : Path
    powers : Powers
    settings : dict
        All that decides what is written, ready for JSON. A later run goes on only with the same settings.
    force : bool
        Replace the checkpoint that `out` holds.
    written : list of Path
        Takes the path of each complete file.
    fused : int, default 0
        Bytes of fused experts that are stored in `out` when the written checkpoint is loaded.
    """

    def __init__(
        self,
        source: Checkpoint,
        folder: Path,
        out: Path,
        powers: Powers,
        settings: Mapping[str, Any],
        *,
        force: bool,
        written: list[Path],
        fused: int = 0,
    ) -> None:
        self.source, self.folder, self.out, self.powers = source, folder, out, powers
        self.written = written
        self.settings = json.loads(json.dumps(settings))
        self.shards = sorted(set(source.files.values()))
        self._begin(fused, force=force)

    def _begin(self, fused: int, *, force: bool) -> None:
        """Make the folder ready: complete shards of an interrupted run with these settings are kept."""
        there = (self.out / MANIFEST).is_file()
        before = _read(self.out / MANIFEST) if there else {}
        same = not before.get("complete") and before.get("settings") == self.settings
        if there and not same and not force:
            raise FileExistsError(
                f"to-fp16: {str(self.out)!r} holds part of another conversion: name another folder, or add --force"
            )
        if not same and self.out.is_dir():
            (self.out / MANIFEST).unlink(missing_ok=True)  # first, because it vouches for the others
            for path in [*self.out.glob("*.safetensors"), *self.out.glob("*.safetensors.index.json")]:
                path.unlink()
        check_space(self.source, self.folder, self.out, fused=fused, at_once=True)
        with _named(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
        for path in self.out.glob(f"{TEMPORARY}*"):
            path.unlink()
        self._put_json(MANIFEST, {"complete": False, "settings": self.settings})

    def write(self, config: Mapping[str, Any], note: str, details: Mapping[str, Any]) -> int:
        """Write all files, the manifest last; return how many shards were there already.

        Raises
        ------
        OSError
            The disk is full or cannot be written. Complete shards stay, and a second call goes on.
        ValueError
            A tensor is not finite, or FP16 cannot hold it.
        """
        kept = total = 0
        for shard in self.shards:
            if self._is_whole(shard):
                kept += 1
            else:
                self._write_shard(shard)
            total += _data_size(self.out / shard)
        self._write_index(total)
        self._copy_others()
        self._put_json("config.json", config)
        self._put(NOTE, lambda place: place.write_text(note, encoding="utf-8"))
        self._put_json(MANIFEST, {"complete": True, "settings": self.settings, **details})
        return kept

    def _names(self, shard: str) -> list[str]:
        return sorted(name for name, file in self.source.files.items() if file == shard)

    def _is_whole(self, shard: str) -> bool:
        """Return whether an earlier run has written a shard, and nothing has cut it since."""
        from safetensors import SafetensorError, safe_open

        if not (self.out / shard).is_file():
            return False
        try:
            with safe_open(str(self.out / shard), framework="pt") as file:
                return sorted(file.keys()) == self._names(shard)
        except SafetensorError:
            return False

    def _write_shard(self, shard: str) -> None:
        """Write a file of safetensors, one tensor after the other: memory holds no second one."""
        head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        codes = {dtype: code for code, dtype in CODES.items()}
        dtypes, end = {}, 0
        for name in self._names(shard):
            shape = self.source.shape(name)
            dtypes[name] = self.powers.dtype(name, self.source.dtype(name))
            begin, end = end, end + math.prod(shape) * dtypes[name].itemsize
            head[name] = {"dtype": codes[dtypes[name]], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(head).encode()
        text += b" " * (-len(text) % 8)  # so that the data are aligned

        def save(place: Path) -> None:
            with place.open("wb") as file:
                file.write(len(text).to_bytes(8, "little") + text)
                for name, dtype in dtypes.items():
                    data = self.powers.apply(name, self.source.get(name)).contiguous()
                    if data.dtype != dtype:
                        raise AssertionError(f"{name} is {data.dtype}, and not {dtype}")
                    file.write(data.reshape(-1).view(torch.uint8).numpy().data)

        self._put(shard, save)

    def _write_index(self, total: int) -> None:
        for name in WEIGHT_FILES:
            path = self.folder / f"{name}.index.json"
            if path.is_file():
                index = _read(path)
                index["metadata"] = {**(index.get("metadata") or {}), "total_size": total}
                self._put_json(path.name, index)

    def _copy_others(self) -> None:
        """Copy the tokenizer and all other small files at the top of the folder."""
        for path in sorted(self.folder.iterdir()):
            ours = path.name in ("config.json", MANIFEST, NOTE) or path.name.endswith(".index.json")
            if path.is_file() and not ours and path.suffix not in NOT_COPIED and not path.name.startswith("."):
                self._put(path.name, lambda place, path=path: shutil.copyfile(path, place))  # type: ignore[misc]

    def _put_json(self, name: str, content: Mapping[str, Any]) -> None:
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        self._put(name, lambda place: place.write_text(text, encoding="utf-8"))

    def _put(self, name: str, write: Callable[[Path], object]) -> None:
        """Write a file under a temporary name, then rename it: under its own name it is whole."""
        place = self.out / f"{TEMPORARY}{name}"
        try:
            with _named(self.out / name):
                write(place)
                os.replace(place, self.out / name)
            self.written.append(self.out / name)
        finally:
            place.unlink(missing_ok=True)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name the file in errors of the system, which name none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def hashes(source: Checkpoint, folder: Path) -> dict[str, str]:
    """Return the SHA-256 of config.json and of each file of weights."""
    digests = {}
    for name in ["config.json", *sorted(set(source.files.values()))]:
        digest = hashlib.sha256()
        with (folder / name).open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
        digests[name] = digest.hexdigest()
    return digests


def _data_size(path: Path) -> int:
    """Return the bytes of tensors in a safetensors file, without its head."""
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
