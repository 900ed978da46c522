"""Select the attention modules of a diffusers pipeline or model that PASA can patch, with reasons for the others."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models import attention_processor
from diffusers.models.attention_processor import Attention

from pasa.ops.backends import Backend
from pasa.ops.registry import BACKENDS
from pasa.patching import diffusers_attention as ours
from pasa.patching.callbacks import BINDING
from pasa.patching.diffusers_attention import KINDS
from pasa.patching.versions import check_transformers

if TYPE_CHECKING:
    from pasa.patching import Policy

Pairs = list[tuple[str, str]]
Modules = dict[str, torch.nn.Module]


def components_of(root: Any) -> Modules:
    """Return the models of a pipeline by name, each once; a single model has the name ""."""
    if isinstance(root, torch.nn.Module):
        return {"": root}
    parts: dict[str, Any] = getattr(root, "components", {})  # of classic and modular pipelines
    names = {id(part): name for name, part in reversed(parts.items()) if isinstance(part, torch.nn.Module)}
    if not names:
        raise TypeError(f"patch_pipeline: {type(root).__name__} holds no model: pass a pipeline or one of its models")
    return {name: part for name, part in parts.items() if names.get(id(part)) == name}


def _plain(component: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside a compiled one, or the model itself."""
    plain: torch.nn.Module = getattr(component, "_orig_mod", component)
    return plain


def _is_transformers(component: torch.nn.Module) -> bool:
    """Return whether this is a transformers model; transformers is not imported."""
    return any(base.__module__.startswith("transformers.") for base in type(_plain(component)).__mro__)


def select_modules(components: Modules, policy: Policy, backend: str | None) -> tuple[Modules, Pairs]:
    """Return the attention modules of the diffusers models to patch, and the (name, reason) pairs of the others."""
    selected: Modules = {}
    skipped: Pairs = []
    for name, component in components.items():
        if not _is_transformers(component):
            chosen, left = _select(name, component, policy, backend)
            selected |= chosen
            skipped += left
    return selected, skipped


def select_encoders(components: Modules, policy: Policy) -> tuple[dict[str, Modules], Pairs]:
    """Return the attention modules of the text and image encoders by component, and (name, reason) pairs of the others.

    An encoder that cannot be patched as a whole is skipped as a whole.
    """
    encoders: dict[str, Modules] = {}
    skipped: Pairs = []
    for name, component in components.items():
        if not _is_transformers(component):
            continue
        check_transformers()
        from pasa.patching.transformers_selection import select  # imports the library, so only for its models

        try:
            _, chosen, left = select(component, named(name, policy))
        except NotImplementedError as error:
            skipped.append((name, str(error).removeprefix("patch_pipeline: ")))
            continue
        encoders[name] = {join(name, path): module for path, module in chosen.items()}
        skipped += [(join(name, path), reason) for path, reason in left]
    return encoders, skipped


def named(component: str, policy: Policy) -> Callable[[str, torch.nn.Module], bool]:
    """Return a policy for one component that asks `policy` with the module's name in the whole pipeline."""
    return lambda path, module: policy(join(component, path), module) if callable(policy) else True


def _select(
    component_name: str, component: torch.nn.Module, policy: Policy, backend: str | None
) -> tuple[Modules, Pairs]:
    """Split a model's attention modules into those to patch and those to leave, with the reason.

    Raises
    ------
    NotImplementedError
        The model has processors, and PASA can replace none of them. An autoencoder is skipped instead, because its
        attention, if it has any, is not the reason to patch a pipeline.
    """
    selected: Modules = {}
    skipped: Pairs = []
    foreign: Pairs = []
    with_processor = 0
    for path, module in component.named_modules():
        name = join(component_name, path)
        processor = getattr(module, "processor", None)
        if processor is None:
            if not _attends_itself(module):
                continue
            if not ours.calls_sdpa_itself(module):
                skipped.append((name, f"{type(module).__name__} computes its attention itself, without a processor"))
                continue
        else:
            with_processor += 1
        if callable(policy) and not policy(name, module):
            skipped.append((name, "declined by the policy"))
        elif processor is not None and (reason := _unknown(module, component)):
            foreign.append((name, reason))
        elif too_wide := _too_wide(module, backend):
            skipped.append((name, too_wide))
        else:
            selected[name] = module
    model = type(_plain(component))
    is_autoencoder = model.__module__.startswith("diffusers.models.autoencoders")
    if foreign and len(foreign) == with_processor and not is_autoencoder:
        name, reason = foreign[0]
        raise NotImplementedError(
            f"patch_pipeline: {model.__name__} is not supported: {reason} ({name}, as all of its attention); "
            "leave it out with policy=lambda name, module: ..."
        )
    return selected, skipped + foreign


def join(component: str, path: str) -> str:
    """Return the name of a module in a pipeline; a single model has no component name."""
    return ".".join(part for part in (component, path) if part)


def _unknown(module: torch.nn.Module, component: torch.nn.Module) -> str | None:
    """Return why PASA cannot replace the module's processor; None if it can."""
    processor: Any = module.processor
    name = type(processor).__name__  # a class of another package may have the same name
    reason = f"PASA cannot take the place of {name}"
    if isinstance(processor, torch.nn.Module):
        return reason  # a processor of an adapter, with its own weights
    if BINDING in vars(processor):
        return None
    if ours.uses_dispatcher(processor):
        if ours.needs_flex(processor):
            return f"{reason}, which needs the attention backend 'flex' for its block masks"
        if getattr(getattr(_plain(component), "config", None), "attention_type", None) == "nabla":
            return f"{reason} where attention_type='nabla': its block masks need the attention backend 'flex'"
        return None
    if name in KINDS:
        genuine = getattr(attention_processor, name, None) is type(processor)
        return None if isinstance(module, Attention) and genuine else reason
    if ours.calls_sdpa(processor):
        return None
    return f"{reason}, which calls neither diffusers' dispatcher nor scaled_dot_product_attention"


def _attends_itself(module: torch.nn.Module) -> bool:
    """Return whether a module without a processor computes attention, by its class name; containers do not count."""
    return _named_attention(module) and not any(
        _named_attention(child) or hasattr(child, "processor") for child in module.modules() if child is not module
    )


def _named_attention(module: torch.nn.Module) -> bool:
    return re.search(r"Attention(Block)?$|Attn(Block)?$", type(module).__name__) is not None


def _too_wide(module: torch.nn.Module, backend: str | None) -> str | None:
    """Return why the head dimension is too large for the backend, or for all backends if none is named.

    None if the head dimension fits or is unknown.
    """
    width = _head_dim(module)
    candidates = [each for each in BACKENDS.values() if backend in (None, each.name)]
    if width is None or not candidates or any(_serves(each, width) for each in candidates):
        return None
    return f"head dim {width} is more than {max(each.head_dims[1] for each in candidates)}, the most of " + (
        f"backend {backend!r}" if backend else "any backend"
    )


def _serves(backend: Backend, width: int) -> bool:
    return backend.head_dims[0] <= width <= backend.head_dims[1]


def _head_dim(module: Any) -> int | None:
    """Return the head dimension of a classic module or of one without a processor, and None for other modules.

    Modules of dispatched models have no common attribute for it, and their head dimensions are below 256. Modules
    without a processor are those of autoencoders, with a single head.
    """
    width: int | None = None
    if isinstance(module, Attention):
        width = module.inner_dim // module.heads
    elif not hasattr(module, "processor"):
        width = getattr(module, "dim", None) or getattr(module, "in_channels", None)
    return width
