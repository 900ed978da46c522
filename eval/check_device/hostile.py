"""Attention calls that break attention in FP16, and the measures of a backend's results against FP64."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

import pasa
from pasa.eval.kit.error_metrics import generator
from pasa.eval.random_calls.inputs import Call, Three
from pasa.eval.random_calls.judge import Arithmetic, against_naive, count_faults, judge
from pasa.eval.random_calls.truth import Truth, find_truth, prepare


class View(NamedTuple):
    """State which keys the rows of a call see, and what else changes their weights.

    Attributes
    ----------
    mask : str
        "none", "bool", "float" (FP16, N(0, 1)) or "large" (FP32, 1000 times as large).
    causal : bool
    window : (int, int), optional
    sinks : bool
        Whether each head has a sink, N(0, 100).
    """

    mask: str = "none"
    causal: bool = False
    window: tuple[int, int] | None = None
    sinks: bool = False

    @property
    def requested(self) -> str:
        """Return the mask's name in a `Request` to a backend."""
        return "float" if self.mask == "large" else self.mask


# B, Hq, Hkv, Sq, Skv, D
SHAPES = ((1, 2, 2, 70, 600, 64), (1, 4, 1, 37, 257, 80), (1, 2, 2, 1, 513, 72))
MORE_SHAPES = (
    (1, 2, 2, 130, 130, 64), (2, 4, 2, 24, 300, 128), (1, 4, 1, 97, 257, 80), (1, 2, 2, 1, 513, 64),
    (1, 8, 2, 40, 90, 40), (1, 2, 1, 300, 33, 72), (1, 2, 2, 512, 2048, 72),
)  # fmt: skip
MASKS = {"none": View(), "causal": View(causal=True), "bool": View("bool"), "float": View("float")}
MORE_MASKS = MASKS | {
    "causal, float": View("float", causal=True),
    "float of 1000, sinks": View("large", sinks=True),
    "causal, window, sinks": View(causal=True, window=(50, 0), sinks=True),
    "window": View(window=(20, 9)),
}
HULL = 2.0**-10  # times max |V|: how far an output may leave the values that its row sees
# Nats. FP32 scores that may err by more (from some 16,000 nats on) do not determine the weights of keys that compete
# for the maximum, so rows with such scores must only be finite and stay among their values.
SCORE_ERROR_LIMIT = 0.25
Case = tuple[str, str, tuple[int, ...]]  # a name in `MORE_KINDS`, one in `MORE_MASKS`, and a shape


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


def _scaled(kind: str, size: float, q: Tensor, k: Tensor, v: Tensor) -> Three:
    q, k, v = KINDS[kind](q, k, v)
    return size * q, size * k, v


MORE_KINDS: dict[str, Callable[[Tensor, Tensor, Tensor], Three]] = {
    **KINDS,
    "scale 30000": partial(_scaled, "scale 1", 30000.0),
    **{f"{kind}, scale {x:g}": partial(_scaled, kind, x) for kind in ("equal keys", "outlier key")
       for x in (1e-6, 100.0, 30000.0)},
    "300000 nats": partial(_nats, 3e5),
    "queries 0, V 65504": lambda q, k, v: (0 * q, k, 0 * v + 65504),
}  # fmt: skip


def cases() -> list[Case]:
    """Return the inputs of `pasa check-device`: every kind with every mask and shape."""
    return list(product(KINDS, MASKS, SHAPES))


def more_cases() -> list[Case]:
    """Return the inputs of `pasa eval hostile`, with larger scales, windows, sinks and more shapes."""
    return list(product(MORE_KINDS, MORE_MASKS, MORE_SHAPES))


@cache
def prepared(case: Case) -> tuple[Call, Truth, Tensor]:
    """Prepare a case as `prepare_case` does, and keep the result for all backends."""
    return prepare_case(case)


def prepare_case(case: Case) -> tuple[Call, Truth, Tensor]:
    """Return the call of a case, FP16, on the CPU; its true result; and attention with scores and sums in FP32."""
    kind, name, (batch, heads, kv_heads, rows, keys, dim) = case
    view, source = MORE_MASKS[name], generator(0, *map(str, case))
    sizes = (heads, rows), (kv_heads, keys), (kv_heads, keys)
    tensors = (torch.randn(batch, count, length, dim, generator=source) for count, length in sizes)
    q, k, v = (x.clamp(-65504, 65504).half() for x in MORE_KINDS[kind](*tensors))
    bias = torch.randn(heads, rows, keys, generator=source)
    bias = 1000 * bias if view.mask == "large" else bias.half()
    if view.mask == "bool":
        bias = bias > 0
        bias[:, rows // 2] &= rows == 1  # a row without keys, unless it is the only one
    sinks = 10 * torch.randn(heads, generator=source) if view.sinks else None
    window = None if view.window is None else list(view.window)
    call = Call(
        q, k, v, None if view.mask == "none" else bias, view.causal, dim**-0.5, window=window, sinks=sinks
    )  # fmt: skip
    return call, find_truth(call, fp16_scores=False), _in_fp32(call)


def _in_fp32(call: Call) -> Tensor:
    """Return attention with scores, weights and sums in FP32."""
    part = prepare(call)
    scores = part.q.float() @ part.k.float().mT * call.scale + part.added.float()
    scores = scores.masked_fill(~part.seen, -torch.inf)
    out = torch.softmax(scores, -1).nan_to_num(0.0) @ part.v.float()
    if call.sinks is None:
        return out
    return out * torch.sigmoid(scores.logsumexp(-1, keepdim=True) - call.sinks[:, None, None])


def measure(case: Case, backend: str, device: str, known: tuple[Call, Truth, Tensor] | None = None) -> dict[str, float]:
    """Run a case and judge it; `known` is what `prepare_case` returned for it.

    Returns
    -------
    dict of str to float
        ``faults`` counts elements that are not finite, and those of rows without keys that are not 0 and -inf.
        ``outside`` counts elements beyond the values that their row sees. ``error`` is the largest error over 4 times
        that of attention with FP32 scores, plus 2^-10 max |V|. ``derived`` and ``lse`` are the largest errors of output
        and log-sum-exp over what FP32 sums may cause.
    """
    call, truth, fp32 = known or prepared(case)
    there = call.to(torch.device(device))
    out, lse = pasa.attention(
        there.q, there.k, there.v, attn_mask=there.mask, is_causal=call.causal, scale=call.scale,
        window=None if call.window is None else (call.window[0], call.window[1]), sinks=there.sinks,
        return_lse=True, backend=backend,
    )  # fmt: skip
    out, lse = out.cpu().double(), lse.cpu().double()
    beyond = torch.maximum(truth.low - out, out - truth.high) > HULL * truth.largest.max()
    judged = ((truth.eps <= SCORE_ERROR_LIMIT) & ~truth.fully_masked).unsqueeze(-1) & out.isfinite()
    fp32, ours = (x.double().where(judged, truth.out) for x in (fp32, out))
    arithmetic = Arithmetic(torch.float16)
    measures = judge(truth, out, lse, arithmetic)
    return {
        "faults": sum(count_faults(truth, out, lse).values()),
        "outside": float(beyond.sum()),
        "error": against_naive(truth, fp32, ours, arithmetic),
        "derived": measures["error"],
        "lse": measures["lse"],
    }
