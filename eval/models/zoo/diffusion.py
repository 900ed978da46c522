"""Models of diffusers: how each is built small, from the defaults of its constructor, and what it is called with."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pasa.eval.models.zoo.building import accepted, first_that_runs, small
from pasa.eval.models.zoo.diffusion_inputs import GIVEN, made
from pasa.eval.models.zoo.inputs import Inputs, parameters
from pasa.eval.models.zoo.judging import Case

MODELS = "diffusers model"
LEVELS = ("all", "widths kept")
HEADS, HEAD_DIM, WIDTH, BASE, SIDE = 2, 32, 64, 16, 16

COGVIDEO = {"max_text_seq_length": 7, "sample_width": 8, "sample_height": 8, "sample_frames": 5}
HUNYUAN = {"in_channels": 4, "patch_size": 2, "text_len": 7, "text_len_t5": 7, "hidden_size": 64, "sample_size": 8}
LATTE = {"in_channels": 4, "patch_size": 2, "sample_size": 8, "video_length": 5, "norm_type": "ada_norm_single"}
HUNYUAN_VAE = {
    "in_channels": 3, "out_channels": 3, "latent_channels": 4, "block_out_channels": (32, 64), "layers_per_block": 1,
    "spatial_compression_ratio": 2, "sample_size": 32,
}  # fmt: skip
CONTINUOUS = {"in_channels": 64, "cross_attention_dim": 64}
OWN: dict[str, dict[str, Any]] = {
    "AuraFlowTransformer2DModel": {"pos_embed_max_size": 256},
    "CogVideoXTransformer3DModel": COGVIDEO,
    "ConsisIDTransformer3DModel": COGVIDEO,
    "DreamLiteTransformer2DModel": CONTINUOUS,
    "Transformer2DModel": CONTINUOUS,
    "TransformerTemporalModel": {"in_channels": 64},
    "EasyAnimateTransformer3DModel": {"in_channels": 16, "out_channels": 16, "patch_size": 2, "mmdit_layers": 2},
    "HunyuanDiT2DModel": HUNYUAN,
    "HunyuanDiT2DControlNetModel": {**HUNYUAN, "transformer_num_layers": 6},
    "Kandinsky5Transformer3DModel": {"num_visual_blocks": 2},
    "PriorTransformer": {"num_embeddings": 7},
    "PRXTransformer2DModel": {"axes_dim": (16, 16)},
    "WanVACETransformer3DModel": {"vace_layers": [0, 1]},
    "LatteTransformer3DModel": {**LATTE, "caption_channels": 64, "cross_attention_dim": 64},
    "AutoencoderKLHunyuanImage": HUNYUAN_VAE,
    "UVit2DModel": {"micro_cond_encode_dim": 64, "micro_cond_embed_dim": 320},
}
"""Arguments that a model needs beside the rules."""


def models() -> list[str]:
    """Names of diffusers' model classes."""
    import diffusers

    found = []
    for name in diffusers._import_structure["models"]:
        cls = getattr(diffusers, name, None)
        if isinstance(cls, type) and issubclass(cls, diffusers.ModelMixin) and cls is not diffusers.ModelMixin:
            found.append(name)
    return found


def build(name: str) -> tuple[Any, Inputs] | str:
    """A small model with inputs that it accepts; why not, if there is none."""
    import diffusers

    cls = getattr(diffusers, name)
    return first_that_runs(LEVELS, partial(small_model, cls), _accepted)


def small_model(cls: Any, level: str = LEVELS[0], **fields: Any) -> Any:
    """Return the model, with these fields in place of small ones."""
    chosen = {**small_fields(cls, level), **OWN.get(cls.__name__, {}), **fields}
    return small(lambda: cls(**chosen))


def small_fields(cls: Any, level: str) -> dict[str, Any]:
    """Arguments of the constructor, small."""
    defaults = {
        name: each.default
        for name, each in parameters(cls.__init__).items()
        if each.default is not inspect.Parameter.empty
    }
    heads = next((defaults[n] for n in ("num_attention_heads", "num_heads", "n_heads") if n in defaults), None)
    dim = defaults.get("attention_head_dim")
    width = next((defaults[n] for n in ("hidden_size", "dim") if isinstance(defaults.get(n), int)), None)
    if dim is None and isinstance(heads, int) and width:
        dim = width // heads
    inner = heads * dim if isinstance(heads, int) and isinstance(dim, int) else 0
    return {name: small_field(name, value, inner, dim, level) for name, value in defaults.items()}


