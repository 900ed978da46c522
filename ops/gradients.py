"""The gradients of torch.ops.pasa.*, registered as custom operators so that a compiled graph keeps each as one node.

A backend whose module defines `attention_backward` also differentiates the calls that it served.
For all other backends ops/attention/spec/gradients.py does so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pasa.ops import dispatch, operands, registry
from pasa.ops.attention.spec import gradients as backward
from pasa.ops.dispatch import without_autocast


def _formula(backend: str) -> Callable[..., backward.Gradients]:
    """Return the `attention_backward` of a backend, or the one that serves all devices."""
    formula: Callable[..., backward.Gradients] = getattr(
        registry.BACKENDS[backend].load(), "attention_backward", backward.attention_backward
    )
    return formula


def _default(scale: float | None, q: Tensor) -> float:
    return float(q.shape[-1] ** -0.5) if scale is None else scale


@torch.library.custom_op("pasa::attention_backward", mutates_args=())
def attention_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    mask_too: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv, dmask or empty) for heads-first tensors; see ops/attention/spec/gradients.py."""
    operands.check_attention(q, k, v, attn_mask, scale)
    operands.check_gradients(grad_out, grad_lse, q, tuple(q.shape[:3]), backend)
    given = (grad_out, grad_lse, q, k, v, attn_mask, is_causal, _default(scale, q))
    with without_autocast(q.device.type):
        if not mask_too or attn_mask is None:
            dq, dk, dv = _formula(backend)(*given)
            return dq.contiguous(), dk.contiguous(), dv.contiguous(), q.new_empty(0)
        shape = (1,) * (4 - attn_mask.dim()) + attn_mask.shape
        grad_mask = torch.zeros(shape, dtype=torch.float32, device=q.device)
        dq, dk, dv = backward.attention_backward(*given, grad_mask)
    grad_mask = grad_mask.reshape(attn_mask.shape).to(attn_mask.dtype)
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), grad_mask


@attention_backward.register_fake
def _(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    mask_too: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    operands.check_attention(q, k, v, attn_mask, scale)
    operands.check_gradients(grad_out, grad_lse, q, tuple(q.shape[:3]), backend)
    of_mask = q.new_empty(0) if not mask_too or attn_mask is None else attn_mask.new_empty(attn_mask.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), of_mask


@torch.library.custom_op("pasa::attention_varlen_backward", mutates_args=())
def attention_varlen_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    is_causal: bool,
    scale: float | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) for packed sequences; see ops/attention/spec/gradients.py."""
    operands.check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, scale)
    operands.check_gradients(grad_out, grad_lse, q, tuple(q.shape[:2]), backend)
    with without_autocast(q.device.type):
        return backward.attention_varlen_backward(
            _formula(backend), grad_out, grad_lse, q, k, v, cu_seqlens_q, cu_seqlens_k, is_causal, _default(scale, q)
        )


@attention_varlen_backward.register_fake
def _(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    is_causal: bool,
    scale: float | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    operands.check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, scale)
    operands.check_gradients(grad_out, grad_lse, q, tuple(q.shape[:2]), backend)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _remember_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    return None


def _refuse_second(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError("pasa attention has no second derivative: its gradients cannot be differentiated")


for _op in (attention_backward, attention_varlen_backward):
    _op.register_autograd(_refuse_second)
    dispatch.shorten(_op, _remember_nothing, _refuse_second)


def remember(ctx: Any, tensors: tuple[Tensor | None, ...], output: tuple[Tensor, ...], *switches: Any) -> None:
    """Save what a gradient needs: tensors, and (is_causal, scale, backend)."""
    ctx.save_for_backward(*tensors)
    ctx.switches = switches
    ctx.mark_non_differentiable(output[2])  # the counts of diagnostics
    ctx.set_materialize_grads(False)


def of_attention(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, grad_counts: None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the operator's 16 arguments, None where there is none."""
    if grad_out is None and grad_lse is None:
        return (None,) * 16
    q, k, v, attn_mask = ctx.saved_tensors
    is_causal, scale, backend = ctx.switches
    mask_too = any(ctx.needs_input_grad[3:4])  # torch omits arguments that have their defaults
    given = (grad_out, grad_lse, q, k, v, attn_mask, is_causal, scale)
    dq, dk, dv, grad_mask = dispatch.call(attention_backward, *given, mask_too, backend)
    return dq, dk, dv, grad_mask if mask_too else None, *(None,) * 12


def of_varlen(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, grad_counts: None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the operator's 17 arguments, None where there is none."""
    if grad_out is None and grad_lse is None:
        return (None,) * 17
    found = dispatch.call(attention_varlen_backward, grad_out, grad_lse, *ctx.saved_tensors, *ctx.switches)
    return *found, *(None,) * 14
