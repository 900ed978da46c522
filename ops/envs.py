"""Every environment variable that pasa reads, in one table."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent  # where `ascend_c` lies, in the repository as in an installation

VARIABLES: dict[str, tuple[str, Callable[[str], object]]] = {
    # name: (default, parser)
    "PASA_CACHE_DIR": ("~/.cache/pasa", lambda text: Path(text).expanduser()),  # converted models, chosen tiles
    "PASA_ASCEND_LIBRARY": (  # the Ascend C kernels, which `ascend_build_script` builds
        str(PACKAGE / "ascend_c" / "lib" / "libpasa_npu.so"),
        lambda text: Path(text).expanduser(),
    ),
    "RANK": ("0", int),  # torchrun's and accelerate launch's: of several processes the first one talks
    "TRITON_INTERPRET": ("0", lambda text: text.lower() in ("1", "true", "on")),  # Triton's own: kernels run on the CPU
}


def read(name: str) -> object:
    """Value of one of `VARIABLES`, parsed; KeyError for a name that is not in the table."""
    default, parse = VARIABLES[name]
    return parse(os.environ.get(name) or default)


def cache_dir() -> Path:
    """Folder for what is expensive to make again (not created here)."""
    return _path("PASA_CACHE_DIR")


def ascend_build_script() -> Path:
    """What builds that library: in the repository, or in the installed package beside the kernels' sources."""
    return PACKAGE / "scripts" / "build_ascend.sh"


def ascend_library() -> Path:
    """Where the library of the Ascend C kernels is, or would be."""
    return _path("PASA_ASCEND_LIBRARY")


def _path(name: str) -> Path:
    value = read(name)
    if not isinstance(value, Path):
        raise TypeError(f"{name} parsed to {value!r}, not a path")
    return value
