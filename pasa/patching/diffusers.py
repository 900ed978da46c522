"""diffusers pipelines and models: put PASA's processors in the place of the model's own, and put those back.

Every attention module that diffusers lets one replace carries a `processor`. A patch keeps the processor objects it
found and gives back the very same ones. The transformers models of a pipeline (text and image encoders) go through
the transformers host.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.attention_processor import Attention

from pasa.ops.registry import BACKENDS, Backend
from pasa.patching import diffusers_attention as ours
from pasa.patching.diffusers_attention import BINDING, KINDS
from pasa.patching.handle import PatchHandle, PatchReport

if TYPE_CHECKING:
    from pasa import PasaConfig
    from pasa.patching import Policy

Pairs = list[tuple[str, str]]


@dataclass(eq=False)
class Binding:
    """By what a processor of ours knows the module it was made for, and the patch that made it."""

    module: int  # id(): that of a copied module differs
    modules: frozenset[int]
    settings: tuple[PasaConfig | None, str | None]
    handle: PatchHandle | None = None


def patch(root: Any, *, policy: Policy, config: PasaConfig | None, backend: str | None) -> PatchHandle:
    """Patch every attention module of a pipeline or model that `policy` selects; see :func:`pasa.patch_pipeline`."""
    components = _components(root)
    selected: dict[str, torch.nn.Module] = {}
    skipped: Pairs = []
    for name, component in components.items():
        if not _is_transformers(component):
            chosen, left = _select(name, component, policy, backend)
            selected |= chosen
            skipped += left
    found = _handle_in_force(selected, (config, backend))
    if found is not None:
        return found
    with ExitStack() as undo:
        patched = list(selected)
        for name, component in components.items():
            if _is_transformers(component):
                done, left = _patch_transformers(name, component, policy, config, backend, undo)
                patched += done
                skipped += left
        if not patched:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped[:3]) or "no attention module found"
            raise NotImplementedError(f"patch_pipeline: nothing to patch in {type(root).__name__} ({reasons})")
        bindings = _swap(selected, (config, backend), undo)
        notes = [(name, note) for name, module in selected.items() if (note := _width_note(module))]
        report = PatchReport(f"diffusers: {type(root).__name__}", tuple(patched), tuple(skipped), tuple(notes))
        handle = PatchHandle(report, undo.pop_all().close)
    for binding in bindings:
        binding.handle = handle
    return handle


def _components(root: Any) -> dict[str, torch.nn.Module]:
    """The models of a pipeline by name; a model alone has no name."""
    if isinstance(root, torch.nn.Module):
        return {"": root}
    parts: dict[str, Any] = getattr(root, "components", {})  # of classic and modular pipelines
    found = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}
    if not found:
        raise TypeError(f"patch_pipeline: {type(root).__name__} holds no model")
    return found


def _is_transformers(component: torch.nn.Module) -> bool:
    """Tell a transformers model without importing transformers."""
    modules = (component, getattr(component, "_orig_mod", component))  # the second: compiled
    return any(base.__module__.startswith("transformers.") for part in modules for base in type(part).__mro__)


def _select(
    component_name: str, component: torch.nn.Module, policy: Policy, backend: str | None
) -> tuple[dict[str, torch.nn.Module], Pairs]:
    """Split a model's attention modules into those to patch and those to leave, with the reason.

    Raises
    ------
    NotImplementedError
        The model has processors, and PASA can stand in for none of them. An autoencoder is skipped instead: its
        attention, where it has any, is not what a pipeline is patched for.
    """
    selected: dict[str, torch.nn.Module] = {}
    skipped: Pairs = []
    foreign: Pairs = []
    with_processor = 0
    for path, module in component.named_modules():
        name = _join(component_name, path)
        processor = getattr(module, "processor", None)
        if processor is None:
            if _attends_itself(module):
                skipped.append((name, f"{type(module).__name__} computes its attention itself, without a processor"))
            continue
        with_processor += 1
        if callable(policy) and not policy(name, module):
            skipped.append((name, "declined by the policy"))
        elif not _known(module):
            foreign.append((name, f"PASA cannot take the place of {type(processor).__name__}"))
        elif too_wide := _too_wide(module, backend):
            skipped.append((name, too_wide))
        else:
            selected[name] = module
    is_autoencoder = type(component).__module__.startswith("diffusers.models.autoencoders")
    if foreign and len(foreign) == with_processor and not is_autoencoder:
        name, reason = foreign[0]
        raise NotImplementedError(
            f"patch_pipeline: {type(component).__name__} is not supported: {reason} ({name}, as all of its attention); "
            "leave it out with policy=lambda name, module: ..."
        )
    return selected, skipped + foreign


def _join(component: str, path: str) -> str:
    return ".".join(part for part in (component, path) if part)


def _known(module: torch.nn.Module) -> bool:
    """Tell whether PASA can stand in for the module's processor."""
    processor: Any = module.processor
    if isinstance(processor, torch.nn.Module):
        return False  # an adapter's, with weights of its own
    if BINDING in vars(processor) or ours.uses_dispatcher(processor):
        return True
    return isinstance(module, Attention) and type(processor).__name__ in KINDS


