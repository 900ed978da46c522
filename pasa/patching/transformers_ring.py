"""The attention and mask functions of a transformers model whose sequence several ranks share.

A rank's tokens are those that `pasa.shard_sequence` gave it. No mask is built. transformers sees only the shard, so it
would take the step between the shard's two chunks for the border of packed sequences. Ring attention handles causality
itself, and everything else that a mask could express is refused.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import pasa
from pasa.patching.callbacks import BINDING
from pasa.patching.transformers_attention import Binding, _is_causal, _refuse_keywords
from pasa.patching.transformers_masks import BORDERS
from pasa.scaled_dot_product import autocast_inputs, equal_widths

UNSERVED = {
    "softcap": "soft caps",
    "s_aux": "attention sinks",
    "position_bias": "float masks",
    "indices": "choice of keys",
    "block_indices": "choice of keys",
}
"""Maps keywords that a patch without ``context_parallel`` serves to what ring attention lacks."""


def check_mask(*, attention_mask: torch.Tensor | None = None, local_size: int | None = None, **kwargs: Any) -> None:
    """Refuse padding and sliding windows, instead of building a mask for them."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise NotImplementedError("context_parallel: padding is not supported; give every row all tokens")
    if local_size is not None:
        raise NotImplementedError("context_parallel: sliding windows are not supported")


def attend_shard(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with this rank's queries (B, Hq, L, D) to the keys of all ranks; return (B, L, Hq, D) and no weights.

    Raises
    ------
    NotImplementedError
        The call has a mask, a sliding window, borders of packed sequences, or tokens decoded after a prompt, or
        another keyword that is not supported; or the module is not patched.
    ValueError
        The position ids are not those of this rank's tokens.
    """
    binding: Binding | None = module.__dict__.get(BINDING)
    where = type(module).__name__
    if binding is None or binding.context_parallel is None:
        raise NotImplementedError(f"{where}: cannot keep its own attention beside context_parallel in one model")
    for keyword in ("seq_idx", *BORDERS):
        if kwargs.get(keyword) is not None:
            what = f"{where}: {keyword} is not supported with context_parallel"
            raise NotImplementedError(f"{what}: packed sequences cannot be separated; give one sequence a row")
    for keyword in UNSERVED:
        if kwargs.get(keyword) is not None:
            raise NotImplementedError(
                f"{where}: {keyword} is not supported with context_parallel: ring attention has no "
                f"{UNSERVED[keyword]}; patch without context_parallel"
            )
    _refuse_keywords(module, dropout, kwargs)
    if attention_mask is not None or sliding_window is not None:
        what = "a mask" if attention_mask is not None else f"sliding_window={sliding_window}"
        raise NotImplementedError(f"{where}: {what} is not supported with context_parallel")
    if query.shape[2] == 1 or query.shape[2] != key.shape[2]:
        raise NotImplementedError(
            f"{where}: {query.shape[2]} queries for {key.shape[2]} keys: with context_parallel a prompt is read in one "
            "call, and nothing is decoded after it"
        )
    if (positions := kwargs.get("position_ids")) is not None:
        _check_positions(positions, binding.context_parallel)
    out: torch.Tensor = pasa.ring_attention(
        *equal_widths(*autocast_inputs(query, key, value)),
        group=binding.context_parallel,
        is_causal=_is_causal(module, query.shape[2], is_causal),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        config=binding.config,
        backend=binding.backend,
    )
    return out[..., : value.shape[-1]].transpose(1, 2).contiguous(), None


def _check_positions(position_ids: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Check that the position ids fit this rank's two chunks of the sequence.

    They are two runs of consecutive positions, joined into one on the last rank, and start at 0 on the first rank only.
    The likely mistake is to use the default position ids, which count from 0 on every rank.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    steps = int((position_ids.diff(dim=-1) != 1).sum(-1).max())
    starts_late = bool((position_ids[..., 0] > 0).all())
    if steps != (rank != ranks - 1) or starts_late != (rank > 0):
        raise ValueError(
            "context_parallel: position_ids are not those of this rank's tokens; "
            "give position_ids=pasa.shard_sequence(torch.arange(length)[None], 1)"
        )
