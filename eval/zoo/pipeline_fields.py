"""What the parts of a pipeline need beside the rules to fit together, by words in the pipeline's name."""

from __future__ import annotations

from typing import Any

WIDTH = 64  # of text encoders, as the rules make them

CLIP: dict[str, Any] = {"max_position_embeddings": 77, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
BLOCKS: dict[str, Any] = {
    "block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "attention_head_dim": (2, 4),
    "cross_attention_dim": WIDTH,
}  # fmt: skip
UNET: dict[str, Any] = {**BLOCKS, "sample_size": 32, "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}
CONTROLNET: dict[str, Any] = {**BLOCKS, "conditioning_embedding_out_channels": (16, 32)}
XL: dict[str, Any] = {
    "cross_attention_dim": 2 * WIDTH, "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
    "transformer_layers_per_block": (1, 2), "projection_class_embeddings_input_dim": 6 * 8 + WIDTH,
    "use_linear_projection": True,
}  # fmt: skip
VAE: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (32, 32), "norm_num_groups": 8, "sample_size": 32,
}  # fmt: skip
MOTION: dict[str, Any] = {
    "block_out_channels": (32, 64), "motion_layers_per_block": 1, "motion_norm_num_groups": 2,
    "motion_num_attention_heads": 4,
}  # fmt: skip
SIXTEEN = {"AutoencoderKL": {"latent_channels": 16}}

FIELDS: dict[str, dict[str, dict[str, Any]]] = {
    "": {
        "CLIPTextModel": CLIP, "CLIPTextModelWithProjection": CLIP, "UNet2DConditionModel": UNET,
        "ControlNetModel": CONTROLNET,
        "AutoencoderKL": VAE, "AsymmetricAutoencoderKL": VAE, "MotionAdapter": MOTION,
        "UNet2DModel": {"sample_size": 16},
    },
    "XL": {"UNet2DConditionModel": XL, "ControlNetModel": XL},
    "InstructPix2Pix": {"UNet2DConditionModel": {"in_channels": 8}},
    "UpscalePipeline": {"UNet2DConditionModel": {"in_channels": 7}},
    "Depth2Img": {"UNet2DConditionModel": {"in_channels": 5}},
    "Flux": SIXTEEN,
    "StableDiffusion3": SIXTEEN,
    "Chroma": SIXTEEN,
}  # fmt: skip
"""Fields of a class in the pipelines whose names hold a word; later words come before earlier ones."""

CALLS: dict[str, dict[str, Any]] = {}
"""What pipelines whose names hold a word are called with beside the rules."""
