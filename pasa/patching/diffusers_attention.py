"""Run PASA in place of a diffusers processor: in the classic `Attention` class, and behind the attention dispatcher.

diffusers has two generations of models, and processors between them. In older ones (UNets, their VAEs) an `Attention`
module passes its tensors to a *processor*, which projects, attends and projects back. There PASA replaces the
processor. In newer ones (Flux, Wan, HunyuanVideo) the processor belongs to the model and calls `dispatch_attention_fn`.
This function looks the attention up by the name in the processor's `_attention_backend`, so there PASA registers such a
name. Processors between these generations (SD 3, CogVideoX, HunyuanDiT) call torch's scaled_dot_product_attention
themselves. There PASA runs a copy of the processor's code in which this call is its own.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor

from pasa.patching.callbacks import BINDING, Callbacks
from pasa.patching.copying import reduced_as
from pasa.patching.sdpa_calls import calls_attention, make_attention, redirected

if TYPE_CHECKING:
    from pasa import PasaConfig

_SERIAL = itertools.count(1)


@dataclass(frozen=True)
class Kind:
    """The properties in which the classic processors differ; all of them attend with the same projections.

    Attributes
    ----------
    module_scale : bool
        True: scores are multiplied by ``attn.scale``. False: by 1/sqrt(D), and ``attn.scale`` is ignored.
    norms : bool
        ``attn.norm_q`` and ``attn.norm_k`` are applied.
    fused : bool
        q, k, v come from ``attn.to_qkv``, or k, v from ``attn.to_kv``.
    """

    module_scale: bool = False
    norms: bool = False
    fused: bool = False


KINDS = {
    "AttnProcessor": Kind(module_scale=True),
    "AttnProcessor2_0": Kind(norms=True),
    "AttnProcessorNPU": Kind(),
    "FusedAttnProcessor2_0": Kind(norms=True, fused=True),
    "SlicedAttnProcessor": Kind(module_scale=True),
    "XFormersAttnProcessor": Kind(module_scale=True),
}
"""The processors that :class:`PasaAttnProcessor` can replace, by class name (diffusers 0.37 to 0.42)."""


class PasaAttnProcessor:
    """Processor of a classic `Attention` module that attends with :func:`pasa.attention`.

    All other steps are those of the original processor: spatial and group norm, the norm of the encoder states, norms
    of q and k, masks, output projection, residual connection and rescaling. Two flags need no action:
    ``upcast_attention`` and ``upcast_softmax`` ask for the range and accuracy of FP32 scores and an FP32 softmax, which
    PASA has with FP16 q and k.

    Parameters
    ----------
    kind : Kind
        Properties of the replaced processor.
    config, backend
        Passed to :func:`pasa.attention`.
    callbacks : Callbacks
        Called after every attention call.
    """

    def __init__(self, kind: Kind, config: PasaConfig | None, backend: str | None, callbacks: Callbacks) -> None:
        self.kind, self.attend = kind, make_attention(config, backend, callbacks, type(self).__name__)

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        """Attend; shapes as for `diffusers.models.attention_processor.AttnProcessor2_0`.

        Parameters
        ----------
        attn : diffusers.models.attention_processor.Attention
        hidden_states : Tensor (B, S, C) or (B, C, height, width)
        encoder_hidden_states : Tensor (B, Skv, C'), optional
            Input of the key and value projections; `hidden_states` when None.
        attention_mask : Tensor, optional
            Added to the scores, or bool (True = keep); (B, 1 or S, Skv), one for all heads.
        temb : Tensor, optional
            Conditioning input of a spatial norm.
        """
        residual = hidden_states
        if attn.spatial_norm is not None:
            hidden_states = attn.spatial_norm(hidden_states, temb)
        image = hidden_states.shape[2:] if hidden_states.ndim == 4 else None
        if image is not None:
            hidden_states = hidden_states.flatten(2).transpose(1, 2)
        if attn.group_norm is not None:
            hidden_states = attn.group_norm(hidden_states.transpose(1, 2)).transpose(1, 2)

        query, key, value = (
            x.unflatten(-1, (attn.heads, -1)) for x in self._project(attn, hidden_states, encoder_hidden_states)
        )
        if self.kind.norms and attn.norm_q is not None:
            query = attn.norm_q(query).to(value.dtype)  # under autocast a norm may give FP32
        if self.kind.norms and attn.norm_k is not None:
            key = attn.norm_k(key).to(value.dtype)
        mask = _heads_mask(attn, attention_mask, key)
        scale = attn.scale if self.kind.module_scale else None
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out = self.attend(query, key, value, mask, scale=scale).transpose(1, 2)

        projected: Tensor = attn.to_out[1](attn.to_out[0](out.flatten(2)))  # the projection, then dropout
        if image is not None:
            projected = projected.transpose(-1, -2).unflatten(-1, image)
        if attn.residual_connection:
            projected = projected + residual
        rescaled: Tensor = projected / attn.rescale_output_factor
        return rescaled

    def _project(self, attn: Any, hidden: Tensor, encoder: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v as (B, S, H D); k and v come from the encoder states, if there are any."""
        if encoder is not None and attn.norm_cross is not None:
            encoder = attn.norm_encoder_hidden_states(encoder)
        if not self.kind.fused:
            source = hidden if encoder is None else encoder
            return attn.to_q(hidden), attn.to_k(source), attn.to_v(source)
        if encoder is None:
            query, key, value = attn.to_qkv(hidden).chunk(3, dim=-1)
            return query, key, value
        key, value = attn.to_kv(encoder).chunk(2, dim=-1)
        return attn.to_q(hidden), key, value


def _heads_mask(attn: Any, mask: Tensor | None, key: Tensor) -> Tensor | None:
    """Return the mask as (B, H, 1 or S, Skv), after the module's own method has padded it and repeated it by head."""
    if mask is None:
        return None
    batch, keys = key.shape[:2]
    mask = attn.prepare_attention_mask(mask, keys, batch)
    return mask.view(batch, attn.heads, -1, mask.shape[-1])


def register_backend(config: PasaConfig | None, backend: str | None, callbacks: Callbacks) -> AttentionBackendName:
    """Add an attention to diffusers' dispatcher, and return the name to put into a processor's `_attention_backend`.

    The dispatcher converts the value of that attribute to its enumeration of backends, unless the value is already an
    instance of the enumeration. The enumeration cannot be extended. So the name is an instance of the enumeration that
    is not among its members. The dispatcher finds it, and no list of backends, no default and no other model changes.
    """
    name = f"pasa-{next(_SERIAL)}"
    member = str.__new__(AttentionBackendName, name)
    member._name_, member._value_ = name, name
    _AttentionBackendRegistry.register(member)(make_dispatched(config, backend, callbacks))
    return member


def unregister_backend(member: AttentionBackendName) -> None:
    """Remove a name from the dispatcher's tables by hand, because diffusers has no function for it."""
    for table in ("_backends", "_constraints", "_supported_arg_names"):
        getattr(_AttentionBackendRegistry, table).pop(member, None)


def is_registered(backend: Any) -> bool:
    """Return whether this name is one that `register_backend` has made."""
    return isinstance(backend, AttentionBackendName) and backend not in AttentionBackendName.__members__.values()


def make_dispatched(config: PasaConfig | None, backend: str | None, callbacks: Callbacks) -> Callable[..., Tensor]:
    """Return the function that the dispatcher calls; the dispatcher passes the arguments that its signature names."""
    attend = make_attention(config, backend, callbacks, "dispatch_attention_fn")

    def pasa_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> Tensor:
        """Attend: query (B, S, Hq, D), key, value (B, Skv, Hkv, D) -> (B, S, Hq, D)."""
        for name, setting in (("return_lse", return_lse), ("parallel_config", _parallel_config)):
            if setting:
                raise NotImplementedError(
                    f"dispatch_attention_fn: {name}={setting!r} is not supported by PASA: leave it out"
                )
        if attn_mask is not None and not isinstance(attn_mask, Tensor):
            raise NotImplementedError(
                f"dispatch_attention_fn: attn_mask of type {type(attn_mask).__name__} is not supported by PASA; "
                "call unpatch(), and leave this module out with policy=lambda name, module: ..."
            )
        if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None]  # the dispatcher's shape of a key mask
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa).transpose(1, 2)

    return pasa_attention


