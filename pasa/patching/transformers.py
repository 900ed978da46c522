"""Patch transformers models: find the attention modules, mark them, switch their configs to PASA, and undo it all.

A module reads the name of its attention from ``module.config._attn_implementation``. While any module of a config is
patched, this name is one that PASA has registered. The registered function looks for the mark: marked modules run PASA,
all others run their original attention. So one config may serve patched and unpatched modules, or two models, at once.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from pasa.patching.callbacks import BINDING
from pasa.patching.copying import PatchedName, UncopiedHook
from pasa.patching.handle import PatchHandle, PatchReport, already_patched
from pasa.patching.sdpa_calls import make_attention
from pasa.patching.transformers_attention import (
    REFUSALS,
    REGISTERED,
    RING,
    Binding,
    WrittenOutBinding,
    make_interface,
)
from pasa.patching.transformers_masks import make_mask
from pasa.patching.transformers_ring import attend_shard, check_mask
from pasa.patching.transformers_selection import is_written_out, select, unreachable, uses_interface
from pasa.patching.transformers_serving import accept_continuous_batching
from pasa.patching.written_out import follow_module

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from pasa import PasaConfig
    from pasa.patching import Policy

NAMES = {"sdpa": "pasa+fused", "eager": "pasa+eager", REGISTERED: "pasa+registered"}
"""Maps the original attention to the name that PASA registers.

The names avoid "/", which transformers takes for a hub kernel, and "flash" and "sdpa", for which it has special cases.
"""

OTHER = "pasa+other"
"""The registered name for any other original attention.

Its masks have another form, so all modules of such a model are patched, or none.
"""

EXPLICIT = "+masks"
"""Suffix of the name if modules get the masks of eager attention.

These are float masks, and they are never left out in favour of `is_causal`.
"""

if torch.__version__ < "2.13":  # torch.compile then takes strings for constants, but no subclass of str
    from torch._dynamo.utils import common_constant_types

    common_constant_types.add(PatchedName)

_OURS = frozenset({*NAMES.values(), *(name + EXPLICIT for name in (*NAMES.values(), OTHER)), OTHER, RING})
_LIVE: weakref.WeakSet[_Patch] = weakref.WeakSet()


class Settings(NamedTuple):
    """The arguments of a patch call, which a second call must repeat to get the same handle."""

    config: PasaConfig | None
    backend: str | None
    context_parallel: ProcessGroup | None


class Original(NamedTuple):
    """A transformers config, the attention that it named before the patch, and whether it needs explicit masks."""

    config: Any
    attention: str
    explicit_masks: bool


@dataclass(eq=False)
class _Patch:
    """The changes that one handle made; the patched modules keep the handle, and so this record, alive."""

    settings: Settings
    modules: dict[str, torch.nn.Module]
    originals: list[Original]
    hooks: list[torch.utils.hooks.RemovableHandle] = field(default_factory=list)
    written_out: list[Callable[[], None]] = field(default_factory=list)  # each restores one module
    handle: PatchHandle = field(init=False)

    def name(self, original: Original) -> str:
        """Return the name that PASA registers for a config whose attention was `original`."""
        if self.settings.context_parallel is not None:
            return RING
        return NAMES.get(original.attention, OTHER) + EXPLICIT * original.explicit_masks

    def apply(self) -> None:
        """Register the names, and set them in the configs."""
        accept_continuous_batching()
        for original in self.originals:
            name, explicit = self.name(original), original.explicit_masks
            attention = make_interface(original.attention, explicit)
            mask = eager_mask if explicit else make_mask
            AttentionInterface.register(name, attend_shard if name == RING else attention)
            AttentionMaskInterface.register(name, check_mask if name == RING else mask)
            # The public property would also set all sub-configs, so the internal attribute is set.
            original.config._attn_implementation_internal = PatchedName(name, original.attention)

    def removed(self) -> dict[str, str]:
        """Return the patched modules that no longer run PASA, each with what runs there instead."""
        return {
            name: replacement
            for name, module in self.modules.items()
            if (replacement := module.__dict__[BINDING].replacement(module)) is not None
        }

    def before_forward(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Warn of modules that no longer run PASA, and refuse ``output_attentions`` (forward pre-hook).

        The attention function cannot refuse it, because most models do not pass ``output_attentions`` on.
        """
        in_force = {isinstance(original.config._attn_implementation, PatchedName) for original in self.originals}
        if False in in_force and not torch.compiler.is_compiling():
            self.handle.check_removed()
        if (True in in_force or self.written_out) and kwargs.get(
            "output_attentions", getattr(model.config, "output_attentions", False)
        ):
            raise NotImplementedError(
                f"{type(model).__name__}: output_attentions=True is not supported: {REFUSALS['output_attentions']}"
            )

    def undo(self) -> None:
        """Unmark the modules; restore each config and unregister each name that no other handle uses."""
        _LIVE.discard(self)
        for restore in self.written_out:
            restore()
        for hook in self.hooks:
            hook.remove()
        for module in self.modules.values():
            module.__dict__.pop(BINDING, None)
        for config, attention, _ in self.originals:
            if config._attn_implementation in _OURS and _recorded_original(config) is None:
                config._attn_implementation_internal = attention
        used = {patch.name(original) for patch in _LIVE for original in patch.originals}
        for name in _OURS - used:
            AttentionInterface._global_mapping.pop(name, None)  # the class has no method to unregister a name
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
    in_force = _handle_in_force(selected, settings)
    if in_force is not None:
        return in_force
    originals = _original_attention(root, filter(uses_interface, selected.values()))
    record = _Patch(settings, selected, originals)
    _check_delegation(root, record)

    report = PatchReport(f"transformers: {type(root).__name__}", tuple(selected), tuple(skipped))
    record.handle = PatchHandle(report, record.undo, record.removed)
    for module in selected.values():
        kind = WrittenOutBinding if is_written_out(module) else Binding
        binding = kind(config, backend, record.handle, context_parallel)
        setattr(module, BINDING, binding)
        if is_written_out(module):
            attend = make_attention(config, backend, binding.callbacks, type(module).__name__)
            record.written_out.append(follow_module(module, attend))
    chosen = set(selected.values())
    for owner in owners:
        if not chosen.isdisjoint(owner.modules()):
            hook = UncopiedHook(record.before_forward)
            record.hooks.append(owner.register_forward_pre_hook(hook, with_kwargs=True))
    _LIVE.add(record)
    record.apply()
    return record.handle


