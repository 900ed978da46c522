"""Tiny random models of the families, with weights made so large that FP16 overflows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor

SIZES = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
GATED = {"down_proj": 1e4, "up_proj": 1e3}
IDS = torch.arange(3, 23)[None]


@dataclass(frozen=True)
class Family:
    """A tiny configuration of an architecture, and what makes it overflow.

    Attributes
    ----------
    model : str
        Name of the class in transformers.
    config : str
        Name of its configuration.
    options : mapping
        Arguments of the configuration.
    factors : mapping of str to float
        Factors of parameters, by a part of their names.
    inputs : callable
        Returns the arguments of a call.
    tolerance : float
        Largest relative difference that scaling may make in FP64.
    """

    model: str
    config: str
    options: Mapping[str, Any]
    factors: Mapping[str, float]
    inputs: Callable[[], dict[str, Any]] = field(default=lambda: {"input_ids": IDS, "use_cache": False})
    tolerance: float = 1e-12

    def build(self) -> Any:
        """Return a model with random biases and norms."""
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.options)
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"
        model = getattr(transformers, self.model)(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim < 2:
                    parameter.copy_(parameter + 0.2 * torch.randn_like(parameter))
                else:
                    parameter.copy_(torch.randn_like(parameter) * 0.1)
                for part, factor in self.factors.items():
                    if part in name:
                        parameter.mul_(factor)
        return model


def _ids_and_decoder() -> dict[str, Any]:
    return {"input_ids": IDS, "decoder_input_ids": IDS[:, :6], "use_cache": False}


def _image() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))}


def _images_and_text() -> dict[str, Any]:
    return {**_image(), "input_ids": IDS}


def padded_patches() -> dict[str, Any]:
    """Return the patches of two images, of which the second has 12 and four of padding."""
    patches = torch.randn(2, 16, 48, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[1, 12:] = 0
    return {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": torch.tensor([[4, 4], [4, 3]])}


def _ids_alone() -> dict[str, Any]:
    return {"input_ids": IDS}


def _image_and_ids() -> dict[str, Any]:
    ids = torch.cat([IDS[:, :4], torch.full((2, 16), 99).reshape(1, -1), IDS[:, 4:]], 1)
    return {"input_ids": ids, **_image(), "use_cache": False}


def _sound_and_ids() -> dict[str, Any]:
    sound = torch.randn(2, 16, 40, generator=torch.Generator().manual_seed(0))
    return {"input_features": sound, "decoder_input_ids": IDS[:, :6].expand(2, -1), "use_cache": False}


def _image_and_typed_ids() -> dict[str, Any]:
    inputs = _image_and_ids()
    return {**inputs, "token_type_ids": (inputs["input_ids"] == 99).long()}


_DECODER = {**SIZES, **HEADS}
_T5 = {"vocab_size": 128, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
_T5_LARGE = {"wo": 1e4, "wi.": 1e3, "wi_1": 1e3}
_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
_VISION = {**_TOWER, "image_size": 16, "patch_size": 4}
_OPT = {
    "vocab_size": 128,
    "hidden_size": 32,
    "ffn_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}

FAMILIES = {
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Config", _DECODER, GATED),
    "qwen2_tied": Family("Qwen2ForCausalLM", "Qwen2Config", {**_DECODER, "tie_word_embeddings": True}, GATED),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**_DECODER, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
        {"down_proj": 1e6, "gate_up_proj": 10},
    ),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", {**_DECODER, "head_dim": 16, "attention_bias": True}, GATED),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**_DECODER, **EXPERTS, "num_experts": 4, "head_dim": 16},
        {"down_proj": 1e6, "gate_up_proj": 10},
    ),
    "llama": Family("LlamaForCausalLM", "LlamaConfig", {**_DECODER, "attention_bias": True, "mlp_bias": True}, GATED),
    "olmo": Family(
        "OlmoForCausalLM", "OlmoConfig", {**_DECODER, "pad_token_id": 0, "eos_token_id": 2}, GATED, tolerance=1e-6
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        "Olmo2Config",
        {**_DECODER, "pad_token_id": 0, "eos_token_id": 2},
        {"post_feedforward_layernorm": 3e4, "gate_proj": 1e-3},
        lambda: {"input_ids": IDS},  # with a cache: values read the stream without a norm
    ),
    "mistral": Family("MistralForCausalLM", "MistralConfig", {**_DECODER, "head_dim": 16}, GATED),
    "gemma": Family(
        "GemmaForCausalLM", "GemmaConfig", {**_DECODER, "head_dim": 16, "pad_token_id": 0}, GATED, tolerance=1e-6
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            **_DECODER,
            "head_dim": 16,
            "pad_token_id": 0,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 15.0,
        },
        {"post_feedforward_layernorm": 6e4, "up_proj": 1e4},
        tolerance=1e-6,
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**_DECODER, "head_dim": 16, "pad_token_id": 0},
        {"post_feedforward_layernorm": 1e5},
        tolerance=1e-6,
    ),
    "glm": Family(
        "GlmForCausalLM",
        "GlmConfig",
        {**_DECODER, "head_dim": 16, "attention_bias": True, "pad_token_id": 0},
        {"down_proj": 1e5, "gate_up_proj": 10},
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        "Glm4Config",
        {**_DECODER, "head_dim": 16, "attention_bias": True, "pad_token_id": 0},
        {"post_mlp_layernorm": 1e5, "gate_up_proj": 10},
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        "Phi3Config",
        {**_DECODER, "pad_token_id": 0, "eos_token_id": 2},
        {"down_proj": 1e5, "gate_up_proj": 10},
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        {
            **SIZES,
            **EXPERTS,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "n_group": 1,
            "topk_group": 1,
        },
        {"down_proj": 1e6, "gate_up_proj": 10},
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
        {"mlp.c_proj": 1e6},
    ),
    "opt": Family("OPTForCausalLM", "OPTConfig", _OPT, {"fc1": 1e3, "fc2": 1e4}),
    "opt_post_norm": Family(
        "OPTForCausalLM",
        "OPTConfig",
        {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 16},
        {"fc1": 1e3, "fc2": 1e4},
    ),
    "t5_encoder": Family("T5EncoderModel", "T5Config", {**_T5, "feed_forward_proj": "relu"}, _T5_LARGE, _ids_alone),
    "t5_encoder_gated": Family(
        "T5EncoderModel", "T5Config", {**_T5, "feed_forward_proj": "gated-gelu"}, _T5_LARGE, _ids_alone
    ),
    "t5": Family(
        "T5ForConditionalGeneration", "T5Config", {**_T5, "feed_forward_proj": "relu"}, _T5_LARGE, _ids_and_decoder
    ),
    "t5_gated": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        _T5_LARGE,
        _ids_and_decoder,
    ),
    "long_t5": Family(
        "LongT5ForConditionalGeneration",
        "LongT5Config",
        {**_T5, "feed_forward_proj": "gated-gelu", "local_radius": 7, "encoder_attention_type": "local"},
        _T5_LARGE,
        _ids_and_decoder,
    ),
    "long_t5_global": Family(
        "LongT5ForConditionalGeneration",
        "LongT5Config",
        {
            **_T5,
            "feed_forward_proj": "gated-gelu",
            "local_radius": 7,
            "global_block_size": 4,
            "encoder_attention_type": "transient-global",
        },
        _T5_LARGE,
        _ids_and_decoder,
    ),
    "whisper": Family(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": 128,
            "d_model": 32,
            **{f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")},
            **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
            "num_mel_bins": 16,
            "max_source_positions": 20,
            "max_target_positions": 32,
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1),
        },
        {"fc2": 1e6},
        _sound_and_ids,
    ),
    "clip_text": Family(
        "CLIPTextModelWithProjection",
        "CLIPTextConfig",
        {**_TOWER, "vocab_size": 128, "projection_dim": 16, "max_position_embeddings": 64, "eos_token_id": 22},
        {"fc2": 1e6},
        _ids_alone,
    ),
    "clip_vision": Family(
        "CLIPVisionModelWithProjection",
        "CLIPVisionConfig",
        {**_VISION, "projection_dim": 16},
        {"fc2": 1e6},
        _image,
    ),
    "siglip_text": Family(
        "SiglipTextModel",
        "SiglipTextConfig",
        {**_TOWER, "vocab_size": 128, "max_position_embeddings": 64},
        {"encoder.layers.0.mlp.fc2": 1e6, "encoder.layers.1.mlp.fc2": 1e6},
        _ids_alone,
    ),
    "siglip_vision": Family("SiglipVisionModel", "SiglipVisionConfig", _VISION, {"mlp.fc2": 1e6}, _image),
    "siglip": Family(
        "SiglipModel",
        "SiglipConfig",
        {
            "vision_config": _VISION,
            "text_config": {
                **_TOWER,
                **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 1),
                "vocab_size": 128,
                "max_position_embeddings": 64,
            },
        },
        {"mlp.fc2": 1e6, "out_proj": 1e4},
        _images_and_text,
    ),
    "siglip2_vision": Family(
        "Siglip2VisionModel",
        "Siglip2VisionConfig",
        {**_TOWER, "patch_size": 4, "num_patches": 16},
        {"mlp.fc2": 1e6},
        padded_patches,
    ),
    "llava": Family(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "vision_config": {**_VISION, "model_type": "clip_vision_model"},
            "text_config": {**_DECODER, "model_type": "qwen2"},
            "image_token_index": 99,
        },
        {**GATED, "mlp.fc2": 1e5},
        _image_and_ids,
    ),
    "gemma3_image": Family(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {
            "vision_config": _VISION,
            "text_config": {**_DECODER, "head_dim": 16, "pad_token_id": 0},
            "mm_tokens_per_image": 16,
            "image_token_index": 99,
            "boi_token_index": 97,
            "eoi_token_index": 98,
        },
        {"post_feedforward_layernorm": 6e4, "mlp.fc2": 1e6},
        _image_and_typed_ids,
        tolerance=1e-6,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        "GptOssConfig",
        {**_DECODER, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0},
        {"down_proj": 1e6},
    ),
}
"""The families of language models, text encoders and image encoders, by name."""


def large(family: str) -> Any:
    """Return a tiny model that passes 65504, in FP32."""
    return FAMILIES[family].build()


def outputs(model: Any, family: str, **arguments: Any) -> dict[str, Tensor]:
    """Return everything that a caller can read: logits, embeddings and hidden states, by name."""
    from pasa.fp16.containers import float_leaves

    inputs = {**FAMILIES[family].inputs(), **arguments, "output_hidden_states": True}
    inputs = {
        name: each.to(next(model.parameters()).dtype) if torch.is_tensor(each) and each.is_floating_point() else each
        for name, each in inputs.items()
    }
    with torch.no_grad():
        return dict(float_leaves(model(**inputs)))
