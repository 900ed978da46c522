"""Register the attention backend "pasa" with diffusers, for `transformer.set_attention_backend("pasa")`.

diffusers looks backends up in an enumeration, and offers no function to add a name: its documented way for other
attention is a processor, which `pasa.patch_pipeline` sets. So the name is added to the enumeration's own tables, from
which Python reads its members. Only models of the attention dispatcher (Flux, Wan, HunyuanVideo) have backends. UNets
have processors alone.
"""

from __future__ import annotations

from typing import Any

from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from pasa.patching.callbacks import Callbacks
from pasa.patching.diffusers_attention import make_dispatched

NAME = "pasa"


def register() -> str:
    """Register the backend under the name "pasa"; return the line of code that selects it."""
    member = AttentionBackendName.__members__.get(NAME.upper()) or _add_member()
    if member not in _AttentionBackendRegistry._backends:
        _AttentionBackendRegistry.register(member)(make_dispatched(None, None, Callbacks()))
    return f"transformer.set_attention_backend({NAME!r}), where a model has attention backends (UNets have none)"


def _add_member() -> AttentionBackendName:
    """Add a member to the enumeration, as its definition would have."""
    kind: Any = AttentionBackendName
    member: Any = str.__new__(kind, NAME)
    member._name_, member._value_, member._sort_order_ = NAME.upper(), NAME, len(kind._member_names_)
    member.__objclass__ = kind
    type.__setattr__(kind, NAME.upper(), member)
    kind._member_names_.append(NAME.upper())
    kind._member_map_[NAME.upper()] = member
    kind._value2member_map_[NAME] = member
    added: AttentionBackendName = member
    return added
