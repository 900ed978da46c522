"""The operators torch.ops.pasa.*: their schemas, fake kernels, and dispatch to a registered backend.

The operators are functional and take plain arguments, so that they trace, compile and serialise.
The caller (`pasa.attention`) validates options and brings tensors into the operators' layout.
gradients.py defines the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pasa.ops import dispatch, gradients, operands, registry
from pasa.ops.attention.options import AttentionOptions
from pasa.ops.attention.spec import watch
from pasa.ops.dispatch import without_autocast
from pasa.ops.registry import Backend, Request, select


def mask_kind(attn_mask: Tensor | None) -> str:
    """Return the kind of a mask: "none", "bool" or "float"."""
    if attn_mask is None:
        return "none"
    return "bool" if attn_mask.dtype == torch.bool else "float"


@cache
def _resolve(
    registered: tuple[Backend, ...],
    backend: str | None,
    needs: tuple[str, torch.dtype, int, str, bool, bool],
    arithmetic: tuple[Any, ...],
    paged: bool,
) -> tuple[ModuleType, AttentionOptions, str]:
    """Return the module that serves such calls, their options, and the backend's name.

    `registered` is part of the cache key, so that a newly registered backend is seen. A choice
    holds for the whole process, because the machine does not change under it. A refusal is not
    cached.
    """
    options = AttentionOptions(*arithmetic)
    request = Request(*needs, options, paged)
    found = select(request, backend)
    if backend is None:
        registry.tell_of_emulation(request, found)
    return found.load(), options, found.name


def serve(
    q: Tensor, mask: str, varlen: bool, diagnose: bool, backend: str | None, *arithmetic: Any, paged: bool = False
) -> tuple[ModuleType, AttentionOptions, str]:
    """Return the module that serves a call, its options, and the backend's name."""
    needs = (q.device.type, q.dtype, q.shape[-1], mask, varlen, diagnose)
    return _resolve(tuple(registry.BACKENDS.values()), backend, needs, arithmetic, paged)


def check_options(*arithmetic: Any) -> None:
    """Check the options of a call without data (meta tensors), which no backend serves."""
    AttentionOptions(*arithmetic)


def _server(q: Tensor, mask: str, varlen: bool, diagnose: bool, backend: str | None, *arithmetic: Any) -> str:
    """Return the name of the backend that serves such calls, uncached for a traced head dim, which has no hash."""
    head_dim: Any = q.shape[-1]
    if isinstance(head_dim, int):
        return serve(q, mask, varlen, diagnose, backend, *arithmetic)[2]
    request = Request(q.device.type, q.dtype, head_dim, mask, varlen, diagnose, AttentionOptions(*arithmetic))
    return select(request, backend).name


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
    """Return (out (B, Hq, Sq, D), lse (B, Hq, Sq), counts (B, Hq, 6) or empty) for heads-first tensors.

    The arguments are those of the reference backend, ops/attention/spec/attention.py.
    """
    operands.check_attention(q, k, v, attn_mask, scale)
    arithmetic = (precision, recovery, beta, block_q, block_k, softmax, overflow, accumulate)
    kernel, options, _ = serve(q, mask_kind(attn_mask), False, diagnose, backend, *arithmetic)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with without_autocast(q.device.type):
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
    operands.check_attention(q, k, v, attn_mask, scale)
    check_options(precision, recovery, beta, block_q, block_k, softmax, overflow, accumulate)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    counts = q.new_empty((*q.shape[:2], 6) if diagnose else (0,), dtype=torch.float64)
    return q.new_empty(q.shape), lse, counts


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, attn_mask, is_causal, scale, *arithmetic, diagnose, backend = inputs
    server = _server(q, mask_kind(attn_mask), False, diagnose, backend, *arithmetic)
    gradients.remember(ctx, (q, k, v, attn_mask), output, is_causal, scale, server)


attention.register_autograd(gradients.of_attention, setup_context=_remember)
dispatch.shorten(attention, _remember, gradients.of_attention)


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
    """Return (out (T, Hq, D), lse (T, Hq), counts (1, Hq, 6) or empty) for packed sequences.

    The arguments are those of the reference backend, ops/attention/spec/attention.py.
    """
    operands.check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, scale)
    arithmetic = (precision, recovery, beta, block_q, block_k, softmax, overflow, accumulate)
    kernel, options, _ = serve(q, "none", True, diagnose, backend, *arithmetic)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    arguments = (cu_seqlens_q, cu_seqlens_k, is_causal, scale, options, diagnose)
    with without_autocast(q.device.type):
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
    operands.check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, scale)
    check_options(precision, recovery, beta, block_q, block_k, softmax, overflow, accumulate)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    counts = q.new_empty((1, q.shape[1], 6) if diagnose else (0,), dtype=torch.float64)
    return q.new_empty(q.shape), lse, counts


def _remember_varlen(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, is_causal, scale, *arithmetic, diagnose, backend = inputs
    server = _server(q, "none", True, diagnose, backend, *arithmetic)
    gradients.remember(ctx, (q, k, v, cu_seqlens_q, cu_seqlens_k), output, is_causal, scale, server)


attention_varlen.register_autograd(gradients.of_varlen, setup_context=_remember_varlen)
dispatch.shorten(attention_varlen, _remember_varlen, gradients.of_varlen)


@torch.library.custom_op("pasa::watch_scores", mutates_args=("totals", "walked"))
def watch_scores(
    q: Tensor, k: Tensor, attn_mask: Tensor | None, totals: Tensor, walked: Tensor, is_causal: bool, scale: float
) -> None:
    """Sample query rows of q (B, Hq, Sq, D) and add what `watch.count` finds in them to `totals`.

    The call never waits for the device. `walked` (1,), INT64, on the CPU, counts the rows that came
    before this call; the call adds its own.
    """
    operands.check_watch(q, k, attn_mask, totals, walked, scale)
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    taken = watch.sample(walked.tolist()[0], rows)
    walked += rows
    if not taken:
        return
    with without_autocast(q.device.type), torch.no_grad():
        watch_counter(q.device.type, q.shape[-1])(q, k, attn_mask, totals, is_causal, scale, taken)


@watch_scores.register_fake
def _(
    q: Tensor, k: Tensor, attn_mask: Tensor | None, totals: Tensor, walked: Tensor, is_causal: bool, scale: float
) -> None:
    operands.check_watch(q, k, attn_mask, totals, walked, scale)


@cache
def watch_counter(device: str, head_dim: int) -> Callable[..., None]:
    """Return the function that counts sampled rows: Triton's on a GPU that Triton serves, torch's elsewhere."""
    triton = registry.BACKENDS["triton"]
    if device != "cuda" or head_dim > triton.head_dims[1] or triton.missing():
        return watch.count
    from pasa.ops.attention.triton.watch import launch as watch_launch

    return watch_launch.count
