"""Random calls of `attention`: arguments, the documented refusals, and the judgement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

import pasa
from pasa.eval.random_calls import faults
from pasa.eval.random_calls.backends import NPU, REFERENCE, TRITON, available
from pasa.eval.random_calls.cases import Kind, Measures
from pasa.eval.random_calls.faults import Arguments, Fault, Params, altered, elsewhere, make_mistake, pick, put
from pasa.eval.random_calls.inputs import MASKS, STRIDES, Call, guaranteed, make
from pasa.eval.random_calls.judge import HALF_ULP, Arithmetic, against_naive, judge, worst
from pasa.eval.random_calls.number_draws import ORDINARY, ORDINARY_VALUES, SCORES, VALUES
from pasa.eval.random_calls.truth import Truth, find_truth, naive_fp16

DIMS = (1, 2, 3, 5, 8, 16, 16, 20, 32, 33, 64, 80, 128)
FAR_DIMS = (96, 160, 256, 257, 512)
SCALES = (None,) * 7 + (1e-4, 1.0, 30.0, 2.0**-80, 2.0**80)
BASELINES = ("fp32", "partial", "fp16", "prescaled", "smooth_k")
LAST_LAYOUTS = ("NHD", "BSND")
CONFIG = ("precision", "recovery", "softmax", "overflow", "accumulate", "block_q", "block_k", "beta")
# Of what is bounded by its inputs only, in nats, on N(0, 1) data: a stored score is off by up to 2^-8; the published
# recovery multiplies a mean by up to 64 (accumulate="fp32": rounded once, of 128 scores), in FP16 rows a rounded one.
LOOSE, LOOSE_ROWS = 2.0**-5, 0.5
SMALL_SCORES, SMALL_BIAS = 64.0, 8.0  # nats: what such an arithmetic is judged on
Result = tuple[Tensor, Tensor | None]


def draw(rng: Random) -> Params:
    """Draw a valid call of any backend."""
    backend = rng.choices((REFERENCE, TRITON, NPU), (973, 4, 23))[0]
    small = backend != REFERENCE
    precision = rng.choice(("pasa",) * 9 + (rng.choice(BASELINES),))
    recovery = rng.choice(("exact",) * 5 + ("paper",)) if precision == "pasa" else "exact"
    params: Params = {
        "backend": backend, "batch": rng.choice((1, 1, 2, 3)), "heads": rng.choice((1, 1, 2, 3)),
        "groups": rng.choice((1, 1, 2, 4)), "rows": rng.choice((1, 1, 2, 3, 7, 17, 40)),
        "keys": rng.choice((1, 2, 3, 15, 31, 60, 100, 129) if small else (1, 2, 3, 15, 31, 60, 100, 129, 150)),
        "dim": rng.choice(DIMS) if rng.random() < 0.95 else rng.choice(FAR_DIMS[: 3 if small else 5]),
        "dtype": rng.choice(("float16",) * 6 + ("bfloat16", "float32")), "data": rng.choice((*ORDINARY, *SCORES)),
        "values": rng.choice(("randn", "randn", "randn", *VALUES)),
        "mask": "none" if rng.random() < 0.4 else rng.choice(MASKS), "causal": rng.random() < 0.35,
        "scale": rng.choice(SCALES if recovery == "exact" else SCALES[:9]),
        "strides": rng.choice(("contiguous", *STRIDES)), "layout": rng.choice(("HND", "BNSD", *LAST_LAYOUTS)),
        "lse": rng.random() < 0.8, "where": rng.choice(("seen", "hidden")),
        "garbage": rng.choice(("query", "key", "value", "mask")) if rng.random() < 0.1 else "none",
        "diagnose": rng.random() < 0.06, "operator": rng.random() < 0.08, "precision": precision, "recovery": recovery,
        "softmax": rng.choice(("safe",) * 4 + ("unbiased", "unbiased_paper")),
        "overflow": rng.choice(("inf", "saturate")), "accumulate": rng.choice(("fp32", "fp32", "fp16")),
        "block_q": rng.choice((128, 128, 16, 1, 7)), "block_k": rng.choice((128, 128, 64, 32, 16, 5, 1, 65536)),
        "beta": rng.choice((None, 0.0, 0.5, 0.9375)) if recovery == "paper" else None,
    }  # fmt: skip
    if params["block_k"] == 1 and params["keys"] > 31:  # a loop of so many steps
        params["block_k"] = 5
    return mild(serve(params, rng), rng)


def serve(params: Params, rng: Random) -> Params:
    """Return a call with only what the backend says it can do."""
    backend = params["backend"]
    if backend == REFERENCE:
        return params
    changed: Params = {"overflow": "inf"} if backend == TRITON else {"mask": "none", "accumulate": "fp32"}
    changed |= {"diagnose": False, "block_k": 128 if backend == NPU else rng.choice((32, 64, 128))}
    if params["precision"] not in ("pasa", "fp32")[: 2 if backend == TRITON else 1]:
        changed |= {"precision": "pasa"}
    if params["softmax"] == "unbiased_paper" or (params["recovery"] == "paper" and params["softmax"] == "unbiased"):
        changed |= {"softmax": "safe"}
    if backend == NPU and params["garbage"] != "query":  # a key that is not finite may reach every row of its head
        changed |= {"garbage": "none"}
    return params | changed


def mild(params: Params, rng: Random) -> Params:
    """Return a call with N(0, 1) data, mostly, where only such are judged."""
    if guaranteed(params) or rng.random() < 0.3:
        return params
    scale = params["scale"] if params["scale"] == 1e-4 else None
    return params | {"data": "randn", "values": "randn", "garbage": "none", "scale": scale}


def config_of(params: Params) -> pasa.PasaConfig:
    """Return the arithmetic."""
    return pasa.PasaConfig(**{name: params[name] for name in CONFIG})


def arguments_of(params: Params, call: Call) -> Arguments:
    """Return what `attention` is called with."""
    tensors = STRIDES[params["strides"]](call.q, call.k, call.v)
    if params["layout"] in LAST_LAYOUTS:
        tensors = tensors[0].transpose(1, 2), tensors[1].transpose(1, 2), tensors[2].transpose(1, 2)
    arguments: Arguments = dict(zip("qkv", tensors, strict=True))
    arguments |= {"attn_mask": call.mask, "is_causal": call.causal, "scale": params["scale"]}
    arguments |= {"tensor_layout": params["layout"], "return_lse": params["lse"]}
    return arguments | {"config": config_of(params), "backend": params["backend"]}


def run(params: Params) -> Measures:
    """Call and judge."""
    call = make(params)
    arguments = arguments_of(params, call)
    level: Any = forward_ad.dual_level() if params["fault"] == "a tangent" else nullcontext()
    with available(params["backend"]):
        with level:
            make_mistake(FAULTS, params, arguments)
            out, lse, measures = record(pasa.attention, params, arguments, call.q.shape[:2])
        if params["fault"] is not None:
            return {}
        if out.shape != arguments["q"].shape or misshapen(call.q, lse, out.dtype):
            return {"shape": 1.0}
        out = out.transpose(1, 2) if params["layout"] in LAST_LAYOUTS else out
        if params["operator"]:
            heads_first = arguments_of(params | {"layout": "HND"}, call)
            del heads_first["tensor_layout"]
            measures["same"] = by_operator(torch.ops.pasa.attention, params, heads_first, (out, lse))
    return measures | judged(params, call, out, lse)


def record(
    function: Callable[..., Any], params: Params, arguments: Arguments, heads: tuple[int, ...]
) -> tuple[Tensor, Tensor | None, Measures]:
    """Call a function; return its results, and whether its diagnostics are one record of this (B, Hq)."""
    recorder: AbstractContextManager[list[Any]] = pasa.record_diagnostics() if params["diagnose"] else nullcontext([])
    with recorder as records:
        result = function(**arguments)
    out, lse = result if params["lse"] else (result, None)
    measures = {"shape": 0.0}
    if params["diagnose"]:
        measures["diagnosed"] = float(len(records) != 1 or records[0].tiles.shape != tuple(heads))
    return out, lse, measures


def misshapen(q: Tensor, lse: Tensor | None, dtype: torch.dtype) -> bool:
    """Return whether shape or type of a log-sum-exp, or the type of an output, is not that documented for q."""
    return dtype != q.dtype or (lse is not None and (lse.shape != q.shape[:-1] or lse.dtype != torch.float32))


def by_operator(operator: Any, params: Params, arguments: Arguments, result: Result) -> float:
    """Count the numbers that differ when torch.ops.pasa.* is called itself, and shapes on the device meta."""
    options = {name: x for name, x in arguments.items() if name not in ("return_lse", "config")}
    options |= {name: params[name] for name in CONFIG}
    again = operator(**options)
    pairs = [(a, b) for a, b in zip(result, again, strict=False) if a is not None]
    differ = sum(int((a.nan_to_num(nan=7.0) != b.nan_to_num(nan=7.0)).sum()) for a, b in pairs)
    meta = operator(**{name: x.to("meta") if isinstance(x, Tensor) else x for name, x in options.items()})
    alike = all(a.is_meta and (a.shape, a.dtype) == (b.shape, b.dtype) for a, b in zip(meta, again, strict=True))
    return float(differ + (not alike))


def is_ordinary(params: Params) -> bool:
    """Return whether scores and values are such that same-precision arithmetic is good at them."""
    return params["data"] in ORDINARY and params["values"] in ORDINARY_VALUES


def arithmetic_of(params: Params, keys: int) -> Arithmetic:
    """Return what the bounds depend on; only the reference stores outputs after every block."""
    blocks = -(-keys // params["block_k"])
    emulated = params["backend"] == REFERENCE
    stores = 1 + 2 * blocks * (params["accumulate"] == "fp16" and emulated)
    summed = params["backend"] == TRITON and is_ordinary(params)
    return Arithmetic(getattr(torch, params["dtype"]), stores, params["softmax"] != "safe", summed)


def judged(params: Params, call: Call, out: Tensor, lse: Tensor | None) -> Measures:
    """Judge what is promised of this arithmetic; of what is bounded by its inputs alone, N(0, 1) data."""
    if not call.k.shape[2]:
        return {"blind": float((out != 0).sum() + (0 if lse is None else (lse != -torch.inf).sum()))}
    # With a scale of 2^80 a rounding decides between two keys.
    ordinary = is_ordinary(params) and params["garbage"] == "none" and params["scale"] in (None, 1e-4, 1.0)
    promised, normal = guaranteed(params), params["data"] == params["values"] == "randn"
    if not promised and not (normal and ordinary):
        return {}
    truth = find_truth(call, fp16_scores=params["backend"] != TRITON)
    if not promised:
        return loosely(params, call, truth, out)
    how = arithmetic_of(params, call.k.shape[2])
    measures = judge(truth, out, truth.lse.masked_fill(truth.bad_rows, torch.nan) if lse is None else lse, how)
    if ordinary:
        measures["naive"] = against_naive(truth, naive_fp16(call), out, how)
    return measures


def loosely(params: Params, call: Call, truth: Truth, out: Tensor) -> Measures:
    """Judge a baseline or the published recovery where scores are small, but for what a float mask may add."""
    q, k = (x.half().double().abs() for x in (call.q, call.k))
    k = k.amax(2).repeat_interleave(q.shape[1] // k.shape[1], 1)
    largest_score = float((q * k.unsqueeze(2)).sum(-1).max()) * call.scale
    if largest_score > SMALL_SCORES or float(truth.added.max()) > SMALL_BIAS:
        return {}
    in_rows = params["accumulate"] == "fp16" or params["precision"] == "fp16"
    eps = LOOSE_ROWS if in_rows or params["softmax"] == "unbiased_paper" else LOOSE
    keys = call.k.shape[2]
    steps = 2 + in_rows * (3 * -(-keys // params["block_k"]) + keys)  # a row sum in FP16 may round at every key
    allowed = torch.expm1(torch.tensor(2 * eps)) * (truth.high - truth.low) + 2.0**-22
    allowed = allowed + (steps * 2.0**-10 + HALF_ULP[out.dtype]) * truth.largest
    finite = torch.isfinite(out) | truth.fully_masked.unsqueeze(-1)
    return {
        "finite": float((~finite).sum()),
        "loose": worst((out.double() - truth.out).abs(), allowed, torch.ones_like(truth.bad)),
    }


def judged_apart(params: Params, calls: Sequence[Call], out: Tensor, lse: Tensor | None) -> Measures:
    """Judge packed rows (T, Hq, D), a sequence at a time; rows behind the last sequence give 0 and -inf."""
    edges = [0, *accumulate(call.q.shape[2] for call in calls), len(out)]
    q, k = out.transpose(0, 1).unsqueeze(0)[:, :, edges[-2] :], out.new_zeros(1, 1, 0, out.shape[2])
    behind = Call(q, k, k, None, False, 1.0)
    largest: Measures = {}
    for call, (first, last) in zip((*calls, behind), pairwise(edges), strict=True):
        one_lse = None if lse is None else lse[first:last].T.unsqueeze(0)
        measures = judged(params, call, out[first:last].transpose(0, 1).unsqueeze(0), one_lse)
        largest |= {name: max(largest.get(name, 0.0), value) for name, value in measures.items()}
    return largest


# ---- what is refused, and with which words


def empty(arguments: Arguments, rng: Random) -> None:
    """Leave no element on one axis of q, or of k and v; on the batch or head dimension of all three."""
    axis = rng.randrange(4)
    names = ("q", "k", "v") if axis in (0, 3) else rng.choice((("q",), ("k", "v")))
    for name in names:
        arguments[name] = arguments[name].narrow(axis, 0, 0)
    arguments["attn_mask"] = None


def too_large(arguments: Arguments, rng: Random) -> None:
    """Put in a finite number that FP16 does not hold, where no mask takes its key away."""
    arguments["attn_mask"] = None
    kind = rng.choice((torch.float32, torch.bfloat16))
    for name in ("q", "k", "v"):
        arguments[name] = arguments[name].to(kind).clone().contiguous()
    arguments[rng.choice(("q", "k", "v"))].flatten()[-1:].fill_(rng.choice((65536.0, -1e30, 3e38)))


def misfit(arguments: Arguments, rng: Random) -> None:
    """Give a mask of another shape."""
    rows = 1 if arguments["tensor_layout"] in LAST_LAYOUTS else 2
    sizes = arguments["q"].shape[rows], arguments["k"].shape[rows]
    shape = rng.choice(((sizes[0] + 1, sizes[1]), (sizes[0], sizes[1] + 1), (1, 1, 1, *sizes), (0,), (7, 1, 1, 1)))
    arguments["attn_mask"] = torch.ones(shape, dtype=torch.bool)


def without(arguments: Arguments, rng: Random) -> None:
    """Ask another backend for what only the reference does."""
    arguments["backend"] = rng.choice((TRITON, NPU))
    arguments["config"] = pasa.PasaConfig(precision="smooth_k", block_k=5)


def published_scale(arguments: Arguments, rng: Random) -> None:
    """Give a scale that the published recovery's matrix does not hold."""
    arguments |= {"config": pasa.PasaConfig(recovery="paper"), "backend": REFERENCE, "attn_mask": None}
    arguments["scale"] = rng.choice((2.0**80, 1e20, 2.0**17))


