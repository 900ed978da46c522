"""Loads models from folders; an error says what the folder lacks, and how a published model comes into one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
SAFE: dict[str, Any] = {"use_safetensors": True, "trust_remote_code": False, "local_files_only": True}
"""Loading options for folders from others: no pickle is read, and no code of theirs is run."""


def check_folder(path: str | Path, file: str) -> Path:
    """Return the path of a folder that holds this file; raise FileNotFoundError, with the next step, if it does not."""
    folder, name = Path(path), str(path)
    if (folder / file).is_file():
        return folder
    if not folder.exists() and HUB_NAME.fullmatch(name):
        raise FileNotFoundError(
            f"model {name!r} is not a folder, and nothing is downloaded here: if it is published, run hf download "
            f"{name} --local-dir {folder.name}, then pass {folder.name}"
        )
    lack = f"has no {file}" if folder.is_dir() else "is not a folder"
    raise FileNotFoundError(f"model {name!r} {lack}: pass a folder as save_pretrained writes it")


@contextmanager
def whole_weights(path: str) -> Iterator[None]:
    """Raise ValueError, with the next step, where safetensors cannot read a file of weights."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"model {path!r} has a file of weights that is not whole ({error}): load it again") from error


def load_folder(path: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer from a folder, from safetensors and without running its code."""
    folder = check_folder(path, "config.json")
    if not any((folder / name).is_file() for name in TOKENIZERS):
        files = ", ".join(TOKENIZERS)
        raise FileNotFoundError(f"model {path!r} has no tokenizer (none of {files}): download all files of the model")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with whole_weights(path):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **SAFE).eval()
    return model, AutoTokenizer.from_pretrained(path, trust_remote_code=False)