def dispatched_processor(processor: Any, member: AttentionBackendName) -> Any:
    """Return a copy of the model's processor, whose original many modules may share, that asks for `member`."""
    twin = copy.copy(processor)
    twin._attention_backend = member
    return twin


def redirected_processor(processor: Any, config: PasaConfig | None, backend: str | None, callbacks: Callbacks) -> Any:
    """Return a copy of a processor whose calls of torch's scaled_dot_product_attention run PASA."""
    kind, twin = type(processor), copy.copy(processor)
    attend = make_attention(config, backend, callbacks, kind.__name__)
    names = {"__call__": redirected(kind.__call__, attend), "__module__": kind.__module__, "__doc__": kind.__doc__}
    twin.__class__ = type(kind.__name__, (kind,), names)
    return twin


def redirect_module(module: Any, config: PasaConfig | None, backend: str | None, callbacks: Callbacks) -> None:
    """Make a module whose forward calls torch's scaled_dot_product_attention run PASA; `restore_module` undoes it.

    The module gets a subclass of its class. A copy of the module has its original class.
    """
    kind = type(module)
    attend = make_attention(config, backend, callbacks, kind.__name__)
    names = {"forward": redirected(kind.forward, attend), "__module__": kind.__module__, "__doc__": kind.__doc__}
    module.__class__ = type(kind.__name__, (kind,), names | {"__reduce_ex__": reduced_as(kind)})


def restore_module(module: Any) -> None:
    """Give a module back the class that it had before `redirect_module`."""
    module.__class__ = type(module).__base__


def calls_sdpa_itself(module: torch.nn.Module) -> bool:
    """Return whether a module of diffusers calls scaled_dot_product_attention itself, as those of autoencoders do."""
    kind = type(module)
    within = kind.__module__.startswith("diffusers.models.autoencoders.")
    return within and (BINDING in vars(module) or calls_attention(kind.forward))


def calls_sdpa(processor: Any) -> bool:
    """Return whether a processor of diffusers calls torch's scaled_dot_product_attention itself."""
    kind = type(processor)
    return kind.__module__.startswith("diffusers.") and calls_attention(kind.__call__)


def uses_dispatcher(processor: Any) -> bool:
    """Return whether a processor gets its attention from the dispatcher."""
    return hasattr(type(processor), "_attention_backend")


def needs_flex(processor: Any) -> bool:
    """Return whether a processor always uses the dispatcher's backend "flex", even if `_attention_backend` differs.

    Such a processor passes block masks, which no other backend accepts. It is recognised by "flex" as its class's
    default backend or in the code of its `__call__`.
    """
    kind = type(processor)
    code = getattr(kind.__call__, "__code__", None)
    named = code is not None and ("FLEX" in code.co_names or "flex" in code.co_consts)
    return named or getattr(kind, "_attention_backend", None) == "flex"
