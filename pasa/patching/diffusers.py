"""Patch diffusers pipelines and models: replace their attention processors by PASA's, and restore them.

Almost every attention module of diffusers carries a `processor`. A patch keeps the original processor objects, and
undoing it restores the same objects. Blocks of autoencoders (Wan, Qwen-Image, HunyuanImage) call attention in their
forward instead, and get a copy of it. The transformers models of a pipeline (text and image encoders) are patched by
`pasa/patching/transformers.py`.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pasa.patching import diffusers_attention as ours
from pasa.patching.callbacks import BINDING, Callbacks
from pasa.patching.copying import Uncopied, UncopiedHook, copies_as
from pasa.patching.diffusers_attention import KINDS
from pasa.patching.diffusers_selection import (
    Modules,
    components_of,
    join,
    named,
    select_encoders,
    select_modules,
)
from pasa.patching.handle import PatchHandle, PatchReport, already_patched, nothing_to_patch

if TYPE_CHECKING:
    from pasa import PasaConfig
    from pasa.patching import Policy

_LIVE: weakref.WeakSet[_Patch] = weakref.WeakSet()


class Settings(NamedTuple):
    """The arguments of a patch call, which a second call must repeat to get the same handle."""

    config: PasaConfig | None
    backend: str | None


@dataclass(eq=False)
class _Patch:
    """The changes that one handle made; the processors of the patched modules keep this record alive."""

    settings: Settings
    modules: Modules  # of all components, also of transformers models
    names: dict[torch.nn.Module, str]  # of the modules with a processor
    processors: dict[torch.nn.Module, Any] = field(default_factory=dict)  # PASA's processors
    encoders: dict[str, PatchHandle] = field(default_factory=dict)
    seen: dict[str, str] = field(default_factory=dict)  # modules whose last call ran without PASA, with the reason
    handle: PatchHandle = field(init=False)

    def removed(self) -> dict[str, str]:
        """Return the patched modules that no longer run PASA, each with what runs there instead."""
        removed = dict(self.seen)
        for module, processor in self.processors.items():
            if not _in_place(module, processor):
                removed[self.names[module]] = _replacement(module, processor)
        for component, encoder in self.encoders.items():
            removed |= {join(component, name): reason for name, reason in encoder.find_removed().items()}
        return removed

    def before_forward(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """Note the module, and warn, when a call begins with another processor than PASA's (forward pre-hook).

        A later call that begins with PASA's processor deletes the note.
        """
        if torch.compiler.is_compiling():
            return
        processor, name = self.processors[module], self.names[module]
        if _in_place(module, processor):
            self.seen.pop(name, None)
        else:
            self.seen[name] = "in its last call, " + _replacement(module, processor)
            self.handle.check_removed()


@dataclass(eq=False)
class Binding:
    """The mark on a processor of PASA: the processor that it replaced, the patch record and the callbacks."""

    original: Any
    patch: _Patch
    callbacks: Callbacks

    def replacement(self, module: Any) -> str | None:
        """Return what the module runs instead of PASA; None if it runs PASA."""
        return None if _in_place(module, module.processor) else _replacement(module, module.processor)


@dataclass(eq=False)
class ModuleBinding(Uncopied):
    """The mark on a patched module without a processor; nothing but the handle can remove the patch."""

    patch: _Patch
    callbacks: Callbacks

    @staticmethod
    def replacement(module: Any) -> str | None:
        """Return None, because the module runs PASA until the patch is undone."""
        return None


def patch(root: Any, *, policy: Policy, config: PasaConfig | None, backend: str | None) -> PatchHandle:
    """Patch every attention module of a pipeline or model that `policy` selects; see :func:`pasa.patch_pipeline`."""
    components = components_of(root)
    selected, skipped = select_modules(components, policy, backend)
    encoders, left = select_encoders(components, policy)
    chosen = selected | {name: module for modules in encoders.values() for name, module in modules.items()}
    skipped += left
    settings = Settings(config, backend)
    in_force = _handle_in_force(chosen, settings)
    if in_force is not None:
        return in_force
    if not chosen:
        raise nothing_to_patch(root, skipped)
    _refuse_patched_encoders(encoders)
    record = _Patch(settings, chosen, {module: name for name, module in selected.items()})
    with ExitStack() as undo:
        undo.callback(_LIVE.discard, record)
        for name in encoders:
            record.encoders[name] = _patch_encoder(components[name], name, policy, config, backend, undo)
        _swap(selected, record, undo)
        report = PatchReport(f"diffusers: {type(root).__name__}", tuple(chosen), tuple(skipped))
        record.handle = PatchHandle(report, undo.pop_all().close, record.removed)
    _LIVE.add(record)
    return record.handle


def _handle_in_force(chosen: Modules, settings: Settings) -> PatchHandle | None:
    """Return the handle that already patches exactly these modules this way; None if none is patched.

    Raises
    ------
    ValueError
        Some of the modules are patched, but not all, or with other settings; or a patched module has been given
        another processor, backend or attention since.
    """
    modules = frozenset(chosen.values())
    for record in list(_LIVE):
        if modules.isdisjoint(record.modules.values()):
            continue
        if modules != set(record.modules.values()) or settings != record.settings:
            raise already_patched(record.modules, record.settings._asdict(), chosen, settings._asdict())
        for name, module in chosen.items():
            if module in record.processors and not _in_place(module, record.processors[module]):
                raise ValueError(
                    f"patch_pipeline: {name} was given another processor or backend after it was patched; "
                    "call unpatch() on that handle first"
                )
        for component, encoder in record.encoders.items():
            for name, reason in encoder.find_removed().items():
                raise ValueError(
                    f"patch_pipeline: {join(component, name)} was patched, and {reason}; "
                    "call unpatch() on that handle first"
                )
        return record.handle
    for module in modules:
        _take_back(module)
    return None


def _in_place(module: Any, processor: Any) -> bool:
    """Return whether the module still has PASA's processor and, if dispatched, still asks for PASA's attention."""
    return module.processor is processor and not (
        ours.uses_dispatcher(processor) and not ours.is_registered(processor._attention_backend)
    )


METHODS = {
    "Fused": "fuse_qkv_projections",
    "PAG": "the pipeline's perturbed attention guidance",
    "Sliced": "set_attention_slice or enable_attention_slicing",
    "XFormers": "enable_xformers_memory_efficient_attention",
}
"""Maps the start of a processor's class name to the diffusers method that sets such processors."""


