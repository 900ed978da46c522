"""Tiny random diffusion models, with weights made so large that FP16 overflows, and how each is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import Tensor

NORMS = {"norm_num_groups": 8}
BLOCKS = {"block_out_channels": (16, 32), "layers_per_block": 1, **NORMS}


def draw(*shape: int) -> Tensor:
    """Return normal random numbers that depend on the shape alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def cast(model: Any, inputs: Any) -> Any:
    """Return inputs in the precision of a model."""
    dtype = next(model.parameters()).dtype
    return torch.utils._pytree.tree_map_only(
        Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, inputs
    )


@dataclass(frozen=True)
class Family:
    """A model, the arguments of its call, and the factors that make it overflow.

    Attributes
    ----------
    build : callable
    arguments : dict
        Arguments of the model's call.
    large : dict of str to float
        Factors for parameters, by the end of their names.
    method : str
        The method to call.
    tolerance : float
        Largest relative difference in FP64 after scaling; 1e-6 where the model itself computes in FP32.
    """

    build: Callable[[], Any]
    arguments: dict[str, Any]
    large: dict[str, float]
    method: str = "__call__"
    tolerance: float = 1e-12

    def run(self, model: Any) -> list[Tensor]:
        """Return the tensors that the model's call returns."""
        with torch.no_grad():
            out = getattr(model, self.method)(**cast(model, self.arguments), return_dict=False)[0]
        return [out.mean if hasattr(out, "mean") and not isinstance(out, Tensor) else out]

    def model(self) -> Any:
        """Return the model in FP32 with its large weights."""
        torch.manual_seed(0)
        model = self.build().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("scale_shift_table", "norm.bias", "norm1.bias", "norm2.bias")):
                    parameter.copy_(torch.randn_like(parameter) / 4)
                for end, factor in self.large.items():
                    if name.endswith(end):
                        parameter.mul_(factor)
        return model


def unet(**fields: Any) -> Any:
    return diffusers.UNet2DConditionModel(
        sample_size=8, cross_attention_dim=16, attention_head_dim=8, **BLOCKS, **fields,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip


def sdxl_unet() -> Any:
    return unet(
        use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=8 * 6 + 16, transformer_layers_per_block=(1, 2),
    )  # fmt: skip


def svd_unet() -> Any:
    return diffusers.UNetSpatioTemporalConditionModel(
        sample_size=8, in_channels=8, out_channels=4, block_out_channels=(32, 64), layers_per_block=1,
        num_attention_heads=(2, 4), cross_attention_dim=16, addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=24,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
    )  # fmt: skip


def vae() -> Any:
    return diffusers.AutoencoderKL(
        **BLOCKS, down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        sample_size=16, force_upcast=True,
    )  # fmt: skip


def svd_vae() -> Any:
    return diffusers.AutoencoderKLTemporalDecoder(
        block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D",) * 2, layers_per_block=1, sample_size=16
    )  # fmt: skip


def dit() -> Any:
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=3, sample_size=8,
        patch_size=2, num_embeds_ada_norm=10, norm_num_groups=4,
    )  # fmt: skip


def sd3() -> Any:
    return diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=3, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4,
        pos_embed_max_size=8, dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip


def flux() -> Any:
    return diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8), guidance_embeds=True,
    )  # fmt: skip


def wan() -> Any:
    return diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=32,
        ffn_dim=32, num_layers=3, rope_max_seq_len=32, cross_attn_norm=True,
    )  # fmt: skip


def cogvideox() -> Any:
    return diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8,
        text_embed_dim=16, num_layers=3, sample_width=8, sample_height=8, sample_frames=5, patch_size=2,
        temporal_compression_ratio=4, max_text_seq_length=8,
    )  # fmt: skip


PICTURE, TEXT = draw(2, 4, 8, 8), draw(2, 7, 16)
TIME, TIMES = torch.tensor(3), torch.tensor([3, 5])
RESNETS = {"conv2.weight": 1e6, "to_out.0.weight": 1e6, "ff.net.2.weight": 1e6, "proj_out.weight": 1e2}
BLOCK_OUTPUTS = {
    "to_out.0.weight": 2e6, "to_add_out.weight": 2e6, "net.2.weight": 2e6, "proj_out.weight": 1,
    "to_out.0.bias": 1e6, "net.2.bias": 1e6,
}  # fmt: skip
FAMILIES = {
    "unet": Family(unet, {"sample": PICTURE, "timestep": TIME, "encoder_hidden_states": TEXT}, RESNETS),
    "sdxl-unet": Family(
        sdxl_unet,
        {
            "sample": PICTURE,
            "timestep": TIME,
            "encoder_hidden_states": TEXT,
            "added_cond_kwargs": {"text_embeds": draw(2, 16), "time_ids": torch.ones(2, 6)},
        },
        RESNETS,
    ),
    "svd-unet": Family(
        svd_unet,
        {
            "sample": draw(1, 2, 8, 8, 8),
            "timestep": TIME,
            "encoder_hidden_states": draw(1, 1, 16),
            "added_time_ids": torch.ones(1, 3),
        },
        RESNETS,
    ),
    "vae-decode": Family(vae, {"z": draw(1, 4, 8, 8)}, RESNETS, "decode"),
    "vae-encode": Family(vae, {"x": draw(1, 3, 16, 16)}, RESNETS, "encode"),
    "svd-vae-decode": Family(svd_vae, {"z": draw(2, 4, 8, 8), "num_frames": 2}, RESNETS, "decode"),
    "svd-vae-encode": Family(svd_vae, {"x": draw(1, 3, 16, 16)}, RESNETS, "encode"),
    "dit": Family(
        dit, {"hidden_states": PICTURE, "timestep": TIMES, "class_labels": torch.tensor([1, 2])}, BLOCK_OUTPUTS
    ),
    "sd3": Family(
        sd3,
        {
            "hidden_states": PICTURE,
            "timestep": TIMES,
            "encoder_hidden_states": TEXT,
            "pooled_projections": draw(2, 16),
        },
        BLOCK_OUTPUTS,
    ),
    "flux": Family(
        flux,
        {
            "hidden_states": draw(1, 24, 16),
            "encoder_hidden_states": draw(1, 7, 32),
            "pooled_projections": draw(1, 32),
            "timestep": torch.tensor([0.3]),
            "guidance": torch.tensor([3.5]),
            "img_ids": draw(24, 3).round(),
            "txt_ids": torch.zeros(7, 3),
        },
        BLOCK_OUTPUTS | {"transformer_blocks.0.proj_out.weight": 1e6, "transformer_blocks.1.proj_out.weight": 1e6},
    ),
    "wan": Family(
        wan,
        {"hidden_states": draw(1, 4, 2, 8, 8), "timestep": torch.tensor([3]), "encoder_hidden_states": draw(1, 9, 16)},
        BLOCK_OUTPUTS,
    ),
    "cogvideox": Family(
        cogvideox,
        {"hidden_states": draw(1, 2, 4, 8, 8), "timestep": torch.tensor([3]), "encoder_hidden_states": draw(1, 8, 16)},
        BLOCK_OUTPUTS,
    ),
}
