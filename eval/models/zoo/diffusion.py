"""Models of diffusers: how each is built small, from the defaults of its constructor, and what it is called with."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pasa.eval.models.zoo.building import FIELDS, Inputs, cap, find, first_that_runs, parameters, required, small
from pasa.eval.models.zoo.judging import Case

LEVELS = ("all", "widths kept")
HEADS, HEAD_DIM, WIDTH = 2, 32, 64

SIDE, TEXT, FRAMES, TOKENS = 8, 7, 2, 16
GUESSED = {"encoder": 1031, "pooled": 1033, "other": 1039}
"""Widths of inputs where no field names one: an error that speaks of such a width says which one it needs."""
TEXT_WIDTHS = ("joint_attention_dim", "cross_attention_dim", "cap_feat_dim", "text_in_dim")
AXES = ("axes_dims_rope", "axes_dim_rope", "axes_dims", "axes_dim", "rope_axes_dim")
MATRIX = re.compile(r"\(\d+x(\d+) and (\d+)x\d+\)")
CHANNELS = re.compile(r"to have (\d+) channels, but got (\d+) channels")


def classes(part: str, base: str) -> list[str]:
    """Return the names of diffusers' classes of one part that are below a base class."""
    import diffusers

    top, names = getattr(diffusers, base), dict.fromkeys(diffusers._import_structure[part])
    known = {name: getattr(diffusers, name, None) for name in names}
    return [name for name, cls in known.items() if isinstance(cls, type) and issubclass(cls, top) and cls != top]


def build(name: str) -> tuple[Any, Inputs] | str:
    """Return a small model with inputs that it accepts, or why there is none."""
    import diffusers

    return first_that_runs(LEVELS, partial(small_model, getattr(diffusers, name)), candidates, repaired)


def small_model(cls: Any, level: str = LEVELS[0], **fields: Any) -> Any:
    """Return the model, with these fields in place of small ones."""
    chosen = {**small_fields(cls, level), **FIELDS["diffusers"].get(cls.__name__, {}), **fields}
    return small(lambda: cls(**chosen))


def small_fields(cls: Any, level: str) -> dict[str, Any]:
    """Return the arguments of the constructor, small."""
    known = parameters(cls.__init__)
    defaults = {name: each.default for name, each in known.items() if name not in required(known)}
    heads = next((defaults[n] for n in ("num_attention_heads", "num_heads", "n_heads") if n in defaults), None)
    dim = defaults.get("attention_head_dim")
    width = next((defaults[n] for n in ("hidden_size", "dim") if isinstance(defaults.get(n), int)), None)
    if dim is None and isinstance(heads, int) and width:
        dim = width // heads
    inner = heads * dim if isinstance(heads, int) and isinstance(dim, int) else 0
    return {name: small_field(name, value, inner, dim, level) for name, value in defaults.items()}


def small_field(name: str, value: Any, inner: int, dim: Any, level: str) -> Any:
    """Return one argument, small; `inner` and `dim` are the default widths of all heads and of one."""
    if isinstance(value, (tuple, list)):
        return small_list(name, value, dim, level)
    if type(value) is not int:
        return value
    most = cap(name, FIELDS["caps"]["diffusers"])
    if level == LEVELS[0] and most == math.inf:
        if value == inner:
            return HEADS * HEAD_DIM
        most = cap(name, FIELDS["caps"]["diffusers widths"])
    return int(min(value, most))


def small_list(name: str, value: Any, dim: Any, level: str) -> Any:
    """Return widths of blocks, or parts of rotary embeddings, which add up to the width of a head."""
    if level != LEVELS[0] or not value or not all(type(each) is int for each in value):
        return value
    if sum(value) == dim and isinstance(dim, int) and dim > HEAD_DIM:
        parts = [max(2, 2 * round(each * HEAD_DIM / dim / 2)) for each in value]
        return type(value)([HEAD_DIM - sum(parts[1:]), *parts[1:]])
    cap = HEADS if name.endswith("heads") else WIDTH if name.endswith("channels") else max(value)
    return type(value)(min(each, cap) for each in value)


