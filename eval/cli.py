"""The console script `pasa`; its commands are in commands.py, which takes seconds to load."""

from __future__ import annotations

from collections.abc import Sequence

from pasa.eval.kit.exits import BAD_INPUT, complain, leave


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command in `arguments`, by default those of the process, and exit.

    0: done; 1: a gate or check failed; 2: bad input, and one line on stderr says what is wrong.
    """
    leave(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    import typer

    from pasa.eval.commands import app

    try:
        status = app(args=arguments, prog_name="pasa", standalone_mode=False)
    except typer.Abort:  # typer's word for an interrupt from the keyboard
        raise KeyboardInterrupt from None
    except Exception as error:
        # Usage errors of typer share this method and nothing that typer exports; anything else is not ours to word.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        text = message()
        return complain(text) if text else BAD_INPUT  # nothing was asked for: the help has been shown
    return status if isinstance(status, int) else 0


if __name__ == "__main__":
    main()
