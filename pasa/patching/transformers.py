"""transformers models: find the attention modules, bind PASA to them, switch their configs, and undo all of it.

A module reads the name of its attention from ``module.config._attn_implementation``. While any module of a config is
patched, that name is one of ours, and the function registered under it looks at the module: bound modules run PASA,
all others run what they had. So one config may serve patched and unpatched modules, or two models, at once.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from pasa.patching.copying import PatchedName, UncopiedHook
from pasa.patching.handle import PatchHandle, PatchReport, already_patched
from pasa.patching.onlookers import BINDING
from pasa.patching.transformers_attention import REFUSALS, Binding, make_interface
from pasa.patching.transformers_masks import make_mask
from pasa.patching.transformers_ring import attend_shard, check_mask
from pasa.patching.transformers_selection import INDICES, has_indexer, select, unreachable, uses_interface

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from pasa import PasaConfig
    from pasa.patching import Policy

NAMES = {"sdpa": "pasa", "eager": "pasa+eager"}
"""Original attention -> the name registered over it. No "/" (a hub kernel), no "flash" or "sdpa" (read as such)."""

OTHER = "pasa+other"
"""Registered over any other original; it can be patched as a whole, not module by module (masks of another form)."""

RING = "pasa+ring"
"""Registered over any original where a process group shares the sequence; patched as a whole too."""

EXPLICIT = "+masks"
"""Ends the name where modules are given the masks of eager attention, which are float and never left to causality."""

_OURS = frozenset({*NAMES.values(), *(name + EXPLICIT for name in (*NAMES.values(), OTHER)), OTHER, RING})
_LIVE: weakref.WeakSet[_Patch] = weakref.WeakSet()


class Settings(NamedTuple):
    """What a patch was asked for."""

    config: PasaConfig | None
    backend: str | None
    context_parallel: ProcessGroup | None


class Original(NamedTuple):
    """A transformers config, and the attention it named before PASA."""

    config: Any
    attention: str
    explicit_masks: bool


@dataclass(eq=False)
class _Patch:
    """What one handle changed; alive as long as the patched modules are, which hold the handle that holds it."""

    settings: Settings
    modules: dict[str, torch.nn.Module]
    originals: list[Original]
    hooks: list[torch.utils.hooks.RemovableHandle] = field(default_factory=list)
    handle: PatchHandle = field(init=False)

    def name(self, original: Original) -> str:
        """Return the name registered over `original`."""
        if self.settings.context_parallel is not None:
            return RING
        return NAMES.get(original.attention, OTHER) + EXPLICIT * original.explicit_masks

    def apply(self) -> None:
        """Register the names and point the configs at them."""
        for original in self.originals:
            name, explicit = self.name(original), original.explicit_masks
            own_attention = make_interface(original.attention, explicit)
            own_mask = eager_mask if explicit else make_mask
            AttentionInterface.register(name, attend_shard if name == RING else own_attention)
            AttentionMaskInterface.register(name, check_mask if name == RING else own_mask)
            # The property would also set all sub-configs.
            original.config._attn_implementation_internal = PatchedName(name, original.attention)

    def removed(self) -> dict[str, str]:
        """Return the patched modules that no longer run PASA, each with what runs there instead."""
        return {
            name: replacement
            for name, module in self.modules.items()
            if (replacement := Binding.replacement(module)) is not None
        }

    def before_forward(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook: warn of what was removed, and refuse attention weights.

        Most models never tell the attention function that its weights are wanted.
        """
        in_force = {own.config._attn_implementation in _OURS for own in self.originals}
        if False in in_force and not torch.compiler.is_compiling():
            self.handle.check_removed()
        if True in in_force and kwargs.get("output_attentions", getattr(model.config, "output_attentions", False)):
            raise NotImplementedError(
                f"{type(model).__name__}: output_attentions=True is not supported: {REFUSALS['output_attentions']}"
            )

    def undo(self) -> None:
        """Unbind the modules; restore each config, and drop each name, that no other handle uses."""
        _LIVE.discard(self)
        for hook in self.hooks:
            hook.remove()
        for module in self.modules.values():
            module.__dict__.pop(BINDING, None)
        for config, attention, _ in self.originals:
            if config._attn_implementation in _OURS and _recorded_original(config) is None:
                config._attn_implementation_internal = attention
        used = {patch.name(original) for patch in _LIVE for original in patch.originals}
        for name in _OURS - used:
            AttentionInterface._global_mapping.pop(name, None)  # the class offers no way to unregister
            AttentionMaskInterface._global_mapping.pop(name, None)


