"""Random calls of `attention` and `attention_varlen`: their arguments, and how each result is judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from itertools import accumulate, pairwise
from random import Random
from typing import Any

import torch
from torch import Tensor

import pasa
from pasa.eval.random_calls.backends import NPU, REFERENCE, SDPA, TRITON, available
from pasa.eval.random_calls.cases import Kind, Measures, Params
from pasa.eval.random_calls.inputs import BOOL_MASKS, MASKS, SINKS, STRIDES, Call, guaranteed, indices, make
from pasa.eval.random_calls.judge import HALF_ULP, Arithmetic, against_naive, count_wrong_maxima, judge, worst
from pasa.eval.random_calls.number_draws import ORDINARY, ORDINARY_VALUES, SCORES, VALUES
from pasa.eval.random_calls.truth import Truth, find_truth, naive_fp16, pieces, prepare
from pasa.ops.attention.ascend import backend as npu_backend
from pasa.ops.attention.ascend import on_310p
from pasa.ops.attention.options import CHOICES
from pasa.ops.registry import BACKENDS

DIMS = (1, 2, 3, 5, 8, 16, 16, 20, 32, 33, 64, 80, 128)
FAR_DIMS = (96, 160, 256, 257, 512)
SCALES = (None,) * 7 + (1e-4, 1.0, 30.0, 2.0**-80, 2.0**80)
BASELINES = CHOICES["precision"][1:]
LAST_LAYOUTS = ("NHD", "BSND")
PACKED_LENGTHS = (0, 1, 2, 5, 17, 33)
PACKED_TILES = (0, 1, 2, 33, 150, 300)  # of the NPU's kernels: a sequence may have several tiles and blocks
PACKED_STRIDES = ("contiguous", "sliced", "turned", "offset", "reversed")  # those of `STRIDES` for three axes
WINDOWS = ([0, 0], [3, 0], [17, -1], [-1, 4], [40, 9], [200, 200])
SOFTCAPS = (1.0, 30.0, 50.0)
FEATURES = {"window": "windows", "softcap": "soft caps", "sinks": "sinks", "max_logits": "max logits"}
CONFIG = asdict(pasa.PasaConfig())
# Of what is bounded by its inputs only, in nats, on N(0, 1) data: a stored score is off by up to 2^-8; the published
# recovery multiplies a mean by up to 64 (accumulate="fp32": rounded once, of 128 scores), in FP16 rows a rounded one.
LOOSE, LOOSE_ROWS = 2.0**-5, 0.5
SMALL_SCORES, SMALL_BIAS = 64.0, 8.0  # nats: what such an arithmetic is judged on
Arguments = dict[str, Any]
Result = tuple[Tensor, Any]
"""Outputs (B, Hq, Sq, D) and log-sum-exps; None in place of these if the call does not ask for them."""


def draw(rng: Random, backend: str | None = None) -> Params:
    """Draw a valid call of any backend, or of one."""
    backend = backend or rng.choices((REFERENCE, SDPA, TRITON, NPU), (600, 373, 4, 23))[0]
    small = backend in (TRITON, NPU)
    precision = rng.choice(("pasa",) * 9 + (rng.choice(BASELINES),))
    recovery = rng.choice(("exact",) * 5 + ("paper",)) if precision == "pasa" else "exact"
    params: Params = {
        "backend": backend, "batch_invariant": False,
        "batch": rng.choice((1, 1, 2, 3)), "heads": rng.choice((1, 1, 2, 3)),
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
        "window": rng.choice((*(None,) * 12, *WINDOWS)), "softcap": rng.choice((None,) * 8 + SOFTCAPS),
        "sinks": rng.choice((*(None,) * 12, *SINKS)), "max_logits": rng.random() < 0.15 or None,
    }  # fmt: skip
    if params["block_k"] == 1 and params["keys"] > 31:  # a loop of so many steps
        params["block_k"] = 5
    return mild(serve(params, rng), rng)


def serve(params: Params, rng: Random) -> Params:
    """Return a call with only what the backend says it can do."""
    backend, lacks = params["backend"], BACKENDS[params["backend"]].feature_refusals
    params = params | {name: None for name, feature in FEATURES.items() if lacks(feature, config_of(params))}
    if backend == REFERENCE:
        return params
    accepted = {name: BACKENDS[backend].values(name) or (params[name],) for name in CONFIG}
    changed: Params = {name: CONFIG[name] for name, values in accepted.items() if params[name] not in values}
    if backend == TRITON:
        changed |= {"block_k": rng.choice((32, 64, 128))}
    if backend == NPU and params["recovery"] == "paper":
        changed |= {"mask": "none"}
    if params["recovery"] == "paper" and params["softmax"] == "unbiased":
        changed |= {"softmax": "safe"}
    if backend == NPU and params["garbage"] in ("key", "value"):  # it may reach every row of its head
        changed |= {"garbage": "none"}
    # Calls of few rows take other kernels with diagnostics, whose bits differ from those of the operator without.
    diagnosed = not lacks("diagnostics", config_of(params | changed)) and not params["operator"]
    if backend == NPU and npu_backend.architecture() == on_310p.ARCHITECTURE:
        changed |= {"recovery": "exact", "beta": None, "softmax": "safe", "overflow": "saturate"}
        changed |= {"mask": params["mask"] if params["mask"] in BOOL_MASKS else "none"}
        changed |= {"dtype": "float16"} if params["dtype"] == "bfloat16" else {}
        diagnosed = False
    return params | changed | {"diagnose": params["diagnose"] and diagnosed}


def mild(params: Params, rng: Random) -> Params:
    """Return a call with N(0, 1) data, mostly, where only such are judged."""
    if guaranteed(params):
        return params
    if rng.random() < 0.3:  # of the NPU's limits: scores beyond FP16 that are not saturated feed NaN to its matrix unit
        return params | ({"overflow": "saturate"} if params["backend"] == NPU else {})
    scale = params["scale"] if params["scale"] == 1e-4 else None
    return params | {"data": "randn", "values": "randn", "garbage": "none", "scale": scale}


def config_of(params: Params) -> pasa.PasaConfig:
    """Return the arithmetic."""
    return pasa.PasaConfig(**{name: params[name] for name in CONFIG})


def shared_arguments(params: Params, call: Call) -> Arguments:
    """Return the arguments that all functions of attention take."""
    names = {"is_causal": "causal", "scale": "scale", "return_lse": "lse", "backend": "backend"}
    scores = {"window": call.window, "softcap": call.softcap, "sinks": call.sinks}
    return {name: params[key] for name, key in names.items()} | {"config": config_of(params)} | scores


def arguments_of(params: Params, call: Call) -> Arguments:
    """Return what `attention` is called with, or `attention_varlen` if the call is of packed sequences."""
    if call.sequences is None:
        tensors = STRIDES[params["strides"]](call.q, call.k, call.v)
        if params["layout"] in LAST_LAYOUTS:
            tensors = tensors[0].transpose(1, 2), tensors[1].transpose(1, 2), tensors[2].transpose(1, 2)
        arguments: Arguments = {"attn_mask": call.mask, "tensor_layout": params["layout"]}
    else:
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (call.q, call.k, call.v))
        tensors, arguments = STRIDES[params["strides"]](q, k, v), {}
        for name, lengths in zip("qk", zip(*call.sequences, strict=True), strict=True):
            edges = indices(params, list(accumulate(lengths, initial=0)))
            arguments |= {f"cu_seqlens_{name}": edges.to(q.device), f"max_seqlen_{name}": max(lengths)}
    return dict(zip("qkv", tensors, strict=True)) | arguments | shared_arguments(params, call)


def attend(params: Params, call: Call) -> Result:
    """Return outputs and log-sum-exps of a call, heads first."""
    function = pasa.attention if call.sequences is None else pasa.attention_varlen
    return heads_first(params, function(**arguments_of(params, call)))


def heads_first(params: Params, result: Any) -> Result:
    """Return what a function returned, heads first; packed rows (T, Hq, D) become one batch entry (1, Hq, T, D)."""
    out, lse = result if params["lse"] else (result, None)
    if out.dim() == 3:
        return out.transpose(0, 1).unsqueeze(0), None if lse is None else lse.T.unsqueeze(0)
    return out.transpose(1, 2) if params["layout"] in LAST_LAYOUTS else out, lse


def run(params: Params) -> Measures:
    """Call and judge."""
    call = make(params)
    function = pasa.attention if call.sequences is None else pasa.attention_varlen
    with available(params["backend"]):
        result, measures = checked(lambda: attend(params, call), params, call.q)
        rows = [rows for rows, _ in call.sequences or [(1, 1)] * params["batch"]]
        largest = maxima(params, function, arguments_of(params, call), rows)
        if params["operator"] and not measures["shape"]:
            operator = torch.ops.pasa.attention if call.sequences is None else torch.ops.pasa.attention_varlen
            arguments = arguments_of(params | {"layout": "HND"}, call)
            measures["same"] = by_operator(operator, params, arguments, result)
    if measures["shape"]:
        return measures
    if call.sequences is None:
        return measures | judged(params, call, *result, largest)
    return measures | judged_apart(params, pieces(call)[0], *result, largest)


def maxima(params: Params, function: Callable[..., Any], arguments: Arguments, rows: Sequence[int]) -> Tensor | None:
    """Return the largest scores of the sequences that have `rows`, if the case asks for largest scores."""
    wanted = params.get("max_logits")
    return function(**arguments | {"return_max_logits": True})[-1][[n > 0 for n in rows]] if wanted else None


def checked(attend: Callable[[], Result], params: Params, q: Tensor) -> tuple[Result, Measures]:
    """Return results for these queries, and whether shapes and types are right, and diagnostics one record of all."""
    recorder: AbstractContextManager[list[Any]] = pasa.record_diagnostics() if params["diagnose"] else nullcontext([])
    with recorder as records:
        out, lse = attend()
    right = (out.shape, out.dtype) == (q.shape, q.dtype)
    right &= lse is None or (lse.shape, lse.dtype) == (q.shape[:-1], torch.float32)
    measures = {"shape": float(not right)}
    if params["diagnose"]:
        measures["diagnosed"] = float(len(records) != 1 or records[0].tiles.shape != q.shape[:2])
    return (out, lse), measures


def by_operator(operator: Any, params: Params, arguments: Arguments, result: Result) -> float:
    """Count the numbers that differ when torch.ops.pasa.* is called itself, and shapes on the device meta."""
    known = {argument.name for argument in operator.default._schema.arguments}
    options = {name: x for name, x in arguments.items() if name in known and x is not None}
    options |= dict(zip(("window_left", "window_right"), arguments["window"] or (-1, -1), strict=True))
    options |= {name: params[name] for name in CONFIG}
    again = operator(**options)
    meta = operator(**{name: x.to("meta") if isinstance(x, Tensor) else x for name, x in options.items()})
    alike = all(a.is_meta and (a.shape, a.dtype) == (b.shape, b.dtype) for a, b in zip(meta, again, strict=True))
    pairs = zip(result, heads_first(params | {"layout": "HND", "lse": True}, again[:2]), strict=True)
    differ = [(a.nan_to_num(nan=7.0) != b.nan_to_num(nan=7.0)).sum() for a, b in pairs if a is not None]
    return float(sum(map(int, differ)) + (not alike))


def is_ordinary(params: Params) -> bool:
    """Return whether scores and values are such that same-precision arithmetic is good at them."""
    return params["data"] in ORDINARY and params["values"] in ORDINARY_VALUES


def arithmetic_of(params: Params, keys: int) -> Arithmetic:
    """Return the arithmetic of a call; only the reference stores outputs after every block."""
    blocks = -(-keys // params["block_k"])
    emulated = params["backend"] == REFERENCE
    stores = 1 + 2 * blocks * (params["accumulate"] == "fp16" and emulated)
    fp32_scores = params["backend"] == TRITON and is_ordinary(params)
    return Arithmetic(getattr(torch, params["dtype"]), stores, params["softmax"] != "safe", fp32_scores)


def judged(params: Params, call: Call, out: Tensor, lse: Tensor | None, largest: Tensor | None = None) -> Measures:
    """Judge what is promised of this arithmetic; of what is bounded by its inputs alone, N(0, 1) data."""
    if not call.k.shape[2]:
        expected = -torch.inf if call.sinks is None else call.sinks.float()[:, None]
        return {"fully-masked": float((out != 0).sum() + (0 if lse is None else (lse != expected).sum()))}
    # With a scale of 2^80 a rounding decides between two keys.
    ordinary = is_ordinary(params) and params["garbage"] == "none" and params["scale"] in (None, 1e-4, 1.0)
    promised, normal = guaranteed(params), params["data"] == params["values"] == "randn"
    if not promised and not (normal and ordinary):
        return {}
    truth = find_truth(call, fp16_scores=params["backend"] not in (TRITON, SDPA))
    if not promised:
        return loosely(params, call, truth, out)
    how = arithmetic_of(params, call.k.shape[2])
    measures = judge(truth, out, truth.lse.masked_fill(truth.bad_rows, torch.nan) if lse is None else lse, how)
    if largest is not None:
        measures["max-logits"] = count_wrong_maxima(truth, prepare(call).scores.amax(-1), largest)
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


def judged_apart(
    params: Params, calls: Sequence[Call], out: Tensor, lse: Tensor | None, top: Tensor | None
) -> Measures:
    """Judge rows (1, Hq, T, D) a sequence at a time; rows behind the last sequence give 0 and -inf."""
    edges = [0, *accumulate(call.q.shape[2] for call in calls), out.shape[2]]
    no_keys = out.new_zeros(1, 1, 0, out.shape[3])
    behind = Call(out[:, :, edges[-2] :], no_keys, no_keys, None, False, 1.0)
    largest: Measures = {}
    tops = [*([None] * len(calls) if top is None else top.unsqueeze(1)), None]
    for call, (first, last), one in zip((*calls, behind), pairwise(edges), tops, strict=True):
        measures = judged(params, call, out[:, :, first:last], None if lse is None else lse[:, :, first:last], one)
        largest |= {name: max(largest.get(name, 0.0), value) for name, value in measures.items()}
    return largest


def draw_packed(rng: Random, backend: str | None = None) -> Params:
    """Draw sequences one behind the other; one may be empty."""
    params = draw(rng, backend) | {"mask": "none", "garbage": "none", "batch": 1, "layout": "HND", "diagnose": False}
    count = rng.randint(1, 4)
    tiled = params["backend"] == NPU and params["recovery"] == "exact" and rng.random() < 0.5
    lengths = PACKED_TILES if tiled else PACKED_LENGTHS
    rows, keys = ([rng.choice(lengths) for _ in range(count)] for _ in range(2))
    rows[0], keys[0] = max(rows[0], 1), max(keys[0], 1)
    sizes = {"rows": sum(rows), "keys": sum(keys), "row_lengths": rows, "key_lengths": keys}
    how = {"strides": rng.choice(PACKED_STRIDES), "wide": rng.random() < 0.5, "spaced": rng.random() < 0.3}
    return params | sizes | how


SIMPLEST = {
    "backend": REFERENCE, "batch": 1, "heads": 1, "groups": 1, "rows": 1, "keys": 1, "dim": 1, "dtype": "float16",
    "data": "randn", "values": "randn", "mask": "none", "causal": False, "scale": None, "strides": "contiguous",
    "layout": "HND", "garbage": "none", "where": "seen", "diagnose": False, "operator": False,
    "window": None, "softcap": None, "sinks": None, "max_logits": None,
    "beta": None, **CONFIG,  # beta first, because it needs recovery="paper"
}  # fmt: skip
SIMPLEST_PACKED = {name: least for name, least in SIMPLEST.items() if name not in ("rows", "keys", "batch")}
SIMPLEST_PACKED |= {"wide": False, "spaced": False}
KINDS = {"attention": Kind(draw, run, 700, SIMPLEST), "attention_varlen": Kind(draw_packed, run, 120, SIMPLEST_PACKED)}
