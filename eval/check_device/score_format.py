"""Measure in which format a device's own attention keeps scores, by inputs whose results are known exactly.

Classes "a", "b" and "c" are those of `pasa.ops.attention.sdpa.fused.ScoreFormat`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

DIM, KEYS, ROWS = 64, 128, (128, 1)  # prefill and decoding may be served by different kernels
TOLERANCE = 2.0**-7  # a score that its format cannot hold moves the result by 0.02 at least, other roundings by 2^-10


class Probe(NamedTuple):
    """State two scores: all elements of q are `query`, those of keys `key`; one of each odd key is larger by `step`."""

    query: float
    key: float
    step: float
    scale: float

    def passes(self, attention: Callable[..., Tensor], device: str, rows: int) -> bool:
        """Return whether the weight of the odd keys is right; it is the output, since their values alone are 1."""
        q, k = torch.full((1, 2, rows, DIM), self.query), torch.full((1, 2, KEYS, DIM), self.key)
        v = torch.zeros_like(k)
        k[:, :, 1::2, 0] += self.step
        v[:, :, 1::2] = 1
        out = attention(*(x.half().to(device) for x in (q, k, v)), scale=self.scale)
        weight = 1 / (1 + math.exp(-self.query * self.step * self.scale))
        return bool(((out.float().cpu() - weight).abs() <= TOLERANCE).all())


PROBES = {
    "q.k beyond 65504": Probe(64.0, 32.0, 1024.0, 2.0**-16),  # 131072 and 196608; scaled 2 and 3
    "q.k too close for FP16": Probe(1.0, 64.0, 1.0, 1.0),  # 4096 and 4097
    "q.k scaled down": Probe(2.0**-6, 32.0, 1024.0, 2.0**-4),  # the first with Q times 2^-12: 32 and 48
    "scores beyond 65504": Probe(1.0, 16.0, 1.0, 128.0),  # q.k 1024 and 1025; scaled 131072 and 131200
    "the same, Q scaled down": Probe(2.0**-8, 16.0, 1.0, 2.0**15),
    "scores too close for FP16": Probe(1.0, 16.0, 1.0, 3.01),  # scaled 3082.24 and 3085.25; FP16 has even numbers there
}
PRODUCTS = ("q.k beyond 65504", "q.k too close for FP16")  # wrong where q.k is FP16, even if the softmax is FP32


def measure_format(device: str, attention: Callable[..., Tensor] | None = None) -> dict[str, Any]:
    """Return the class of an attention, by default torch's; which probes it passes; and why it refuses FP16, if so."""
    probes: dict[str, bool] = {}
    try:
        for name, probe in PROBES.items():
            used = attention or torch.nn.functional.scaled_dot_product_attention
            probes[name] = all(probe.passes(used, device, rows) for rows in ROWS)
    except (RuntimeError, TypeError) as error:
        return {"class": "c", "probes": probes, "refusal": " ".join(str(error).split())}
    others = all(right for name, right in probes.items() if name not in PRODUCTS)
    return {"class": "a" if all(probes.values()) else "b" if others else "c", "probes": probes, "refusal": None}
