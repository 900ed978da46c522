"""Define the operators torch.ops.pasa.*: their schemas, fake kernels and gradients.

The operators are functional and take plain arguments, so that they trace, compile and serialise.
The caller (`pasa.attention`) validates options and brings tensors into the operators' layout.
Gradients are operators too, so that a compiled graph keeps each as one node. A backend whose module
defines `gradients` also differentiates the calls that it served; otherwise
ops/attention/spec/gradients.py does so. Calls over a paged cache have no gradients, because caches
are for inference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from pasa.ops import dispatch, operands, plans, registry
from pasa.ops.arguments import LIMITS, OPTIONS, dense, packed, paged, schema
from pasa.ops.attention.call import NO_WINDOW, Call, is_tokens_first
from pasa.ops.attention.options import AttentionOptions
from pasa.ops.attention.spec import gradients as spec
from pasa.ops.attention.spec import pages, watch
from pasa.ops.backends import Request
from pasa.ops.devices import without_autocast
from pasa.ops.recording import recorded


def mask_kind(attn_mask: Tensor | None) -> str:
    """Return the kind of a mask: "none", "bool" or "float"."""
    if attn_mask is None:
        return "none"
    return "bool" if attn_mask.dtype == torch.bool else "float"


def choose(call: Call, backend: str | None, *arithmetic: Any) -> tuple[ModuleType, AttentionOptions, str]:
    """Return the module that serves a call, its options, and the backend's name."""
    needs = (call.q.device.type, call.q.dtype, call.q.shape[-1], mask_kind(call.mask), call.features)
    return registry.choose(tuple(registry.BACKENDS.values()), backend, needs, arithmetic)


