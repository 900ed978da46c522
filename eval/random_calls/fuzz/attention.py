"""Random calls of `attention`: arguments, the documented refusals, and the judgement."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import Tensor

import pasa
from pasa.eval.random_calls.fuzz import truth
from pasa.eval.random_calls.fuzz.backends import NPU, REFERENCE, TRITON, available
from pasa.eval.random_calls.fuzz.cases import Arguments, Fault, Kind, Measures, Params, spoil
from pasa.eval.random_calls.fuzz.inputs import MASKS, STRIDES, Call, lay_out, make
from pasa.eval.random_calls.soak.data import ORDINARY, ORDINARY_VALUES, SCORES, VALUES

DIMS = (1, 2, 3, 5, 8, 16, 16, 20, 32, 33, 64, 80, 128)
FAR_DIMS = (96, 160, 256, 257, 512)
SCALES = (None,) * 7 + (1e-4, 1.0, 30.0, 2.0**-80, 2.0**80)
BASELINES = ("fp32", "partial", "fp16", "prescaled", "smooth_k")
FIRST_LAYOUTS, LAST_LAYOUTS = ("HND", "BNSD"), ("NHD", "BSND")
CONFIG = ("precision", "recovery", "softmax", "overflow", "accumulate", "block_q", "block_k", "beta")
# Of what is bounded by its inputs only, in nats, on N(0, 1) data: a stored score is off by up to 2^-8; the published
# recovery multiplies a mean by up to 64 (accumulate="fp32": rounded once, of 128 scores), in FP16 rows a rounded one.
LOOSE, LOOSE_ROWS = 2.0**-5, 0.5


def draw(rng: Random) -> Params:
    """A valid call of any backend."""
    backend = rng.choices((REFERENCE, TRITON, NPU), (973, 4, 23))[0]
    small = backend != REFERENCE
    precision = rng.choice(("pasa",) * 9 + (rng.choice(BASELINES),))
    recovery = rng.choice(("exact",) * 5 + ("paper",)) if precision == "pasa" else "exact"
    params: Params = {
        "backend": backend,
        "batch": rng.choice((1, 1, 2, 3)),
        "heads": rng.choice((1, 1, 2, 3)),
        "groups": rng.choice((1, 1, 2, 4)),
        "rows": rng.choice((1, 1, 2, 3, 7, 17, 40)),
        "keys": rng.choice((1, 2, 3, 15, 31, 60, 100, 129) if small else (1, 2, 3, 15, 31, 60, 100, 129, 150)),
        "dim": rng.choice(DIMS) if rng.random() < 0.95 else rng.choice(FAR_DIMS[: 3 if small else 5]),
        "dtype": rng.choice(("float16",) * 6 + ("bfloat16", "float32")),
        "data": rng.choice((*ORDINARY, *SCORES)),
        "values": rng.choice(("randn", "randn", "randn", *VALUES)),
        "mask": "none" if rng.random() < 0.4 else rng.choice(MASKS),
        "causal": rng.random() < 0.35,
        "scale": rng.choice(SCALES if recovery == "exact" else SCALES[:9]),
        "strides": rng.choice(("contiguous", *STRIDES)),
        "layout": rng.choice((*FIRST_LAYOUTS, *LAST_LAYOUTS)),
        "lse": rng.random() < 0.8,
        "garbage": rng.choice(("query", "key", "value", "mask")) if rng.random() < 0.1 else "none",
        "diagnose": rng.random() < 0.06,
        "operator": rng.random() < 0.08,
        "precision": precision,
        "recovery": recovery,
        "softmax": rng.choice(("safe",) * 4 + ("unbiased", "unbiased_paper")),
        "overflow": rng.choice(("inf", "saturate")),
        "accumulate": rng.choice(("fp32", "fp32", "fp16")),
        "block_q": rng.choice((128, 128, 16, 1, 7)),
        "block_k": rng.choice((128, 128, 64, 32, 16, 5, 1, 65536)),
        "beta": rng.choice((None, 0.0, 0.5, 0.9375)) if recovery == "paper" else None,
    }
    if params["block_k"] == 1 and params["keys"] > 31:  # a loop of so many steps
        params["block_k"] = 5
    return mild(serve(params, rng), rng)


def serve(params: Params, rng: Random) -> Params:
    """Only what the backend says it can do."""
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


def guaranteed(params: Params) -> bool:
    """Whether the call is promised not to overflow."""
    return (params["precision"], params["recovery"]) == ("pasa", "exact") and bool(
        params["softmax"] != "unbiased_paper"
    )


def mild(params: Params, rng: Random) -> Params:
    """Mostly N(0, 1) data where only such are judged, and few keys that a mask takes away: the emulation keeps them."""
    if guaranteed(params):
        return params
    if params["mask"] == "padding-float":  # in FP16 rows -3e38 is -inf, and a block of such keys NaN
        params = params | {"mask": "padding"}
    if rng.random() < 0.3:
        return params
    scale = params["scale"] if params["scale"] == 1e-4 else None
    return params | {"data": "randn", "values": "randn", "garbage": "none", "scale": scale}


def config_of(params: Params) -> pasa.PasaConfig:
    """The arithmetic."""
    return pasa.PasaConfig(**{name: params[name] for name in CONFIG})


def arguments_of(params: Params, call: Call) -> Arguments:
    """What `attention` is called with."""
    tensors = lay_out(params["strides"], call)
    if params["layout"] in LAST_LAYOUTS:
        q, k, v = (x.transpose(1, 2) for x in tensors)
    else:
        q, k, v = tensors
    return {
        "q": q,
        "k": k,
        "v": v,
        "attn_mask": call.mask,
        "is_causal": params["causal"],
        "scale": params["scale"],
        "tensor_layout": params["layout"],
        "return_lse": params["lse"],
        "config": config_of(params),
        "backend": params["backend"],
    }


def run(params: Params) -> Measures:
    """Call and judge."""
    call = make(params)
    arguments = arguments_of(params, call)
    spoil(FAULTS, params, arguments)
    with available(params["backend"]):
        if params["fault"] == "a tangent":
            with torch.autograd.forward_ad.dual_level():
                q = torch.autograd.forward_ad.make_dual(arguments["q"], torch.ones_like(arguments["q"]))
                return attend(arguments | {"q": q}, params)
        return attend(arguments, params, call)


def attend(arguments: Arguments, params: Params, call: Call | None = None) -> Measures:
    """One call, its results as heads come first, and what they are worth."""
    records: list[Any] = []
    if params["diagnose"]:
        with pasa.record_diagnostics() as records:
            found = pasa.attention(**arguments)
    else:
        found = pasa.attention(**arguments)
    out, lse = found if params["lse"] else (found, None)
    if params["fault"] is not None or call is None:
        return {}
    q = arguments["q"]
    expected = (*call.q.shape[:3],)
    wrong = out.shape != q.shape or out.dtype != q.dtype
    wrong = wrong or (lse is not None and (lse.shape != expected or lse.dtype != torch.float32))
    measures = {"shape": float(wrong)}
    if wrong:
        return measures
    heads_first = out.transpose(1, 2) if params["layout"] in LAST_LAYOUTS else out
    if params["operator"]:
        measures["same"] = by_operator(params, call, heads_first, lse)
    if params["diagnose"]:
        measures["diagnosed"] = float(len(records) != 1 or records[0].tiles.shape != expected[:2])
    return measures | worth(params, call, heads_first, lse)


def by_operator(params: Params, call: Call, out: Tensor, lse: Tensor | None) -> float:
    """How many numbers differ when torch.ops.pasa.attention is called itself, and shapes on the device meta."""
    options = [getattr(config_of(params), name) for name in CONFIG[:2]]
    options += [params["beta"], params["block_q"], params["block_k"], params["softmax"], params["overflow"]]
    tail = (params["causal"], params["scale"], *options, params["accumulate"], False, params["backend"])
    strided = lay_out(params["strides"], call)
    again, again_lse, _ = torch.ops.pasa.attention(*strided, call.mask, *tail)
    differ = int((again.nan_to_num(nan=7.0) != out.nan_to_num(nan=7.0)).sum())
    if lse is not None:
        differ += int((again_lse.nan_to_num(nan=7.0) != lse.nan_to_num(nan=7.0)).sum())
    mask = None if call.mask is None else call.mask.to("meta")
    q, k, v = (x.to("meta") for x in strided)
    meta, meta_lse, _ = torch.ops.pasa.attention(q, k, v, mask, *tail)
    alike = meta.is_meta and meta.shape == again.shape and meta.dtype == again.dtype
    return float(differ + (not alike) + (meta_lse.shape != again_lse.shape))


def worth(params: Params, call: Call, out: Tensor, lse: Tensor | None) -> Measures:
    """Judge what is promised of this arithmetic; of what is bounded by its inputs alone, N(0, 1) data."""
    ordinary = params["data"] in ORDINARY and params["values"] in ORDINARY_VALUES and params["garbage"] == "none"
    ordinary = ordinary and params["scale"] in (None, 1e-4, 1.0)  # with 2^80 a rounding decides between two keys
    scale = call.q.shape[-1] ** -0.5 if params["scale"] is None else params["scale"]
    promised = guaranteed(params)
    if not promised and not (params["data"] == params["values"] == "randn" and ordinary and params["scale"] != 2.0**80):
        return {}
    true, naive = truth.find_truth(call.q, call.k, call.v, call.mask, params["causal"], scale, naive=ordinary)
    blocks = -(-call.k.shape[2] // params["block_k"])
    stores = 1 + (2 * blocks + 1) * (params["accumulate"] == "fp16" and params["backend"] == REFERENCE)
    how = truth.Arithmetic(params["backend"] != TRITON, stores, call.q.dtype, params["softmax"] != "safe")
    if promised:
        judged = truth.judge(true, out, true.lse.masked_fill(true.bad_rows, torch.nan) if lse is None else lse, how)
        if naive is not None:
            judged["naive"] = truth.against_naive(true, naive, out, how)
        return judged
    return loosely(params, true, out)


def loosely(params: Params, true: truth.Truth, out: Tensor) -> Measures:
    """A baseline or the published recovery where scores are small, but for what a float mask may add."""
    if float(true.sizes.max()) > 64 or (params["mask"] not in ("none", "bool") and float(true.added.max()) > 8):
        return {}
    in_rows = params["accumulate"] == "fp16" or params["precision"] == "fp16"
    eps = LOOSE_ROWS if in_rows or params["softmax"] == "unbiased_paper" else LOOSE
    largest = torch.maximum(true.low.abs(), true.high.abs())
    blocks = -(-true.seen.shape[-1] // params["block_k"])
    steps = 2 + in_rows * (3 * blocks + true.seen.shape[-1])  # a row sum in FP16 may round at every key
    allowed = torch.expm1(torch.tensor(2 * eps)) * (true.high - true.low) + steps * 2.0**-10 * largest + 2.0**-22
    allowed = allowed + truth.HALF_ULP[out.dtype] * largest
    finite = torch.isfinite(out) | true.blind.unsqueeze(-1)
    return {
        "finite": float((~finite).sum()),
        "loose": truth.worst((out.double() - true.out).abs(), allowed, torch.ones_like(true.bad)),
    }


# ---- what is refused, and with which words


def put(**values: Any) -> Any:
    """A spoiler that sets arguments."""
    return lambda arguments, rng: arguments.update(values)


def pick(name: str, *values: Any) -> Any:
    """A spoiler that takes one of several values."""
    return lambda arguments, rng: arguments.update({name: rng.choice(values)})


def change(*names: str, by: Any) -> Any:
    """A spoiler that changes some tensors."""
    return lambda arguments, rng: arguments.update({name: by(arguments[name]) for name in names})


def empty(arguments: Arguments, rng: Random) -> None:
    """One axis of q, or of k and v, has no element; the batch or head dimension of all three."""
    axis = rng.randrange(4)
    names = ("q", "k", "v") if axis in (0, 3) else rng.choice((("q",), ("k", "v")))
    for name in names:
        arguments[name] = arguments[name].narrow(axis, 0, 0)
    arguments["attn_mask"] = None


def too_large(arguments: Arguments, rng: Random) -> None:
    """A finite number that FP16 does not hold, where no mask takes its key away."""
    arguments["attn_mask"] = None
    kind = rng.choice((torch.float32, torch.bfloat16))
    for name in ("q", "k", "v"):
        arguments[name] = arguments[name].to(kind).clone().contiguous()
    arguments[rng.choice(("q", "k", "v"))].flatten()[-1:].fill_(rng.choice((65536.0, -1e30, 3e38)))


def misfit(arguments: Arguments, rng: Random) -> None:
    """A mask of another shape."""
    rows = 1 if arguments["tensor_layout"] in LAST_LAYOUTS else 2
    sizes = arguments["q"].shape[rows], arguments["k"].shape[rows]
    shape = rng.choice(((sizes[0] + 1, sizes[1]), (sizes[0], sizes[1] + 1), (1, 1, 1, *sizes), (0,), (7, 1, 1, 1)))
    arguments["attn_mask"] = torch.ones(shape, dtype=torch.bool)


def without(arguments: Arguments, rng: Random) -> None:
    """What only the reference does, asked of another backend, or more than any does."""
    arguments["backend"] = rng.choice((TRITON, NPU))
    arguments["config"] = pasa.PasaConfig(precision="smooth_k", block_k=5)


def second_derivative(arguments: Arguments, rng: Random) -> None:
    """A gradient of a gradient."""


FAULTS = {
    "not a tensor": Fault(pick("q", None, 3, [1.0], "q"), TypeError, r"q is a \w+, not a Tensor"),
    "value not a tensor": Fault(put(v=7), TypeError, "v is a int, not a Tensor"),
    "rank": Fault(change("k", by=lambda x: x[0]), ValueError, r"k has 3 dimensions .* expected 4"),
    "integers": Fault(
        change("q", "k", "v", by=lambda x: x.nan_to_num().clamp(-9, 9).int()), TypeError, "q is torch.int32"
    ),
    "FP64": Fault(change("q", "k", "v", by=Tensor.double), TypeError, "q is torch.float64"),
    "complex": Fault(change("q", by=lambda x: x.float() + 0j), TypeError, "q is torch.complex64"),
    "mixed types": Fault(
        change("v", by=lambda x: x.to(torch.float32 if x.dtype != torch.float32 else torch.float16)),
        TypeError, r"v is torch\.\w+ but q is torch",
    ),
    "mixed devices": Fault(change("k", by=lambda x: x.to("meta")), ValueError, "k is on meta but q is on cpu"),
    "batch": Fault(change("k", "v", by=lambda x: torch.cat([x, x])), ValueError, "batch of q"),
    "head dim": Fault(change("k", "v", by=lambda x: torch.cat([x, x], -1)), ValueError, "head dim of q"),
    "keys and values": Fault(change("v", by=lambda x: torch.cat([x, x], 1)), ValueError, "k and v differ in shape"),
    "head groups": Fault(
        lambda a, rng: a.update(q=torch.zeros(1, 3, 3, 4), k=torch.zeros(1, 2, 2, 4), v=torch.zeros(1, 2, 2, 4),
                                attn_mask=None),
        ValueError, "3 query heads are not a multiple of 2 key heads",
    ),
    "empty": Fault(empty, ValueError, r"[qk] is empty"),
    "too large": Fault(too_large, ValueError, r"[qkv] has \d+ values beyond the FP16 range"),
    "head dim beyond all": Fault(
        lambda a, rng: a.update({n: torch.zeros(1, 1, 1, 513) for n in "qkv"}, attn_mask=None),
        NotImplementedError, "head dim 513 is outside",
    ),
    "mask shape": Fault(misfit, ValueError, "attn_mask .* does not broadcast"),
    "mask of integers": Fault(
        pick("attn_mask", torch.ones(1).int(), torch.ones(1).double()), TypeError, "attn_mask is torch"
    ),
    "mask not a tensor": Fault(
        pick("attn_mask", True, [[1]], "causal"), TypeError, r"attn_mask is a \w+, not a Tensor"
    ),
    "mask elsewhere": Fault(
        put(attn_mask=torch.ones(1, dtype=torch.bool, device="meta")), ValueError, "attn_mask is on meta"
    ),
    "causal": Fault(pick("is_causal", 1, None, "yes", torch.tensor(True)), TypeError, "is_causal="),
    "return_lse": Fault(pick("return_lse", 1, None, "yes"), TypeError, "return_lse="),
    "scale": Fault(
        pick("scale", 0.0, -1.0, float("nan"), float("inf"), 2.0**81, 2.0**-81, -0.0, 10**400), ValueError, "scale="
    ),
    "published scale": Fault(
        lambda a, rng: a.update(config=pasa.PasaConfig(recovery="paper"), backend=REFERENCE, attn_mask=None,
                                scale=rng.choice((2.0**80, 1e20, 2.0**17))),
        ValueError, "scale=.* carries the shifting matrix beyond the range",
    ),
    "scale not a number": Fault(pick("scale", "1", True, 1j, torch.tensor(1.0)), TypeError, "scale="),
    "layout": Fault(pick("tensor_layout", "hnd", "", None, 4, ["HND"], "BHSD"), ValueError, "tensor_layout="),
    "config": Fault(pick("config", {}, "exact", pasa.PasaConfig), TypeError, r"config is a \w+, not a PasaConfig"),
    "backend": Fault(pick("backend", "abacus", "", "Reference"), ValueError, "is not registered"),
    "backend not a name": Fault(pick("backend", 1, ["reference"], True), TypeError, "backend="),
    "capability": Fault(without, NotImplementedError, "no backend can serve this call"),
    "keyword": Fault(pick("dropout_p", 0.0, 0.1), TypeError, "unexpected keyword argument 'dropout_p'"),
    "a tangent": Fault(second_derivative, NotImplementedError, "forward"),
}  # fmt: skip
SIMPLEST = {
    "backend": REFERENCE, "batch": 1, "heads": 1, "groups": 1, "rows": 1, "keys": 1, "dim": 1, "dtype": "float16",
    "data": "randn", "values": "randn", "mask": "none", "causal": False, "scale": None, "strides": "contiguous",
    "layout": "HND", "garbage": "none", "diagnose": False, "operator": False, "softmax": "safe", "overflow": "inf",
    "accumulate": "fp32", "block_q": 128, "block_k": 128, "beta": None, "precision": "pasa", "recovery": "exact",
}  # fmt: skip
KIND = Kind(draw, run, 700, SIMPLEST, FAULTS)
