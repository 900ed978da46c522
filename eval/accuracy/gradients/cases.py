"""Calls to differentiate: shapes, masks and data, drawn on the CPU so that every device sees the same numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BATCH = 2
BIAS = 1024.0  # in one column of queries and keys: scores of 1024^2 / sqrt(64) = 131,072
KEPT = 0.6  # share of the keys that a mask leaves


@dataclass(frozen=True)
class Inputs:
    """Tensors of one call, heads first, and the gradients of its results."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    causal: bool
    grad: Tensor
    grad_lse: Tensor | None


@dataclass(frozen=True)
class GradientCase:
    """One call.

    `heads` and `lengths` are those of queries and of keys; `mask` is "none", "bool" or "float"; with `lse` the
    log-sum-exp has a gradient too; the gradient of the output is multiplied by `size`; `change` is a bias of queries
    and keys, described at `add_bias`; `kernels_judged` holds the Triton kernels to the bound.
    """

    name: str
    heads: tuple[int, int]
    lengths: tuple[int, int]
    dim: int
    causal: bool = False
    mask: str = "none"
    lse: bool = False
    dtype: str = "float16"
    size: float = 1.0
    change: str = "plain"
    kernels_judged: bool = True


CASES = (
    GradientCase("plain, D 64", (4, 4), (512, 512), 64),
    GradientCase("causal, D 64", (4, 4), (1024, 1024), 64, causal=True),
    GradientCase("causal, D 128, grouped", (8, 2), (777, 1000), 128, causal=True),
    GradientCase("more rows than keys", (4, 2), (300, 129), 128, causal=True),
    GradientCase("odd, D 80", (4, 2), (129, 1023), 80),
    GradientCase("causal, D 256", (4, 2), (260, 400), 256, causal=True),
    GradientCase("bool mask", (4, 2), (300, 500), 64, causal=True, mask="bool"),
    GradientCase("float mask", (4, 2), (300, 500), 128, mask="float"),
    GradientCase("log-sum-exp too", (4, 2), (333, 500), 128, causal=True, lse=True),
    GradientCase("BF16", (4, 2), (500, 500), 128, causal=True, dtype="bfloat16"),
    GradientCase("loss scale 30000", (4, 2), (500, 500), 64, size=30000.0),
    GradientCase("bias 80, log-sum-exp too", (4, 2), (500, 500), 128, lse=True, change="spread"),
    GradientCase("scores of 131072", (4, 2), (500, 500), 64, change="shared"),
    GradientCase("one key without the bias", (4, 2), (500, 500), 64, change="sink", kernels_judged=False),
)


def make_inputs(case: GradientCase, seed: int, device: torch.device | str = "cpu") -> Inputs:
    """Draw a case on the CPU, and move it to the device; FP16 holds all of it."""
    source = torch.Generator().manual_seed(seed)

    def draw(heads: int, *lengths: int) -> Tensor:
        return torch.randn(BATCH, heads, *lengths, generator=source)

    (heads, kv_heads), (rows, keys) = case.heads, case.lengths
    q, k, v = draw(heads, rows, case.dim), draw(kv_heads, keys, case.dim), draw(kv_heads, keys, case.dim)
    add_bias(q, k, case.change)
    grad = case.size * draw(heads, rows, case.dim).clamp(-2, 2)
    grad_lse = draw(heads, rows) if case.lse else None
    mask = None
    if case.mask != "none":
        keep = torch.rand(BATCH, 1, rows, keys, generator=source) < KEPT
        mask = keep if case.mask == "bool" else draw(1, rows, keys).masked_fill(~keep, -torch.inf)
    q, k, v, grad = (x.to(device, getattr(torch, case.dtype)) for x in (q, k, v, grad))
    mask, grad_lse = (None if x is None else x.to(device) for x in (mask, grad_lse))
    return Inputs(q, k, v, mask, case.causal, grad, grad_lse)


def add_bias(q: Tensor, k: Tensor, change: str) -> None:
    """Change queries and keys in place.

    "spread" adds 80 to 16 columns. "shared" sets one column to 1024, so that all scores share 131,072; "sink" does so
    for all keys but the first. "plain" leaves N(0, 1).
    """
    if change == "spread":
        q[..., :16] += 80
        k[..., :16] += 80
    if change in ("shared", "sink"):
        q[..., 0] = k[..., 0] = BIAS
    if change == "sink":
        k[..., 0, 0] = 3.14159
