"""Random calls of what is not attention: configurations, shifting matrices, bounds from weights, patched models."""

from __future__ import annotations

import math
from functools import cache
from random import Random
from typing import Any

import torch
from torch import Tensor

import pasa
from pasa import geometry
from pasa.eval.random_calls.cases import Kind, Measures
from pasa.eval.random_calls.faults import SEED, Arguments, Fault, Params, make_mistake, pick, put
from pasa.projections import Norm, project

MANTISSA = {"float16": (10, -14), "bfloat16": (7, -126), "float32": (23, -126)}  # bits, smallest exponent
TOLERANCE = 1e-7  # of beta: ten times that of the iteration

# ---- configurations


def draw_config(rng: Random) -> Params:
    """Draw every field."""
    paper = rng.random() < 0.3
    precisions = ("pasa",) if paper else ("pasa", "fp32", "partial", "fp16", "prescaled", "smooth_k")
    return {
        "precision": rng.choice(precisions), "recovery": "paper" if paper else "exact",
        "softmax": rng.choice(("safe", "unbiased", "unbiased_paper")), "overflow": rng.choice(("inf", "saturate")),
        "accumulate": rng.choice(("fp32", "fp16")), "block_q": rng.choice((1, 128, 65536)),
        "block_k": rng.choice((1, 7, 128, 65536)), "beta": rng.choice((None, 0, 0.0, 0.5, 0.999)) if paper else None,
    }  # fmt: skip


def run_config(params: Params) -> Measures:
    """Check that a configuration keeps its values, and equals itself made again."""
    arguments = {name: value for name, value in params.items() if name not in ("fault", "twice", SEED)}
    make_mistake(CONFIG_FAULTS, params, arguments)
    made, again = pasa.PasaConfig(**arguments), pasa.PasaConfig(**arguments)
    kept = all(getattr(made, name) == value for name, value in arguments.items())
    return {"same": float(not kept or made != again or hash(made) != hash(again))}


def wrong_beta(arguments: Arguments, rng: Random) -> None:
    """Give a beta beyond its range where it is used."""
    arguments |= {"precision": "pasa", "recovery": "paper", "beta": rng.choice((1, 1.0, -0.1, math.nan, "x", [], 9))}


NO_MODE: tuple[Any, ...] = ("", "FP16", "auto", None, 3, True, [], "exactly")
NO_SIZE: tuple[Any, ...] = (0, -1, 65537, 1.0, True, "128", None, math.nan)
MODES, SIZES = ("precision", "recovery", "softmax", "overflow", "accumulate"), ("block_q", "block_k")
CONFIG_FAULTS = {
    **{name: Fault(pick(name, *NO_MODE), ValueError, rf"{name}=.* is not one of") for name in MODES},
    **{name: Fault(pick(name, *NO_SIZE), ValueError, rf"{name}=.* not an integer") for name in SIZES},
    "beta": Fault(wrong_beta, ValueError, r"beta=.* is not in \[0, 1\)"),
    "beta unused": Fault(put(recovery="exact", precision="pasa", beta=0.5), ValueError, "beta=0.5 is only used by"),
    "unknown": Fault(put(window=128), TypeError, "unexpected keyword argument 'window'"),
}


# ---- shifting matrices and their beta


def draw_matrix(rng: Random) -> Params:
    """Draw block size, share and scale."""
    return {
        "n": rng.choice((1, 2, 3, 7, 16, 63, 64, 127, 128, 200)),
        "beta": rng.choice((0.0, 0.5, 0.9, 0.9375, 1 - 2**-6, 0.99, 0.999, rng.random(), 1.0)),
        "scale": rng.choice((1.0, 1.0, 64**-0.5, 80**-0.5, 128**-0.5, 1e-3, 30.0, 2.0**-30)),
        "dtype": rng.choice(list(MANTISSA)),
    }


def nearest_error(x: Tensor, exact: float, dtype: str) -> float:
    """Return how far entries are off, over half the spacing at the exact number."""
    bits, least = MANTISSA[dtype]
    exponent = max(math.frexp(exact)[1] - 1 if exact else least, least)
    half = 2.0 ** (exponent - bits - 1) * (1 + 2.0**-40)
    return float((x.double() - exact).abs().max()) / half if x.numel() else 0.0


def run_matrix(params: Params) -> Measures:
    """Check that every entry is the nearest to scale (1 - beta/n) or -scale beta/n."""
    arguments: Arguments = {name: params[name] for name in ("n", "beta", "scale")}
    arguments["dtype"] = getattr(torch, params["dtype"])
    make_mistake(MATRIX_FAULTS, params, arguments)
    matrix = pasa.shifting_matrix(**arguments)
    n, share = params["n"], params["beta"] / params["n"]
    if matrix.shape != (n, n) or matrix.dtype != arguments["dtype"]:
        return {"shape": 1.0}
    off = matrix[~torch.eye(n, dtype=torch.bool)]
    return {
        "diagonal": nearest_error(matrix.diagonal(), params["scale"] * (1 - share), params["dtype"]),
        "beside": nearest_error(off, -params["scale"] * share, params["dtype"]),
    }


