"""`attention_paged` and `write_pages`: attention over a cache in pages, as servers keep it."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from pasa import diagnostics
from pasa.checks import DTYPES, check_switches, checked_config, checked_scale
from pasa.config import PasaConfig
from pasa.ops import dispatch, paged_library

INTEGERS = (torch.int32, torch.int64)


@overload
def attention_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    key_anchors: Tensor | None = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
    config: PasaConfig | None = ...,
    backend: str | None = ...,
) -> Tensor: ...
@overload
def attention_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    key_anchors: Tensor | None = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    return_lse: Literal[True],
    config: PasaConfig | None = ...,
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


def attention_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    key_anchors: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    config: PasaConfig | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a paged key-value cache: sequence b has keys 0 to seq_lens[b] - 1, those of the queries included.

    Parameters
    ----------
    q : Tensor (B, Hq, D), or (T, Hq, D) with `cu_seqlens_q`
        FP16, BF16 or FP32; converted to FP16 inside.
    k_cache, v_cache : Tensor (pages, slots of a page, Hkv, D)
        Of q's dtype and device; the last stride is 1, the others are free. Slots that no sequence has reached may hold
        anything.
    block_table : Tensor (B, most pages of a sequence), int32 or int64
        Key i of sequence b is in slot i % slots of page block_table[b, i // slots]. Sequences may share pages.
        Entries behind a sequence's last page may be anything.
    seq_lens : Tensor (B,), int32 or int64
        A sequence of length 0 gives 0 and LSE -inf.
    cu_seqlens_q : Tensor (B + 1,), int32 or int64, optional
        Queries of sequence b are rows cu_seqlens_q[b] to cu_seqlens_q[b + 1]; its last query is that of its last key if
        `is_causal`. Rows behind the last one are padding: 0 and LSE -inf. Without it, each sequence has one query.
    max_seqlen_q, max_seqlen_k : int, optional
        Longest query and longest sequence, or an upper bound: they choose tiles and splits, never results beyond
        rounding. By default T, and as many keys as the table has room for.
    key_anchors : Tensor (pages, Hkv, D), FP16, contiguous, optional
        What `write_pages` keeps of each page so that single queries need not find block means at every step. The Triton
        kernel uses them where scores are large, on pages of a multiple of 16 slots, head dims up to 128 and at most 16
        query heads a key head; elsewhere they change nothing. It is then several times as fast if keys share a bias in
        most columns, and a third slower if in a few (README, "On a GPU"); results are as exact as without. They must
        be those of the keys: with others keys are rounded, or overflow. A key that is not finite may make its page NaN
        for sequences that end before it in the page.
    is_causal, scale, return_lse, config, backend
        As for `pasa.attention`.

    Returns
    -------
    out : Tensor, shape and dtype of q
    lse : Tensor (B or T, Hq), FP32, only with ``return_lse=True``

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As for `pasa.attention`. Lengths, table entries and anchors are checked on a CPU only: nothing here waits for a
        GPU, so a call can be captured in a CUDA graph. A finite BF16 or FP32 value beyond 65504 gives NaN there, not an
        error.
    NotImplementedError
        For a tensor that needs a gradient: there are none.

    Examples
    --------
    >>> k_cache, v_cache = torch.randn(2, 8, 16, 1, 32).half()  # 8 pages of 16 slots, one head
    >>> table, lengths = torch.tensor([[3, 7], [5, 0]]), torch.tensor([21, 1])
    >>> out = pasa.attention_paged(torch.randn(2, 4, 32).half(), k_cache, v_cache, table, lengths)
    >>> out.shape, bool((out[1] == v_cache[5, 0]).all())  # one key has all the weight
    (torch.Size([2, 4, 32]), True)
    """
    check_switches(is_causal, return_lse, backend)
    _check_caches(k_cache, v_cache)
    _check_like("q", q, k_cache, rank=3)
    _refuse_gradients("attention_paged", q=q, k_cache=k_cache, v_cache=v_cache)
    _check_queries(q, k_cache)
    _check_tables(q, block_table, seq_lens, cu_seqlens_q)
    _check_anchors(key_anchors, k_cache)
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if longest is not None and (isinstance(longest, bool) or not isinstance(longest, int) or longest < 1):
            raise ValueError(f"{name}={longest!r} is not a positive integer")
    options, diagnose = checked_config(config).arguments, diagnostics.recording()
    tables = (block_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k, key_anchors)
    switches = (is_causal, checked_scale(scale, q.shape[-1]), *options, diagnose, backend)
    out, lse, counts = dispatch.call(paged_library.attention_paged, q, k_cache, v_cache, *tables, *switches)
    if diagnose:
        diagnostics.record(counts)
    return (out, lse) if return_lse else out


