"""Make the spatial attention of a video UNet overflow FP16 without changing what the UNet computes.

Softmax does not see a constant that is added to every score of a row. In one dimension of every head the key weights
are set to zero, so that keys are 0 there; then q and k are given a bias b in that dimension. The score of query i and
key j becomes S_ij + b (q_i + b), with q_i what the query has in that dimension: the same for every key. FP16 numbers
lose nothing by it either: b is an integer, so k is exact there, and the rounding of q_i + b is the same for every key.

Zeroing the weights changes the model, so this is for random weights, where one model is as good as another. The model
to compare with has the same zeros and no bias (``offset=0``).
"""

from __future__ import annotations

import math
from typing import Any

import torch

OFFSET = 131072.0
"""Twice what FP16 can hold; the square of 362, to three digits."""
LARGEST_EXACT_INTEGER = 2048  # 2^11: up to here every integer is an FP16 number


def bias_scores(unet: Any, offset: float = OFFSET) -> dict[str, Any]:
    """Add about `offset` to every score q.k of every spatial self-attention, before it is scaled, in place.

    The q and k projections must have no biases, as SVD's. Offset 0 only sets the weights to zero. Returns the integer
    ``bias`` b, the ``offset`` b^2 by which scores really grow on average, and the number of ``modules``.
    """
    if not 0 <= offset <= LARGEST_EXACT_INTEGER**2:
        raise ValueError(f"offset={offset!r} is not in 0 to {LARGEST_EXACT_INTEGER**2}")
    bias = round(math.sqrt(offset))
    modules = spatial_attention(unet)
    if not modules:
        raise ValueError(f"{type(unet).__name__} has no spatial self-attention")
    for name, attention in modules.items():
        if attention.to_q.bias is not None or attention.to_k.bias is not None:
            raise ValueError(f"{name} has biases of its own")
        rows = torch.arange(0, attention.inner_dim, attention.inner_dim // attention.heads)
        with torch.no_grad():
            attention.to_k.weight[rows] = 0
        if bias:
            attention.to_q, attention.to_k = (_biased(part, rows, bias) for part in (attention.to_q, attention.to_k))
    return {"bias": bias, "offset": bias**2, "modules": len(modules)}


def spatial_attention(unet: Any) -> dict[str, Any]:
    """Return the self-attention over the pixels of one frame, by name."""
    from diffusers.models.attention_processor import Attention

    return {
        name: module
        for name, module in unet.named_modules()
        if isinstance(module, Attention) and name.endswith(".attn1") and "temporal" not in name
    }


def _biased(projection: torch.nn.Linear, rows: torch.Tensor, bias: int) -> torch.nn.Linear:
    """Return the same projection with `bias` in `rows` of its output."""
    new = torch.nn.Linear(projection.in_features, projection.out_features).to(projection.weight)
    with torch.no_grad():
        new.weight.copy_(projection.weight)
        new.bias.zero_()
        new.bias[rows] = bias
    return new
