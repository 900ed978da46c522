"""Tiny random models of many architectures, and the naive attention of the same precision that sets error bounds."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from tests.versions import skip_unless_known

hf.logging.set_verbosity_error()

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": None,
}
PLAIN = {name: value for name, value in SIZES.items() if name not in ("head_dim", "num_key_value_heads")}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
INDEXED = {
    "n_routed_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "index_topk": 4,
    "index_head_dim": 16,
    "index_n_heads": 2,
}
MIXED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
VISION = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 2, "mlp_ratio": 2}


def gemma4(sizes):
    return hf.Gemma4TextConfig(
        **sizes, global_head_dim=16, vocab_size_per_layer_input=97, hidden_size_per_layer_input=8
    )


CONFIGS = {
    "qwen2": lambda: hf.Qwen2Config(**SIZES),
    "llama": lambda: hf.LlamaConfig(**SIZES),
    "mistral": lambda: hf.MistralConfig(**SIZES, sliding_window=8),
    "qwen3": lambda: hf.Qwen3Config(**SIZES),
    "gemma3": lambda: hf.Gemma3TextConfig(**SIZES, **MIXED),
    "phi3": lambda: hf.Phi3Config(**PLAIN, num_key_value_heads=2),
    "gpt2": lambda: hf.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=97, n_positions=128, eos_token_id=None),
    "gemma4": lambda: gemma4(SIZES | MIXED | {"num_kv_shared_layers": 0}),
    "gemma4 with shared keys": lambda: gemma4(
        SIZES | {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": 2 * MIXED["layer_types"]}
    ),
    "gemma2": lambda: hf.Gemma2Config(**SIZES),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "gpt_oss": lambda: hf.GptOssConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1),
    "falcon": lambda: hf.FalconConfig(**PLAIN),
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **PLAIN | LATENT,
        n_routed_experts=2,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=1,
        moe_intermediate_size=32,
    ),
    "deepseek_v32": lambda: hf.DeepseekV32Config(**PLAIN | LATENT | INDEXED),
    "glm_moe_dsa": lambda: hf.GlmMoeDsaConfig(**PLAIN | LATENT | INDEXED, indexer_types=["full", "shared"]),
}


CLASSES = {
    "gemma4": "Gemma4TextConfig",
    "gemma4 with shared keys": "Gemma4TextConfig",
    "gpt_oss": "GptOssConfig",
    "deepseek_v32": "DeepseekV32Config",
    "glm_moe_dsa": "GlmMoeDsaConfig",
}
"""The architectures above that some supported versions of transformers do not have."""


def naive_fp16(module, query, key, value, mask, scaling=None, **kwargs):
    """Attend with FP16 inputs and probabilities and FP32 sums: the roundings that no FP16 attention can avoid."""
    groups = query.shape[1] // key.shape[1]
    q, k, v = (x.half().float() for x in (query, key, value))
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if mask is None and query.shape[2] > 1:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp().nan_to_num()
    weights = weights.half().float() / weights.sum(-1, keepdim=True).clamp(min=1)  # 0 only in a fully masked row
    return (weights @ v).half().to(query.dtype).transpose(1, 2).contiguous(), None


@pytest.fixture
def tiny():
    """A function from the name of an architecture to a causal language model: FP32, seeded, in evaluation mode."""

    def build(name, attention="eager", **overrides):
        skip_unless_known(CLASSES.get(name, "PreTrainedModel"))
        config = CONFIGS[name]()
        for field, value in overrides.items():
            setattr(config, field, value)
        torch.manual_seed(0)
        return hf.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()

    return build


@pytest.fixture
def tiny_vl():
    """A Qwen2-VL whose text and vision towers may have different attention."""

    def build(attention):
        text = {**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
        del text["head_dim"]
        config = hf.Qwen2VLConfig(text_config=text, vision_config=VISION, attn_implementation=attention)
        torch.manual_seed(0)
        return hf.Qwen2VLForConditionalGeneration._from_config(config).eval()

    return build


@pytest.fixture
def batch():
    """Two rows of 21 tokens, the first with 5 padding tokens on its left: (ids, attention_mask)."""
    ids = torch.randint(5, 97, (2, 21), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return ids, mask


@pytest.fixture
def naive():
    """The name under which :func:`naive_fp16` is registered with transformers."""
    AttentionInterface.register("naive_fp16", naive_fp16)
    AttentionMaskInterface.register("naive_fp16", sdpa_mask)
    yield "naive_fp16"
    for interface in (AttentionInterface, AttentionMaskInterface):
        del interface._global_mapping["naive_fp16"]


@pytest.fixture
def pipeline():
    """A fresh tiny Stable Video Diffusion pipeline, FP32: 16 attention modules in the UNet, 2 in the VAE, 2 in CLIP."""
    from pasa.eval.models.video.tiny import tiny_pipeline  # also imports diffusers, which takes seconds

    return tiny_pipeline()