def shapes(heads: int, dim: int) -> Callable[[Arguments, Random], object]:
    """Give so many query heads for two key heads."""
    q, k = torch.zeros(1, heads, 3, dim), torch.zeros(1, 2, 2, dim)
    return put(q=q, k=k, v=k, attn_mask=None, tensor_layout="HND")


def tangent(x: Tensor) -> Tensor:
    """Return a tensor with a tangent of forward-mode differentiation."""
    dual: Tensor = forward_ad.make_dual(x, torch.ones_like(x))
    return dual


ONE = torch.ones(1)
NO_SCALES = (0.0, -1.0, float("nan"), float("inf"), 2.0**81, 2.0**-81, -0.0, 10**400)
FAULTS = {
    "not a tensor": Fault(pick("q", None, 3, [1.0], "q"), TypeError, r"q is a \w+, not a Tensor"),
    "value not a tensor": Fault(put(v=7), TypeError, "v is a int, not a Tensor"),
    "rank": altered("k", lambda x: x[0], ValueError, r"k has 3 dimensions .* expected 4"),
    "integers": altered("q k v", Tensor.int, TypeError, "q is torch.int32"),
    "FP64": altered("q k v", Tensor.double, TypeError, "q is torch.float64"),
    "complex": altered("q", lambda x: x.float() + 0j, TypeError, "q is torch.complex64"),
    "mixed types": altered("v", faults.other_type, TypeError, r"v is torch\.\w+ but q is torch"),
    "mixed devices": elsewhere("k", "k is on meta but q is on cpu"),
    "batch": altered("k v", faults.doubled(0), ValueError, "batch of q"),
    "head dim": altered("k v", faults.doubled(-1), ValueError, "head dim of q"),
    "keys and values": altered("v", faults.doubled(1), ValueError, "k and v differ in shape"),
    "head groups": Fault(shapes(3, 4), ValueError, "3 query heads are not a multiple of 2 key heads"),
    "empty": Fault(empty, ValueError, r"[qk] is empty"),
    "too large": Fault(too_large, ValueError, r"[qkv] has \d+ values beyond the FP16 range"),
    "head dim beyond all": Fault(shapes(2, 513), NotImplementedError, "head dim 513 is outside"),
    "mask shape": Fault(misfit, ValueError, "attn_mask .* does not broadcast"),
    "mask of integers": Fault(pick("attn_mask", ONE.int(), ONE.double()), TypeError, "attn_mask is torch"),
    "mask not a tensor": Fault(
        pick("attn_mask", True, [[1]], "causal"), TypeError, r"attn_mask is a \w+, not a Tensor"
    ),
    "mask elsewhere": Fault(put(attn_mask=ONE.bool().to("meta")), ValueError, "attn_mask is on meta"),
    "causal": Fault(pick("is_causal", 1, None, "yes", torch.tensor(True)), TypeError, "is_causal="),
    "return_lse": Fault(pick("return_lse", 1, None, "yes"), TypeError, "return_lse="),
    "scale": Fault(pick("scale", *NO_SCALES), ValueError, "scale="),
    "published scale": Fault(published_scale, ValueError, "scale=.* carries the shifting matrix beyond the range"),
    "scale not a number": Fault(pick("scale", "1", True, 1j, torch.tensor(1.0)), TypeError, "scale="),
    "layout": Fault(pick("tensor_layout", "hnd", "", None, 4, ["HND"], "BHSD"), ValueError, "tensor_layout="),
    "config": Fault(pick("config", {}, "exact", pasa.PasaConfig), TypeError, r"config is a \w+, not a PasaConfig"),
    "backend": Fault(pick("backend", "abacus", "", "Reference"), ValueError, "is not registered"),
    "backend not a name": Fault(pick("backend", 1, ["reference"], True), TypeError, "backend="),
    "capability": Fault(without, NotImplementedError, "no backend can serve this call"),
    "keyword": Fault(pick("dropout_p", 0.0, 0.1), TypeError, "unexpected keyword argument 'dropout_p'"),
    "a tangent": altered("q", tangent, NotImplementedError, "forward"),
}
SIMPLEST = {
    "backend": REFERENCE, "batch": 1, "heads": 1, "groups": 1, "rows": 1, "keys": 1, "dim": 1, "dtype": "float16",
    "data": "randn", "values": "randn", "mask": "none", "causal": False, "scale": None, "strides": "contiguous",
    "layout": "HND", "garbage": "none", "where": "seen", "diagnose": False, "operator": False, "softmax": "safe",
    "overflow": "inf", "accumulate": "fp32", "block_q": 128, "block_k": 128, "beta": None, "precision": "pasa",
    "recovery": "exact",
}  # fmt: skip
KIND = Kind(draw, run, 700, SIMPLEST, FAULTS)
