"""Define the operators torch.ops.pasa.*: their schemas, fake kernels and gradients, and the `Call` that a backend gets.

The operators are functional and take plain arguments, so that they trace, compile and serialise.
The caller (`pasa.attention`) validates options and brings tensors into the operators' layout.
Gradients are operators too, so that a compiled graph keeps each as one node. A backend whose module
defines `gradients` also differentiates the calls that it served; otherwise
ops/attention/spec/gradients.py does so. Calls over a paged cache have no gradients, because caches
are for inference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from pasa.ops import dispatch, operands, registry
from pasa.ops.attention.call import Call, Pages, Results
from pasa.ops.attention.options import AttentionOptions
from pasa.ops.attention.spec import gradients as spec
from pasa.ops.attention.spec import pages, watch
from pasa.ops.backends import Request
from pasa.ops.dispatch import without_autocast

# Maps the Python type of an option to its type in a schema.
TYPES = {"str": "str", "Overflow": "str", "int": "int", "float | None": "float?"}


def _text(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


OPTIONS = ", ".join(f"{TYPES[str(each.type)]} {each.name}={_text(each.default)}" for each in fields(AttentionOptions))
SWITCHES = f"bool is_causal=False, float? scale=None, {OPTIONS}, bool diagnose=False, str? backend=None"


def mask_kind(attn_mask: Tensor | None) -> str:
    """Return the kind of a mask: "none", "bool" or "float"."""
    if attn_mask is None:
        return "none"
    return "bool" if attn_mask.dtype == torch.bool else "float"


def choose(
    q: Tensor, mask: str, packed: bool, diagnose: bool, backend: str | None, *arithmetic: Any, paged: bool = False
) -> tuple[ModuleType, AttentionOptions, str]:
    """Return the module that serves a call, its options, and the backend's name."""
    needs = (q.device.type, q.dtype, q.shape[-1], mask, packed, diagnose, paged)
    return registry.choose(tuple(registry.BACKENDS.values()), backend, needs, arithmetic)


def _dense(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None, diagnose: bool
) -> Call:
    operands.check_attention(q, k, v, attn_mask, scale)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return Call(q, k, v, scale, is_causal=is_causal, mask=attn_mask, diagnose=diagnose)


def _packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    is_causal: bool,
    scale: float | None,
    diagnose: bool,
) -> Call:
    operands.check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, scale)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return Call(q, k, v, scale, is_causal=is_causal, cu_q=cu_seqlens_q, cu_k=cu_seqlens_k, diagnose=diagnose)


def _paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    key_anchors: Tensor | None,
    is_causal: bool,
    scale: float | None,
    diagnose: bool,
) -> Call:
    tables = Pages(block_table, seq_lens, max_seqlen_q, max_seqlen_k, key_anchors)
    operands.check_paged(q, (k_cache, v_cache), tables, cu_seqlens_q, scale)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return Call(q, k_cache, v_cache, scale, is_causal=is_causal, cu_q=cu_seqlens_q, pages=tables, diagnose=diagnose)


def _define(name: str, tensors: str, make: Callable[..., Call]) -> CustomOpDef:
    """Define an operator that returns (out, lse, counts), and its fake kernel.

    `make` builds the `Call` from the tensors, is_causal, scale and diagnose. `counts` is empty
    unless diagnose is set.
    """

    def parts(arguments: tuple[Any, ...]) -> tuple[Call, tuple[Any, ...], str | None]:
        arguments += defaults[len(arguments) :]  # torch omits trailing arguments that have their default values
        head, arithmetic = arguments[: -2 - options], arguments[-2 - options : -2]
        return make(*head, arguments[-2]), arithmetic, arguments[-1]

    def kernel(*arguments: Any) -> Results:
        call, arithmetic, backend = parts(arguments)
        packed, paged = call.q.dim() == 3, call.pages is not None
        kind = mask_kind(call.mask)
        module, call.options, _ = choose(call.q, kind, packed, call.diagnose, backend, *arithmetic, paged=paged)
        if paged:
            pages.check_pages(call)
        with without_autocast(call.q.device.type):
            out, lse, counts = module.attend(call)
        return out.contiguous(), lse.contiguous(), counts

    def fake(*arguments: Any) -> Results:
        call, arithmetic, _ = parts(arguments)
        AttentionOptions(*arithmetic)  # only validates, as `choose` does for calls with data
        q = call.q
        heads = q.shape[:2] if q.dim() == 4 else (1, q.shape[1])
        counts = q.new_empty((*heads, 6) if call.diagnose else (0,), dtype=torch.float64)
        return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32), counts

    options = len(fields(AttentionOptions))
    schema = f"({tensors}, {SWITCHES}) -> (Tensor, Tensor, Tensor)"
    operator = torch.library.custom_op(f"pasa::{name}", kernel, mutates_args=(), schema=schema)
    operator.register_fake(fake)
    defaults = tuple(each.default_value for each in operator._opoverload._schema.arguments)
    return operator


