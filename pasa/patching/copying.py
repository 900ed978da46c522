"""Why a copy of a patched model is an unpatched model: how each thing that a patch adds leaves itself out of a copy.

`copy.deepcopy`, `pickle` and `torch.save` ask every object what its copy is made of. What a patch puts into a model
answers with something that needs no PASA, so that a saved model loads where PASA is not installed. A shallow copy
shares the patched modules and is patched with them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from typing import Any


class Uncopied:
    """Base of what a copy has not: the copy has None in its place."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class UncopiedHook:
    """A hook of a module; the copy of the module has a hook that does nothing.

    Parameters
    ----------
    function : callable
        What torch calls; it returns None.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> None:
        """Call the function."""
        self.function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes any arguments and returns None


class PatchedName(str):
    """The name of a patched attention in a config; the copy of the config has the name that it was put over.

    Parameters
    ----------
    name, original : str
        Of PASA, and of the attention whose place it takes.
    """

    original: str

    def __new__(cls, name: str, original: str) -> PatchedName:
        """Make the name; a string is immutable, so not in `__init__`."""
        self = super().__new__(cls, name)
        self.original = original
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.original,)


def copies_as(original: Any) -> Callable[[int], tuple[Any, ...]]:
    """Return a `__reduce_ex__` for an object whose copy is to be a copy of `original`."""
    return partial(_reduce, original)


def _reduce(original: Any, protocol: int) -> tuple[Any, ...]:
    return copy.copy, (original,)