def _replacement(module: Any, processor: Any) -> str:
    """Return what a patched module runs instead of PASA's processor, with the diffusers method that sets it."""
    if module.processor is processor:
        backend = getattr(processor._attention_backend, "value", processor._attention_backend)
        return f"it asks for the attention backend {backend!r} (set_attention_backend or reset_attention_backend)"
    kind = type(module.processor).__name__
    method = next((each for start, each in METHODS.items() if kind.startswith(start)), "set_attn_processor")
    return f"{kind} took its place ({method})"


def _take_back(module: Any) -> None:
    """Restore a module's original processor where PASA's came back after the patch was undone.

    That happens when the caller had saved PASA's processors and sets them again, as `unfuse_qkv_projections` does.
    """
    binding = vars(getattr(module, "processor", object)).get(BINDING)
    if binding is not None:
        _set(module, binding.original)


def _refuse_patched_encoders(encoders: dict[str, Modules]) -> None:
    """Refuse encoders that have a patch of their own, because undoing this patch would undo that one too."""
    for component, modules in encoders.items():
        from pasa.patching import transformers as host

        if any(map(host.is_patched, modules.values())):
            raise ValueError(f"patch_pipeline: {component} is already patched; call unpatch() on that handle first")


def _patch_encoder(
    component: torch.nn.Module,
    name: str,
    policy: Policy,
    config: PasaConfig | None,
    backend: str | None,
    undo: ExitStack,
) -> PatchHandle:
    from pasa.patching import transformers as host

    handle = host.patch(component, policy=named(name, policy), config=config, backend=backend)
    undo.callback(handle.unpatch)
    return handle


def _swap(selected: Modules, record: _Patch, undo: ExitStack) -> None:
    """Give every module a processor of PASA, and register with `undo` how to restore the original."""
    for module in selected.values():
        attention: Any = module
        callbacks = Callbacks()
        if not hasattr(attention, "processor"):
            ours.redirect_module(attention, *record.settings, callbacks)
            setattr(attention, BINDING, ModuleBinding(record, callbacks))
            undo.callback(_restore_module, attention)
            continue
        original = attention.processor
        if ours.uses_dispatcher(original):
            member = ours.register_backend(*record.settings, callbacks)
            undo.callback(ours.unregister_backend, member)
            processor = ours.dispatched_processor(original, member)
        elif type(original).__name__ not in KINDS:
            processor = ours.redirected_processor(original, *record.settings, callbacks)
        else:
            processor = ours.PasaAttnProcessor(KINDS[type(original).__name__], *record.settings, callbacks)
        record.processors[module] = processor
        setattr(processor, BINDING, Binding(original, record, callbacks))
        processor.__reduce_ex__ = copies_as(original)  # copy and pickle look this method up on the instance
        undo.callback(partial(_restore, attention, processor, original))
        undo.callback(attention.register_forward_pre_hook(UncopiedHook(record.before_forward)).remove)
        _set(attention, processor)


def _restore(attention: Any, processor: Any, original: Any) -> None:
    """Restore the original processor, unless another one has replaced PASA's meanwhile."""
    if attention.processor is processor:
        _set(attention, original)


def _restore_module(attention: Any) -> None:
    """Restore a module without a processor."""
    del attention.__dict__[BINDING]
    ours.restore_module(attention)


def _set(attention: Any, processor: Any) -> None:
    """Set a module's processor, by its own method if it has one."""
    if hasattr(attention, "set_processor"):
        attention.set_processor(processor)
    else:
        attention.processor = processor
