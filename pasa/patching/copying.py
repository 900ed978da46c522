"""Keep a patch out of copies: a deep or pickled copy of a patched model is an unpatched model.

`copy.deepcopy`, `pickle` and `torch.save` ask every object how to rebuild it. The objects that a patch puts into a
model answer with something that needs no PASA, so a saved model loads even where PASA is not installed. A shallow copy
shares the patched modules, so it is patched too.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
from collections.abc import Callable
from functools import partial
from typing import Any


class Uncopied:
    """Base class of objects that are not copied: a copy of the model holds None in their place."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class UncopiedHook:
    """A hook of a module; in a copy of the module, the hook does nothing.

    Parameters
    ----------
    function : callable
        What torch calls; it returns None.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> None:
        """Call the function, as torch does for a hook."""
        self.function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes any arguments and returns None


class PatchedName(str):
    """The name of PASA's attention in a config; a copy of the config holds the name of the original attention.

    Parameters
    ----------
    name, original : str
        Name of PASA's attention, and of the attention that it replaces.
    """

    original: str

    def __new__(cls, name: str, original: str) -> PatchedName:
        """Make the name; this cannot be done in `__init__`, because a string is immutable."""
        self = super().__new__(cls, name)
        self.original = original
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.original,)


def reduced_as(kind: type) -> Callable[[Any, Any], tuple[Any, ...]]:
    """Return a `__reduce_ex__` for a subclass of `kind` whose copies are to be of `kind` itself."""

    original: Any = kind

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        parts = original.__reduce_ex__(self, protocol)
        return copyreg._reconstructor, (kind, object, None), *parts[2:]  # type: ignore[attr-defined]

    return reduce


def copies_as(original: Any) -> Callable[[int], tuple[Any, ...]]:
    """Return a `__reduce_ex__` for an object whose copy is to be a copy of `original`."""
    return partial(_reduce, original)


def _reduce(original: Any, protocol: int) -> tuple[Any, ...]:
    return copy.copy, (original,)
