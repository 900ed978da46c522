"""Random calls of what is derived from attention: its definition in FP64, gradients, outputs of parts joined."""

from __future__ import annotations

from random import Random

import torch

import pasa
from pasa.eval.accuracy.gradients.cases import Inputs
from pasa.eval.accuracy.gradients.truth import exact_gradients, plain_gradients
from pasa.eval.random_calls import attention
from pasa.eval.random_calls.backends import REFERENCE
from pasa.eval.random_calls.cases import Kind, Measures, Params
from pasa.eval.random_calls.inputs import STRIDES, make
from pasa.eval.random_calls.judge import Arithmetic, judge, worst
from pasa.eval.random_calls.truth import find_truth, prepare
from pasa.ops.ring.merge import Merge

FP64_UNIT = 2.0**-53
GRADIENT_FACTOR = 4.0  # of a plain FP32 backward pass; few numbers, so more than eval/accuracy/gradients allows
GRADIENT_FLOOR = {"float16": 2.0**-9, "bfloat16": 2.0**-6}  # of the gradient's norm
PLAIN = {
    "backend": REFERENCE, "layout": "HND", "strides": "contiguous", "garbage": "none", "diagnose": False,
    "operator": False, "precision": "pasa", "recovery": "exact", "softmax": "safe", "beta": None, "scale": None,
    "window": None, "softcap": None, "sinks": None,
}  # fmt: skip


def draw_golden(rng: Random) -> Params:
    """Draw finite numbers, as any call has them."""
    params = attention.draw(rng)
    kept = {name: params[name] for name in ("strides", "scale")}
    return params | PLAIN | kept | {"dtype": "float16", "rows": min(params["rows"], 17)}


def run_golden(params: Params) -> Measures:
    """Compare with the definition in plain torch; both round in FP64."""
    call = make(params)
    q, k, v = STRIDES[params["strides"]](call.q, call.k, call.v)
    out, lse = pasa.golden_attention(q, k, v, attn_mask=call.mask, is_causal=call.causal, scale=call.scale)
    part, truth = prepare(call), find_truth(call)
    top = part.scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = torch.exp(part.scores - top)
    total = weights.sum(-1, keepdim=True)
    exact, exact_lse = weights / total.where(total > 0, 1.0) @ part.v, (top + total.log()).squeeze(-1)
    seen, n = ~truth.fully_masked, call.k.shape[2]
    eps = (q.shape[-1] + 4) * FP64_UNIT * truth.products + 4 * FP64_UNIT * (truth.added + exact_lse.abs() + 1)
    spread = torch.expm1(4 * eps).clamp(max=1.0).unsqueeze(-1) * (truth.high - truth.low)
    return {
        "shape": float(out.shape != call.q.shape or {out.dtype, lse.dtype} != {torch.float64}),
        "fully-masked": float((out[~seen] != 0).sum() + (lse[~seen] != -torch.inf).sum()),
        "error": worst((out - exact).abs(), spread + 4 * n * FP64_UNIT * truth.largest, seen.unsqueeze(-1)),
        "lse": worst((lse - exact_lse).abs(), 4 * eps, seen),
    }


def draw_gradients(rng: Random) -> Params:
    """Draw ordinary numbers, and which of the tensors have gradients."""
    data, mask = rng.choice(("randn", "bias", "repeated")), rng.choice(("none", "bool", "float", "keys"))
    params = attention.draw(rng) | PLAIN | {"data": data, "values": "randn", "mask": mask}
    params |= {"dtype": rng.choice(("float16", "bfloat16")), "dim": rng.choice((16, 20, 64))}
    return params | {"of": rng.choice((7, 7, 1, 2, 4, 3)), "of_lse": rng.random() < 0.3}


def run_gradients(params: Params) -> Measures:
    """Judge dQ, dK and dV, relative to their norm, beside a plain backward pass."""
    call = make(params)
    source = torch.Generator().manual_seed(params["rows"])
    grad = torch.randn(call.q.shape, generator=source).to(call.q.dtype)
    leaves = [x.clone().requires_grad_(bool(params["of"] >> i & 1)) for i, x in enumerate((call.q, call.k, call.v))]
    config = attention.config_of(params)
    out, lse = pasa.attention(*leaves, attn_mask=call.mask, is_causal=call.causal, return_lse=True, config=config)
    grad_lse = None
    if params["of_lse"]:
        grad_lse = torch.randn(call.q.shape[:3], generator=source).masked_fill(lse.isneginf(), 0.0)
    torch.autograd.backward([out] if grad_lse is None else [out, lse], [grad] if grad_lse is None else [grad, grad_lse])
    inputs = Inputs(call.q, call.k, call.v, call.mask, call.causal, grad, grad_lse)
    exact, plain = exact_gradients(inputs), plain_gradients(inputs)
    grads = {i: x.grad for i, x in enumerate(leaves) if x.grad is not None}
    measures = {
        "shape": float(any(x.dtype != call.q.dtype for x in grads.values())),
        "finite": float(sum(int((~torch.isfinite(x)).sum()) for x in grads.values())),
    }
    for i, name in enumerate(("dq", "dk", "dv")):
        norm = float(exact[i].norm())
        if not leaves[i].requires_grad or norm == 0:
            continue
        plain_error, error = (float((x[i].double() - exact[i]).norm()) / norm for x in (plain, grads))
        scale = max(1.0, float(sum(e.norm() for e in exact)) / norm)  # one that all but cancels has the others' error
        measures[name] = error / (GRADIENT_FACTOR * plain_error + GRADIENT_FLOOR[params["dtype"]] * scale)
    return measures


def draw_parts(rng: Random) -> Params:
    """Draw keys that are cut into up to five chunks."""
    params = attention.draw(rng) | PLAIN | {"mask": "none", "causal": False}
    return params | {"dtype": "float16", "accumulate": "fp32", "parts": rng.randint(1, 5)}


def run_parts(params: Params) -> Measures:
    """Join parts as `ring_attention` joins what its ranks compute, in one process."""
    call = make(params)
    merge = Merge(call.q)
    parts = list(zip(call.k.chunk(params["parts"], 2), call.v.chunk(params["parts"], 2), strict=True))
    for k, v in parts:
        out, lse = pasa.attention(call.q, k, v, return_lse=True, config=attention.config_of(params), backend=REFERENCE)
        merge.add(slice(None), out.float(), lse)
    merged, lse = merge.finish()
    how = Arithmetic(torch.float16, stores=1 + len(parts))
    measures = judge(find_truth(call, chunks=len(parts)), merged.half(), lse, how)
    return {"shape": float(merged.shape != call.q.shape)} | measures


KINDS = {
    "golden_attention": Kind(draw_golden, run_golden, 15, attention.SIMPLEST),
    "gradients": Kind(draw_gradients, run_gradients, 50, attention.SIMPLEST | {"dim": 16}),
    "ring merge": Kind(draw_parts, run_parts, 25, attention.SIMPLEST | {"parts": 1}),
}
