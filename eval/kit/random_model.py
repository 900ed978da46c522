"""Qwen2 with random weights, for what does not depend on their values."""

from __future__ import annotations

from typing import Any

import torch

SMALL = "tiny"
SEED = 42
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2-7b": {  # config.json of Qwen/Qwen2-7B
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    SMALL: {  # for tests, and to try the command out
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 97,
        "max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "head_dim": 64,
    },
}


def build(config: dict[str, Any], device: torch.device) -> Any:
    """Make a Qwen2 of this configuration with random weights, FP16, on its device."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(SEED)
    with device:
        model = Qwen2ForCausalLM._from_config(Qwen2Config(**config), dtype=torch.float16)
    return model.eval()
