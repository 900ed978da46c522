"""Patch the attention of a diffusers model, and undo the patch."""

import torch
from diffusers import UNet2DConditionModel

import pasa

torch.manual_seed(0)
unet = UNet2DConditionModel(
    sample_size=8,
    in_channels=4,
    out_channels=4,
    layers_per_block=1,
    block_out_channels=(32, 32),
    cross_attention_dim=32,
    attention_head_dim=8,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
).eval()
latents, text = torch.randn(1, 4, 8, 8), torch.randn(1, 7, 32)

with torch.no_grad():
    before = unet(latents, 10, text).sample
    with pasa.patch_pipeline(unet) as handle:  # a whole pipeline is patched in the same way
        patched = unet(latents, 10, text).sample
        print(handle.report())
    after = unet(latents, 10, text).sample
print(f"largest difference to the model's own attention: {(patched - before).abs().max():.1e}")
print(f"after the patch is undone, every bit is as before: {bool((after == before).all())}")
