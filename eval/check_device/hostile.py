"""Attention calls that break attention in FP16, and the measures of a backend's results against FP64."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import product

import torch
from torch import Tensor

import pasa
from pasa.eval.kit.error_metrics import generator
from pasa.eval.random_calls.inputs import Call, Three
from pasa.eval.random_calls.judge import Arithmetic, against_naive, count_faults
from pasa.eval.random_calls.truth import Truth, find_truth, prepare

SHAPES = ((1, 2, 2, 70, 600, 64), (1, 4, 1, 37, 257, 80), (1, 2, 2, 1, 513, 72))  # B, Hq, Hkv, Sq, Skv, D
MASKS = {"none": "none", "causal": "none", "bool": "bool", "float": "float"}  # with the name that a `Request` has
HULL = 2.0**-10  # times max |V|: how far an output may leave the values that its row sees
# Nats. FP32 scores that may err by more (from some 16,000 nats on) do not determine the weights of keys that compete
# for the maximum, so rows with such scores must only be finite and stay among their values.
SCORE_ERROR_LIMIT = 0.25
Case = tuple[str, str, tuple[int, ...]]  # a name in `KINDS`, one in `MASKS`, and a shape


def _nats(bound: float, q: Tensor, k: Tensor, v: Tensor) -> Three:
    """Return random signs, which have no mean to subtract, with scores up to `bound`; the values lie in [1, 2]."""
    size = (bound / q.shape[-1] ** 0.5) ** 0.5
    return q.sign() * size, k.sign() * size, 1 + torch.special.ndtr(v)


def _bias(size: float, q: Tensor, k: Tensor, v: Tensor) -> Three:
    shift = torch.where(torch.arange(q.shape[-1]) < 16, size, 0.0)
    return q + shift, k + shift, v


def _one_key(size: float, shift: float, factor: float, q: Tensor, k: Tensor, v: Tensor) -> Three:
    """Multiply the key of number 7 by `factor`, and the others by `size`; these are shifted, too."""
    return q, torch.where(torch.arange(k.shape[2])[:, None] == 7, factor * k, size * k + shift), v


KINDS: dict[str, Callable[[Tensor, Tensor, Tensor], Three]] = {
    **{f"scale {x:g}": partial(lambda x, q, k, v: (x * q, x * k, v), x) for x in (1e-6, 1.0, 4.0, 100.0)},
    "scale 65504": lambda q, k, v: (q.sign() * 65504, k.sign() * 65504, v),
    "equal keys": lambda q, k, v: (q, k[:, :, :1].expand(k.shape), v),
    "V 65504": lambda q, k, v: (q, k, v.sign() * 65504),
    "outlier key": partial(_one_key, 1.0, 0.0, 1000.0),
    "sink key": partial(_one_key, 0.1, 300.0, 0.0),
    **{f"{bound:g} nats": partial(_nats, bound) for bound in (1e4, 1e6, 1e8, 1e10)},
    **{f"bias {size:g}": partial(_bias, size) for size in (80.0, 8000.0)},
}


def cases() -> list[Case]:
    """Return every kind of input with every mask and shape."""
    return list(product(KINDS, MASKS, SHAPES))


@cache
def prepared(case: Case) -> tuple[Call, Truth, Tensor]:
    """Return the call of a case, FP16, on the CPU; its true result; and attention with scores and sums in FP32."""
    kind, mask, (batch, heads, kv_heads, rows, keys, dim) = case
    source = generator(0, *map(str, case))
    sizes = (heads, rows), (kv_heads, keys), (kv_heads, keys)
    tensors = (torch.randn(batch, count, length, dim, generator=source) for count, length in sizes)
    q, k, v = (x.clamp(-65504, 65504).half() for x in KINDS[kind](*tensors))
    bias = torch.randn(heads, rows, keys, generator=source).half()
    if mask == "bool":
        bias = bias > 0
        bias[:, rows // 2] &= rows == 1  # a row without keys, unless it is the only one
    call = Call(q, k, v, None if MASKS[mask] == "none" else bias, mask == "causal", dim**-0.5)
    part = prepare(call)
    scores = part.q.float() @ part.k.float().mT * call.scale + part.added.float()
    weights = torch.softmax(scores.masked_fill(~part.seen, -torch.inf), -1).nan_to_num(0.0)
    return call, find_truth(call, fp16_scores=False), weights @ part.v.float()


def measure(case: Case, backend: str, device: str) -> dict[str, float]:
    """Run a case; count elements that are not finite or outside the values; return the error over the allowed error.

    The allowed error is 4 times that of attention with FP32 scores, plus 2^-10 max |V|. Rows without keys must give 0
    and -inf; what is not counts as a fault.
    """
    call, truth, fp32 = prepared(case)
    there = call.to(torch.device(device))
    out, lse = pasa.attention(
        there.q, there.k, there.v, attn_mask=there.mask, is_causal=call.causal, scale=call.scale,
        return_lse=True, backend=backend,
    )  # fmt: skip
    out, lse = out.cpu().double(), lse.cpu().double()
    beyond = torch.maximum(truth.low - out, out - truth.high) > HULL * truth.largest.max()
    judged = ((truth.eps <= SCORE_ERROR_LIMIT) & ~truth.fully_masked).unsqueeze(-1) & out.isfinite()
    fp32, ours = (x.double().where(judged, truth.out) for x in (fp32, out))
    error = against_naive(truth, fp32, ours, Arithmetic(torch.float16))
    return {"faults": sum(count_faults(truth, out, lse).values()), "outside": float(beyond.sum()), "error": error}
