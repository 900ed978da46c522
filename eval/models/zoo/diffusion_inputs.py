"""Inputs for a model of diffusers, by the names that its `forward` takes."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pasa.eval.models.zoo.inputs import parameters

SIDE, TEXT, FRAMES, TOKENS = 8, 7, 2, 16
GUESSED = {"encoder": 1031, "pooled": 1033, "other": 1039}
"""Widths of inputs where no field names one: an error that speaks of such a width says which is wanted."""

TEXT_WIDTHS = (
    "joint_attention_dim", "cross_attention_dim", "caption_channels", "text_dim", "text_embed_dim", "cap_feat_dim",
    "text_in_dim", "context_in_dim", "text_in_channels", "text_feature_dim", "encoder_hid_dim", "text_states_dim",
    "cond_token_dim", "cross_attention_input_dim", "encoder_hidden_size", "embedding_dim", "condition_dim",
)  # fmt: skip
AXES = ("axes_dims_rope", "axes_dim_rope", "axes_dims", "axes_dim", "rope_axes_dim")


def field(model: Any, *names: str, default: int) -> int:
    """The first of these fields that is a number."""
    for name in names:
        value = model.config.get(name)
        value = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return default


def made(name: str, model: Any) -> list[Any]:
    """Values to try for an input, by its name; none for a name that is not known."""
    if name in ("hidden_states", "sample", "x", "latent_model_input"):
        return latents(model)
    if name in MAKERS:
        return MAKERS[name](model)
    if name.endswith("mask") or "attention_mask" in name:
        return [torch.ones(2, TEXT, dtype=torch.bool), torch.ones(2, TEXT)]
    if re.search(r"(encoder|prompt|text|cap).*(states|embed|feats)", name):
        return [text(model)]
    return []


def text(model: Any, *names: str) -> Tensor:
    """What an encoder says of a prompt, (2, TEXT, width)."""
    return torch.randn(2, TEXT, field(model, *names, *TEXT_WIDTHS, default=GUESSED["encoder"]))


def vector(model: Any, *names: str) -> list[Tensor]:
    """One for each entry of the batch, (2, width)."""
    return [torch.randn(2, field(model, *names, default=GUESSED["pooled"]))]


def axes(model: Any) -> int:
    """Of a position."""
    return next((len(model.config[name]) for name in AXES if model.config.get(name)), 3)


def places(model: Any) -> Tensor:
    """Positions of `TOKENS` patches."""
    grid = torch.cartesian_prod(torch.arange(4), torch.arange(4)).float()
    return torch.cat([torch.zeros(TOKENS, axes(model) - 2), grid], -1)


def rotary(model: Any) -> list[Any]:
    """Cosines and sines for the patches of a picture."""
    angles = torch.rand(TOKENS, field(model, "attention_head_dim", default=32))
    return [(angles.cos(), angles.sin())]


MAKERS: dict[str, Callable[[Any], list[Any]]] = {
    "timestep": lambda model: [torch.tensor([3.0, 3.0]), torch.tensor([3, 3]), torch.tensor(3)],
    "timesteps": lambda model: [torch.tensor([3.0, 3.0])],
    "t": lambda model: [torch.tensor([0.3, 0.3])],
    "timestep_ratio": lambda model: [torch.tensor([0.3, 0.3])],
    **dict.fromkeys(("r_timestep", "timestep_r"), lambda model: [torch.tensor([1.0, 1.0])]),
    "encoder_hidden_states": lambda model: [text(model)],
    "encoder_hidden_states_2": lambda model: [text(model, "text_embed_2_dim")],
    "encoder_hidden_states_t5": lambda model: [text(model, "cross_attention_dim_t5", "text_embed_dim_t5")],
    "text_bth": lambda model: [text(model)],
    "text_lens": lambda model: [torch.tensor([TEXT, TEXT - 3])],
    "text_encoder_layers": lambda model: [[text(model, "text_encoder_dim") for _ in range(4)]],
    "image_embeds": lambda model: [text(model, "image_embed_dim", "image_proj_dim")],
    "image_embeddings": lambda model: vector(model, "cross_attention_dim"),
    "pooled_projections": lambda model: vector(model, "pooled_projection_dim"),
    "pooled_text_emb": lambda model: vector(model, "cond_embed_dim"),
    "proj_embedding": lambda model: vector(model, "embedding_dim"),
    "clip_text_pooled": lambda model: [torch.randn(2, 1, field(model, "clip_text_pooled_in_channels", default=64))],
    "global_hidden_states": lambda model: [
        *vector(model, "global_cond_dim"), torch.randn(2, 1, field(model, "global_states_input_dim", default=64))
    ],
    "micro_conds": lambda model: [torch.ones(2, 5)],
    "guidance": lambda model: [torch.ones(2)],
    "img_ids": lambda model: [places(model)],
    "txt_ids": lambda model: [torch.zeros(TEXT, axes(model))],
    "img_shapes": lambda model: [[(1, 4, 4)] * 2, [[(1, 4, 4)]] * 2],
    "image_rotary_emb": rotary,
    "rotary_embedding": rotary,
    "class_labels": lambda model: [torch.tensor([1, 2])],
    "style": lambda model: [torch.tensor([0, 0])],
    "image_meta_size": lambda model: [torch.ones(2, 6)],
    **dict.fromkeys(("original_size", "target_size"), lambda model: [torch.full((2, 2), 64.0)]),
    "crop_coords": lambda model: [torch.zeros(2, 2)],
    "prior_token_id": lambda model: [torch.randint(0, 60, (2, TOKENS))],
    "prior_token_drop": lambda model: [torch.zeros(2, TOKENS, dtype=torch.bool)],
    "input_ids": lambda model: [torch.randint(0, 60, (2, 4, 4)), torch.randint(0, 60, (2, TEXT))],
    "target_input_ids": lambda model: [torch.randint(0, 60, (2, TEXT))],
    "source_hidden_states": lambda model: [text(model, "source_dim")],
    "controlnet_cond": lambda model: [
        latents(model)[0],
        torch.randn(2, field(model, "conditioning_channels", default=3), *[8 * latents(model)[0].shape[-1]] * 2),
    ],
    "image_latents": lambda model: [torch.randn(2, 4, 2 * FRAMES + 1, SIDE, SIDE)],
    "context_latents": lambda model: [torch.randn(2, TOKENS, GUESSED["other"])],
    "indices_latents": lambda model: [torch.arange(2 * FRAMES + 1)[None].repeat(2, 1)],
    "added_time_ids": lambda model: [torch.ones(2, 3)],
    "cap_feats": lambda model: [list(text(model))],
    "return_dict": lambda model: [True],
    "sample_posterior": lambda model: [False],
    "num_frames": lambda model: [1],
    "height": lambda model: [4],
    "width": lambda model: [4],
    "fps": lambda model: [torch.tensor([8, 8])],
    "text_embedding_mask": lambda model: [torch.ones(2, TEXT)],
    "text_embedding_mask_t5": lambda model: [torch.ones(2, TEXT)],
    "added_cond_kwargs": lambda model: [{"resolution": None, "aspect_ratio": None, "image_embeds": text(model)[:, 0]}],
}  # fmt: skip
"""What makes the values to try for an input."""


def clip(model: Any) -> Tensor:
    """Frames of latents, channels first."""
    return torch.randn(2, field(model, "in_channels", default=4), 2 * FRAMES + 1, SIDE, SIDE)


def first(name: str, model: Any) -> Any:
    """The likeliest value of an input."""
    return MAKERS[name](model)[0]


GIVEN: dict[str, dict[str, Callable[[Any], Any]]] = {
    "AnyFlowTransformer3DModel": dict.fromkeys(("timestep", "r_timestep"), lambda model: torch.full((2, FRAMES), 3.0)),
    "AutoencoderKLHunyuanVideo15": {"sample": lambda model: torch.randn(1, 3, 5, 32, 32)},
    "AutoencoderKLMochi": {"sample": lambda model: torch.randn(1, 3, 7, 32, 32)},
    "BriaFiboTransformer2DModel": {
        name: partial(first, name)
        for name in ("encoder_hidden_states", "text_encoder_layers", "timestep", "img_ids", "txt_ids")
    },
    "EasyAnimateTransformer3DModel": {"encoder_hidden_states": text},
    "HunyuanVideo15Transformer3DModel": {
        "encoder_hidden_states_2": lambda model: text(model, "text_embed_2_dim"),
        "encoder_attention_mask_2": lambda model: torch.ones(2, TEXT),
        "image_embeds": lambda model: text(model, "image_embed_dim"),
    },
    "HunyuanVideoFramepackTransformer3DModel": {"indices_latents": lambda model: torch.arange(2 * FRAMES + 1)},
    "Kandinsky5Transformer3DModel": {
        "hidden_states": lambda model: torch.randn(1, FRAMES, SIDE, SIDE, 4),
        "encoder_hidden_states": lambda model: torch.randn(1, TEXT, 64),
        "timestep": lambda model: torch.tensor([3.0]),
        "pooled_projections": lambda model: torch.randn(1, model.config.in_text_dim2),
        "visual_rope_pos": lambda model: [torch.arange(FRAMES), torch.arange(SIDE // 2), torch.arange(SIDE // 2)],
        "text_rope_pos": lambda model: torch.arange(TEXT),
    },
    "Krea2Transformer2DModel": {
        "encoder_hidden_states": lambda model: torch.randn(2, TEXT, model.config.num_text_layers, 64),
        "position_ids": lambda model: torch.cat([torch.zeros(TEXT, 3), places(model)]),
    },
    "LatteTransformer3DModel": {
        "hidden_states": clip,
        "timestep": lambda model: torch.tensor([3.0, 3.0]),
        "encoder_hidden_states": text,
    },
    "MiniMaxMusic3Transformer1DModel": {"encoder_hidden_states": lambda model: torch.randn(2, TOKENS, 64)},
    "SparseControlNetModel": {
        "sample": clip,
        "controlnet_cond": clip,
        "conditioning_mask": lambda model: torch.ones(2, 1, 2 * FRAMES + 1, SIDE, SIDE),
    },
    "TransformerTemporalModel": {
        "hidden_states": lambda model: torch.randn(2 * FRAMES, 64, SIDE, SIDE),
        "num_frames": lambda model: FRAMES,
    },
    "UNetControlNetXSModel": {"controlnet_cond": lambda model: MAKERS["controlnet_cond"](model)[1]},
    "WanVACETransformer3DModel": {"control_hidden_states": lambda model: torch.randn(2, 96, 5, SIDE, SIDE)},
}
"""Inputs that a model needs beside those it must be given, and their values."""


def latents(model: Any) -> list[Any]:
    """Pictures, clips, sequences, and lists of pictures; the likely ones first."""
    channels = field(
        model, "in_channels", "latent_channels", "io_channels", "audio_in_channels", default=GUESSED["other"]
    )
    side = max(SIDE, min(32, field(model, "sample_size", default=SIDE)))
    kind, known = type(model).__name__, parameters(type(model).forward)
    if re.search("Autoencoder|VQ|VAE", kind):
        channels = field(model, "in_channels", default=3)
        return [torch.randn(2, channels, *size) for size in ((32, 32), (5, 32, 32), (1, 32, 32), (2048,))]
    picture, wave = torch.randn(2, channels, side, side), torch.randn(2, channels, 64)
    frames_second = torch.randn(2, channels, 2 * FRAMES + 1, side, side)
    frames_first = torch.randn(2, FRAMES, channels, side, side)
    sequence = torch.randn(2, TOKENS, channels)
    single = torch.randn(2, field(model, "embedding_dim", default=channels))
    several = list(torch.randn(2, channels, 1, side, side))
    order = [picture, sequence, wave, frames_second, frames_first, single, several]
    if re.search("3D|Video|Motion|SpatioTemporal|Wan|I2V", kind):
        order = [frames_second, frames_first, sequence, picture]
    if {"img_ids", "img_shapes", "num_frames", "context_latents"} & set(known):
        order = [sequence, *(each for each in order if each is not sequence)]
    return [several, picture] if "x" in known else order
