"""Probes of torch_npu's fused attention, on which the backend `sdpa` rests on an NPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import pasa
from pasa.eval.check_device.npu.finding import Finding
from pasa.eval.check_device.score_format import measure_format
from pasa.eval.kit.error_metrics import generator
from pasa.ops.attention.sdpa import npu
from pasa.ops.attention.sdpa.fused import score_format

ROWS, KEYS, DIM = 40, 70, 64
BOUND = 2.0**-6  # of outputs and log-sum-exps: scores of at most 8 nats in FP16 err by 2^-8, and outputs by 2^-10
ORDER = "abc"  # classes of `score_format`, the best first


def check_scores(device: str) -> Finding:
    """Measure in which format the attention keeps scores in each precision."""
    found = {}
    for precision in (0, 1):
        found[precision] = measure_format(device, partial(_attend, inner_precise=precision))["class"]
    listed = score_format("npu").kind
    better = ORDER.index(found[0]) <= ORDER.index(listed)
    detail = f"class ({found[0]}) with inner_precise=0, ({found[1]}) with 1; pasa lists ({listed})"
    return Finding(found[0] != listed, detail, harmless=better)


def check_masks(device: str) -> Finding:
    """Check bool masks with a fully masked row, and the causal mask of sparse_mode=2."""
    q, k, v = _inputs()
    mask = torch.rand(1, 1, ROWS, KEYS, generator=generator(0, "vendor's mask")) > 0.3  # True: seen
    mask[:, :, 3] = False
    causal = torch.ones(ROWS, KEYS, dtype=torch.bool).tril()
    hidden = (~mask).expand(1, q.shape[1], ROWS, KEYS).contiguous().to(device)
    triangle = torch.ones(npu.MASK_SIDE, npu.MASK_SIDE, dtype=torch.bool, device=device).triu(1)
    errors = {}
    cases: tuple[tuple[str, Tensor, dict[str, Any]], ...] = (
        ("bool", mask, {"atten_mask": hidden, "inner_precise": npu.HIGH_PRECISION_MASKED_ROWS}),
        ("causal", causal, {"atten_mask": triangle, "sparse_mode": npu.TOP_LEFT_CAUSAL}),
    )
    for name, seen, how in cases:
        golden, _ = pasa.golden_attention(q, k, v, attn_mask=seen)
        out = _attend(*(x.to(device) for x in (q, k, v)), scale=DIM**-0.5, **how).cpu().double()
        errors[name] = float((out - golden).abs().nan_to_num(nan=torch.inf).max())
    detail = ", ".join(f"largest error with a {name} mask {error:.2g}" for name, error in errors.items())
    return Finding(not max(errors.values()) <= BOUND, detail)


def check_lse(device: str) -> Finding:
    """Check the log-sum-exp's numbers, and that its shape has one for each row."""
    q, k, v = _inputs()
    _, golden = pasa.golden_attention(q, k, v)
    lse = _launch(*(x.to(device) for x in (q, k, v)), scale=DIM**-0.5)[1].cpu().double()
    if lse.numel() != golden.numel():
        return Finding(True, f"shape {tuple(lse.shape)} for {tuple(golden.shape)} rows")
    error = float((lse.reshape(golden.shape) - golden).abs().nan_to_num(nan=torch.inf).max())
    return Finding(not error <= BOUND, f"shape {tuple(lse.shape)}, largest error {error:.2g}")


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    source = generator(0, "vendor")
    q, k, v = (torch.randn(1, 2, length, DIM, generator=source).half() for length in (ROWS, KEYS, KEYS))
    return q, k, v


def _attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, **how: Any) -> Tensor:
    return _launch(q, k, v, scale=scale, **how)[0]


def _launch(q: Tensor, k: Tensor, v: Tensor, *, scale: float, **how: Any) -> tuple[Tensor, Tensor]:
    import torch_npu

    options = {"atten_mask": None, "sparse_mode": npu.ALL_KEYS, "inner_precise": npu.HIGH_PRECISION} | how
    out, lse = torch_npu.npu_fused_infer_attention_score(
        q, k, v, num_heads=q.shape[1], num_key_value_heads=k.shape[1], input_layout="BNSD", scale=scale,
        softmax_lse_flag=True, **options,
    )  # fmt: skip
    return out, lse