def small_field(name: str, value: Any, inner: int, dim: Any, level: str) -> Any:
    """One argument; `inner` and `dim` are the default widths of all heads and of one."""
    if isinstance(value, (tuple, list)):
        return small_list(name, value, dim, level)
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if re.search(r"layers|depth$|num_blocks|num_refiner", name):
        return min(value, 2)
    if re.search(r"vocab|max_(size|len)|sample_(size|height|width)$", name) and value > SIDE:
        return 320 if "vocab" in name else SIDE
    if level != LEVELS[0]:
        return value
    if value == inner:
        return HEADS * HEAD_DIM
    if re.search(r"heads$", name):
        return min(value, HEADS)
    if name == "attention_head_dim":
        return min(value, HEAD_DIM)
    if name == "norm_num_groups":
        return min(value, 8)
    if re.search(r"^base_dim|^base_channels|decoder_base_dim", name):
        return min(value, BASE)
    wide = re.search(r"(dims?|size|channels|features|width)$", name) and value > WIDTH
    kept = r"^freq|patch|sample|(^|_)in_channels|time_embed_dim|projection_class|addition|rotary|timestep|codebook"
    return WIDTH if wide and not re.search(kept, name) else value


def small_list(name: str, value: Any, dim: Any, level: str) -> Any:
    """Widths of blocks, and parts of rotary embeddings, which add up to the width of a head."""
    if level != LEVELS[0] or not value or not all(type(each) is int for each in value):
        return value
    if sum(value) == dim and isinstance(dim, int) and dim > HEAD_DIM:
        parts = [max(2, 2 * round(each * HEAD_DIM / dim / 2)) for each in value]
        return type(value)([HEAD_DIM - sum(parts[1:]), *parts[1:]])
    if name.endswith("heads"):
        return type(value)(min(each, HEADS) for each in value)
    if name.endswith("channels") and max(value) > WIDTH:
        return type(value)(min(each, WIDTH) for each in value)
    return value


def candidates(model: Any) -> Iterator[Inputs]:
    """Sets of inputs to try: those that must be given, then all that are known by name."""
    known = parameters(type(model).forward)
    needed = [name for name, each in known.items() if each.default is inspect.Parameter.empty]
    main = next(iter(known), None)
    if main is None:
        return
    own = GIVEN.get(type(model).__name__)
    if own is not None:
        given = {name: value(model) for name, value in own.items()}
        rest = {name: made(name, model) for name in needed if name not in given}
        for latent in rest.pop(main, [None]):
            yield {main: given.get(main, latent), **{name: each[0] for name, each in rest.items()}, **given}
        return
    every = [name for name in known if name in needed or made(name, model)]
    usual = [
        n for n in every if n in needed or n == main or re.search("^encoder_hidden|timestep|pooled|ids$|shapes", n)
    ]
    for names in ([main, *(n for n in needed if n != main)], usual, every):
        values = {name: made(name, model) for name in names}
        if not all(values.values()):
            continue
        for latent in values[main]:
            for turn in range(
                max(len(options) for name, options in values.items() if name != main) if names[1:] else 1
            ):
                rest = {name: options[min(turn, len(options) - 1)] for name, options in values.items() if name != main}
                yield {main: latent, **rest}


def _accepted(model: Any) -> tuple[Inputs | None, str]:
    """Return the first candidate, mended where an error says how, that the model runs on, or why the last failed."""
    inputs, reasons = accepted(model, candidates(model), shapes, repaired)
    return inputs, reasons[-1] if reasons else ""


def shapes(inputs: Inputs) -> str:
    """Inputs in words."""
    return ", ".join(f"{name} {list(each.shape) if isinstance(each, Tensor) else ''}" for name, each in inputs.items())


def repaired(inputs: Inputs, message: str) -> Inputs | None:
    """Inputs with the width that the error asks for; None where it asks for none that can be found."""
    found = re.search(r"\(\d+x(\d+) and (\d+)x\d+\)", message)
    if found is None:
        wanted = re.search(r"to have (\d+) channels, but got (\d+) channels", message)
        pair = (int(wanted[2]), int(wanted[1])) if wanted else None
        return None if pair is None else _with_width(inputs, *pair, axis=1)
    return _with_width(inputs, int(found[1]), int(found[2]), axis=-1)


def _with_width(inputs: Inputs, width: int, wanted: int, axis: int) -> Inputs | None:
    """The first tensor of this width gets another."""
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.ndim > 1 and value.shape[axis] == width and width != wanted:
            shape = list(value.shape)
            shape[axis] = wanted
            return {**inputs, name: torch.randn(shape)}
    return None


def cases(model: Any, inputs: Inputs) -> list[Case]:
    """The call as it is, and with a part of the text masked, where the model takes such a mask."""
    found = [Case("plain", partial(model, **inputs))]
    for name in ("encoder_attention_mask", "encoder_hidden_states_mask", "attention_mask"):
        if name in parameters(type(model).forward) and isinstance(inputs.get("encoder_hidden_states"), Tensor):
            mask = torch.ones(inputs["encoder_hidden_states"].shape[:2], dtype=torch.bool)
            mask[0, -3:] = False
            found.append(Case(f"with {name}", partial(model, **{**inputs, name: mask})))
    return found