def run_beta(params: Params) -> Measures:
    """Check a fixed point: the matrix rounded at that beta has that beta, by its row sum."""
    n, scale, start = params["n"], params["scale"], min(params["beta"], 0.9375)
    if params["fault"] is not None:  # from 0 the result is 0, whatever the matrix
        start = 0.5
    arguments: Arguments = {"beta0": start, "n": n, "scale": scale, "dtype": getattr(torch, params["dtype"])}
    make_mistake(BETA_FAULTS, params, arguments)
    try:
        optimum = pasa.optimal_beta(**arguments)
    except pasa.optimal_beta.__globals__["NoOptimalBetaError"]:  # documented: the format is too coarse
        if params["fault"] is not None:
            raise
        return {}
    matrix = pasa.shifting_matrix(n, optimum.beta, scale=scale, dtype=arguments["dtype"])
    beta = 1 - float(matrix.double()[0].sum()) / scale
    exact = optimum.beta == start == 0
    return {
        "fixed": 0.0 if exact else abs(beta - optimum.beta) / (TOLERANCE * optimum.beta),
        "invariance": 0.0 if exact else abs(optimum.invariance - beta / (1 - beta)) * (1 - beta) ** 2 / TOLERANCE,
    }


NUMBERS = {
    "n": Fault(pick("n", 0, -1, 1.5, True, "8", None, math.nan), ValueError, "n must be an integer >= 1"),
    "scale": Fault(pick("scale", 0.0, -1.0, math.nan, math.inf), ValueError, "scale must be positive and finite"),
    "scale not a number": Fault(pick("scale", "1", None, 1j, [1.0]), TypeError, "scale=.* is not a number"),
    "scale too large": Fault(put(scale=1e6, dtype=torch.float16), ValueError, "beyond the range of torch.float16"),
    "dtype": Fault(pick("dtype", torch.int32, torch.bool), ValueError, "torch"),
}
MATRIX_FAULTS = NUMBERS | {
    "beta": Fault(pick("beta", -0.1, 1.5, math.nan, math.inf), ValueError, r"beta must lie in \[0, 1\)"),
    "beta not a number": Fault(pick("beta", "0.9", None, 1j), TypeError, "beta=.* is not a number"),
}
BETA_FAULTS = NUMBERS | {
    "beta": Fault(pick("beta0", -0.1, 1.0, 1.5, math.nan), ValueError, r"(beta must lie in \[0, 1\)|singular)"),
    "beta not a number": Fault(pick("beta0", "0.9", None, 1j), TypeError, "beta=.* is not a number"),
}


# ---- bounds from weights


def draw_bounds(rng: Random) -> Params:
    """Draw weights of one layer."""
    return {
        "hidden": rng.choice((4, 16, 33, 64)), "heads": rng.choice((1, 2, 4)), "dim": rng.choice((2, 4, 16)),
        "grouped": rng.random() < 0.5, "bias": rng.choice((0.0, 1.0, 100.0)), "size": rng.choice((1e-3, 1.0, 30.0)),
        "gain": rng.random() < 0.5, "centred": rng.random() < 0.5, "aligned": rng.random() < 0.5,
    }  # fmt: skip


