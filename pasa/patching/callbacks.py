"""Callbacks that get the queries and keys of patched modules, and functions that find the patched modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pasa.ops.attention.call import NO_WINDOW

BINDING = "_pasa_binding"
"""Attribute that marks a patched module of transformers, or a processor of PASA in diffusers.

It is a plain attribute, because `torch.compile` can read those.
"""

Callback = Callable[[Tensor, Tensor, Tensor | None, bool, float, tuple[int, int], float], None]


@dataclass(eq=False)
class Callbacks:
    """The functions that are called after each attention call of one patched module; usually there are none."""

    functions: tuple[Callback, ...] = ()

    def call(
        self,
        q: Tensor,
        k: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        scale: float,
        window: tuple[int, int] | None = None,
        softcap: float | None = None,
    ) -> None:
        """Call all functions with q (B, Hq, Sq, D), k (B, Hkv, Skv, D), and the rest as `pasa.attention` takes it."""
        for function in self.functions:
            function(q, k, attn_mask, is_causal, scale, window or NO_WINDOW, softcap or 0.0)


def is_patched(module: torch.nn.Module) -> bool:
    """Return whether this attention module, or its processor, carries the mark of a patch."""
    return any(_binding(holder) is not None for holder in (module, getattr(module, "processor", None)))


def patched_modules(
    components: Mapping[str, torch.nn.Module],
) -> Iterator[tuple[str, torch.nn.Module, Callbacks]]:
    """Yield (name, module, callbacks) of every patched module, with the names of the patch report."""
    for name, module, binding in _bindings(components):
        yield name, module, binding.callbacks


def removed_modules(components: Mapping[str, torch.nn.Module]) -> dict[str, str]:
    """Return the names of patched modules that no longer run PASA, each with what runs there instead."""
    replacements = ((name, binding.replacement(module)) for name, module, binding in _bindings(components))
    return {name: replacement for name, replacement in replacements if replacement is not None}


def _bindings(components: Mapping[str, torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module, Any]]:
    for component, model in components.items():
        for path, module in model.named_modules():
            for holder in (module, getattr(module, "processor", None)):
                binding = _binding(holder)
                if binding is not None:
                    yield ".".join(part for part in (component, path) if part), module, binding


def _binding(holder: object) -> Any:
    """Return the mark of a patch on a module or processor; None if it has no mark, as in a copy."""
    return getattr(holder, "__dict__", {}).get(BINDING)
