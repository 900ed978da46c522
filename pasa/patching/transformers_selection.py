"""Select the attention modules of a transformers model that PASA can patch, with reasons for the others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from pasa.patching.handle import no_model
from pasa.patching.transformers_attention import REFUSALS, forward_constants, forward_names

if TYPE_CHECKING:
    from pasa.patching import Policy

INDICES = ("indices", "block_indices")
"""Keywords with which a module passes on the keys that an indexer has chosen."""


def select(
    root: torch.nn.Module, policy: Policy
) -> tuple[list[PreTrainedModel], dict[str, torch.nn.Module], list[tuple[str, str]]]:
    """Return the models below `root`, their attention modules to patch, and (name, reason) pairs of the others.

    Raises
    ------
    TypeError
        There is no transformers model.
    NotImplementedError
        Nothing can be patched, or a selected module needs what PASA does not support.
    """
    owners = [module for module in root.modules() if isinstance(module, PreTrainedModel)]
    if not owners:
        raise no_model(root)
    selected: dict[str, torch.nn.Module] = {}
    skipped = list(unreachable(root))
    configs = {id(owner.config) for owner in owners}
    for name, module in root.named_modules():
        if not uses_interface(module):
            continue
        if id(module.config) not in configs:
            skipped.append((name, "no model here makes its masks from this module's config"))
        elif callable(policy) and not policy(name, module):
            skipped.append((name, "declined by the policy"))
        else:
            _refuse_module(name, module)
            selected[name] = module
    if not selected:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped[:3]) or "no attention module found"
        raise NotImplementedError(f"patch_pipeline: nothing to patch in {type(root).__name__} ({reasons})")
    return owners, selected, skipped


def uses_interface(module: torch.nn.Module) -> bool:
    """Return whether `module.forward` gets its attention from transformers' registry, by the name of that global."""
    return "ALL_ATTENTION_FUNCTIONS" in forward_names(module) and hasattr(module, "config")


def unreachable(root: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) of attention modules that compute attention themselves and cannot be patched.

    They are recognised by their class name. Modules that contain other attention modules are left out.
    """
    for name, module in root.named_modules():
        inner = any(is_named_attention(type(child)) or uses_interface(child) for child in _descendants(module))
        if is_named_attention(type(module)) and not inner and not uses_interface(module):
            yield name, f"{type(module).__name__} computes its attention itself, not through AttentionInterface"


def is_named_attention(kind: type) -> bool:
    """Return whether a class is one of attention, by its name."""
    return re.search(r"Attention(V?\d+)?$|Attn$", kind.__name__) is not None


def _descendants(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    return (child for child in module.modules() if child is not module)


def _refuse_module(name: str, module: torch.nn.Module) -> None:
    """Refuse a module that needs an unsupported keyword at every call, before anything is changed."""
    needs: dict[str, Callable[[], bool]] = {
        "softcap": lambda: getattr(module, "attn_logit_softcapping", None) is not None,
        "s_aux": lambda: getattr(module, "sinks", None) is not None,
        "position_bias": lambda: "position_bias" in type(module).forward.__code__.co_varnames,
        **{name: partial(has_indexer, module, name) for name in INDICES},
    }
    for keyword, needed in needs.items():
        if needed():
            raise NotImplementedError(
                f"patch_pipeline: {name} ({type(module).__name__}) needs {keyword}: {REFUSALS[keyword]}; "
                "leave it out with policy=lambda name, module: ..."
            )


def has_indexer(module: torch.nn.Module, keyword: str) -> bool:
    """Return whether the module attends only to keys that an indexer, its own or another layer's, has chosen.

    Only for the attention names "eager" and "sdpa" does such a module put the choice into the mask. Under any other
    name it passes the choice on as this keyword.
    """
    indexed = getattr(module, "indexer", None) is not None or getattr(module, "skip_topk", False)
    return bool(indexed) and keyword in forward_constants(module)
