"""The attention function that a patch registers with transformers, and its handling of masks and keywords.

transformers 5 looks up ``fn(module, query, key, value, attention_mask, **kwargs)`` in a registry, and the function that
builds the mask in a second registry. Two rules follow from its sources:

* a name without an entry in the *second* registry gets ``attention_mask=None`` for every input, padded or not;
* whatever a model needs beyond q, k, v arrives as a keyword. Each keyword is honoured here or refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import pasa
from pasa.patching.callbacks import BINDING, Callbacks
from pasa.patching.copying import Uncopied
from pasa.patching.transformers_masks import (
    chosen_keys,
    implied_limits,
    separate_sequences,
    with_bias,
    without_lowest,
)
from pasa.patching.transformers_packed import PACKED, attend_packed, is_packed
from pasa.scaled_dot_product import autocast_inputs, equal_widths

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from pasa import PasaConfig
    from pasa.patching.handle import PatchHandle

Interface = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

INFORMATIVE = frozenset(
    {
        "cache_position",  # already used for the cache update and the mask
        "deterministic",  # asks a flash kernel for a deterministic backward pass
        "grid_thw",  # image sizes, for layers other than attention
        "input_ids",  # for layers other than attention that look up tokens
        "labels",
        "logits_to_keep",
        "max_length_k",  # sizes the launch of a flash kernel
        "max_length_q",
        "mm_token_type_ids",  # already in the mask
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",  # already in q and k
        "position_ids",  # already in q, k and, when packed, in the mask
        "return_dict",
        "seq_idx",  # separates packed sequences for state-space layers
        "shift_labels",
        "token_type_ids",  # already in the mask
        "use_cache",
    }
)
"""Keywords that models pass to the attention function although they do not change its result."""

REFUSALS = {
    "head_mask": "a per-head mask on the attention weights is not supported; leave it out",
    "cache": "this transformers leaves the paged cache of continuous batching to the attention; install 5.24 or newer",
    "output_attentions": "attention weights are never formed, so they cannot be returned",
}
"""Keywords that change the result and are not supported, with the reason. All other keywords are refused as unknown."""


PREFIX = "pasa+"
"""Every attention name that a patch registers starts with this."""

REGISTERED = "pasa"
"""The attention name that `pasa.register` registers. It belongs to no handle."""

RING = "pasa+ring"
"""The registered name when a process group shares the sequence; then all modules are patched, or none."""


@dataclass(frozen=True)
class Binding(Uncopied):
    """The mark on a patched module: the settings that it runs with, and the handle that undoes the patch."""

    config: PasaConfig | None
    backend: str | None
    handle: PatchHandle | None
    context_parallel: ProcessGroup | None = None
    callbacks: Callbacks = field(default_factory=Callbacks)

    @staticmethod
    def replacement(module: Any) -> str | None:
        """Return what the module runs instead of PASA; None if it runs PASA."""
        attention: str = module.config._attn_implementation
        if attention.startswith(PREFIX):
            return None
        return f"its config names the attention {attention!r} now (set_attn_implementation)"


@dataclass(frozen=True)
class WrittenOutBinding(Binding):
    """The mark on a patched module that writes its attention out; no attention name can remove the patch."""

    @staticmethod
    def replacement(module: Any) -> str | None:
        """Return None, because the module runs PASA until the patch is undone."""
        return None


def make_interface(original: str, explicit_masks: bool) -> Interface:
    """Return the attention function to register for models whose attention was `original`.

    A module that carries a :class:`Binding` runs PASA. Any other module that calls the function runs its original
    attention: the policy has declined it, or it belongs to another model that shares the config.

    Parameters
    ----------
    original : str
        Name of the attention that the function replaces.
    explicit_masks : bool
        True if the masks are those of eager attention: float, and left out only if every key is visible.
    """

    def attention_interface(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        binding = module.__dict__.get(BINDING)
        if binding is None:
            return run_original(original, explicit_masks, module, query, key, value, attention_mask, **kwargs)
        return run_pasa(binding, module, query, key, value, attention_mask, explicit_masks=explicit_masks, **kwargs)

    return attention_interface


def run_pasa(
    binding: Binding,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    explicit_masks: bool = False,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with PASA: query (B, Hq, Lq, D), key, value (B, Hkv, Lk, D) -> (B, Lq, Hq, D) contiguous, no weights."""
    packed = is_packed(kwargs)
    _refuse_keywords(module, dropout, {x: kwargs[x] for x in kwargs if x not in PACKED} if packed else kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if packed:
        unsupported = {"attention_mask": attention_mask, "sinks": sinks, "position_bias": position_bias}
        unsupported |= {"indices": indices, "block_indices": block_indices}
        out = attend_packed(
            binding.callbacks, query, key, value, (cu_seq_lens_q, cu_seq_lens_k),
            (kwargs["max_length_q"], kwargs["max_length_k"]), sliding_window, unsupported,
            scale=scale, softcap=softcap, sinks=s_aux, config=binding.config, backend=binding.backend,
        )  # fmt: skip
        return out, None
    causal, window = False, None
    if attention_mask is not None or explicit_masks:
        attention_mask = without_lowest(attention_mask)  # causality, padding and window are in the mask
    else:
        causal = _is_causal(module, query.shape[2], is_causal)
        if causal and key.shape[2] > query.shape[2]:
            # Prefill of a static cache: keys after the last query are not written yet (upper-left alignment).
            key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        if causal or sliding_window is not None:
            limits = implied_limits(query.shape[2], key.shape[2], sliding_window, causal, query.device)
            attention_mask, window = limits
            causal = causal and attention_mask is None
    if not indices is block_indices is cu_seq_lens_q is cu_seq_lens_k is position_bias is None:
        attention_mask = chosen_keys(module, attention_mask, key, indices, block_indices, kwargs.get("position_ids"))
        attention_mask = separate_sequences(module, attention_mask, cu_seq_lens_q, cu_seq_lens_k, query, key)
        attention_mask = with_bias(attention_mask, position_bias)
    width = value.shape[-1]
    query, key, value = autocast_inputs(query, key, value)
    if width != key.shape[-1]:
        query, key, value = equal_widths(query, key, value)
    attend = partial(
        pasa.attention,
        attn_mask=attention_mask,
        is_causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        sinks=s_aux,
        config=binding.config,
        backend=binding.backend,
    )
    if sinks is None:
        out = attend(query, key, value)
    else:  # one for each row, (B, Hq, Lq, 1), which is one more score whose value is 0
        out, lse = attend(query, key, value, return_lse=True)
        out = out * torch.sigmoid(lse[..., None] - sinks.float()).to(out.dtype)
    if binding.callbacks.functions:
        binding.callbacks.call(query, key, attention_mask, causal, scale, window, softcap)
    if out.shape[-1] != width:
        out = out[..., :width]
    return out.transpose(1, 2).contiguous(), None


def run_original(
    original: str,
    explicit_masks: bool,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend as the module did before the patch, bit for bit.

    Unless masks are explicit, the mask was made for PASA, and is converted for eager attention.

    Raises
    ------
    NotImplementedError
        `original` needs masks of another kind (flash and flex attention, hub kernels).
    """
    scope = forward_code_scope(module)
    function: Interface
    # Only under its own name does a module put the keys that an indexer has chosen into the mask.
    chosen = kwargs.pop("indices", None), kwargs.pop("block_indices", None)
    attention_mask = chosen_keys(module, attention_mask, key, *chosen, kwargs.get("position_ids"))
    if original == "sdpa":
        function = scope["ALL_ATTENTION_FUNCTIONS"]["sdpa"]
    elif original == REGISTERED:
        function = partial(run_pasa, Binding(None, None, None), explicit_masks=explicit_masks)
    elif original == "eager":
        function = scope[_eager_name(module)]
        if not explicit_masks:
            attention_mask = _eager_mask(module, query, key, attention_mask, kwargs.get("is_causal"))
    else:
        raise NotImplementedError(f"{type(module).__name__}: cannot fall back to {original!r} beside PASA in one model")
    return function(module, query, key, value, attention_mask, **kwargs)


def forward_code_scope(module: torch.nn.Module) -> dict[str, Any]:
    """Return the globals of the file that defines `module.forward`."""
    scope: dict[str, Any] = inspect.unwrap(type(module).forward).__globals__
    return scope


def forward_names(module: torch.nn.Module) -> tuple[str, ...]:
    """Return the global and attribute names that `module.forward` uses; empty if it is not a Python function."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code.co_names if code is not None else ()


def _eager_name(module: torch.nn.Module) -> str:
    """Return the name of the eager attention function that `module.forward` uses (some files define several)."""
    return next(name for name in forward_names(module) if name.endswith("eager_attention_forward"))


def _eager_mask(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool | None,
) -> torch.Tensor | None:
    """Convert a boolean mask, or a mask that was left out, into the additive mask that eager attention always gets."""
    if mask is None and _is_causal(module, query.shape[2], is_causal):
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    if mask is None or mask.dtype != torch.bool:
        return mask
    lowest = torch.finfo(query.dtype).min
    return torch.where(mask, torch.zeros((), dtype=query.dtype, device=query.device), lowest)


def _is_causal(module: torch.nn.Module, queries: int, is_causal: bool | None) -> bool:
    """Return whether a call without a mask is causal.

    A call with one query is not: a decoded token sees every key.
    """
    if queries == 1:
        return False
    declared = is_causal if is_causal is not None else getattr(module, "is_causal", None)
    if declared is None:
        raise NotImplementedError(
            f"{type(module).__name__}: no mask and no `is_causal`, so whether later keys are visible is unknown"
        )
    return bool(declared)


def _refuse_keywords(module: torch.nn.Module, dropout: float, kwargs: dict[str, Any]) -> None:
    """Refuse every keyword that may change the result; the message names the module's class and the keyword."""
    where = type(module).__name__
    if dropout:
        raise NotImplementedError(
            f"{where}: dropout={dropout} on attention weights is not supported; call model.eval()"
        )
    for name, value in kwargs.items():
        if value is None or name in INFORMATIVE or (name == "output_attentions" and value is False):
            continue
        reason = REFUSALS.get(name, "this keyword is unknown, and ignoring it could change the result")
        raise NotImplementedError(f"{where}: {name} is not supported: {reason}")
