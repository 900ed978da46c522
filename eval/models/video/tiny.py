"""Stable Video Diffusion in small: every class of the real pipeline, random weights, seconds on a CPU.

Random weights prove that the plumbing holds: shapes, flags, call coverage, determinism, agreement with FP32 through the
whole sampler. They prove nothing about a picture, nor that the real model's scores overflow: for that the fixture in
:mod:`pasa.eval.models.video.overflow` adds to them, and a real checkpoint takes the place of this pipeline.
"""

from __future__ import annotations

from typing import Any

import torch

SEED = 0
CROSS_DIM = 32


def tiny_pipeline(seed: int = SEED) -> Any:
    """Return a ``StableVideoDiffusionPipeline`` with random FP32 weights that depend on `seed` alone.

    The UNet has 4 spatio-temporal transformers, so 16 attention modules; latents are 1/8 of the frame, as in the real
    model; the image encoder takes 224 x 224 pixels, because that is what the pipeline resizes its input to.
    """
    from diffusers import EulerDiscreteScheduler, StableVideoDiffusionPipeline
    from transformers import CLIPImageProcessor

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        models = {"unet": tiny_unet(), "vae": _vae(), "image_encoder": _image_encoder()}
    scheduler = EulerDiscreteScheduler(  # the real pipeline's
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", prediction_type="v_prediction",
        use_karras_sigmas=True, sigma_min=0.002, sigma_max=700.0, steps_offset=1, timestep_spacing="leading",
        timestep_type="continuous",
    )  # fmt: skip
    pipeline = StableVideoDiffusionPipeline(**models, scheduler=scheduler, feature_extractor=CLIPImageProcessor())
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def tiny_unet() -> Any:
    """Return a ``UNetSpatioTemporalConditionModel`` with two levels, drawn from the current random state."""
    from diffusers import UNetSpatioTemporalConditionModel

    return UNetSpatioTemporalConditionModel(
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        block_out_channels=(64, 128),
        num_attention_heads=(1, 2),  # head dimension 64, as in the real UNet
        layers_per_block=1,
        cross_attention_dim=CROSS_DIM,
        addition_time_embed_dim=32,
        projection_class_embeddings_input_dim=96,
    ).eval()


def _vae() -> Any:
    """Return a VAE with two layers a block; with one, the decoder's middle block would never call its attention."""
    from diffusers import AutoencoderKLTemporalDecoder

    return AutoencoderKLTemporalDecoder(
        down_block_types=("DownEncoderBlock2D",) * 4, block_out_channels=(32, 32, 64, 64), layers_per_block=2
    ).eval()


def _image_encoder() -> Any:
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return CLIPVisionModelWithProjection(CLIPVisionConfig(**sizes, projection_dim=CROSS_DIM)).eval()


def sample_image(height: int = 128, width: int = 128) -> Any:
    """Return the conditioning image of the tiny run: edges, gradients and fine texture, made of sines."""
    from PIL import Image

    y, x = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    waves = [torch.sin(6.3 * (a * x + b * y)) for a, b in ((1, 2), (3, -1), (7, 5))]
    disc = ((x - 0.4) ** 2 + (y - 0.5) ** 2 < 0.06).float()
    pixels = torch.stack([0.5 + 0.4 * wave * (1 - 0.5 * disc) for wave in waves], -1)
    return Image.fromarray((255 * pixels).round().byte().numpy())