def write_pages(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, key_anchors: Tensor | None = None
) -> None:
    """Put new keys and values into their slots of a paged cache, in place.

    Parameters
    ----------
    k, v : Tensor (T, Hkv, D)
    k_cache, v_cache : Tensor (pages, slots of a page, Hkv, D)
        As for `attention_paged`.
    slot_mapping : Tensor (T or fewer,), int32 or int64
        page * slots of a page + slot, all different; a negative one is padding, whose token is not written. Tokens
        behind its end are padding, too.
    key_anchors : Tensor (pages, Hkv, D), FP16, contiguous, optional
        Is given the anchors of the pages that are written to: block means on a grid that keys can lose without
        rounding. Give the same tensor (zeros, to begin with) with every write to a cache, and copy its rows where pages
        are copied. An anchor is that of slots 0 to the last one which this call writes in the page, all of which must
        hold keys: a sequence grows slot by slot, or is written anew from some key on; who rewrites one key of a page
        writes all behind it again in the same call.

    Raises
    ------
    ValueError, TypeError
        For tensors that do not fit together; on a CPU also for a slot behind the cache, or given twice. Nothing waits
        for a GPU, which leaves out what has no slot in the cache.
    NotImplementedError
        For a tensor that needs a gradient.

    Examples
    --------
    >>> k_cache, v_cache = torch.zeros(2, 8, 16, 1, 32).half()
    >>> k, v = torch.randn(2, 3, 1, 32).half()
    >>> pasa.write_pages(k, v, k_cache, v_cache, slot_mapping=torch.tensor([7 * 16 + 4, -1, 5 * 16]))
    >>> bool((k_cache[7, 4] == k[0]).all()), bool((k_cache[5, 0] == k[2]).all()), int(k_cache.count_nonzero())
    (True, True, 64)

    Anchors of a page whose keys share a bias:

    >>> k, v = torch.randn(2, 16, 1, 32).half() + 50
    >>> key_anchors = torch.zeros(8, 1, 32).half()
    >>> pasa.write_pages(k, v, k_cache, v_cache, torch.arange(16), key_anchors)
    >>> bool((key_anchors[0] - 50).abs().max() < 2)
    True
    """
    _check_caches(k_cache, v_cache)
    for name, x in (("k", k), ("v", v)):
        _check_like(name, x, k_cache, rank=3)
        if x.shape[1:] != k_cache.shape[2:]:
            raise ValueError(f"{name} {tuple(x.shape)} does not fit the cache's heads {tuple(k_cache.shape[2:])}")
    _refuse_gradients("write_pages", k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    _check_integers("slot_mapping", slot_mapping, k_cache, rank=1)
    _check_anchors(key_anchors, k_cache)
    if k.shape != v.shape or len(slot_mapping) > len(k):
        raise ValueError(f"{len(slot_mapping)} slots, but {len(k)} keys and {len(v)} values")
    if len(slot_mapping):
        n = len(slot_mapping)
        torch.ops.pasa.write_pages(k[:n], v[:n], k_cache, v_cache, slot_mapping, key_anchors)


def _check_caches(k_cache: Tensor, v_cache: Tensor) -> None:
    _check_like("k_cache", k_cache, None, rank=4)
    _check_like("v_cache", v_cache, k_cache, rank=4)
    if k_cache.shape != v_cache.shape or 0 in k_cache.shape:
        raise ValueError(f"caches (pages, slots, Hkv, D) are {tuple(k_cache.shape)} and {tuple(v_cache.shape)}")
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.stride(-1) != 1:
            raise ValueError(f"{name} has strides {x.stride()}: the last one is not 1")


def _check_like(name: str, x: Tensor, cache: Tensor | None, rank: int) -> None:
    """A tensor of so many dimensions, of the cache's dtype and device."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}, not a Tensor")
    if x.dim() != rank:
        raise ValueError(f"{name} has {x.dim()} dimensions {tuple(x.shape)}, expected {rank}")
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} is {x.dtype}, expected one of {DTYPES}")
    if cache is not None and x.dtype != cache.dtype:
        raise TypeError(f"{name} is {x.dtype} but k_cache is {cache.dtype}")
    if cache is not None and x.device != cache.device:
        raise ValueError(f"{name} is on {x.device} but k_cache is on {cache.device}")


def _check_anchors(key_anchors: Tensor | None, k_cache: Tensor) -> None:
    if key_anchors is None:
        return
    if not isinstance(key_anchors, Tensor) or key_anchors.dtype != torch.float16:
        found = key_anchors.dtype if isinstance(key_anchors, Tensor) else type(key_anchors)
        raise TypeError(f"key_anchors is {found}, not an FP16 Tensor")
    wanted = (k_cache.shape[0], *k_cache.shape[2:])
    if key_anchors.shape != wanted or not key_anchors.is_contiguous() or key_anchors.device != k_cache.device:
        raise ValueError(
            f"key_anchors {tuple(key_anchors.shape)} on {key_anchors.device} are not contiguous, or not the {wanted} "
            f"of k_cache on {k_cache.device}"
        )


def _refuse_gradients(function: str, **tensors: Tensor) -> None:
    for name, x in tensors.items():
        if torch.is_grad_enabled() and x.requires_grad:
            raise NotImplementedError(f"{function} has no gradient, and {name} requires one: detach it, or no_grad()")


def _check_integers(name: str, x: Tensor, cache: Tensor, rank: int) -> None:
    if not isinstance(x, Tensor) or x.dtype not in INTEGERS:
        raise TypeError(f"{name} is {x.dtype if isinstance(x, Tensor) else type(x)}, not an int32 or int64 Tensor")
    if x.dim() != rank:
        raise ValueError(f"{name} has {x.dim()} dimensions {tuple(x.shape)}, expected {rank}")
    if x.device != cache.device:
        raise ValueError(f"{name} is on {x.device} but k_cache is on {cache.device}")


def _check_queries(q: Tensor, k_cache: Tensor) -> None:
    if q.shape[0] == 0 or q.shape[-1] != k_cache.shape[-1] or q.shape[1] == 0:
        raise ValueError(f"q {tuple(q.shape)} is empty, or not of the cache's head dim {k_cache.shape[-1]}")
    if q.shape[1] % k_cache.shape[2]:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k_cache.shape[2]} key heads")


def _check_tables(q: Tensor, block_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor | None) -> None:
    """Form only: values are looked at where they are read, on a CPU."""
    _check_integers("block_table", block_table, q, rank=2)
    _check_integers("seq_lens", seq_lens, q, rank=1)
    batch = len(seq_lens)
    if batch == 0 or block_table.shape[0] != batch or block_table.shape[1] == 0:
        raise ValueError(f"block_table {tuple(block_table.shape)} does not fit {batch} seq_lens")
    if cu_seqlens_q is None:
        if len(q) != batch:
            raise ValueError(f"q has {len(q)} rows for {batch} sequences; give cu_seqlens_q unless each has one query")
        return
    _check_integers("cu_seqlens_q", cu_seqlens_q, q, rank=1)
    if len(cu_seqlens_q) != batch + 1:
        raise ValueError(f"cu_seqlens_q has {len(cu_seqlens_q)} entries for {batch} sequences, expected {batch + 1}")
