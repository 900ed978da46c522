"""Exit with the status of a command, or, after an error that a user can correct, with 2 and one line on stderr."""

from __future__ import annotations

import atexit
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

# Modules that may be missing, and the extra of setup.py that installs each.
EXTRAS = {
    **dict.fromkeys(("matplotlib", "jinja2", "safetensors", "transformers", "gguf", "accelerate"), "eval"),
    **dict.fromkeys(("diffusers", "skimage", "imageio", "imageio_ffmpeg", "PIL"), "video"),
    **dict.fromkeys(("rouge", "jieba"), "longbench"),
    "triton": "triton",
}
BAD_INPUT = 2  # exit status
NO_READER = 141  # what a shell says of SIGPIPE: 128 + 13
STOPPED = 130  # what a shell says of SIGINT: 128 + 2
SHOWN_FILES = 3  # in the line of a command that was stopped
NO_MEMORY = re.compile("can't allocate memory|out of memory")  # in errors of torch
# Exceptions that the library raises for arguments and installations that it cannot use; all others are bugs.
EXPECTED = (ValueError, TypeError, NotImplementedError, OSError, ImportError)


def leave(action: Callable[[], int]) -> NoReturn:
    """Call `action` and exit with the status it returns; after an expected error, print one line and exit with 2.

    After an interrupt from the keyboard, print one line and exit with 130. If nobody reads stdout any more, exit with
    141, as other programs do.
    """
    # Python unloads torch for half a second at its end. An interrupt then would only replace the exit status.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    try:
        sys.exit(action())
    except ModuleNotFoundError as error:
        known = EXTRAS.get((error.name or "").partition(".")[0])
        why = f"{error.name} is not installed; run, in the checkout: pip install '.[{known}]'" if known else str(error)
        sys.exit(complain(why))
    except BrokenPipeError:  # the reader, such as head, has what it wants
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python still writes when it ends
        sys.exit(NO_READER)
    except OSError as error:
        sys.exit(complain(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)))
    except EXPECTED as error:
        sys.exit(complain(str(error)))
    except (MemoryError, RuntimeError) as error:  # torch raises the latter
        if not isinstance(error, MemoryError) and not NO_MEMORY.search(str(error)):
            raise
        sys.exit(complain(f"not enough memory ({error}): choose smaller sizes, or a smaller model"))
    except KeyboardInterrupt:
        sys.exit(stop())


def stop(files: Sequence[Path] = (), resume: str = "") -> int:
    """Print which files an interrupted command has completed, and how to resume; return the exit status."""
    names = ", ".join(map(str, files[:SHOWN_FILES]))
    if len(files) > SHOWN_FILES:
        names += f" and {len(files) - SHOWN_FILES} more"
    kept = f"complete: {names}" if files else "nothing was written"
    print("; ".join(["pasa: stopped", kept, *([resume] if files and resume else [])]), file=sys.stderr)
    return STOPPED


def complain(message: str) -> int:
    """Print a message as one line on stderr; return the exit status of bad input."""
    print(f"pasa: {' '.join(message.split())}", file=sys.stderr)
    return BAD_INPUT