def candidates(model: Any) -> Iterator[Inputs]:
    """Yield sets of inputs to try: those that must be given, then all that are known by name."""
    known = parameters(type(model).forward)
    needed, main = required(known), next(iter(known))
    special = {name: value(model) for name, value in OF_MODEL.get(type(model).__name__, {}).items()}
    every = [name for name in known if name in needed or made(name, model)]
    usual = [n for n in every if n in needed or re.search("^encoder_hidden|timestep|pooled|ids$|shapes", n)]
    for names in [needed] if special else [needed, usual, every]:
        values = {name: made(name, model) for name in names if name not in special}
        latents = values.pop(main, None) or ([special[main]] if main in special else made(main, model))
        if all(values.values()) and latents:
            for latent in latents:
                for turn in range(1 if special else max(map(len, values.values()), default=1)):
                    rest = {name: options[min(turn, len(options) - 1)] for name, options in values.items()}
                    yield {main: latent, **rest, **special}


def repaired(inputs: Inputs, message: str) -> Inputs | None:
    """Return inputs with the width that the error asks for; None where it asks for none that can be found."""
    if match := MATRIX.search(message):
        width, needed, axis = int(match[1]), int(match[2]), -1
    elif match := CHANNELS.search(message):
        width, needed, axis = int(match[2]), int(match[1]), 1
    else:
        return None
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.ndim > 1 and value.shape[axis] == width != needed:
            shape = list(value.shape)
            shape[axis] = needed
            return {**inputs, name: torch.randn(shape)}
    return None


def made(name: str, model: Any) -> list[Any]:
    """Return values to try for an input, by its name; none for a name that is not known."""
    if name in ("hidden_states", "sample", "x", "latent_model_input"):
        return latents(model)
    if name in CONSTANT:
        return [CONSTANT[name]]
    if name in BY_NAME:
        return list(BY_NAME[name](model))
    if name.endswith("mask") or "attention_mask" in name:
        return [torch.ones(2, TEXT, dtype=torch.bool), torch.ones(2, TEXT)]
    return [text(model)] if re.search(r"(encoder|prompt|text|cap).*(states|embed|feats)", name) else []


def text(model: Any, *names: str) -> Tensor:
    """Return an encoding of a prompt, (2, TEXT, width)."""
    return torch.randn(2, TEXT, find(model.config, *names, *TEXT_WIDTHS, default=GUESSED["encoder"]))


def pooled(model: Any, name: str) -> Tensor:
    """Return one vector for each entry of the batch, (2, width)."""
    return torch.randn(2, find(model.config, name, default=GUESSED["pooled"]))


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
BY_NAME: dict[str, Callable[[Any], list[Any]]] = {
    "encoder_hidden_states_t5": lambda model: [text(model, "cross_attention_dim_t5", "text_embed_dim_t5")],
    "text_bth": lambda model: [text(model)],
    "source_hidden_states": lambda model: [text(model, "source_dim")],
    "image_embeddings": lambda model: [pooled(model, "cross_attention_dim")],
    "pooled_projections": lambda model: [pooled(model, "pooled_projection_dim")],
    "pooled_text_emb": lambda model: [pooled(model, "cond_embed_dim")],
    "proj_embedding": lambda model: [pooled(model, "embedding_dim")],
    "timestep": lambda model: [torch.tensor([3.0, 3.0]), torch.tensor([3, 3]), torch.tensor(3)],
    "text_encoder_layers": lambda model: [[text(model, "text_encoder_dim") for _ in range(4)]],
    "clip_text_pooled": lambda model: [
        torch.randn(2, 1, find(model.config, "clip_text_pooled_in_channels", default=64))
    ],
    "global_hidden_states": lambda model: [
        pooled(model, "global_cond_dim"),
        torch.randn(2, 1, find(model.config, "global_states_input_dim", default=64)),
    ],
    "img_ids": lambda model: [places(model)],
    "txt_ids": lambda model: [torch.zeros(TEXT, axes(model))],
    "img_shapes": lambda model: [[(1, 4, 4)] * 2, [[(1, 4, 4)]] * 2],
    "prior_token_id": lambda model: [torch.randint(0, 60, (2, TOKENS))],
    "input_ids": lambda model: [torch.randint(0, 60, (2, 4, 4)), torch.randint(0, 60, (2, TEXT))],
    "target_input_ids": lambda model: [torch.randint(0, 60, (2, TEXT))],
    "controlnet_cond": lambda model: [
        latents(model)[0],
        torch.randn(2, find(model.config, "conditioning_channels", default=3), *[8 * latents(model)[0].shape[-1]] * 2),
    ],
    "image_latents": lambda model: [torch.randn(2, 4, 2 * FRAMES + 1, SIDE, SIDE)],
}
"""Inputs that depend on the model, likely values first."""