attention = _define("attention", "Tensor q, Tensor k, Tensor v, Tensor? attn_mask=None", _dense)
attention_varlen = _define(
    "attention_varlen", "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k", _packed
)
attention_paged = _define(
    "attention_paged",
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, Tensor? cu_seqlens_q=None, "
    "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, Tensor? key_anchors=None",  # SymInt: they grow
    _paged,
)


# ---- gradients


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
    call = _dense(q, k, v, attn_mask, is_causal, scale, False)
    operands.check_gradients(grad_out, grad_lse, q, backend)
    with without_autocast(q.device.type):
        if not mask_too or attn_mask is None:
            dq, dk, dv = _formula(backend)(call, grad_out, grad_lse)
            return dq.contiguous(), dk.contiguous(), dv.contiguous(), q.new_empty(0)
        shape = (1,) * (4 - attn_mask.dim()) + attn_mask.shape
        grad_mask = torch.zeros(shape, dtype=torch.float32, device=q.device)
        dq, dk, dv = spec.gradients(call, grad_out, grad_lse, grad_mask)
    grad_mask = grad_mask.reshape(attn_mask.shape).to(attn_mask.dtype)
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), grad_mask


@attention_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_out, grad_lse, q, k, v, attn_mask, is_causal, scale, mask_too, backend = arguments
    _dense(q, k, v, attn_mask, is_causal, scale, False)
    operands.check_gradients(grad_out, grad_lse, q, backend)
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
    call = _packed(q, k, v, cu_seqlens_q, cu_seqlens_k, is_causal, scale, False)
    operands.check_gradients(grad_out, grad_lse, q, backend)
    with without_autocast(q.device.type):
        return spec.packed_gradients(_formula(backend), call, grad_out, grad_lse)


@attention_varlen_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    grad_out, grad_lse, q, k, v, cu_seqlens_q, cu_seqlens_k, is_causal, scale, backend = arguments
    _packed(q, k, v, cu_seqlens_q, cu_seqlens_k, is_causal, scale, False)
    operands.check_gradients(grad_out, grad_lse, q, backend)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _formula(backend: str) -> Callable[[Call, Tensor | None, Tensor | None], spec.Gradients]:
    """Return the gradient function of a backend, or that of the reference if the backend has none."""
    formula: Callable[..., spec.Gradients] = getattr(registry.BACKENDS[backend].load(), "gradients", spec.gradients)
    return formula


