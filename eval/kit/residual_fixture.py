"""Make a language model's residual stream overflow FP16 without changing what the model computes.

RMSNorm divides by the magnitude of its input. If all that is added to the stream is multiplied by a power of two f, and
the eps of the norms that read the stream by f squared, every norm returns what it returned before.
"""

from __future__ import annotations

import copy
from typing import Any

import torch


@torch.no_grad()
def amplify_residual(model: Any, factor: int) -> Any:
    """Return a copy of a Llama or Qwen2 whose residual stream is `factor` times as large; its logits are the same.

    The embedding is multiplied. A head that is tied to it is too, so the weight of the last norm is divided.
    """
    if factor < 1 or factor & (factor - 1):
        raise ValueError(f"factor={factor} is not a power of two")
    model = copy.deepcopy(model)
    inner = model.model
    inner.embed_tokens.weight *= factor
    if model.lm_head.weight is inner.embed_tokens.weight:
        inner.norm.weight /= factor
    for layer in inner.layers:
        for writer in (layer.self_attn.o_proj, layer.mlp.down_proj):
            for parameter in writer.parameters():
                parameter *= factor
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.variance_epsilon *= factor**2
    inner.norm.variance_epsilon *= factor**2
    model.config.rms_norm_eps *= factor**2
    return model
