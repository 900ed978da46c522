"""torch.ops.pasa.*: schemas, fake kernels, dispatch to a backend of the registry.

The operators are functional and take plain arguments, so that they trace, compile and serialise; validation and
layouts are the caller's (`pasa.attention`).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from pasa.ops.attention.options import AttentionOptions
from pasa.ops.numerics.formats import Overflow
from pasa.ops.registry import Backend, Request, select


def mask_kind(attn_mask: Tensor | None) -> str:
    """ "none", "bool" or "float"."""
    if attn_mask is None:
        return "none"
    return "bool" if attn_mask.dtype == torch.bool else "float"


def _select(
    q: Tensor, attn_mask: Tensor | None, varlen: bool, diagnose: bool, options: AttentionOptions, backend: str | None
) -> Backend:
    request = Request(q.device.type, q.dtype, q.shape[-1], mask_kind(attn_mask), varlen, diagnose, options)
    return select(request, backend)


@torch.library.custom_op("pasa::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
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
    """(out (B, Hq, Sq, D), lse (B, Hq, Sq), counts (B, Hq, 6) or empty) of heads-first tensors; see the reference."""
    options = AttentionOptions(
        precision, recovery, beta, block_q, block_k, softmax, cast(Overflow, overflow), accumulate
    )
    kernel = _select(q, attn_mask, False, diagnose, options, backend).load()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast(q.device.type, enabled=False):  # it would change the arithmetic that `options` states
        out, lse, counts = kernel.attention(q, k, v, attn_mask, is_causal, scale, options, diagnose)
    return out.contiguous(), lse.contiguous(), counts


@attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
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
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    counts = q.new_empty((*q.shape[:2], 6) if diagnose else (0,), dtype=torch.float64)
    return q.new_empty(q.shape), lse, counts


@torch.library.custom_op("pasa::attention_varlen", mutates_args=())
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
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
    """(out (T, Hq, D), lse (T, Hq), counts (1, Hq, 6) or empty) of packed sequences; see the reference."""
    options = AttentionOptions(
        precision, recovery, beta, block_q, block_k, softmax, cast(Overflow, overflow), accumulate
    )
    kernel = _select(q, None, True, diagnose, options, backend).load()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    arguments = (cu_seqlens_q, cu_seqlens_k, is_causal, scale, options, diagnose)
    with torch.autocast(q.device.type, enabled=False):
        out, lse, counts = kernel.attention_varlen(q, k, v, *arguments)
    return out.contiguous(), lse.contiguous(), counts


@attention_varlen.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
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
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    counts = q.new_empty((1, q.shape[1], 6) if diagnose else (0,), dtype=torch.float64)
    return q.new_empty(q.shape), lse, counts