def _refuse_second(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError(
        "pasa attention has no second derivative, so its gradients cannot be differentiated: call backward() or "
        "torch.autograd.grad without create_graph=True, or use torch's scaled_dot_product_attention in FP32"
    )


def _remember_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    return None


for _op in (attention_backward, attention_varlen_backward):
    _op.register_autograd(_refuse_second)
    dispatch.shorten(_op, _remember_nothing, _refuse_second)


def _server(q: Tensor, mask: str, packed: bool, diagnose: bool, backend: str | None, *arithmetic: Any) -> str:
    """Return the name of the backend that serves such calls.

    The choice is not cached for a symbolic head dimension (under tracing), which has no hash.
    """
    head_dim: Any = q.shape[-1]
    if isinstance(head_dim, int):
        return choose(q, mask, packed, diagnose, backend, *arithmetic)[2]
    options = AttentionOptions(*arithmetic)
    request = Request(q.device.type, q.dtype, head_dim, mask, packed, diagnose, False, options)
    return registry.select(request, backend).name


def _differentiate(operator: CustomOpDef, tensors: int, backward: CustomOpDef) -> None:
    """Register `backward`, which takes the first `tensors` arguments of the operator, as its gradient."""
    count = len(operator._opoverload._schema.arguments)
    masked = operator is attention

    def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        kept = inputs[:tensors]
        is_causal, scale, *arithmetic, diagnose, backend = inputs[tensors:]
        kind = mask_kind(kept[3]) if masked else "none"
        ctx.save_for_backward(*kept)
        ctx.switches = is_causal, scale, _server(kept[0], kind, not masked, diagnose, backend, *arithmetic)
        ctx.mark_non_differentiable(output[2])  # the counts of diagnostics
        ctx.set_materialize_grads(False)

    def gradient(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad_out is None and grad_lse is None:
            return (None,) * count
        is_causal, scale, backend = ctx.switches
        mask_too = masked and any(ctx.needs_input_grad[3:4])  # empty if torch omitted the mask, which defaults to None
        switches = (is_causal, scale, mask_too, backend) if masked else ctx.switches
        grads = dispatch.call(backward, grad_out, grad_lse, *ctx.saved_tensors, *switches)
        return *grads[: 3 + mask_too], *(None,) * (count - 3 - mask_too)

    operator.register_autograd(gradient, setup_context=remember)
    dispatch.shorten(operator, remember, gradient)


_differentiate(attention, 4, attention_backward)
_differentiate(attention_varlen, 5, attention_varlen_backward)


# ---- operators other than attention


@torch.library.custom_op("pasa::write_pages", mutates_args=("k_cache", "v_cache", "key_anchors"))
def write_pages(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, key_anchors: Tensor | None
) -> None:
    """Write keys and values (T, Hkv, D) into their slots; see `spec.pages.write_pages`.

    No argument has a default, because torch 2.11 fails if a mutable argument is left out.
    """
    operands.check_writes(k, v, (k_cache, v_cache), slot_mapping, key_anchors)
    if len(slot_mapping):
        writer = registry.provider("write_pages", k.device.type) or pages  # a copy: for any head dimension
        writer.write_pages(k, v, k_cache, v_cache, slot_mapping, key_anchors)


@write_pages.register_fake
def _(*arguments: Any) -> None:
    k, v, k_cache, v_cache, slot_mapping, key_anchors = arguments
    operands.check_writes(k, v, (k_cache, v_cache), slot_mapping, key_anchors)


@torch.library.custom_op("pasa::watch_scores", mutates_args=("totals", "walked"))
def watch_scores(
    q: Tensor, k: Tensor, attn_mask: Tensor | None, totals: Tensor, walked: Tensor, is_causal: bool, scale: float
) -> None:
    """Sample query rows of q (B, Hq, Sq, D), and add the counts of `spec.watch.count_scores` to `totals`.

    The call never waits for the device. `walked` (1,), INT64, on the CPU, is the number of query rows
    of all earlier calls, sampled or not; this call adds its rows.
    """
    operands.check_watch(q, k, attn_mask, totals, walked, scale)
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    sampled = watch.sample(walked.tolist()[0], rows)
    walked += rows
    if not sampled:
        return
    with without_autocast(q.device.type), torch.no_grad():
        score_counter(q.device.type, q.shape[-1])(q, k, attn_mask, totals, is_causal, scale, sampled)


def score_counter(device: str, head_dim: int) -> Callable[..., None]:
    """Return the `count_scores` of the preferred backend for a device, or that of the reference."""
    count: Callable[..., None] = (registry.provider("count_scores", device, head_dim) or watch).count_scores
    return count


@watch_scores.register_fake
def _(*arguments: Any) -> None:
    q, k, attn_mask, totals, walked, _, scale = arguments
    operands.check_watch(q, k, attn_mask, totals, walked, scale)
