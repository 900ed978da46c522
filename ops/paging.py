"""Paged caches: keys and values in pages of a few slots, and a table of the pages that each sequence has.

A cache is (pages, slots of a page, Hkv, D), with any strides but that of the last dimension, which is 1. Key i of a
sequence is in slot i % slots of page table[i // slots]. What stands in the table behind a sequence's last page is never
read as a page, and slots that no sequence has reached may hold anything, NaN too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def check_pages(block_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor | None, cache: Tensor, tokens: int) -> None:
    """What the tables say fits the cache and the queries. Looked at on a CPU only: elsewhere a look would wait.

    Raises
    ------
    ValueError
        With what does not fit.
    """
    if seq_lens.device.type != "cpu":
        return
    pages, slots = cache.shape[:2]
    shortest, longest, room = int(seq_lens.min()), int(seq_lens.max()), block_table.shape[1] * slots
    if shortest < 0 or longest > room:
        raise ValueError(f"seq_lens are {shortest} to {longest}, but the block table has room for 0 to {room} keys")
    used = torch.arange(block_table.shape[1]) * slots < seq_lens[:, None]
    wrong = block_table[used & ((block_table < 0) | (block_table >= pages))]
    if wrong.numel():
        raise ValueError(f"block_table names page {int(wrong[0])}, but the cache has {pages} pages")
    if cu_seqlens_q is not None:
        edges = cu_seqlens_q.tolist()
        if edges[0] != 0 or sorted(edges) != edges or edges[-1] > tokens:
            raise ValueError(f"cu_seqlens_q={edges} does not rise from 0 to at most the {tokens} tokens of q")


def gather_pages(cache: Tensor, block_table: Tensor, seq_lens: Tensor) -> Tensor:
    """Keys or values (sum of seq_lens, Hkv, D) of all sequences, one after another. Reads lengths back."""
    lengths = seq_lens.long()
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    at = torch.arange(len(sequence), device=lengths.device) - (lengths.cumsum(0) - lengths)[sequence]
    return cache[block_table.long()[sequence, at // cache.shape[1]], at % cache.shape[1]]


def attend_gathered(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]],
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `attend` (q, k, v, cu_seqlens_q, cu_seqlens_k) gives for packed sequences; 0 and LSE -inf for padding."""
    k, v = (gather_pages(cache, block_table, seq_lens) for cache in caches)
    cu_q = torch.arange(len(q) + 1, device=q.device) if cu_seqlens_q is None else cu_seqlens_q
    cu_k = torch.nn.functional.pad(seq_lens.long().cumsum(0), (1, 0))
    used = int(cu_q[-1])
    out, lse, counts = attend(q[:used], k, v, cu_q, cu_k)
    behind = (0, 0, 0, len(q) - used)
    out = torch.nn.functional.pad(out, (0, 0, *behind))
    return out, torch.nn.functional.pad(lse, behind, value=-torch.inf), counts


def write_pages(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Put keys and values (T, Hkv, D) into slots (page * slots of a page + slot); negative ones are padding.

    Nothing is read back. A padding token writes once more what the first other token writes, or what is there already.

    Raises
    ------
    ValueError
        On a CPU, if a slot lies behind the cache or is given twice.
    """
    slots = slot_mapping.long()
    if slots.device.type == "cpu":
        _check_slots(slots[slots >= 0], k_cache.shape[0] * k_cache.shape[1])
    real = slots >= 0
    first = real.int().argmax()
    source = torch.where(real, torch.arange(len(slots), device=slots.device), first)
    target = slots[source].clamp(min=0)
    where = target // k_cache.shape[1], target % k_cache.shape[1]
    some = real.any()
    for new, cache in ((k, k_cache), (v, v_cache)):
        cache.index_put_(where, torch.where(some, new[source].to(cache.dtype), cache[where]))


def _check_slots(slots: Tensor, room: int) -> None:
    if slots.numel() and int(slots.max()) >= room:
        raise ValueError(f"slot_mapping names slot {int(slots.max())}, but the cache has {room} slots")
    if len(slots.unique()) < len(slots):
        raise ValueError("slot_mapping names a slot twice")
