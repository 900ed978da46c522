"""Dotted paths of modules and parameters; in a pipeline they begin with the name of the model, otherwise with none."""

from __future__ import annotations

from collections.abc import Iterable


def join(*parts: str) -> str:
    """Return one path of several parts, of which any may be empty."""
    return ".".join(filter(None, parts))


def owner(path: str) -> str:
    """Return the path of the module that holds a module or parameter; it is empty at the top."""
    return path.rpartition(".")[0]


def contains(outer: str, path: str) -> bool:
    """Return whether a path is that of a module itself, or lies within it; the empty path is the whole model's."""
    return not outer or path == outer or path.startswith(f"{outer}.")


def inside(path: str, modules: Iterable[str]) -> bool:
    """Return whether a path lies within one of some modules, or is that of one of them."""
    return any(contains(module, path) for module in modules)
