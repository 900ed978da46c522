"""Read weights from a model in memory or from a folder of safetensors files, one tensor at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
CODES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
"""The dtypes that are read, by their names in safetensors files."""
READABLE = tuple(CODES.values())
QUANTISED = "quantised weights are not supported; pass the unquantised checkpoint"
WEIGHT_FILES = ("model.safetensors", "diffusion_pytorch_model.safetensors")
OTHER_WEIGHTS = (".bin", ".ckpt", ".gguf", ".pt", ".pth", ".safetensors")
"""Suffixes of weight files that are not read; they are named in the error message.

They are pickles, which can run code when loaded, quantised files, and safetensors files under another name.
"""


class Source(Protocol):
    """A source of weights: a model's configuration, the names of its tensors, and each tensor by name."""

    label: str
    config: dict[str, Any]
    names: frozenset[str]

    def get(self, name: str) -> Tensor:
        """Return the tensor of this name."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor of this name, without reading its data."""
        ...


class Live:
    """A model in memory, of transformers or diffusers.

    Raises
    ------
    TypeError
        The model has no configuration, so the meaning of its weights is unknown.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        config: Any = getattr(model, "config", None)
        if config is None:
            name = type(model).__name__
            raise TypeError(
                f"predict_overflow: {name} has no config: give a transformers or diffusers model, or a folder"
            )
        self.model, self.label = model, type(model).__name__
        self.config = config.to_dict() if hasattr(config, "to_dict") else {**config, "_class_name": self.label}
        self._tensors = model.state_dict()
        self.names = frozenset(self._tensors)

    def get(self, name: str) -> Tensor:
        """Return the model's own tensor; refuse one that is offloaded (on the meta device) or quantised."""
        tensor = self._tensors[name]
        if tensor.is_meta:
            raise NotImplementedError(f"{self.label}: {name} has no data (offloaded); give its folder instead")
        return check_dtype(self.label, name, tensor)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the model's own tensor."""
        return tuple(self._tensors[name].shape)


class Checkpoint:
    """A folder with ``config.json`` and safetensors files, whole or in shards; a tensor is read on demand.

    Raises
    ------
    FileNotFoundError
        The folder, its configuration or its safetensors files are missing.
    ValueError
        ``config.json`` or the index is not a JSON object, or the index has no map of files.
    ModuleNotFoundError
        safetensors is not installed.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            if folder.exists():
                raise FileNotFoundError(
                    f"model {str(folder)!r} is a file: pass the folder that holds config.json and safetensors files"
                )
            name, place = str(folder), folder.name
            if not HUB_NAME.fullmatch(name):
                name, place = "NAME", "FOLDER"
            raise FileNotFoundError(
                f"model {str(folder)!r} is not a folder: download it (hf download {name} --local-dir {place}, or "
                "huggingface_hub.snapshot_download), or pass the model itself"
            )
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"{str(folder)!r} holds no config.json: pass the folder of save_pretrained")
        self.label, self._folder = str(folder), folder
        self.config = _read_json(folder / "config.json")
        self.files = self._find_tensors()
        self.names = frozenset(self.files)

    def _find_tensors(self) -> dict[str, str]:
        """Return the file name of every tensor, by the name of the tensor."""
        try:
            from safetensors import SafetensorError, safe_open
        except ModuleNotFoundError as error:
            what = "safetensors, which reads the weights, is missing: pip install safetensors"
            raise ModuleNotFoundError(what, name=error.name) from None

        for name in WEIGHT_FILES:
            if (self._folder / f"{name}.index.json").is_file():
                files = self._read_index(self._folder / f"{name}.index.json")
                missing = sorted({file for file in files.values() if not (self._folder / file).is_file()})
                if missing:
                    raise FileNotFoundError(f"{self.label!r}: its index names {missing[0]!r}, which is not there")
                return files
            if (self._folder / name).is_file():
                try:
                    with safe_open(str(self._folder / name), framework="pt") as file:
                        return dict.fromkeys(file.keys(), name)
                except SafetensorError as error:
                    raise ValueError(f"{str(self._folder / name)!r} is not a whole safetensors file: {error}") from None
        others = sorted(each.name for each in self._folder.iterdir() if each.suffix in OTHER_WEIGHTS)
        hint = f"; {others[0]} is not read: save it under such a name, as safetensors" if others else ""
        raise FileNotFoundError(f"{self.label!r} holds no {' or '.join(WEIGHT_FILES)}, whole or in shards{hint}")

    def _read_index(self, path: Path) -> dict[str, str]:
        """Return the file name of every tensor from an index of shards; all shards must be in the same folder."""
        files = _read_json(path).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            raise ValueError(f"{self.label!r}: {path.name} has no weight_map from names to files")
        for file in files.values():
            if Path(file).name != file:
                raise ValueError(f"{self.label!r}: its index names {file!r}, which is not a file of the folder")
        return files

    def check_index(self) -> None:
        """Check that the files hold no tensor but those that the index names, each in the file that it names.

        Raises
        ------
        ValueError
            A loader that reads whole files would load a tensor that the index does not name there.
        """
        for file in sorted(set(self.files.values())):
            first = min(name for name, place in self.files.items() if place == file)
            with self._open(first) as opened:
                for name in sorted(opened.keys()):
                    if self.files.get(name) != file:
                        place = f"in {self.files[name]!r}" if name in self.files else "nowhere"
                        raise ValueError(
                            f"{self.label!r}: {file!r} holds {name}, which is {place} by the index: load both again"
                        )

    def get(self, name: str) -> Tensor:
        """Read one tensor from its file."""
        with self._open(name) as file:
            return check_dtype(self.label, name, file.get_tensor(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Read the shape of a tensor from the head of its file."""
        with self._open(name) as file:
            return tuple(file.get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Read the dtype of a tensor from the head of its file."""
        with self._open(name) as file:
            code = file.get_slice(name).get_dtype()
        if code not in CODES:
            raise NotImplementedError(f"{self.label}: {name} is {code}: {QUANTISED}")
        return CODES[code]

    @contextmanager
    def _open(self, name: str) -> Iterator[Any]:
        from safetensors import SafetensorError, safe_open

        path = self._folder / self.files[name]
        try:
            with safe_open(str(path), framework="pt") as file:
                yield file
        except SafetensorError as error:
            raise ValueError(f"{str(path)!r}: {name} cannot be read: {error}") from None


def check_dtype(label: str, name: str, tensor: Tensor) -> Tensor:
    """Return the tensor; refuse dtypes that are not plain floating point, as quantised weights need their scales."""
    if tensor.dtype not in READABLE:
        raise NotImplementedError(f"{label}: {name} is {tensor.dtype}: {QUANTISED}")
    return tensor


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # brackets nested too deeply
        raise ValueError(f"{str(path)!r} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{str(path)!r} holds no object of JSON, but {type(content).__name__}")
    return content
