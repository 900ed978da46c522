"""Tiny random models of the families, with weights made so large that FP16 overflows."""

from __future__ import annotations

from typing import Any

import torch

SIZES = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


def qwen2() -> Any:
    from transformers.models.qwen2 import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**SIZES, **HEADS))


def gemma3() -> Any:
    from transformers.models.gemma3 import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **HEADS, head_dim=16, pad_token_id=0))


def gpt2() -> Any:
    from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=2, n_positions=64))


FAMILIES = {"qwen2": qwen2, "gemma3": gemma3, "gpt2": gpt2}

LARGE = {
    "down_proj.weight": 1e6,
    "up_proj.weight": 1e3,
    "mlp.c_proj.weight": 5e6,
    "post_feedforward_layernorm.weight": 3e4,
}
"""Factors that make a residual stream pass 65504, by the end of a parameter's name."""


def large(family: str) -> Any:
    """Return a tiny model whose residual stream passes 65504, in FP32; norms that begin at 0 become random."""
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for end, factor in LARGE.items():
                if name.endswith(end):
                    parameter.copy_((parameter if parameter.std() > 0 else torch.randn_like(parameter)) * factor)
    return model