def _attends_itself(module: torch.nn.Module) -> bool:
    """Tell attention without a processor by its class name; blocks that hold other attention are not meant."""
    return _named_attention(module) and not any(
        _named_attention(child) or hasattr(child, "processor") for child in module.modules() if child is not module
    )


def _named_attention(module: torch.nn.Module) -> bool:
    return re.search(r"Attention(Block)?$|Attn(Block)?$", type(module).__name__) is not None


def _too_wide(module: torch.nn.Module, backend: str | None) -> str | None:
    """Why the backend asked for cannot serve the module's head dimension; None where it can, or none was asked for."""
    width = _head_dim(module)
    candidates = [each for each in BACKENDS.values() if backend in (None, each.name)]
    if width is None or not candidates or any(_serves(each, width) for each in candidates):
        return None
    return f"head dim {width} is more than {max(each.head_dims[1] for each in candidates)}, the most of " + (
        f"backend {backend!r}" if backend else "any backend"
    )


def _width_note(module: torch.nn.Module) -> str | None:
    """A remark on a head dimension that one backend alone can serve."""
    width = _head_dim(module)
    able = [] if width is None else [each for each in BACKENDS.values() if _serves(each, width)]
    return f"head dim {width}: only backend {able[0].name!r} serves it; it {able[0].label}" if len(able) == 1 else None


def _serves(backend: Backend, width: int) -> bool:
    return backend.head_dims[0] <= width <= backend.head_dims[1]


def _head_dim(module: Any) -> int | None:
    """Head dimension of a classic module; those of dispatched models differ in how they say it, and are below 256."""
    return module.inner_kv_dim // module.heads if isinstance(module, Attention) else None


def _handle_in_force(
    selected: dict[str, torch.nn.Module], settings: tuple[PasaConfig | None, str | None]
) -> PatchHandle | None:
    """Return the handle that already patches exactly these modules this way; None where none is patched.

    Raises
    ------
    ValueError
        Some are patched, but not all, or with other settings; or the model is a copy of a patched one.
    """
    bindings = {name: vars(module.processor)[BINDING] for name, module in selected.items() if _is_bound(module)}
    if not bindings:
        return None
    for name, binding in bindings.items():
        if binding.module != id(selected[name]):
            raise ValueError(f"patch_pipeline: {name} was copied from a patched model; patch the original or reload it")
    modules = frozenset(map(id, selected.values()))
    first: Binding = next(iter(bindings.values()))
    if len(bindings) == len(selected) and first.modules == modules and first.settings == settings:
        return first.handle
    raise ValueError(
        f"patch_pipeline: already patched with config={first.settings[0]!r}, backend={first.settings[1]!r} "
        f"on {len(first.modules)} modules; call unpatch() on that handle first"
    )


def _is_bound(module: Any) -> bool:
    return BINDING in vars(module.processor)


def _swap(
    selected: dict[str, torch.nn.Module], settings: tuple[PasaConfig | None, str | None], undo: ExitStack
) -> list[Binding]:
    """Give every module a processor of ours, and tell `undo` how to give it back its own."""
    modules = frozenset(map(id, selected.values()))
    member = None
    bindings = []
    for module in selected.values():
        attention: Any = module
        original = attention.processor
        if ours.uses_dispatcher(original):
            if member is None:
                member = ours.register_backend(*settings)
                undo.callback(ours.unregister_backend, member)
            processor = ours.dispatched_processor(original, member)
        else:
            processor = ours.PasaAttnProcessor(KINDS[type(original).__name__], *settings)
        bindings.append(Binding(id(module), modules, settings))
        setattr(processor, BINDING, bindings[-1])
        undo.callback(_restore, attention, processor, original)
        attention.set_processor(processor)
    return bindings


def _restore(attention: Any, processor: Any, original: Any) -> None:
    """Put the original object back, unless somebody has put another one in the place of ours."""
    if attention.processor is processor:
        attention.set_processor(original)


def _patch_transformers(
    component_name: str,
    component: torch.nn.Module,
    policy: Policy,
    config: PasaConfig | None,
    backend: str | None,
    undo: ExitStack,
) -> tuple[list[str], Pairs]:
    """Patch a text or image encoder; one that cannot be patched keeps its attention, and the report says why."""
    from pasa.patching import transformers as host

    def named(path: str, module: torch.nn.Module) -> bool:
        return policy(_join(component_name, path), module) if callable(policy) else True

    try:
        handle = host.patch(component, policy=named, config=config, backend=backend)
    except NotImplementedError as error:
        return [], [(component_name, str(error).removeprefix("patch_pipeline: "))]
    undo.callback(handle.unpatch)
    report = handle.report()
    skipped = [(_join(component_name, name), reason) for name, reason in report.skipped]
    return [_join(component_name, name) for name in report.patched], skipped