OF_MODEL: dict[str, dict[str, Callable[[Any], Any]]] = {
    "AnyFlowTransformer3DModel": dict.fromkeys(("timestep", "r_timestep"), lambda model: torch.full((2, FRAMES), 3.0)),
    "AutoencoderKLHunyuanVideo15": {"sample": lambda model: torch.randn(1, 3, 5, 32, 32)},
    "AutoencoderKLMochi": {"sample": lambda model: torch.randn(1, 3, 7, 32, 32)},
    "BriaFiboTransformer2DModel": {
        "encoder_hidden_states": text,
        "text_encoder_layers": lambda model: [text(model, "text_encoder_dim") for _ in range(4)],
        "timestep": lambda model: torch.tensor([3.0, 3.0]),
        "img_ids": lambda model: places(model),
        "txt_ids": lambda model: torch.zeros(TEXT, axes(model)),
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
    "TransformerTemporalModel": {"num_frames": lambda model: FRAMES},
    "UNetControlNetXSModel": {"controlnet_cond": lambda model: made("controlnet_cond", model)[1]},
    "WanVACETransformer3DModel": {"control_hidden_states": lambda model: torch.randn(2, 96, 5, SIDE, SIDE)},
}
"""Inputs that a model needs beside those without a default, and their values."""


def latents(model: Any) -> list[Any]:
    """Return pictures, clips, sequences, and lists of pictures; the likely ones first."""
    names = ("in_channels", "latent_channels", "io_channels", "audio_in_channels")
    channels = find(model.config, *names, default=GUESSED["other"])
    side = max(SIDE, min(32, find(model.config, "sample_size", default=SIDE)))
    kind, known = type(model).__name__, parameters(type(model).forward)
    if re.search("Autoencoder|VQ|VAE", kind):
        channels = find(model.config, "in_channels", default=3)
        return [torch.randn(2, channels, *size) for size in ((32, 32), (5, 32, 32), (1, 32, 32), (2048,))]
    picture, wave = torch.randn(2, channels, side, side), torch.randn(2, channels, 64)
    frames_second = torch.randn(2, channels, 2 * FRAMES + 1, side, side)
    frames_first = torch.randn(2, FRAMES, channels, side, side)
    sequence = torch.randn(2, TOKENS, channels)
    single = torch.randn(2, find(model.config, "embedding_dim", default=channels))
    order = [picture, sequence, wave, frames_second, frames_first, single]
    if re.search("3D|Video|Motion|SpatioTemporal|Wan|I2V", kind):
        order = [frames_second, frames_first, sequence, picture]
    if {"img_ids", "img_shapes", "num_frames", "context_latents"} & set(known):
        order = [sequence, *(each for each in order if each is not sequence)]
    several = list(torch.randn(2, channels, 1, side, side))
    return [several, picture] if "x" in known else [*order, several]


def cases(model: Any, inputs: Inputs) -> Iterator[Case]:
    """Yield the call as it is, and with a part of the text masked, where the model takes such a mask."""
    yield Case("plain", partial(model, **inputs))
    for name in ("encoder_attention_mask", "encoder_hidden_states_mask", "attention_mask"):
        if name in parameters(type(model).forward) and isinstance(inputs.get("encoder_hidden_states"), Tensor):
            mask = torch.ones(inputs["encoder_hidden_states"].shape[:2], dtype=torch.bool)
            mask[0, -3:] = False
            yield Case(f"with {name}", partial(model, **{**inputs, name: mask}))
