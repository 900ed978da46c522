"""Who is shown the queries and keys of a patched module, and where the modules of a patched model keep that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BINDING = "_pasa_binding"
"""Attribute by which a patched module of transformers, and a processor of ours in diffusers, is known; a plain
attribute, so that `torch.compile` can read it."""

Look = Callable[[Tensor, Tensor, Tensor | None, bool, float], None]


@dataclass(eq=False)
class Onlookers:
    """What is called after each attention call of one patched module; mostly nothing."""

    looks: tuple[Look, ...] = ()

    def show(self, q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float) -> None:
        """Show a call: q (B, Hq, Sq, D), k (B, Hkv, Skv, D), mask as `pasa.attention` takes it."""
        for look in self.looks:
            look(q, k, attn_mask, is_causal, scale)

    def show_heads_last(self, q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float) -> None:
        """As `show`, for q (B, Sq, Hq, D), k (B, Skv, Hkv, D)."""
        if self.looks:
            self.show(q.transpose(1, 2), k.transpose(1, 2), attn_mask, is_causal, scale)


def is_patched(module: torch.nn.Module) -> bool:
    """Whether this attention module runs PASA."""
    return any(_binding(holder) is not None for holder in (module, getattr(module, "processor", None)))


def patched_modules(
    components: Mapping[str, torch.nn.Module],
) -> Iterator[tuple[str, torch.nn.Module, Onlookers]]:
    """The patched modules of models, with the names that a patch report gives them."""
    for name, module, binding in _bindings(components):
        yield name, module, binding.onlookers


def removed_modules(components: Mapping[str, torch.nn.Module]) -> dict[str, str]:
    """The patched modules of models that no longer run PASA, each with what runs there instead."""
    found = ((name, binding.replacement(module)) for name, module, binding in _bindings(components))
    return {name: replacement for name, replacement in found if replacement is not None}


def _bindings(components: Mapping[str, torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module, Any]]:
    for component, model in components.items():
        for path, module in model.named_modules():
            for holder in (module, getattr(module, "processor", None)):
                binding = _binding(holder)
                if binding is not None:
                    yield ".".join(part for part in (component, path) if part), module, binding


def _binding(holder: object) -> Any:
    """Return what a patch left with a module or processor; None where none did, and in a copy."""
    return getattr(holder, "__dict__", {}).get(BINDING)
