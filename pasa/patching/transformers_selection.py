"""Which attention modules of a transformers model PASA takes the place of, and which it leaves or refuses, and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from pasa.patching.transformers_attention import REFUSALS, forward_constants, forward_names

if TYPE_CHECKING:
    from pasa.patching import Policy

INDICES = ("indices", "block_indices")
"""Keywords by which a module hands on the keys that an indexer chose."""


def select(
    root: torch.nn.Module, policy: Policy
) -> tuple[list[PreTrainedModel], dict[str, torch.nn.Module], list[tuple[str, str]]]:
    """The models below `root`; their attention modules to patch, and those to leave, with the reason.

    Raises
    ------
    TypeError
        There is no transformers model.
    NotImplementedError
        Nothing can be patched, or a selected module needs what PASA has not.
    """
    owners = [module for module in root.modules() if isinstance(module, PreTrainedModel)]
    if not owners:
        raise TypeError(f"patch_pipeline: {type(root).__name__} contains no transformers model")
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
    """Tell whether `module.forward` asks the registry for its attention, which it does by this global's name."""
    return "ALL_ATTENTION_FUNCTIONS" in forward_names(module) and hasattr(module, "config")


def unreachable(root: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Yield attention modules that compute attention themselves: by class name, innermost, without the interface."""
    for name, module in root.named_modules():
        inner = any(_named_attention(child) or uses_interface(child) for child in _descendants(module))
        if _named_attention(module) and not inner and not uses_interface(module):
            yield name, f"{type(module).__name__} computes its attention itself, not through AttentionInterface"


def _named_attention(module: torch.nn.Module) -> bool:
    return re.search(r"Attention(V?\d+)?$|Attn$", type(module).__name__) is not None


def _descendants(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    return (child for child in module.modules() if child is not module)


def _refuse_module(name: str, module: torch.nn.Module) -> None:
    """Refuse, before anything is changed, a module that is known to need an unsupported keyword at every call."""
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
    """Tell whether the module attends to keys that an indexer, its own or another layer's, has chosen.

    It puts the choice into the mask for the names "eager" and "sdpa" alone, and hands it on under any other.
    """
    indexed = getattr(module, "indexer", None) is not None or getattr(module, "skip_topk", False)
    return bool(indexed) and keyword in forward_constants(module)
