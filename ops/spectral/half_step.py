"""Compute half a step of power iteration, y -> [W, b] [W, b]ᵀ y, for every head at once."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

FUSED_DIMS = (32, 64, 128, 256)


def half_step(weight: Tensor, bias: Tensor | None, y: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply y by the weights of H matrices, transposed and not, and measure the vector between the two products.

    On a CUDA device, weights of 16 bits without a bias are read once, by a Triton kernel. Otherwise
    two batched products are used.

    Parameters
    ----------
    weight : Tensor (H, D, d)
        With 16-bit weights, vectors are rounded to 16 bits before each product.
    bias : Tensor (H, D), optional
        Appended to the weights as a last column.
    y : Tensor (H, G, D), FP32 or FP64
        Of any length.

    Returns
    -------
    Tensor (H, G, D), Tensor (H, G)
        W t and ``|t|^2`` of t = Wᵀ y / |y|.
    """
    if fused(weight, bias):
        from pasa.ops.spectral.half_step_launch import launch

        return launch(weight, y)
    tiny = torch.finfo(y.dtype).tiny
    unit = y / y.norm(dim=-1, keepdim=True).clamp(min=tiny)
    t = (unit.to(weight.dtype) @ weight).to(y.dtype)
    square = t.square().sum(-1)
    last = None if bias is None else unit @ bias.to(y.dtype)[:, :, None]  # (H, G, 1)
    if last is not None:
        square = square + last[..., 0].square()
    length = square.sqrt()[..., None]
    # scaled to unit length between the products, so that neither leaves the range of 16 bits before
    # the norm itself does
    out = ((t / length.clamp(min=tiny)).to(weight.dtype) @ weight.mT).to(y.dtype) * length
    return (out if last is None or bias is None else out + last * bias.to(y.dtype)[:, None]), square


def fused(weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether the Triton kernel serves these weights."""
    sixteen = weight.dtype in (torch.float16, torch.bfloat16) and weight.shape[1] in FUSED_DIMS
    on_gpu = weight.is_cuda and weight.is_contiguous() and importlib.util.find_spec("triton") is not None
    return sixteen and on_gpu and bias is None
