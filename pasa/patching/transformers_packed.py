"""Attend to the packed sequences of transformers' continuous batching, without a mask."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor

import pasa
from pasa.patching.callbacks import Callbacks
from pasa.scaled_dot_product import autocast_inputs, equal_widths

PACKED = frozenset({"logits_indices", "logits_processor_args", "read_index", "write_index"})
"""Keywords of continuous batching that are for the cache, which has used them, or for what follows the last layer."""


def is_packed(kwargs: dict[str, Any]) -> bool:
    """Return whether an attention call is one of continuous batching, whose keys come from a paged cache."""
    return kwargs.get("read_index") is not None


def attend_packed(
    callbacks: Callbacks,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: tuple[Tensor | None, Tensor | None],
    longest: tuple[int, int],
    sliding_window: int | None,
    unsupported: dict[str, Tensor | None],
    **how: Any,
) -> Tensor:
    """Attend with packed queries (1, Hq, Tq, D) to packed keys and values (1, Hkv, Tk, D); return (1, Tq, Hq, D).

    The sequences are causal, and their last queries are at their last keys.

    Parameters
    ----------
    callbacks : Callbacks
        Called for each sequence.
    query, key, value : Tensor
    cu_seq_lens, longest : pairs
        Cumulative lengths of queries and of keys, and the most queries and keys of a sequence.
    sliding_window : int, optional
        Keys that a query sees, with its own.
    unsupported : dict
        Arguments of the module by name, which must be None.
    how
        Options of `pasa.attention_varlen`.

    Raises
    ------
    NotImplementedError
        An unsupported argument is passed.
    """
    for name, tensor in unsupported.items():
        if tensor is not None:
            raise NotImplementedError(f"{name} is not supported in continuous batching: call model.generate")
    cu_q, cu_k = cu_seq_lens
    if cu_q is None or cu_k is None:
        raise NotImplementedError("continuous batching without cu_seq_lens_q and cu_seq_lens_k is not supported")
    width = value.shape[-1]
    window = None if sliding_window is None else (sliding_window - 1, -1)
    query, key, value = (x[0].transpose(0, 1) for x in equal_widths(*autocast_inputs(query, key, value)))
    out: Any = pasa.attention_varlen(
        query, key, value, cu_q, cu_k, *map(int, longest), is_causal=True, window=window, **how
    )
    if callbacks.functions:
        edges = (pairwise(each.tolist()) for each in (cu_q, cu_k))
        for (first_q, end_q), (first_k, end_k) in zip(*edges, strict=True):
            q, k = (x.transpose(0, 1)[None] for x in (query[first_q:end_q], key[first_k:end_k]))
            callbacks.call(q, k, None, True, how["scale"], window, how["softcap"])
    packed: Tensor = out[None, ..., :width].contiguous()
    return packed
