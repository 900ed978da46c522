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
"""Widths of inputs where no field names one: an error that speaks of such a width says which one it needs."""
TEXT_WIDTHS = ("joint_attention_dim", "cross_attention_dim", "cap_feat_dim", "text_in_dim")
AXES = ("axes_dims_rope", "axes_dim_rope", "axes_dims", "axes_dim", "rope_axes_dim")
Make = Callable[[Any], Any]


def made(name: str, model: Any) -> list[Any]:
    """Return values to try for an input, by its name; none for a name that is not known."""
    if name in ("hidden_states", "sample", "x", "latent_model_input"):
        return latents(model)
    if name in CONSTANT:
        return [CONSTANT[name]]
    if name in POOLED:
        return [torch.randn(2, field(model, *POOLED[name], default=GUESSED["pooled"]))]
    if name in BY_NAME:
        return list(BY_NAME[name](model))
    if name.endswith("mask") or "attention_mask" in name:
        return [torch.ones(2, TEXT, dtype=torch.bool), torch.ones(2, TEXT)]
    if re.search(r"(encoder|prompt|text|cap).*(states|embed|feats)", name) or name in TEXTS:
        return [text(model, *TEXTS.get(name, ()))]
    return []


def field(model: Any, *names: str, default: int) -> int:
    """Return the first of these fields that is a number."""
    for name in names:
        value = model.config.get(name)
        value = value[0] if isinstance(value, (list, tuple)) and value else value
        if type(value) is int:
            return value
    return default


def text(model: Any, *names: str) -> Tensor:
    """Return an encoding of a prompt, (2, TEXT, width)."""
    return torch.randn(2, TEXT, field(model, *names, *TEXT_WIDTHS, default=GUESSED["encoder"]))


def axes(model: Any) -> int:
    """Return the number of axes of a position."""
    return next((len(model.config[name]) for name in AXES if model.config.get(name)), 3)


def places(model: Any) -> Tensor:
    """Return the positions of `TOKENS` patches."""
    grid = torch.cartesian_prod(torch.arange(4), torch.arange(4)).float()
    return torch.cat([torch.zeros(TOKENS, axes(model) - 2), grid], -1)


CONSTANT: dict[str, Any] = {
    **dict.fromkeys(("t", "timestep_ratio"), torch.tensor([0.3, 0.3])),
    "text_lens": torch.tensor([TEXT, TEXT - 3]),
    "micro_conds": torch.ones(2, 5),
    "guidance": torch.ones(2),
    "class_labels": torch.tensor([1, 2]),
    "style": torch.tensor([0, 0]),
    "image_meta_size": torch.ones(2, 6),
    **dict.fromkeys(("original_size", "target_size"), torch.full((2, 2), 64.0)),
    "crop_coords": torch.zeros(2, 2),
    "prior_token_drop": torch.zeros(2, TOKENS, dtype=torch.bool),
    "added_time_ids": torch.ones(2, 3),
    "num_frames": 1,
    **dict.fromkeys(("height", "width"), 4),
    "fps": torch.tensor([8, 8]),
    "text_embedding_mask_t5": torch.ones(2, TEXT),
}
"""Inputs that are the same for every model."""
TEXTS = {
    "encoder_hidden_states_t5": ("cross_attention_dim_t5", "text_embed_dim_t5"),
    "text_bth": (),
    "source_hidden_states": ("source_dim",),
}
"""Encodings of prompts, and the fields with their widths."""
POOLED = {
    "image_embeddings": ("cross_attention_dim",),
    "pooled_projections": ("pooled_projection_dim",),
    "pooled_text_emb": ("cond_embed_dim",),
    "proj_embedding": ("embedding_dim",),
}
"""One vector for each entry of the batch, and the fields with their widths."""
BY_NAME: dict[str, Callable[[Any], list[Any]]] = {
    "timestep": lambda model: [torch.tensor([3.0, 3.0]), torch.tensor([3, 3]), torch.tensor(3)],
    "text_encoder_layers": lambda model: [[text(model, "text_encoder_dim") for _ in range(4)]],
    "clip_text_pooled": lambda model: [torch.randn(2, 1, field(model, "clip_text_pooled_in_channels", default=64))],
    "global_hidden_states": lambda model: [
        torch.randn(2, field(model, "global_cond_dim", default=GUESSED["pooled"])),
        torch.randn(2, 1, field(model, "global_states_input_dim", default=64)),
    ],
    "img_ids": lambda model: [places(model)],
    "txt_ids": lambda model: [torch.zeros(TEXT, axes(model))],
    "img_shapes": lambda model: [[(1, 4, 4)] * 2, [[(1, 4, 4)]] * 2],
    "prior_token_id": lambda model: [torch.randint(0, 60, (2, TOKENS))],
    "input_ids": lambda model: [torch.randint(0, 60, (2, 4, 4)), torch.randint(0, 60, (2, TEXT))],
    "target_input_ids": lambda model: [torch.randint(0, 60, (2, TEXT))],
    "controlnet_cond": lambda model: [
        latents(model)[0],
        torch.randn(2, field(model, "conditioning_channels", default=3), *[8 * latents(model)[0].shape[-1]] * 2),
    ],
    "image_latents": lambda model: [torch.randn(2, 4, 2 * FRAMES + 1, SIDE, SIDE)],
}
"""Inputs that depend on the model, likely values first."""


