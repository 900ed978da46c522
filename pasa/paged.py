"""`attention_paged` and `write_pages`: attention over a cache in pages, as servers keep it."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from pasa import diagnostics
from pasa.checks import check_switches, checked_config, checked_scale
from pasa.config import PasaConfig
from pasa.ops import dispatch, paged_library


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
    _check_types(q=q, k_cache=k_cache, v_cache=v_cache, block_table=block_table, seq_lens=seq_lens)
    _check_options(cu_seqlens_q=cu_seqlens_q, key_anchors=key_anchors)
    _refuse_gradients("attention_paged", q=q, k_cache=k_cache, v_cache=v_cache)
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
    _check_types(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping)
    _check_options(key_anchors=key_anchors)
    _refuse_gradients("write_pages", k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    n = slot_mapping.numel()
    if k.dim() == v.dim() == 3 and len(k) != len(v):
        raise ValueError(f"{n} slots, but {len(k)} keys and {len(v)} values")
    torch.ops.pasa.write_pages(k[:n], v[:n], k_cache, v_cache, slot_mapping, key_anchors)


def _check_types(**tensors: object) -> None:
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}, not a Tensor")


def _check_options(**tensors: object) -> None:
    _check_types(**{name: x for name, x in tensors.items() if x is not None})


def _refuse_gradients(function: str, **tensors: Tensor) -> None:
    for name, x in tensors.items():
        if torch.is_grad_enabled() and x.requires_grad:
            raise NotImplementedError(f"{function} has no gradient, and {name} requires one: detach it, or no_grad()")
