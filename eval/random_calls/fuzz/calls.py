"""Random calls of what stands beside `attention`: packed sequences, gradients, and outputs of parts joined."""

from __future__ import annotations

from itertools import accumulate, pairwise
from random import Random

import torch

import pasa
from pasa.eval.accuracy.gradients.cases import Inputs
from pasa.eval.accuracy.gradients.truth import exact_gradients, plain_gradients
from pasa.eval.random_calls.fuzz import attention, truth
from pasa.eval.random_calls.fuzz.attention import pick, put
from pasa.eval.random_calls.fuzz.backends import REFERENCE, available
from pasa.eval.random_calls.fuzz.cases import Arguments, Fault, Kind, Measures, Params, spoil
from pasa.eval.random_calls.fuzz.inputs import Call, indices, lay_out, make
from pasa.eval.random_calls.soak.truth import UNIT
from pasa.ops.ring.merge import Merge

FP64_UNIT = 2.0**-53
GRADIENT_FACTOR = 4.0  # of a plain FP32 backward pass; few numbers, so more than eval/accuracy/gradients allows
GRADIENT_FLOOR = {"float16": 2.0**-9, "bfloat16": 2.0**-6, "float32": 2.0**-9}  # of the gradient's norm


# ---- packed sequences


def draw_packed(rng: Random) -> Params:
    """Sequences one behind the other; one may be empty."""
    params = attention.draw(rng) | {"mask": "none", "garbage": "none", "batch": 1, "layout": "HND", "operator": False}
    count = rng.randint(1, 4)
    rows, keys = ([rng.choice((0, 1, 2, 5, 17, 33)) for _ in range(count)] for _ in range(2))
    rows[0], keys[0] = max(rows[0], 1), max(keys[0], 1)
    changed = {"rows": sum(rows), "keys": sum(keys), "row_lengths": rows, "key_lengths": keys, "strides": "contiguous"}
    return params | changed | {"wide": rng.random() < 0.5, "spaced": rng.random() < 0.3, "diagnose": False}


def run_packed(params: Params) -> Measures:
    """Judge each sequence on its own."""
    call = make(params)
    edges = [list(accumulate(params[name], initial=0)) for name in ("row_lengths", "key_lengths")]
    arguments: Arguments = {name: x[0].transpose(0, 1) for name, x in (("q", call.q), ("k", call.k), ("v", call.v))}
    arguments |= {f"cu_seqlens_{name}": indices(params, e) for name, e in zip("qk", edges, strict=True)}
    arguments |= {"max_seqlen_q": max(params["row_lengths"]), "max_seqlen_k": max(params["key_lengths"])}
    arguments |= {"is_causal": params["causal"], "scale": params["scale"], "return_lse": True}
    arguments |= {"config": attention.config_of(params), "backend": params["backend"]}
    spoil(PACKED_FAULTS, params, arguments)
    with available(params["backend"]):
        out, lse = pasa.attention_varlen(**arguments)
    if out.shape != arguments["q"].shape or lse.shape != out.shape[:2] or out.dtype != call.q.dtype:
        return {"shape": 1.0}
    worst: Measures = {"shape": 0.0}
    for (q0, q1), (k0, k1) in zip(*(pairwise(e) for e in edges), strict=True):
        if q0 == q1:
            continue
        one, one_lse = out[q0:q1].transpose(0, 1).unsqueeze(0), lse[q0:q1].T.unsqueeze(0)
        if k0 == k1:
            found = {"blind": float((one != 0).sum() + (one_lse != -torch.inf).sum())}
        else:
            part = Call(call.q[:, :, q0:q1], call.k[:, :, k0:k1], call.v[:, :, k0:k1], None)
            found = attention.worth(params, part, one, one_lse)
        worst = {name: max(worst.get(name, 0.0), found.get(name, 0.0)) for name in worst | found}
    return worst


def longer(arguments: Arguments, rng: Random) -> None:
    """Cumulative lengths that do not end with the tensor, fall, or do not begin with 0."""
    name = rng.choice(("cu_seqlens_q", "cu_seqlens_k"))
    last = arguments[name][-1:]
    beginning = torch.cat([arguments[name][:1] + 1, arguments[name][1:] + 1])
    falling = torch.cat([arguments[name], last - 1, last])
    arguments[name] = rng.choice((torch.cat([arguments[name][:-1], last + 1]), beginning, falling))
    for each in ("q", "k"):
        arguments[f"max_seqlen_{each}"] += 2
    short = min(len(arguments["cu_seqlens_q"]), len(arguments["cu_seqlens_k"]))
    if name == "cu_seqlens_q":
        tail = arguments["cu_seqlens_k"][-1:].expand(len(arguments[name]) - short)
        arguments["cu_seqlens_k"] = torch.cat([arguments["cu_seqlens_k"], tail])
    else:
        tail = arguments["cu_seqlens_q"][-1:].expand(len(arguments[name]) - short)
        arguments["cu_seqlens_q"] = torch.cat([arguments["cu_seqlens_q"], tail])


