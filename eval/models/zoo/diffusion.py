"""Models of diffusers: how each is built small, from the defaults of its constructor, and what it is called with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pasa.eval.models.zoo.building import first_that_runs, small
from pasa.eval.models.zoo.diffusion_inputs import OF_MODEL, made
from pasa.eval.models.zoo.inputs import Inputs, parameters, required
from pasa.eval.models.zoo.judging import Case

LEVELS = ("all", "widths kept")
HEADS, HEAD_DIM, WIDTH, BASE, SIDE = 2, 32, 64, 16, 16

COGVIDEO = {"max_text_seq_length": 7, "sample_width": 8, "sample_height": 8, "sample_frames": 5}
HUNYUAN = {"in_channels": 4, "patch_size": 2, "text_len": 7, "text_len_t5": 7, "hidden_size": 64, "sample_size": 8}
CROSS = {"in_channels": WIDTH, "cross_attention_dim": WIDTH}
EXTRA: dict[str, dict[str, Any]] = {
    "AuraFlowTransformer2DModel": {"pos_embed_max_size": 256},
    "CogVideoXTransformer3DModel": COGVIDEO,
    "ConsisIDTransformer3DModel": COGVIDEO,
    **dict.fromkeys(("DreamLiteTransformer2DModel", "Transformer2DModel"), CROSS),
    "TransformerTemporalModel": {"in_channels": WIDTH},
    "EasyAnimateTransformer3DModel": {"in_channels": 16, "out_channels": 16, "patch_size": 2, "mmdit_layers": 2},
    "HunyuanDiT2DModel": HUNYUAN,
    "HunyuanDiT2DControlNetModel": {**HUNYUAN, "transformer_num_layers": 6},
    "PriorTransformer": {"num_embeddings": 7},
    "PRXTransformer2DModel": {"axes_dim": (16, 16)},
    "WanVACETransformer3DModel": {"vace_layers": [0, 1]},
    "LatteTransformer3DModel": {
        "in_channels": 4, "patch_size": 2, "video_length": 5, "caption_channels": WIDTH, "cross_attention_dim": WIDTH,
        "norm_type": "ada_norm_single",
    },
    "AutoencoderKLHunyuanImage": {
        "in_channels": 3, "out_channels": 3, "latent_channels": 4, "block_out_channels": (32, 64),
        "layers_per_block": 1, "spatial_compression_ratio": 2, "sample_size": 32,
    },
    "UVit2DModel": {"micro_cond_embed_dim": 320},
}  # fmt: skip
"""Arguments that a model needs beside the rules."""
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
    chosen = {**small_fields(cls, level), **EXTRA.get(cls.__name__, {}), **fields}
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
    if re.search(r"layers|depth$|num_(\w+_)?blocks|num_refiner", name):
        return min(value, 2)
    if re.search(r"vocab|max_(size|len)|sample_(size|height|width)$", name) and value > SIDE:
        return 320 if "vocab" in name else SIDE
    if level != LEVELS[0]:
        return value
    if value == inner:
        return HEADS * HEAD_DIM
    kept = r"^freq|patch|sample|(^|_)in_channels|time_embed_dim|projection_class|addition|rotary|timestep|codebook"
    caps = {
        r"heads$": HEADS,
        r"^attention_head_dim$": HEAD_DIM,
        r"^norm_num_groups$": 8,
        r"^base_dim|^base_channels|decoder_base_dim": BASE,
        kept: value,
        r"(dims?|size|channels|features|width)$": WIDTH,
    }
    return min(value, next((cap for pattern, cap in caps.items() if re.search(pattern, name)), value))


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


def cases(model: Any, inputs: Inputs) -> Iterator[Case]:
    """Yield the call as it is, and with a part of the text masked, where the model takes such a mask."""
    yield Case("plain", partial(model, **inputs))
    for name in ("encoder_attention_mask", "encoder_hidden_states_mask", "attention_mask"):
        if name in parameters(type(model).forward) and isinstance(inputs.get("encoder_hidden_states"), Tensor):
            mask = torch.ones(inputs["encoder_hidden_states"].shape[:2], dtype=torch.bool)
            mask[0, -3:] = False
            yield Case(f"with {name}", partial(model, **{**inputs, name: mask}))