def likeliest(name: str, model: Any) -> Any:
    """Return the first value that is tried for an input."""
    return made(name, model)[0]


OF_MODEL: dict[str, dict[str, Make]] = {
    "AnyFlowTransformer3DModel": dict.fromkeys(("timestep", "r_timestep"), lambda model: torch.full((2, FRAMES), 3.0)),
    "AutoencoderKLHunyuanVideo15": {"sample": lambda model: torch.randn(1, 3, 5, 32, 32)},
    "AutoencoderKLMochi": {"sample": lambda model: torch.randn(1, 3, 7, 32, 32)},
    "BriaFiboTransformer2DModel": {
        name: partial(likeliest, name)
        for name in ("encoder_hidden_states", "text_encoder_layers", "timestep", "img_ids", "txt_ids")
    },
    "EasyAnimateTransformer3DModel": {"encoder_hidden_states": text},
    "HunyuanVideo15Transformer3DModel": {
        "encoder_hidden_states_2": lambda model: text(model, "text_embed_2_dim"),
        "encoder_attention_mask_2": lambda model: torch.ones(2, TEXT),
        "image_embeds": lambda model: text(model, "image_embed_dim"),
    },
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
    "LatteTransformer3DModel": {"timestep": partial(likeliest, "timestep"), "encoder_hidden_states": text},
    "TransformerTemporalModel": {"num_frames": lambda model: FRAMES},
    "UNetControlNetXSModel": {"controlnet_cond": lambda model: made("controlnet_cond", model)[1]},
    "WanVACETransformer3DModel": {"control_hidden_states": lambda model: torch.randn(2, 96, 5, SIDE, SIDE)},
}
"""Inputs that a model needs beside those without a default, and their values."""


def latents(model: Any) -> list[Any]:
    """Return pictures, clips, sequences, and lists of pictures; the likely ones first."""
    names = ("in_channels", "latent_channels", "io_channels", "audio_in_channels")
    channels = field(model, *names, default=GUESSED["other"])
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
    order = [picture, sequence, wave, frames_second, frames_first, single]
    if re.search("3D|Video|Motion|SpatioTemporal|Wan|I2V", kind):
        order = [frames_second, frames_first, sequence, picture]
    if {"img_ids", "img_shapes", "num_frames", "context_latents"} & set(known):
        order = [sequence, *(each for each in order if each is not sequence)]
    several = list(torch.randn(2, channels, 1, side, side))
    return [several, picture] if "x" in known else [*order, several]