def one_more(arguments: Arguments, rng: Random) -> None:
    """Not as many sequences of keys as of queries."""
    arguments["cu_seqlens_k"] = torch.cat([arguments["cu_seqlens_k"], arguments["cu_seqlens_k"][-1:]])


PACKED_FAULTS = {
    "lengths": Fault(longer, ValueError, r"cu_seqlens_[qk]=.* does not rise from 0 to the"),
    "as many": Fault(one_more, ValueError, r"cu_seqlens_q has \d+ entries but cu_seqlens_k has"),
    "no edges": Fault(put(cu_seqlens_q=torch.zeros(1).int()), ValueError, r"cu_seqlens_q has shape"),
    "edges in a row": Fault(put(cu_seqlens_k=torch.zeros(2, 2).int()), ValueError, r"cu_seqlens_k has shape"),
    "edges of floats": Fault(put(cu_seqlens_q=torch.zeros(2)), TypeError, "cu_seqlens_q is torch.float32"),
    "edges as a list": Fault(put(cu_seqlens_k=[0, 1]), TypeError, "cu_seqlens_k is list"),
    "edges elsewhere": Fault(
        lambda a, rng: a.update(cu_seqlens_q=a["cu_seqlens_q"].to("meta")), ValueError, "cu_seqlens_q is on meta"
    ),
    "longest too short": Fault(put(max_seqlen_k=-1), ValueError, "max_seqlen_k=-1 is below the longest sequence"),
    "longest not a number": Fault(
        pick("max_seqlen_q", 7.0, True, "7", None), TypeError, "max_seqlen_q=.* not an integer"
    ),
    "no tokens": Fault(lambda a, rng: a.update(q=a["q"][:0]), ValueError, "q is empty"),
    "heads first": Fault(lambda a, rng: a.update(v=a["v"].unsqueeze(0)), ValueError, "v has 4 dimensions"),
    "return_lse": Fault(put(return_lse=2), TypeError, "return_lse="),
    "a mask": Fault(put(attn_mask=None), TypeError, "unexpected keyword argument 'attn_mask'"),
}  # fmt: skip


# ---- attention in FP64


def draw_golden(rng: Random) -> Params:
    """Finite numbers, as any call has them."""
    params = attention.draw(rng) | {"backend": REFERENCE, "dtype": "float16", "layout": "HND", "garbage": "none"}
    return params | {"block_k": 128, "rows": min(params["rows"], 17)}


def run_golden(params: Params) -> Measures:
    """Beside the fuzzer's own; both round in FP64."""
    call = make(params)
    scale = call.q.shape[-1] ** -0.5 if params["scale"] is None else params["scale"]
    how = {"attn_mask": call.mask, "is_causal": params["causal"], "scale": scale}
    out, lse = pasa.golden_attention(*lay_out(params["strides"], call), **how)
    true, _ = truth.find_truth(call.q, call.k, call.v, call.mask, params["causal"], scale)
    seen = ~true.blind
    eps = (call.q.shape[-1] + 4) * FP64_UNIT * true.products + 4 * FP64_UNIT * (true.added + true.lse.abs() + 1)
    spread = torch.expm1(4 * eps).clamp(max=1.0).unsqueeze(-1) * (true.high - true.low)
    allowed = spread + 4 * call.k.shape[2] * FP64_UNIT * torch.maximum(true.low.abs(), true.high.abs())
    return {
        "shape": float(out.shape != call.q.shape or {out.dtype, lse.dtype} != {torch.float64}),
        "blind": float((out[~seen] != 0).sum() + (lse[~seen] != -torch.inf).sum()),
        "error": truth.worst((out - true.out).abs(), allowed, seen.unsqueeze(-1).expand(out.shape)),
        "lse": truth.worst((lse - true.lse).abs(), 4 * eps, seen),
    }


# ---- gradients


def draw_gradients(rng: Random) -> Params:
    """Ordinary numbers; gradients of some of the tensors."""
    params = attention.draw(rng) | {
        "backend": REFERENCE,
        "data": rng.choice(("randn", "bias", "repeated")),
        "scale": None,
    }
    params |= {"values": "randn", "garbage": "none", "diagnose": False, "operator": False, "strides": "contiguous"}
    params |= {"mask": rng.choice(("none", "bool", "float", "keys")), "layout": "HND", "precision": "pasa"}
    params |= {"recovery": "exact", "softmax": "safe", "beta": None, "dtype": rng.choice(("float16", "bfloat16"))}
    return params | {
        "dim": rng.choice((16, 20, 64)),
        "of": rng.choice((7, 7, 1, 2, 4, 3)),
        "of_lse": rng.random() < 0.3,
    }