def is_patched(module: torch.nn.Module) -> bool:
    """Return whether a handle that is in force has patched the module."""
    return any(module in record.modules.values() for record in _LIVE)


def _handle_in_force(selected: dict[str, torch.nn.Module], settings: Settings) -> PatchHandle | None:
    """Return the handle that already patches exactly these modules with these settings; None if none is patched.

    If PASA has been removed from the modules of a handle, that handle is undone here. The new patch then records the
    attention that the configs name now as the original.

    Raises
    ------
    ValueError
        Some of the modules are patched, but not all, or with other settings. Undoing two such patches would not be
        well defined.
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
        module.__dict__.pop(BINDING, None)  # left in a shallow copy when the original was unpatched
    return None


def _original_attention(root: torch.nn.Module, modules: Iterable[Any]) -> list[Original]:
    """Return each distinct config of `modules` with the attention that it had before any patch."""
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
    """Return whether the masks made from `config` must be complete, as those of eager attention are.

    A mask may be left out in favour of `module.is_causal` only in models that support SDPA, where transformers leaves
    masks out in the same cases. A module that computes attention itself adds the mask to its scores, so it needs one.
    """
    return any(not owner._supports_sdpa or any(unreachable(owner)) for owner in _owners(root, config))


def _owners(root: torch.nn.Module, config: Any) -> Iterator[PreTrainedModel]:
    """Yield the models below `root` whose config is this object."""
    return (each for each in root.modules() if isinstance(each, PreTrainedModel) and each.config is config)


def _recorded_original(config: Any) -> str | None:
    """Return the original attention of this config, as a handle in force recorded it; None if none did."""
    for record in _LIVE:
        for known in record.originals:
            if known.config is config:
                return known.attention
    return None


def _check_delegation(root: torch.nn.Module, record: _Patch) -> None:
    """Refuse a patch that cannot coexist with the modules it leaves out, or with another patch of a shared config.

    Modules left out would get the masks of the patch, although their attention may need masks of another form. And a
    config can name only one attention.

    Raises
    ------
    ValueError
        Another handle has patched a model with the same config under another name.
    NotImplementedError
        A module left out would lose its kind of mask or, with ``context_parallel``, would see only its own shard.
    """
    ring = record.settings.context_parallel is not None
    foreign = {id(each.config): each.attention for each in record.originals if ring or each.attention not in NAMES}
    for other in _LIVE:
        for new, old in itertools.product(record.originals, other.originals):
            if new.config is old.config and record.name(new) != other.name(old):
                raise ValueError(
                    f"patch_pipeline: {type(new.config).__name__} is shared with a model patched with context_parallel="
                    f"{other.settings.context_parallel!r} as {other.name(old)!r}; "
                    "call unpatch() on that handle first"
                )
    for original in record.originals if ring else ():
        for name, reason in itertools.chain.from_iterable(map(unreachable, _owners(root, original.config))):
            raise NotImplementedError(f"patch_pipeline: {name} would attend to its own shard alone: {reason}")
    for name, module in root.named_modules():
        if name in record.modules or not uses_interface(module):
            continue
        if id(module.config) in foreign:
            advice = "" if ring else " or call set_attn_implementation('sdpa') first"
            raise NotImplementedError(
                f"patch_pipeline: {name} would keep {foreign[id(module.config)]!r}, which cannot share masks with "
                f"PASA; select every module{advice}"
            )
