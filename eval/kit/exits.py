"""End a command with its own status, or with one line that says what a user can mend."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

EXTRAS = {
    **dict.fromkeys(("typer", "rich", "matplotlib", "jinja2", "safetensors", "gguf", "accelerate"), "eval"),
    **dict.fromkeys(("diffusers", "transformers", "skimage", "imageio", "imageio_ffmpeg", "PIL"), "video"),
    **dict.fromkeys(("rouge", "jieba"), "longbench"),
    "triton": "triton",
}
BAD_INPUT = 2
# What the library raises for what a user passed, or has installed.
EXPECTED = (ValueError, TypeError, NotImplementedError, OSError, ImportError)


def leave(action: Callable[[], int]) -> NoReturn:
    """Do it and exit with what it returns, or with 2 and one line on stderr for what a user can mend."""
    try:
        sys.exit(action())
    except ModuleNotFoundError as error:
        known = EXTRAS.get((error.name or "").partition(".")[0])
        why = f"{error.name} is not installed; run, in the checkout: pip install '.[{known}]'" if known else str(error)
        sys.exit(complain(why))
    except EXPECTED as error:
        sys.exit(complain(str(error)))


def complain(message: str) -> int:
    """Print one line on stderr and return the status of bad input."""
    print(f"pasa: {' '.join(message.split())}", file=sys.stderr)
    return BAD_INPUT