def run_bounds(params: Params) -> Measures:
    """Check that no q.k of such inputs, random or along the singular vectors, lies above the proven bound."""
    source = torch.Generator().manual_seed(params[SEED])
    hidden, heads, dim = params["hidden"], params["heads"], params["dim"]
    kv_heads = 1 if params["grouped"] else heads
    weights, biases = [], []
    for count in (heads, kv_heads):
        weights.append(params["size"] * torch.randn(count * dim, hidden, generator=source, dtype=torch.float64))
        biases.append(params["bias"] * torch.randn(count * dim, generator=source, dtype=torch.float64))
    gain = 1 + torch.rand(hidden, generator=source, dtype=torch.float64) if params["gain"] else None
    norm = Norm(math.sqrt(hidden), gain, None, params["centred"])
    query, key = (project(w, b, n, norm) for w, b, n in zip(weights, biases, (heads, kv_heads), strict=True))
    how = {"heads": heads, "seq_len": 16, "delta": 1e-6}
    bounds = {rotary: geometry.score_bounds(query, key, **how, rotary=rotary).proven for rotary in (0, dim)}
    n = torch.randn(64, hidden, generator=source, dtype=torch.float64)
    if params["aligned"]:  # along what the first query head looks for
        folded = weights[0][:dim] * (1 if gain is None else gain)
        n = torch.cat([n, torch.linalg.svd(folded, full_matrices=False)[2]])
    n = n - n.mean(-1, keepdim=True) if params["centred"] else n
    n = n / n.norm(dim=-1, keepdim=True).clamp(min=1e-12) * math.sqrt(hidden)
    x = n if gain is None else n * gain
    q, k = ((x @ w.T + b).unflatten(-1, (-1, dim)).transpose(0, 1) for w, b in zip(weights, biases, strict=True))
    scores = (q @ k.repeat_interleave(heads // kv_heads, 0).mT).abs().flatten(1).amax(-1)
    measures = {"finite": float(sum((~torch.isfinite(proven)).sum() for proven in bounds.values()))}
    for rotary, proven in bounds.items():
        measures[f"proven, rotary {rotary > 0}"] = float((scores / proven).max())
    return measures


def run_predict(params: Params) -> Measures:
    """Check that a whole tiny model has a prediction."""
    arguments: Arguments = {"model": tiny_model(params["hidden"] % 2), "delta": 1e-6, "seq_len": params["heads"] * 8}
    make_mistake(PREDICT_FAULTS, params, arguments)
    return {"shape": float(not pasa.predict_overflow(**arguments).as_dict())}


PREDICT_FAULTS = {
    "delta": Fault(pick("delta", 0.0, 1.0, -1, math.nan, math.inf), ValueError, "delta=.* is not a probability"),
    "delta not a number": Fault(pick("delta", "x", None, 1j), TypeError, "delta=.* is not a number"),
    "seq_len": Fault(pick("seq_len", 0, -5), ValueError, "seq_len=.* is not at least 1"),
    "seq_len not a number": Fault(pick("seq_len", "8", 1.5, True), TypeError, "seq_len=.* is not an integer"),
    "model": Fault(pick("model", 3, None, object(), [1]), TypeError, "predict_overflow"),
    "no folder": Fault(pick("model", "no/such/folder", "no.safetensors"), FileNotFoundError, "is not a folder"),
    "no attention": Fault(lambda a, rng: a.update(model=torch.nn.Linear(2, 2)), TypeError, "has no config"),
}


# ---- patched models


@cache
def tiny_model(grouped: int) -> torch.nn.Module:
    """Return a decoder of two layers with random weights, FP32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2 if grouped else 4, max_position_embeddings=64, attn_implementation="eager",
    )  # fmt: skip
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model: torch.nn.Module = LlamaForCausalLM(config).eval()
    return model


def draw_patch(rng: Random) -> Params:
    """Draw a sequence, a policy and an arithmetic."""
    return {
        "grouped": rng.randint(0, 1), "batch": rng.randint(1, 3), "tokens": rng.choice((1, 2, 7, 20)),
        "policy": rng.choice(("all", "auto", "every")), "padded": rng.random() < 0.5,
        "cached": rng.random() < 0.5, "softmax": rng.choice(("safe", "unbiased")),
    }  # fmt: skip


def run_patch(params: Params) -> Measures:
    """Check that logits stay near the model's, and have its bits again after unpatching."""
    model, source = tiny_model(params["grouped"]), torch.Generator().manual_seed(params[SEED])
    ids = torch.randint(0, 32, (params["batch"], params["tokens"]), generator=source)
    keep = torch.ones_like(ids)
    if params["padded"] and params["tokens"] > 2:
        keep[0, :2] = 0
    policies: dict[str, Any] = {"every": lambda *_: True}
    arguments: Arguments = {"model_or_pipeline": model, "policy": policies.get(params["policy"], params["policy"])}
    arguments |= {"config": pasa.PasaConfig(softmax=params["softmax"]), "backend": "reference"}
    make_mistake(PATCH_FAULTS, params, arguments)

    def predict() -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(ids, attention_mask=keep, use_cache=params["cached"]).logits
        return logits

    plain = predict()
    handle = pasa.patch_pipeline(**arguments)
    try:
        patched = predict()
    finally:
        handle.unpatch()
        handle.unpatch()  # idempotent
    good = keep.bool()
    error = float((patched - plain)[good].abs().max())
    allowed = 2.0**-9 * float(plain.abs().max())  # values and weights in FP16, through two layers and a residual
    return {"same": float((predict() != plain).sum()), "logits": error / allowed}


PATCH_FAULTS = {
    "nothing left": Fault(put(policy=lambda *_: False), NotImplementedError, "nothing to patch in LlamaForCausalLM"),
    "policy": Fault(pick("policy", "some", "", None, 3), ValueError, "policy must be"),
    "config": Fault(pick("config", {}, "exact"), TypeError, "config"),
    "backend": Fault(pick("backend", "abacus"), ValueError, "abacus"),
    "model": Fault(pick("model_or_pipeline", None, 3, "llama"), TypeError, "expected a model"),
}

KINDS = {
    "PasaConfig": Kind(draw_config, run_config, 30, {}, CONFIG_FAULTS),
    "shifting_matrix": Kind(draw_matrix, run_matrix, 25, {"n": 1, "scale": 1.0}, MATRIX_FAULTS),
    "optimal_beta": Kind(draw_matrix, run_beta, 25, {"n": 1, "scale": 1.0}, BETA_FAULTS),
    "score_bounds": Kind(draw_bounds, run_bounds, 15, {"bias": 0.0, "gain": False, "centred": False}),
    "predict_overflow": Kind(draw_bounds, run_predict, 8, {}, PREDICT_FAULTS),
    "patch_pipeline": Kind(draw_patch, run_patch, 8, {"batch": 1, "tokens": 1, "padded": False}, PATCH_FAULTS),
}
