"""Exit with the status of a command, or, after an error that a user can correct, with 2 and one line on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

# Modules that may be missing, and the extra of setup.py that installs each.
EXTRAS = {
    **dict.fromkeys(("matplotlib", "jinja2", "safetensors", "gguf", "accelerate"), "eval"),
    **dict.fromkeys(("diffusers", "transformers", "skimage", "imageio", "imageio_ffmpeg", "PIL"), "video"),
    **dict.fromkeys(("rouge", "jieba"), "longbench"),
    "triton": "triton",
}
BAD_INPUT = 2  # exit status
# Exceptions that the library raises for arguments and installations that it cannot use; all others are bugs.
EXPECTED = (ValueError, TypeError, NotImplementedError, OSError, ImportError)


def leave(action: Callable[[], int]) -> NoReturn:
    """Call `action` and exit with the status it returns; after an expected error, print one line and exit with 2."""
    try:
        sys.exit(action())
    except ModuleNotFoundError as error:
        known = EXTRAS.get((error.name or "").partition(".")[0])
        why = f"{error.name} is not installed; run, in the checkout: pip install '.[{known}]'" if known else str(error)
        sys.exit(complain(why))
    except EXPECTED as error:
        sys.exit(complain(str(error)))


def complain(message: str) -> int:
    """Print a message as one line on stderr; return the exit status of bad input."""
    print(f"pasa: {' '.join(message.split())}", file=sys.stderr)
    return BAD_INPUT
