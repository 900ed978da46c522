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

from pasa.eval.kit.overflow_fixture import LARGEST_EXACT_INTEGER

OFFSET = 131072.0  # twice what FP16 can hold; the square of 362, to three digits


def bias_scores(unet: Any, offset: float = OFFSET) -> dict[str, Any]:
    """Add about `offset` to every score q.k of every spatial self-attention, before it is scaled, in place.

    The q and k projections must have no biases, as SVD's. Offset 0 only sets the weights to zero. Returns the integer
    ``bias`` b, the ``offset`` b^2 by which scores really grow on average, and the number of ``modules``.
    """
    if not 0 <= offset <= LARGEST_EXACT_INTEGER**2:
        raise ValueError(f"offset={offset!r} is not in 0 to {LARGEST_EXACT_INTEGER**2}")
    bias = round(math.sqrt(offset))
    modules = spatial_attention(unet)
    for name, attention in modules.items():
        if attention.to_q.bias is not None or attention.to_k.bias is not None:
            raise ValueError(f"{name} has biases of its own")
        rows = torch.arange(0, attention.inner_dim, attention.inner_dim // attention.heads)
        with torch.no_grad():
            attention.to_k.weight[rows] = 0
        if bias:
            for projection in (attention.to_q, attention.to_k):
                constant = projection.weight.new_zeros(projection.out_features)
                constant[rows] = bias
                projection.bias = torch.nn.Parameter(constant)
    return {"bias": bias, "offset": bias**2, "modules": len(modules)}


def spatial_attention(unet: Any) -> dict[str, Any]:
    """Return the self-attention over the pixels of one frame, by name."""
    from diffusers.models.attention_processor import Attention

    spatial = ((name, each) for name, each in unet.named_modules() if isinstance(each, Attention))
    return {name: each for name, each in spatial if name.endswith(".attn1") and "temporal" not in name}
