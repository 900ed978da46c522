"""`attention_paged` and `write_pages`: attention over a paged key-value cache, as inference servers keep it."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from pasa import diagnostics
from pasa.attention import results
from pasa.checks import (
    check_optional,
    check_switches,
    check_tensor,
    checked_config,
    checked_limits,
)
from pasa.config import PasaConfig
from pasa.keywords import hint_at_arguments
from pasa.ops import dispatch, operators


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
    window: tuple[int, int] | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[False] = ...,
    return_max_logits: Literal[False] = ...,
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
    window: tuple[int, int] | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[True],
    return_max_logits: Literal[False] = ...,
    config: PasaConfig | None = ...,
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...
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
    window: tuple[int, int] | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    return_lse: bool = ...,
    return_max_logits: Literal[True],
    config: PasaConfig | None = ...,
    backend: str | None = ...,
) -> tuple[Tensor, ...]: ...


@hint_at_arguments
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
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    config: PasaConfig | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Compute attention over a paged key-value cache.

    Sequence b has keys 0 to seq_lens[b] - 1, including the keys of the query tokens.

    Parameters
    ----------
    q : Tensor (B, Hq, D), or (T, Hq, D) with `cu_seqlens_q`
        FP16, BF16 or FP32; converted to FP16 inside.
    k_cache, v_cache : Tensor (pages, slots of a page, Hkv, D)
        Same dtype and device as q. The last stride is 1, the others are free. Slots that no sequence has reached may
        hold any values.
    block_table : Tensor (B, most pages of a sequence), int32 or int64
        Key i of sequence b is in slot i % slots of page block_table[b, i // slots]. Sequences may share pages.
        Entries after a sequence's last page may hold any values.
    seq_lens : Tensor (B,), int32 or int64
        Number of keys of each sequence. A sequence of length 0 gives 0 and log-sum-exp (LSE) -inf.
    cu_seqlens_q : Tensor (B + 1,), int32 or int64, optional
        Queries of sequence b are rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1. If `is_causal`, its last query
        belongs to its last key. Rows after cu_seqlens_q[B] - 1 are padding, and give 0 and LSE -inf. When None, each
        sequence has one query.
    max_seqlen_q, max_seqlen_k : int, optional
        Largest number of queries and of keys of a sequence, or upper bounds. They choose tiles and splits, and change
        results by no more than rounding. The defaults are T and the number of keys that the table can hold.
    key_anchors : Tensor (pages, Hkv, D), FP16, contiguous, optional
        Anchors that `write_pages` keeps for each page, so that decoding need not form block means at every step. The
        Triton kernel uses them if scores are large, pages have a multiple of 16 slots, the head dimension is at most
        128, and at most 16 query heads share a key head. Otherwise they have no effect. The kernel is then several
        times as fast if keys share a bias in most columns, and a third slower if they do in only a few (see
        docs/evidence-speed.md). Results are as exact as without anchors. The anchors must belong to these keys: with
        wrong anchors keys are rounded or overflow. A key that is not finite may make its page NaN even for sequences
        that end before it in the page.
    is_causal, window, scale, softcap, sinks, return_lse, return_max_logits, config, backend
        As for `pasa.attention`; rows and keys are counted within each sequence.

    Returns
    -------
    out : Tensor, shape and dtype of q
    lse : Tensor (B or T, Hq), FP32, only with ``return_lse=True``
    max_logits : Tensor (B, Hq), FP32, only with ``return_max_logits=True``

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As for `pasa.attention`. Lengths, table entries and anchors are checked on a CPU only. A call never waits for a
        GPU, so it can be captured in a CUDA graph. On a GPU, a finite BF16 or FP32 value beyond 65504 therefore gives
        NaN instead of an error.
    NotImplementedError
        A tensor requires a gradient, which this function does not have.

    Examples
    --------
    >>> k_cache, v_cache = torch.randn(2, 8, 16, 1, 32).half()  # 8 pages of 16 slots, one head
    >>> table, lengths = torch.tensor([[3, 7], [5, 0]]), torch.tensor([21, 1])
    >>> out = pasa.attention_paged(torch.randn(2, 4, 32).half(), k_cache, v_cache, table, lengths)
    >>> out.shape, bool((out[1] == v_cache[5, 0]).all())  # one key has all the weight
    (torch.Size([2, 4, 32]), True)
    """
    check_switches(backend, is_causal, return_lse, return_max_logits)
    _check_types(q=q, k_cache=k_cache, v_cache=v_cache, block_table=block_table, seq_lens=seq_lens)
    check_optional("cu_seqlens_q", cu_seqlens_q)
    check_optional("key_anchors", key_anchors)
    check_optional("sinks", sinks)
    _refuse_gradients("attention_paged", q=q, k_cache=k_cache, v_cache=v_cache)
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if longest is not None and (isinstance(longest, bool) or not isinstance(longest, int) or longest < 1):
            raise ValueError(f"{name}={longest!r} is not a positive integer: leave it out if it is not known")
    options, diagnose = checked_config(config).arguments, diagnostics.recording()
    limits = checked_limits(is_causal, scale, window, softcap, return_max_logits)
    tables = block_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k, key_anchors
    arguments = q, k_cache, v_cache, *tables, sinks, *limits, *options, diagnose, backend
    out, lse, max_logits, counts = dispatch.call(operators.attention_paged, *arguments)
    if diagnose:
        diagnostics.record(counts)
    return results(out, lse, max_logits, return_lse, return_max_logits)


@hint_at_arguments
def write_pages(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, key_anchors: Tensor | None = None
) -> None:
    """Write new keys and values into their slots of a paged cache, in place.

    Parameters
    ----------
    k, v : Tensor (T, Hkv, D)
    k_cache, v_cache : Tensor (pages, slots of a page, Hkv, D)
        As for `attention_paged`.
    slot_mapping : Tensor (T or fewer,), int32 or int64
        page * slots of a page + slot for each token, all different. A token with a negative entry is padding and is not
        written. Tokens beyond the end of this tensor are padding, too.
    key_anchors : Tensor (pages, Hkv, D), FP16, contiguous, optional
        Receives the anchors of the pages that are written to. An anchor is a block mean, on a grid on which it can be
        subtracted from the keys without rounding. Pass the same tensor (zeros at first) with every write to a cache,
        and copy its rows when pages are copied. The anchor of a page is formed from slot 0 to the last slot that this
        call writes in the page, all of which must hold keys. So a sequence must grow slot by slot, or be rewritten from
        some key to its end. A call that rewrites one key of a page must also write all later keys of that page.

    Raises
    ------
    ValueError, TypeError
        Tensors do not fit together. On a CPU also: a slot is beyond the cache, or occurs twice. A GPU skips tokens
        whose slot is beyond the cache, because the call does not wait for it.
    NotImplementedError
        A tensor requires a gradient.

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
    check_optional("key_anchors", key_anchors)
    _refuse_gradients("write_pages", k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    n = slot_mapping.numel()
    if k.dim() == v.dim() == 3 and len(k) != len(v):
        raise ValueError(f"{n} slots, but {len(k)} keys and {len(v)} values: pass one slot, key and value a token")
    torch.ops.pasa.write_pages(k[:n], v[:n], k_cache, v_cache, slot_mapping, key_anchors)


def _check_types(**tensors: object) -> None:
    for name, x in tensors.items():
        check_tensor(name, x)


def _refuse_gradients(function: str, **tensors: Tensor) -> None:
    for name, x in tensors.items():
        if torch.is_grad_enabled() and x.requires_grad:
            raise NotImplementedError(f"{function} has no gradient, and {name} requires one: detach it, or no_grad()")
