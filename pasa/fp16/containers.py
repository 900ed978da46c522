"""Read and change the tensors in what a model takes and returns: nested lists, tuples and dicts.

The outputs of transformers and diffusers are dicts. torch's own functions give no paths for those of diffusers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

NESTED = re.compile(r"\[\d+\]\[\d+\]")
"""Path of a tensor in a tuple within a tuple: a hidden state of a call with ``return_dict=False``."""

HIDDEN = re.compile("hidden_state|pooler_output")
"""Name of an output that may be part of a residual stream. SigLIP returns the last sum of its pooling head."""

ENCODED = re.compile(r"\['(image|video|audio)_outputs'\]")
"""Path of a tensor that an encoder within the model computed, and that transformers returns since 5.24."""

_POOLED = re.compile(rf"^({ENCODED.pattern}\['pooler_output'\])\[\d+\]$")


def shared_path(path: str) -> str:
    """Return one path for all entries of the list that holds the features of each image, video or sound of a call.

    Another call may pass another number of them, and one module computes them all.
    """
    found = _POOLED.match(path)
    return found[1] if found else path


def float_leaves(value: Any, path: str = "") -> list[tuple[str, Tensor]]:
    """Return all floating-point tensors in nested lists, tuples and dicts, each with its path."""
    if isinstance(value, Tensor):
        return [(path, value)] if value.is_floating_point() else []
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in float_leaves(item, f"{path}[{key!r}]")]
    if isinstance(value, (list, tuple)):
        return [leaf for index, item in enumerate(value) for leaf in float_leaves(item, f"{path}[{index}]")]
    return []


def opaque_leaves(value: Any, met: set[int] | None = None, *, inside: bool = False) -> Iterator[Tensor]:
    """Yield the floating-point tensors in attributes of objects that are no containers, caches left out.

    `float_leaves` does not see them, and `replaced` cannot change them.
    """
    met = set() if met is None else met
    if isinstance(value, Tensor):
        if inside and value.is_floating_point():
            yield value
        return
    if id(value) in met or isinstance(value, torch.nn.Module) or "cache" in type(value).__name__.lower():
        return
    met.add(id(value))
    if isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from opaque_leaves(item, met, inside=inside)
        return
    slots = [name for each in type(value).__mro__ for name in vars(each).get("__slots__", ())]
    for item in [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]:
        yield from opaque_leaves(item, met, inside=True)


def replaced(value: Any, change: Callable[[str, Tensor], Tensor], path: str = "") -> Any:
    """Return nested lists, tuples and dicts with their floating-point tensors changed by a function of path and tensor.

    Containers without a changed tensor are the same objects.
    """
    if isinstance(value, Tensor):
        return change(path, value) if value.is_floating_point() else value
    if isinstance(value, dict):
        items = {key: replaced(item, change, f"{path}[{key!r}]") for key, item in value.items()}
        if all(items[key] is value[key] for key in items):
            return value
        return items if type(value) is dict else type(value)(**items)
    if isinstance(value, (list, tuple)):
        parts = [replaced(item, change, f"{path}[{index}]") for index, item in enumerate(value)]
        if all(part is item for part, item in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