def _define(name: str, tensors: str, make: Callable[..., Call], last: str = "") -> CustomOpDef:
    """Define an operator that returns (out, lse, max_logits, counts), and its fake kernel.

    `last` are arguments that joined later: saved graphs have the others by position. `make` builds the `Call`
    (ops/arguments.py). `max_logits` and `counts` are empty unless the call asks for them.
    """

    def parts(arguments: tuple[Any, ...]) -> tuple[Call, tuple[Any, ...], str | None]:
        arguments += defaults[len(arguments) :]  # torch omits trailing arguments that have their default values
        *arithmetic, diagnose, backend = arguments[own : own + OPTIONS + 2]
        return make(*arguments[:own], diagnose, *arguments[own + OPTIONS + 2 :]), tuple(arithmetic), backend

    def kernel(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        call, arithmetic, backend = parts(arguments)
        module, options, name = choose(call.narrowed(), backend, *arithmetic)
        with recorded(registry.BACKENDS[name].repeatable), without_autocast(call.q.device.type):
            call = call.narrowed()  # again, so that a recorder sees it
            call.options = options
            if call.pages is not None:
                pages.check_pages(call)
            out, lse, max_logits, counts = module.attend(call)
            out, lse = call.laid_out(out), lse.contiguous()
        if max_logits is None:
            max_logits = _empty(lse.device, torch.float32).detach()
        if counts is None:
            counts = _empty(lse.device, torch.float64).detach()
        return out, lse, max_logits, counts

    def fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        call, arithmetic, _ = parts(arguments)
        AttentionOptions(*arithmetic)  # only validates, as `choose` does for calls with data
        q = call.q
        heads = q.shape[:2] if q.dim() == 4 else (1, q.shape[1])
        counts = q.new_empty((*heads, 7) if call.diagnose else (0,), dtype=torch.float64)
        max_logits = q.new_empty((call.sequences, q.shape[1]) if call.max_logits else (0,), dtype=torch.float32)
        out = q.new_empty(q.transpose(1, 2).shape).transpose(1, 2) if is_tokens_first(q) else q.new_empty(q.shape)
        return out, q.new_empty(q.shape[:-1], dtype=torch.float32), max_logits, counts

    text = f"({tensors}, Tensor? sinks=None, {schema()}{last}) -> (Tensor, Tensor, Tensor, Tensor)"
    operator = torch.library.custom_op(f"pasa::{name}", kernel, mutates_args=(), schema=text)
    operator.register_fake(fake)
    defaults = tuple(each.default_value for each in operator._opoverload._schema.arguments)
    own = len(defaults) - OPTIONS - 2 - last.count("=")  # arguments before the options of the arithmetic
    return operator


@cache
def _empty(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return one empty tensor for a device: an alias of it costs the host less than a new tensor."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device=device)


attention = _define("attention", "Tensor q, Tensor k, Tensor v, Tensor? attn_mask=None", dense)
LONGEST = ", SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None"  # SymInt: they grow
attention_varlen = _define(
    "attention_varlen", "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k", packed, LONGEST
)
attention_paged = _define(
    "attention_paged",
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, Tensor? cu_seqlens_q=None"
    f"{LONGEST}, Tensor? key_anchors=None",
    paged,
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
    sinks: Tensor | None,
    is_causal: bool,
    scale: float | None,
    window_left: int,
    window_right: int,
    softcap: float,
    mask_too: bool,
    sinks_too: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv, dmask or empty, dsinks or empty) for heads-first tensors (spec/gradients.py)."""
    call = dense(q, k, v, attn_mask, sinks, is_causal, scale, window_left, window_right, softcap)
    operands.check_gradients(grad_out, grad_lse, q, backend)
    with recorded(registry.BACKENDS[backend].repeatable), without_autocast(q.device.type):
        call = call.narrowed()
        grad_mask, grad_sinks = _zeros(attn_mask, mask_too), _zeros(sinks, sinks_too)
        first = k.shape[2] - call.k.shape[2]  # keys before it are outside of every window
        if grad_mask is None:
            dq, dk, dv = _formula(backend)(call, grad_out, grad_lse, grad_sinks=grad_sinks)
        else:
            seen = None if grad_mask is None else grad_mask.reshape((1,) * (4 - grad_mask.dim()) + grad_mask.shape)
            seen = seen if seen is None or seen.shape[3] == 1 else seen[..., first:]
            dq, dk, dv = spec.gradients(call, grad_out, grad_lse, seen, grad_sinks)
        if first:
            dk, dv = (torch.nn.functional.pad(x, (0, 0, first, 0)) for x in (dk, dv))
        optional = _or_empty(grad_mask, attn_mask, q), _or_empty(grad_sinks, sinks, q)
        return dq.contiguous(), dk.contiguous(), dv.contiguous(), *optional


@attention_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    grad_out, grad_lse, q, k, v, attn_mask, sinks, *limits, mask_too, sinks_too, backend = arguments
    dense(q, k, v, attn_mask, sinks, *limits)
    operands.check_gradients(grad_out, grad_lse, q, backend)
    optional = _or_empty(_zeros(attn_mask, mask_too), attn_mask, q), _or_empty(_zeros(sinks, sinks_too), sinks, q)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), *optional


@torch.library.custom_op("pasa::attention_varlen_backward", mutates_args=())
def attention_varlen_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    sinks: Tensor | None,
    is_causal: bool,
    scale: float | None,
    window_left: int,
    window_right: int,
    softcap: float,
    sinks_too: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv, dsinks or empty) for packed sequences; see ops/attention/spec/gradients.py."""
    limits = is_causal, scale, window_left, window_right, softcap
    call = packed(q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, *limits).narrowed()
    operands.check_gradients(grad_out, grad_lse, q, backend)
    grad_sinks = _zeros(sinks, sinks_too)
    with without_autocast(q.device.type):
        grads = spec.packed_gradients(_formula(backend), call, grad_out, grad_lse, grad_sinks)
    return *grads, _or_empty(grad_sinks, sinks, q)


@attention_varlen_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_out, grad_lse, q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, *limits, sinks_too, backend = arguments
    packed(q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, *limits)
    operands.check_gradients(grad_out, grad_lse, q, backend)
    of_sinks = _or_empty(_zeros(sinks, sinks_too), sinks, q)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), of_sinks


def _zeros(x: Tensor | None, needed: bool) -> Tensor | None:
    """Return FP32 zeros for the gradient of a mask or of sinks, or None if it is not needed."""
    return x.new_zeros(x.shape, dtype=torch.float32) if needed and x is not None else None


def _or_empty(grad: Tensor | None, x: Tensor | None, q: Tensor) -> Tensor:
    """Return a gradient in the dtype of its tensor, or an empty tensor, because an operator cannot return None."""
    return q.new_empty(0) if grad is None or x is None else grad.to(x.dtype)


def _formula(backend: str) -> Callable[..., spec.Gradients]:
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


def _server(call: Call, arithmetic: list[Any], backend: str | None) -> str:
    """Return the name of the backend that serves such calls.

    The choice is not cached for a symbolic head dimension (under tracing), which has no hash.
    """
    head_dim: Any = call.q.shape[-1]
    if isinstance(head_dim, int):
        return choose(call, backend, *arithmetic)[2]
    request = Request(
        call.q.device.type, call.q.dtype, head_dim, mask_kind(call.mask), call.features, AttentionOptions(*arithmetic)
    )
    return registry.select(request, backend).name


def _differentiate(operator: CustomOpDef, tensors: int, backward: CustomOpDef) -> None:
    """Register `backward`, which takes the first `tensors` arguments of the operator, as its gradient.

    The last of these are the mask, for dense calls, and the sinks.
    """
    count = len(operator._opoverload._schema.arguments)
    extra = 2 if operator is attention else 1  # the mask and the sinks; a packed call has no mask
    plain = slice(tensors, tensors + len(LIMITS) + OPTIONS + 2)

    def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:tensors])
        q, k, v, mask, *_ = inputs
        is_causal, scale, left, right, softcap, max_logits, *arithmetic, diagnose, backend = inputs[plain]
        ctx.limits = is_causal, scale, left, right, softcap
        features = {"window": (left, right), "softcap": softcap, "sinks": inputs[tensors - 1]}
        call = Call(
            q, k, v, 1.0, mask=mask if extra == 2 else None, max_logits=max_logits, diagnose=diagnose, **features
        )
        ctx.backend = _server(call, arithmetic, backend)
        ctx.mark_non_differentiable(*[x for x in output[2:] if x is not None])  # max_logits and counts, if asked for
        ctx.set_materialize_grads(False)

    def gradient(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad_out is None and grad_lse is None:
            return (None,) * count
        # Shorter than `extra` if torch omitted these tensors, which default to None.
        wanted = [ctx.needs_input_grad[i : i + 1] == (True,) for i in range(tensors - extra, tensors)]
        grads = dispatch.call(backward, grad_out, grad_lse, *ctx.saved_tensors, *ctx.limits, *wanted, ctx.backend)
        extras = [grad if use else None for grad, use in zip(grads[3:], wanted, strict=True)]
        return *grads[:3], *(None,) * (tensors - extra - 3), *extras, *(None,) * (count - tensors)

    operator.register_autograd(gradient, setup_context=remember)
    dispatch.shorten(operator, remember, gradient)


_differentiate(attention, 5, attention_backward)
_differentiate(attention_varlen, 6, attention_varlen_backward)
for _op in (attention, attention_paged, attention_backward):  # packed lengths are read on the host
    plans.REPEATED[_op] = registry.BACKENDS


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
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None,
    totals: Tensor,
    walked: Tensor,
    is_causal: bool,
    scale: float,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
) -> None:
    """Sample query rows of q (B, Hq, Sq, D), and add the counts of `spec.watch.count_scores` to `totals`.

    The call never waits for the device. `walked` (1,), INT64, on the CPU, is the number of query rows
    of all earlier calls, sampled or not; this call adds its rows.
    """
    window = window_left, window_right
    operands.check_watch(q, k, attn_mask, totals, walked, scale, *window, softcap)
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    sampled = watch.sample(walked.tolist()[0], rows)
    walked += rows
    if not sampled:
        return
    call = q, k, attn_mask, totals, is_causal, scale, sampled
    with without_autocast(q.device.type), torch.no_grad():
        if window != NO_WINDOW or softcap:  # the kernels have neither
            watch.count_scores(*call, window, softcap)
        else:
            score_counter(q.device.type, q.shape[-1])(*call)


def score_counter(device: str, head_dim: int) -> Callable[..., None]:
    """Return the `count_scores` of the preferred backend for a device, or that of the reference."""
    count: Callable[..., None] = (registry.provider("count_scores", device, head_dim) or watch).count_scores
    return count


@watch_scores.register_fake
def _(*arguments: Any) -> None:
    q, k, attn_mask, totals, walked, _, *limits = arguments
    operands.check_watch(q, k, attn_mask, totals, walked, *limits)