def run_gradients(params: Params) -> Measures:
    """Judge dQ, dK and dV, relative to their norm, beside a plain backward pass."""
    call = make(params)
    source = torch.Generator().manual_seed(params["rows"])
    grad = torch.randn(call.q.shape, generator=source).to(call.q.dtype)
    grad_lse = torch.randn(call.q.shape[:3], generator=source) if params["of_lse"] else None
    q, k, v = (x.clone().requires_grad_(bool(params["of"] >> i & 1)) for i, x in enumerate((call.q, call.k, call.v)))
    out, lse = pasa.attention(
        q, k, v, attn_mask=call.mask, is_causal=params["causal"], return_lse=True, config=attention.config_of(params)
    )
    wanted = [x for x in (q, k, v) if x.requires_grad]
    if grad_lse is None:
        torch.autograd.backward(out, grad)
    else:
        torch.autograd.backward([out, lse], [grad, grad_lse.masked_fill(lse.isneginf(), 0.0)])
        grad_lse = grad_lse.masked_fill(lse.isneginf(), 0.0)
    given = Inputs(call.q, call.k, call.v, call.mask, params["causal"], grad, grad_lse)
    exact = exact_gradients(given)
    plain = plain_gradients(given)
    found = tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in (q, k, v))
    measures = {"shape": float(any(x.grad is not None and x.grad.dtype != x.dtype for x in wanted))}
    measures["finite"] = float(sum(int((~torch.isfinite(x)).sum()) for x in found))
    for index, name in enumerate(("dq", "dk", "dv")):
        x = (q, k, v)[index]
        norm = float(exact[index].norm())
        if not x.requires_grad or norm == 0:
            continue
        yardstick = float((plain[index].double() - exact[index]).norm()) / norm
        error = float((found[index].double() - exact[index]).norm()) / norm
        scale = max(1.0, float(sum(e.norm() for e in exact)) / norm)  # one that all but cancels has the others' error
        measures[name] = error / (GRADIENT_FACTOR * yardstick + GRADIENT_FLOOR[params["dtype"]] * scale)
    return measures


# ---- outputs of parts, joined


def draw_parts(rng: Random) -> Params:
    """Keys cut into up to five chunks."""
    params = attention.draw(rng) | {"backend": REFERENCE, "mask": "none", "causal": False, "garbage": "none"}
    params |= {"precision": "pasa", "recovery": "exact", "beta": None, "layout": "HND", "strides": "contiguous"}
    params |= {"softmax": "safe", "scale": None, "dtype": "float16", "accumulate": "fp32"}
    return params | {"parts": rng.randint(1, 5), "diagnose": False, "operator": False}


def run_parts(params: Params) -> Measures:
    """As `ring_attention` joins what its ranks find, in one process; what an LSE in FP32 lacks is allowed."""
    call = make(params)
    merge = Merge(call.q)
    pieces = list(zip(*(x.chunk(params["parts"], 2) for x in (call.k, call.v)), strict=True))
    for k, v in pieces:
        out, lse = pasa.attention(call.q, k, v, return_lse=True, config=attention.config_of(params), backend=REFERENCE)
        merge.add(slice(None), out.float(), lse)
    merged, lse = merge.finish()
    true, _ = truth.find_truth(call.q, call.k, call.v, None, False, call.q.shape[-1] ** -0.5)
    spoiled = 2 * UNIT * true.lse.abs() * len(pieces)  # an LSE in FP32 is that coarse, and so is a chunk's weight
    loose = truth.Truth(**{**vars(true), "added": true.added + spoiled / UNIT})
    how = truth.Arithmetic(True, 1 + len(pieces), torch.float16, False)
    return {"shape": float(merged.shape != call.q.shape)} | truth.judge(loose, merged.half(), lse, how)


PACKED_SIMPLEST = {name: value for name, value in attention.SIMPLEST.items() if name not in ("rows", "keys", "batch")}
PACKED_SIMPLEST |= {"wide": True, "spaced": False}
KINDS = {
    "attention_varlen": Kind(draw_packed, run_packed, 120, PACKED_SIMPLEST, PACKED_FAULTS),
    "golden_attention": Kind(draw_golden, run_golden, 15, attention.SIMPLEST),
    "gradients": Kind(draw_gradients, run_gradients, 50, attention.SIMPLEST | {"dim": 16}),
    "ring merge": Kind(draw_parts, run_parts, 25, attention.SIMPLEST | {"parts": 1}),
}