def patch(
    root: torch.nn.Module,
    *,
    policy: Policy,
    config: PasaConfig | None,
    backend: str | None,
    context_parallel: ProcessGroup | None = None,
) -> PatchHandle:
    """Patch every attention module below `root` that `policy` selects; see :func:`pasa.patch_pipeline`."""
    owners, selected, skipped = select(root, policy)
    settings = Settings(config, backend, context_parallel)
    found = _handle_in_force(selected, settings)
    if found is not None:
        return found
    originals = _original_attention(root, selected.values())
    record = _Patch(settings, selected, originals)
    _check_delegation(root, record)

    report = PatchReport(f"transformers: {type(root).__name__}", tuple(selected), tuple(skipped))
    record.handle = PatchHandle(report, record.undo, record.removed)
    for module in selected.values():
        setattr(module, BINDING, Binding(config, backend, record.handle, context_parallel))
    chosen = set(selected.values())
    for owner in owners:
        if not chosen.isdisjoint(owner.modules()):
            hook = UncopiedHook(record.before_forward)
            record.hooks.append(owner.register_forward_pre_hook(hook, with_kwargs=True))
    _LIVE.add(record)
    record.apply()
    return record.handle


def is_patched(module: torch.nn.Module) -> bool:
    """Tell whether a handle that is in force has patched the module."""
    return any(module in record.modules.values() for record in _LIVE)


def _handle_in_force(selected: dict[str, torch.nn.Module], settings: Settings) -> PatchHandle | None:
    """Return the handle that already patches exactly these modules this way; None where none is patched.

    A handle from whose modules PASA was taken out is undone: what the configs name now is to be restored later.

    Raises
    ------
    ValueError
        Some are patched, but not all, or with other settings: undoing would no longer be well defined.
    """
    modules = set(selected.values())
    for record in list(_LIVE):
        if modules.isdisjoint(record.modules.values()):
            continue
        same = modules == set(record.modules.values()) and settings == record.settings
        removed = record.removed()
        if len(removed) == len(record.modules) or (same and removed):
            record.handle.unpatch()
        elif same:
            return record.handle
        else:
            raise already_patched(record.modules, record.settings._asdict(), selected, settings._asdict())
    for module in modules:
        module.__dict__.pop(BINDING, None)  # of a shallow copy, whose patch was undone on the original
    return None


def _original_attention(root: torch.nn.Module, modules: Iterable[Any]) -> list[Original]:
    """Return each distinct config of `modules` with the attention it had before any handle touched it."""
    originals = []
    for config in {id(module.config): module.config for module in modules}.values():
        attention = config._attn_implementation
        if attention in _OURS:
            attention = _recorded_original(config)
        if attention is None:
            raise ValueError(
                f"patch_pipeline: {type(config).__name__} comes from a patched model; "
                "call set_attn_implementation first"
            )
        originals.append(Original(config, attention, attention != "sdpa" and _needs_explicit_masks(root, config)))
    return originals


def _needs_explicit_masks(root: torch.nn.Module, config: Any) -> bool:
    """Tell whether the masks made from `config` must say all, as those of eager attention do.

    A mask may be left to `module.is_causal` only where SDPA could run, whose masks are left out in the same cases. And
    a module that computes attention itself adds the mask to its scores.
    """
    return any(not owner._supports_sdpa or any(unreachable(owner)) for owner in _owners(root, config))


def _owners(root: torch.nn.Module, config: Any) -> Iterator[PreTrainedModel]:
    """Yield the models below `root` that have this very config."""
    return (each for each in root.modules() if isinstance(each, PreTrainedModel) and each.config is config)


def _recorded_original(config: Any) -> str | None:
    """Return what a live handle recorded as this config's own attention."""
    for record in _LIVE:
        for known in record.originals:
            if known.config is config:
                return known.attention
    return None


def _check_delegation(root: torch.nn.Module, record: _Patch) -> None:
    """Refuse to leave modules out where their own attention wants masks of another form than the patch's, and to share
    a config with a patch of another name."""
    ring = record.settings.context_parallel is not None
    foreign = {id(own.config): own.attention for own in record.originals if ring or own.attention not in NAMES}
    for other in _LIVE:
        for own, theirs in itertools.product(record.originals, other.originals):
            if own.config is theirs.config and record.name(own) != other.name(theirs):
                raise ValueError(
                    f"patch_pipeline: {type(own.config).__name__} is shared with a model patched with context_parallel="
                    f"{other.settings.context_parallel!r} as {other.name(theirs)!r}; "
                    "call unpatch() on that handle first"
                )
    for own in record.originals if ring else ():
        for name, reason in itertools.chain.from_iterable(map(unreachable, _owners(root, own.config))):
            raise NotImplementedError(f"patch_pipeline: {name} would attend to its own shard alone: {reason}")
    patched = {id(own.config) for own in record.originals}
    for name, module in root.named_modules():
        if name in record.modules or not uses_interface(module):
            continue
        if id(module.config) in patched and any(has_indexer(module, keyword) for keyword in INDICES):
            raise NotImplementedError(
                f"patch_pipeline: {name} ({type(module).__name__}) would lose its sparse selection of keys beside "
                "PASA in one model; leave out every module of this model"
            )
        if id(module.config) in foreign:
            advice = "" if ring else " or call set_attn_implementation('sdpa') first"
            raise NotImplementedError(
                f"patch_pipeline: {name} would keep {foreign[id(module.config)]!r}, which cannot share masks with "
                f"PASA; select every module{advice}"
            )
