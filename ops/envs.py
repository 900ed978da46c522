"""Every environment variable that pasa reads, in one table."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

VARIABLES: dict[str, tuple[str, Callable[[str], object]]] = {
    # name: (default, parser)
    "PASA_CACHE_DIR": ("~/.cache/pasa", lambda text: Path(text).expanduser()),  # converted models, chosen tiles
    "TRITON_INTERPRET": ("0", lambda text: text.lower() in ("1", "true", "on")),  # Triton's own: kernels run on the CPU
}


def read(name: str) -> object:
    """Value of one of `VARIABLES`, parsed; KeyError for a name that is not in the table."""
    default, parse = VARIABLES[name]
    return parse(os.environ.get(name) or default)


def cache_dir() -> Path:
    """Folder for what is expensive to make again (not created here)."""
    value = read("PASA_CACHE_DIR")
    if not isinstance(value, Path):
        raise TypeError(f"PASA_CACHE_DIR parsed to {value!r}, not a path")
    return value
