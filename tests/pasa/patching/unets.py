"""Small diffusers models that several tests use."""

import torch


def classic_unet():
    """Build a UNet with 8 attention modules, whose projections can be fused."""
    import diffusers  # cannot be imported together with an old transformers

    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(32, 32),
        cross_attention_dim=32, attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ).eval()  # fmt: skip
