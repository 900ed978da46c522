"""Folders of tiny language models whose residual stream passes 65504, as save_pretrained writes them."""

from __future__ import annotations

from pathlib import Path
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


def llama() -> Any:
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, attention_bias=True, mlp_bias=True))


def phi3() -> Any:
    from transformers.models.phi3 import Phi3Config, Phi3ForCausalLM

    return Phi3ForCausalLM(Phi3Config(**SIZES, **HEADS, pad_token_id=0, bos_token_id=1, eos_token_id=2))


def qwen3_moe() -> Any:
    from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **HEADS, **experts))


def deepseek_v2() -> Any:
    """Return a model in which other norms have an epsilon that no entry of config.json feeds."""
    from transformers.models.deepseek_v2 import DeepseekV2Config, DeepseekV2ForCausalLM

    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "head_dim": 8}
    parts = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return DeepseekV2ForCausalLM(DeepseekV2Config(**SIZES, **heads, **parts, **experts, n_group=1, topk_group=1))


BUILDERS = (qwen2, gemma3, gpt2, llama, phi3, qwen3_moe, deepseek_v2)
FAMILIES = {builder.__name__: builder for builder in BUILDERS}
LARGE = {
    "mlp.up_proj.weight": 2.0**8,
    **dict.fromkeys(("gate_up_proj.weight", "experts.gate_up_proj", "c_fc.weight"), 2.0**4),
    **dict.fromkeys(("down_proj.weight", "experts.down_proj", "mlp.c_proj.weight"), 2.0**18),
    "post_feedforward_layernorm.weight": 2.0**17,
}
"""Factors that make a residual stream pass 65504, by the end of a parameter's name."""


def build(family: str) -> Any:
    """Return a tiny model in FP32 whose weights FP16 holds exactly, before and after scaling: multiples of 1/64."""
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            rounded = ((parameter if parameter.std() > 0 else parameter + torch.randn_like(parameter) / 8) * 64).round()
            factor = next((factor for end, factor in LARGE.items() if name.endswith(end)), 1.0)
            parameter.copy_(rounded / 64 * factor)
    return model


def tokenizer() -> Any:
    """Return a tokenizer of 128 bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:120]
    words = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *letters])}
    bytes_only = Tokenizer(models.BPE(words, [], unk_token="<unk>"))
    bytes_only.pre_tokenizer, bytes_only.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytes_only, pad_token="<pad>", unk_token="<unk>")


def save(family: str, folder: Path, **options: Any) -> Any:
    """Write a tiny model and its tokenizer into a folder; return the model."""
    model = build(family)
    model.save_pretrained(folder, **options)
    tokenizer().save_pretrained(folder)
    return model


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of each file of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
