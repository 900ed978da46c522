"""Check a backend on a device with one small call whose scores FP16 cannot hold."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import pasa
from pasa.eval.kit import output

BOUND = 2.0**-9
"""max |error| of the check, |V| <= 1: the output's rounding (2^-12), P's (2^-11 relative), and the scores'
(|t| <= 1 in FP16: 2^-12, weighted twice) come to less than 2^-10; doubled."""


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs with a bias of 34 on all channels of Q and K: q.k reaches 78,000, more than FP16's largest."""
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.rand(1, 2, 130, 64, generator=source) for _ in range(3))
    return (q + 34).half(), (k + 34).half(), v.half()


def check(backend: str, device: str, given: tuple[Tensor, Tensor, Tensor]) -> dict[str, Any]:
    """Check a backend on one device: many rows, a causal mask, and one row."""
    record = {"backend": backend, "device": device, "passed": False, "max_error": math.inf, "why": ""}
    errors = []
    try:
        for rows, causal in ((130, False), (130, True), (1, False)):
            q, k, v = given[0][:, :, -rows:], *given[1:]
            golden, _ = pasa.golden_attention(q, k, v, is_causal=causal)
            there = (x.to(device) for x in (q, k, v))
            out = pasa.attention(*there, is_causal=causal, backend=backend)
            errors.append(float((out.cpu().double() - golden).abs().nan_to_num(nan=math.inf).max()))
    except Exception as error:  # of any kind: it is what the check reports
        return record | {"why": output.error_line(error)}
    worst = max(errors)
    return record | {"passed": worst <= BOUND, "max_error": worst}
