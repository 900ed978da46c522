"""The operators attention_paged and write_pages: their schemas, fake kernels, and dispatch to a backend.

They follow library.py, but have no gradients, because caches are for inference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pasa.ops import operands, paging
from pasa.ops.dispatch import without_autocast
from pasa.ops.library import check_options, serve


@torch.library.custom_op("pasa::attention_paged", mutates_args=())
def attention_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    key_anchors: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    precision: str = "pasa",
    recovery: str = "exact",
    beta: float | None = None,
    block_q: int = 128,
    block_k: int = 128,
    softmax: str = "safe",
    overflow: str = "inf",
    accumulate: str = "fp32",
    diagnose: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (out (T, Hq, D), lse (T, Hq), counts (1, Hq, 6) or empty); see the reference for the arguments."""
    longest = (max_seqlen_q, max_seqlen_k)
    operands.check_paged(q, (k_cache, v_cache), block_table, seq_lens, cu_seqlens_q, longest, key_anchors, scale)
    arithmetic = (precision, recovery, beta, block_q, block_k, softmax, overflow, accumulate)
    kernel, options, _ = serve(q, "none", True, diagnose, backend, *arithmetic, paged=True)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    paging.check_pages(block_table, seq_lens, cu_seqlens_q, k_cache, q.shape[0])
    if key_anchors is not None:
        paging.check_anchors(key_anchors, k_cache, block_table, seq_lens)
    tables = (block_table, seq_lens, cu_seqlens_q, *longest, key_anchors)
    with without_autocast(q.device.type):
        out, lse, counts = kernel.attention_paged(q, k_cache, v_cache, *tables, is_causal, scale, options, diagnose)
    return out.contiguous(), lse.contiguous(), counts


@attention_paged.register_fake
def _(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    key_anchors: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    precision: str = "pasa",
    recovery: str = "exact",
    beta: float | None = None,
    block_q: int = 128,
    block_k: int = 128,
    softmax: str = "safe",
    overflow: str = "inf",
    accumulate: str = "fp32",
    diagnose: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    longest = (max_seqlen_q, max_seqlen_k)
    operands.check_paged(q, (k_cache, v_cache), block_table, seq_lens, cu_seqlens_q, longest, key_anchors, scale)
    check_options(precision, recovery, beta, block_q, block_k, softmax, overflow, accumulate)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    counts = q.new_empty((1, q.shape[1], 6) if diagnose else (0,), dtype=torch.float64)
    return q.new_empty(q.shape), lse, counts


@torch.library.custom_op("pasa::write_pages", mutates_args=("k_cache", "v_cache", "key_anchors"))
def write_pages(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, key_anchors: Tensor | None
) -> None:
    """Write keys and values (T, Hkv, D) into their slots; see `paging.write_pages`.

    No argument has a default, because torch 2.11 fails if a mutable argument is left out.
    """
    operands.check_writes(k, v, (k_cache, v_cache), slot_mapping, key_anchors)
    if len(slot_mapping):
        paging.write_pages(k, v, k_cache, v_cache, slot_mapping, key_anchors)


@write_pages.register_fake
def _(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, key_anchors: Tensor | None) -> None:
    operands.check_writes(k, v, (k_cache, v_cache), slot_mapping, key_anchors)
