"""Tiny random models of every supported family, with attention weights large enough to test bounds."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

hf.logging.set_verbosity_error()

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "max_position_embeddings": 128,
}
CONFIGS = {
    "qwen2": lambda: hf.Qwen2Config(**SIZES),
    "llama": lambda: hf.LlamaConfig(**SIZES),
    "llama with biases": lambda: hf.LlamaConfig(**SIZES, attention_bias=True),
    "mixtral": lambda: hf.MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1),
    "mistral": lambda: hf.MistralConfig(**SIZES),
    "qwen3": lambda: hf.Qwen3Config(**SIZES),
    "gpt2": lambda: hf.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=97, n_positions=128),
}
IDS = torch.randint(0, 97, (2, 40), generator=torch.Generator().manual_seed(1))


def randomise(model, scale=3.0, seed=0):
    """Set weights, gains, norm shifts and biases of all attention layers to large random values, to test bounds."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name or "attn" in name or "attention" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * (scale / 8 if parameter.ndim == 2 else scale))
    return model


@pytest.fixture
def tiny():
    """A function from a name to a causal language model: FP32, seeded, with random attention weights."""

    def build(name, **overrides):
        config = CONFIGS[name]()
        for field, value in overrides.items():
            setattr(config, field, value)
        torch.manual_seed(0)
        return randomise(hf.AutoModelForCausalLM.from_config(config).eval())

    return build
