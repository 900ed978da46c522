"""Warnings that point at whoever called, neither at us nor at torch."""

from __future__ import annotations

import sys
import warnings
from functools import cache


def caller() -> int:
    """Frames up to the first that is neither ours nor torch's, as `stacklevel` counts them for who calls this."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("pasa", "torch"):
        frame, level = frame.f_back, level + 1
    return level


@cache
def warn_once(text: str) -> None:
    """UserWarning, the first time that this text is told."""
    warnings.warn(text, UserWarning, stacklevel=caller())
