"""Emit warnings that point at the caller's line, not at one of pasa or torch."""

from __future__ import annotations

import sys
import warnings
from functools import cache


def caller() -> int:
    """Return the `stacklevel` of the first frame outside pasa and torch, for the function that calls this one."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("pasa", "torch"):
        frame, level = frame.f_back, level + 1
    return level


@cache
def warn_once(text: str) -> None:
    """Emit a UserWarning, the first time that this text is passed."""
    warnings.warn(text, UserWarning, stacklevel=caller())
