"""Fields that the parts of a pipeline need beside the rules to fit together, by words in the pipeline's name."""

from __future__ import annotations

from typing import Any

import torch

WIDTH = 64  # of text encoders, as the rules make them
PIXELS, STEPS, TEXT = 64, 2, 77

CLIP: dict[str, Any] = {"max_position_embeddings": 77, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
BLOCKS: dict[str, Any] = {
    "block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "attention_head_dim": (2, 4),
    "cross_attention_dim": WIDTH,
}  # fmt: skip
UNET: dict[str, Any] = {**BLOCKS, "sample_size": 32, "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}
CONTROLNET: dict[str, Any] = {**BLOCKS, "conditioning_embedding_out_channels": (16, 32)}
UNET_3D: dict[str, Any] = {
    **BLOCKS, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"), "attention_head_dim": 32,
    "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"), "cross_attention_dim": WIDTH,
}  # fmt: skip
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
SIXTEEN = {"AutoencoderKL": {"latent_channels": 16, "shift_factor": 0.1}}
POOLED = {"pooled_projection_dim": 2 * WIDTH}  # of two text encoders
CONTROLLED = {"FluxTransformer2DModel": {"in_channels": 128, "out_channels": 64}}
DECODER = {
    "UNet2DConditionModel": {
        "encoder_hid_dim": WIDTH, "encoder_hid_dim_type": "image_proj", "addition_embed_type": "image",
        "out_channels": 8,
    },
    "VQModel": {**VAE, "latent_channels": 4, "vq_embed_dim": 4, "norm_type": "spatial", "num_vq_embeddings": 32},
}  # fmt: skip

FIELDS: dict[str, dict[str, dict[str, Any]]] = {
    "": {
        "CLIPTextModel": CLIP, "CLIPTextModelWithProjection": CLIP, "UNet2DConditionModel": UNET,
        "ControlNetModel": CONTROLNET, "AutoencoderKL": VAE, "AsymmetricAutoencoderKL": VAE, "MotionAdapter": MOTION,
        "UNet2DModel": {"sample_size": 16}, "UNet3DConditionModel": UNET_3D,
    },
    "XL": {"UNet2DConditionModel": XL, "ControlNetModel": XL},
    "InstructPix2Pix": {"UNet2DConditionModel": {"in_channels": 8}},
    "UpscalePipeline": {"UNet2DConditionModel": {"in_channels": 7}},
    "PIA": {"UNet2DConditionModel": {"in_channels": 9}},
    "LatentConsistency": {"UNet2DConditionModel": {"time_cond_proj_dim": 32}},
    "IF": {"UNet2DConditionModel": {"in_channels": 3, "out_channels": 6}},
    "KandinskyV22": DECODER,
    **dict.fromkeys(("Bria", "Chroma", "CogView", "Flux", "OvisImage", "ZImage"), SIXTEEN),
    "StableDiffusion3": {**SIXTEEN, "SD3Transformer2DModel": POOLED, "SD3ControlNetModel": POOLED},
    "FluxControlI": CONTROLLED,
    "FluxControlP": CONTROLLED,
    "FluxFill": {"FluxTransformer2DModel": {"in_channels": 64 + 64 + 16, "out_channels": 64}},
    "IFS": {"UNet2DConditionModel": {"in_channels": 6}},
    "KandinskyV22Inpaint": {"UNet2DConditionModel": {"in_channels": 9}},
    "LTX": {"AutoencoderKLLTXVideo": {"latent_channels": 128}, "LTXVideoTransformer3DModel": {"out_channels": 128}},
    "Flux2Klein": {"Flux2Transformer2DModel": {"joint_attention_dim": 3 * WIDTH}},
}  # fmt: skip
"""Fields of a class in the pipelines whose names hold a word; later words come before earlier ones."""

PICTURE = torch.linspace(0, 1, 3 * PIXELS * PIXELS).sin().reshape(1, 3, PIXELS, PIXELS)
CALL: dict[str, Any] = {
    "prompt": "a cat on a mat", "num_inference_steps": STEPS, "output_type": "np", "height": PIXELS, "width": PIXELS,
    "image": PICTURE, "control_image": PICTURE, "num_frames": 2, "mask_image": torch.ones(1, 1, PIXELS, PIXELS),
    "max_sequence_length": 32, "conditioning_frames": [PICTURE[0]] * 2, "strength": 0.8, "batch_size": 1,
    "use_resolution_binning": False, "_auto_resize": False, "max_area": PIXELS * PIXELS,
}  # fmt: skip
"""What pipelines are called with, of what they take."""
CALLS: dict[str, dict[str, Any]] = {
    "AttendAndExcite": {"token_indices": [2]},
    "CogVideoX": {"max_sequence_length": 7},
    "Flux2Klein": {"text_encoder_out_layers": (0, 1, 2)},
    "KandinskyV22": dict.fromkeys(("image_embeds", "negative_image_embeds"), torch.linspace(-1, 1, WIDTH)[None]),
    "LongCatAudio": {"audio_duration_s": 0.1},  # of a longer sound the decoder amplifies what FP32 rounds
}
"""What pipelines whose names hold a word are called with beside that."""

ANY_OF = {"PreTrainedModel": "Qwen3Model", "Gemma2PreTrainedModel": "Gemma2Model", "GemmaPreTrainedModel": "GemmaModel"}
"""A class for components that are annotated with a base class, which cannot be built."""
