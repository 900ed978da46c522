"""Read environment variables: every one that pasa uses is in one table."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

# The folder that holds `ascend_c`, in the repository and in an installed package alike.
PACKAGE = Path(__file__).resolve().parent.parent

VARIABLES: dict[str, tuple[str, Callable[[str], object]]] = {
    # name: (default, parser)
    "PASA_CACHE_DIR": ("~/.cache/pasa", lambda text: Path(text).expanduser()),  # converted models, tuned tile sizes
    "PASA_ASCEND_LIBRARY": (  # library of the Ascend C kernels, built by `ascend_build_script`
        str(PACKAGE / "ascend_c" / "lib" / "libpasa_npu.so"),
        lambda text: Path(text).expanduser(),
    ),
    "ASCEND_HOME_PATH": ("", str),  # CANN's own: the folder of CANN, set by its set_env.sh
    # Set by torchrun and accelerate launch. Of several processes, only rank 0 prints.
    "RANK": ("0", int),
    "VLLM_BATCH_INVARIANT": ("0", lambda text: bool(int(text))),  # vLLM's own: pasa/patching/vllm.py follows it
    "TRITON_INTERPRET": ("0", lambda text: text.lower() in ("1", "true", "on")),  # Triton's own: interpret kernels
}


def read(name: str) -> object:
    """Return the parsed value of one of `VARIABLES`; KeyError for a name that is not in the table.

    A ValueError names a variable whose value cannot be parsed.
    """
    default, parse = VARIABLES[name]
    value = os.environ.get(name) or default
    try:
        return parse(value)
    except (ValueError, RuntimeError) as error:  # no integer; "~" without a home
        raise ValueError(f"the environment variable {name}={value!r} cannot be used ({error}): set it anew") from error


def cache_dir() -> Path:
    """Return the folder for files that are expensive to make again; the folder is not created here."""
    return _path("PASA_CACHE_DIR")


def ascend_build_script() -> Path:
    """Return the path of the script that builds the Ascend C library.

    In an installed package it lies beside the kernels' sources, as in the repository.
    """
    return PACKAGE / "scripts" / "build_ascend.sh"


def ascend_library() -> Path:
    """Return the path of the library of the Ascend C kernels, whether or not it exists."""
    return _path("PASA_ASCEND_LIBRARY")


def ascend_home() -> Path | None:
    """Return the folder of CANN, or None where none is set up."""
    home = str(read("ASCEND_HOME_PATH"))
    return Path(home) if home else None


def vllm_batch_invariant() -> bool:
    """Return whether vLLM is to give a request the same result whatever it is batched with."""
    return bool(read("VLLM_BATCH_INVARIANT"))


def for_command(**variables: str) -> dict[str, str]:
    """Return this process's environment with other variables, for a command that it starts."""
    return os.environ | variables


def _path(name: str) -> Path:
    value = read(name)
    if not isinstance(value, Path):
        raise TypeError(f"{name} parsed to {value!r}, not a path")
    return value
