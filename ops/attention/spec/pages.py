"""Read and write paged caches: keys and values in pages of a few slots, and a table of each sequence's pages.

A cache has shape (pages, slots of a page, Hkv, D). Its strides are free except the last, which is
1. Key i of a sequence is in slot i % slots of page table[i // slots]. Table entries behind a
sequence's last page are never read as pages. Slots that no sequence has reached may hold anything,
even NaN.

Anchors (pages, Hkv, D) of a cache are the block means that decoding subtracts from its keys, kept
so that they need not be computed at every step. They are FP16 and contiguous, computed by
`shift_exact` over the keys that each page holds, and NaN where one of these keys is not finite.
Whoever writes keys must write their anchors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pasa.ops.attention.call import Call, Results
from pasa.ops.attention.spec.shift_keys import anchor_near, can_shift, shifts_exactly


def check_pages(call: Call) -> None:
    """Check that the page tables fit the cache and the queries, and that anchors can be subtracted without rounding.

    Only tensors on a CPU are checked, because reading values would wait for a GPU.

    Raises
    ------
    ValueError
        If something does not fit. Anchors do not fit if keys or copies of pages were written without them.
    """
    if call.pages is None or call.pages.seq_lens.device.type != "cpu":
        return
    block_table, seq_lens, _, _, key_anchors = call.pages
    pages, slots = call.k.shape[:2]
    shortest, longest, room = int(seq_lens.min()), int(seq_lens.max()), block_table.shape[1] * slots
    if shortest < 0 or longest > room:
        raise ValueError(f"seq_lens are {shortest} to {longest}, but the block table has room for 0 to {room} keys")
    used = torch.arange(block_table.shape[1]) * slots < seq_lens[:, None]
    wrong = block_table[used & ((block_table < 0) | (block_table >= pages))]
    if wrong.numel():
        raise ValueError(
            f"block_table names page {int(wrong[0])}, but the cache has {pages} pages: pass page "
            "numbers from 0, and as many entries of each row as seq_lens need"
        )
    if call.cu_q is not None:
        edges = call.cu_q.tolist()
        if edges[0] != 0 or sorted(edges) != edges or edges[-1] > len(call.q):
            raise ValueError(
                f"cu_seqlens_q={edges} does not rise from 0 to at most the {len(call.q)} tokens of q: "
                "pass 0, then the running sum of the query counts"
            )
    if key_anchors is not None:
        _check_anchors(key_anchors, call.k, block_table, seq_lens)


def _check_anchors(key_anchors: Tensor, k_cache: Tensor, block_table: Tensor, seq_lens: Tensor) -> None:
    keys = gather_pages(k_cache, block_table, seq_lens).half().float()
    one_slot = key_anchors[:, None].expand(*k_cache.shape)
    anchors = gather_pages(one_slot, block_table, seq_lens).float()
    if not bool((keys.isfinite() & shifts_exactly(keys, anchors) | anchors.isnan()).all()):
        raise ValueError("key_anchors are not those of the keys in k_cache: write both with write_pages")


def gather_pages(cache: Tensor, block_table: Tensor, seq_lens: Tensor) -> Tensor:
    """Return keys or values (sum of seq_lens, Hkv, D) of all sequences, one after another; lengths are read back."""
    lengths = seq_lens.long()
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    at = torch.arange(len(sequence), device=lengths.device) - (lengths.cumsum(0) - lengths)[sequence]
    return cache[block_table.long()[sequence, at // cache.shape[1]], at % cache.shape[1]]


def attend_gathered(attend: Callable[[Call], Results], call: Call) -> Results:
    """Gather the pages of a call, attend to packed sequences, and pad the result.

    Rows of q behind the last sequence get output 0 and LSE -inf.
    """
    if call.pages is None:
        raise ValueError("the call has no pages")
    block_table, seq_lens = call.pages[:2]
    k, v = (gather_pages(cache, block_table, seq_lens) for cache in (call.k, call.v))
    cu_q = torch.arange(len(call.q) + 1, device=call.q.device) if call.cu_q is None else call.cu_q
    cu_k = torch.nn.functional.pad(seq_lens.long().cumsum(0), (1, 0))
    used = int(cu_q[-1])
    longest = (1 if call.cu_q is None else call.pages.max_seqlen_q), call.pages.max_seqlen_k
    results = attend(replace(call, q=call.q[:used], k=k, v=v, cu_q=cu_q, cu_k=cu_k, pages=None, longest=longest))
    behind = (0, 0, 0, len(call.q) - used)
    out = torch.nn.functional.pad(results.out, (0, 0, *behind))
    return results._replace(out=out, lse=torch.nn.functional.pad(results.lse, behind, value=-torch.inf))


def write_pages(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, key_anchors: Tensor | None = None
) -> None:
    """Write keys and values (T, Hkv, D) into slots, numbered page * slots of a page + slot; negative ones are padding.

    With `key_anchors`, also write the anchors of the pages. A page's anchor covers its slots up to
    the last one written. Nothing is read back from a GPU. A padding token repeats the write of the
    first real token, or rewrites what the cache already holds if there is none.

    Raises
    ------
    ValueError
        On a CPU, if a slot lies behind the cache or appears twice.
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
    if key_anchors is not None:
        _write_anchors(slots[real], k_cache, key_anchors)


def _write_anchors(slots: Tensor, k_cache: Tensor, key_anchors: Tensor) -> None:
    """Write the anchors of the pages that hold these slots; waits for a device that is not the CPU."""
    pages, page = (slots // k_cache.shape[1]).unique(return_inverse=True)
    last = torch.zeros_like(pages).scatter_reduce(0, page, slots % k_cache.shape[1], "amax")
    there = torch.arange(k_cache.shape[1], device=slots.device) <= last[:, None]
    keys = k_cache[pages].transpose(1, 2).half().float()  # (pages, Hkv, slots, D)
    keys = torch.where(there[:, None, :, None], keys, 0.0)
    finite = keys.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    keys = torch.where(finite, keys, 0.0)
    anchors = anchor_near(
        keys.sum(-2, keepdim=True) / (last + 1)[:, None, None, None], keys.abs().amax(-2, keepdim=True)
    )
    kept = can_shift(keys, anchors) | ~there[:, None, :, None]
    anchors = torch.where(kept.all(-2, keepdim=True), anchors, 0.0)
    key_anchors[pages] = torch.where(finite, anchors, torch.nan).squeeze(-2).half()


def _check_slots(slots: Tensor, room: int) -> None:
    if slots.numel() and int(slots.max()) >= room:
        raise ValueError(f"slot_mapping names slot {int(slots.max())}, but the cache has {room} slots")
    if len(slots.unique()) < len(slots):
        raise ValueError("slot_mapping names a slot twice: give each token a slot of its own")
