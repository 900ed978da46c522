"""Loads models from folders; an error says what the folder lacks, and how a published model comes into one."""

from __future__ import annotations

import logging
import os
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pasa.first_nonfinite import is_finite

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
OTHER = "of another shape than config.json says"
STREAMING = (5, 23)  # first version of transformers that was found to run models from disk as it runs them in memory
WRITING = re.compile(r"Error while serializing.*\(os error (\d+)\)")  # error of safetensors, with the system's number
SHOWN_LETTERS = 300  # of an error of a library
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


def check_language_model(path: str) -> None:
    """Raise FileNotFoundError, with the next step, if the path is no folder of a language model and its tokenizer."""
    folder = check_folder(path, "config.json")
    if not any((folder / name).is_file() for name in TOKENIZERS):
        files = ", ".join(TOKENIZERS)
        raise FileNotFoundError(f"model {path!r} has no tokenizer (none of {files}): download all files of the model")


@contextmanager
def readable(path: str, offload: str | None = None) -> Iterator[None]:
    """Raise ValueError, with the next step, where a library fails on the files of a model, however it fails.

    Folders come from others. A wrong entry in config.json ends in an error of any type, deep inside of the library.
    Raise OSError if tensors cannot be stored in the folder `offload`.
    """
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        if offload and (code := WRITING.match(str(error))):
            number = int(code[1])
            raise OSError(number, f"{os.strerror(number)}: make room for fused experts", offload) from error
        raise ValueError(f"model {path!r} has a file of weights that is not whole ({error}): load it again") from error
    except Exception as error:
        why = textwrap.shorten(str(error), SHOWN_LETTERS, placeholder=" ...")
        if isinstance(error, (OSError, ImportError)):  # says what is missing
            raise type(error)(f"model {path!r}: {why}") from error
        raise ValueError(
            f"model {path!r} cannot be read ({type(error).__name__}: {why}): compare its files with the published ones"
        ) from error


def load_folder(
    path: str, dtype: torch.dtype = torch.float32, kind: Any = None, offload: str | None = None
) -> tuple[Any, Any]:
    """Load a language model and its tokenizer from a folder, from safetensors and without running its code.

    `kind` is the class of the model, by default the causal one that fits the configuration. With `offload`, a folder
    for tensors that are stored in another form, weights stay on disk, and are loaded for each call of their module.

    Raise ValueError if weights are missing or have another shape, because transformers fills them with random numbers.
    """
    check_language_model(path)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with readable(path, offload), quiet():
        options = {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True, **SAFE}
        options |= on_disk(offload) if offload else {}
        model, info = (kind or AutoModelForCausalLM).from_pretrained(path, **options)
    lacking = {
        **dict.fromkeys(info["missing_keys"], "missing"),
        **dict.fromkeys(map(_name, info["mismatched_keys"]), OTHER),
    }
    if lacking:
        name = min(lacking)
        raise ValueError(
            f"model {path!r}: {name} is {lacking[name]} ({len(lacking)} weights in all), and would be random: download "
            "all files of the model, or correct its config.json"
        )
    broken = next((name for name, x in model.named_parameters() if not (x.is_meta or is_finite(x))), None)
    if broken is not None and dtype == torch.float32:  # FP16 may have made an infinity of a large weight
        raise ValueError(f"model {path!r}: {broken} holds NaN or infinity, which no attention repairs: load it again")
    with readable(path):
        return model.eval(), AutoTokenizer.from_pretrained(path, trust_remote_code=False)


def _name(mismatch: Any) -> str:
    return str(mismatch[0] if isinstance(mismatch, (tuple, list)) else mismatch)


def on_disk(offload: str) -> dict[str, Any]:
    """Return the options of ``from_pretrained`` that leave all weights on disk, or none with an older transformers.

    Those before `STREAMING` do not find tied weights there, or compute wrong logits (DeepSeek-V2 with 5.0.0).
    """
    import transformers

    version = tuple(map(int, re.findall(r"\d+", transformers.__version__)[:2]))
    return {"device_map": {"": "disk"}, "offload_folder": offload} if version >= STREAMING else {}


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the report of transformers on missing weights off the screen: an error of one line replaces it."""
    from transformers.utils import logging as transformers_logging

    before, accelerate = transformers_logging.get_verbosity(), logging.getLogger("accelerate")
    level = accelerate.level
    transformers_logging.set_verbosity_error()
    accelerate.setLevel(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
        accelerate.setLevel(level)
