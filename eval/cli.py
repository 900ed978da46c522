"""The console script `pasa`; its commands are in commands.py, because typer and rich are extras."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

EXTRAS = {
    **dict.fromkeys(("typer", "rich", "matplotlib", "jinja2", "safetensors", "gguf", "accelerate"), "eval"),
    **dict.fromkeys(("diffusers", "transformers", "skimage", "imageio", "imageio_ffmpeg", "PIL"), "video"),
    **dict.fromkeys(("rouge", "jieba"), "longbench"),
    "triton": "triton",
}
BAD_INPUT = 2
EXPECTED = (ValueError, TypeError, NotImplementedError, OSError, ImportError)
"""What the library raises for what a user gave it, or has installed."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0 done, 1 a gate or check failed, 2 bad input (one line on stderr says what).

    Parameters
    ----------
    arguments : sequence of str, optional
        In place of those of the process.
    """
    leave(lambda: _run(arguments))


def leave(action: Callable[[], int]) -> NoReturn:
    """Do it and exit with what it returns, or with 2 and one line on stderr for what a user can mend."""
    try:
        sys.exit(action())
    except ModuleNotFoundError as error:
        known = EXTRAS.get((error.name or "").partition(".")[0])
        why = f"{error.name} is not installed; run, in the checkout: pip install '.[{known}]'" if known else str(error)
        sys.exit(_complain(why))
    except EXPECTED as error:
        sys.exit(_complain(str(error)))


def _run(arguments: Sequence[str] | None) -> int:
    from pasa.eval.commands import app

    try:
        status = app(args=arguments, prog_name="pasa", standalone_mode=False)
    except Exception as error:
        # Usage errors of typer share this method and nothing that typer exports; anything else is not ours to word.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        text = message()
        return _complain(text) if text else BAD_INPUT  # nothing was asked for: the help has been shown
    return status if isinstance(status, int) else 0


def _complain(message: str) -> int:
    print(f"pasa: {' '.join(message.split())}", file=sys.stderr)
    return BAD_INPUT


if __name__ == "__main__":
    main()
