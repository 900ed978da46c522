"""Find the attention layers of a checkpoint: their tensors, their numbers of heads, and the norm before them.

Each language model is a row of `FAMILIES`; UNets and VAEs of diffusers have functions of their own below. Any other
architecture is refused by name, because weights that mean something else would give a wrong bound.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pasa.prediction.checkpoint import Source

EPSILON = 1e-5
"""Epsilon of a layer norm whose configuration names none: the default of PyTorch, GPT-2, CLIP and a UNet's blocks."""
GROUP_EPSILON = 1e-6  # epsilon of an autoencoder's group norms; the configuration does not name it


@dataclass(frozen=True)
class Part:
    """The place of a projection: its tensor names, its rows (outputs) in them, and whether it is stored transposed."""

    weight: str
    bias: str | None
    rows: tuple[int, int] | None = None
    transposed: bool = False


@dataclass(frozen=True)
class Layer:
    """One attention layer of a checkpoint, with all that the bounds on its scores depend on.

    Attributes
    ----------
    name : str
        Path of the attention module.
    query, key : Part
    heads, kv_heads : int
    norm : str
        Path of the norm before the layer; "" if there is none.
    kind : {"rms", "layer", "group", "head"}
        Type of that norm. "head": q and k of every head are RMS-normed; `query` and `key` are the gains of these norms.
    rotary : int
        Number of leading dimensions of a head that rotary embeddings rotate.
    epsilon : float
        Epsilon of a layer or group norm.
    unknown : str
        The reason why no weight bounds these scores; "" if the weights do.
    """

    name: str
    query: Part
    key: Part
    heads: int
    kv_heads: int
    norm: str = ""
    kind: str = "rms"
    rotary: int = 0
    epsilon: float = EPSILON
    unknown: str = ""


@dataclass(frozen=True)
class Family:
    """The names of modules, tensors and configuration entries in checkpoints of one architecture."""

    blocks: str  # name of the list of layers: "layers" for model.layers.0
    attention: str
    norm: str
    kind: str
    query: str = "q_proj"
    key: str = "k_proj"
    fused: str = "qkv_proj"
    head_norms: tuple[str, str] | None = None  # RMS norms of q and k, applied to each head
    transposed: bool = False
    rotary: bool = False
    counts: tuple[str, str, str] = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")


_LLAMA = Family("layers", "self_attn", "input_layernorm", "rms", rotary=True)
_QWEN3 = replace(_LLAMA, head_norms=("q_norm", "k_norm"))
_CLIP = Family("layers", "self_attn", "layer_norm1", "layer")
FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "qwen2"), _LLAMA),
    **dict.fromkeys(("qwen3", "qwen3_moe"), _QWEN3),
    **dict.fromkeys(("clip_text_model", "clip_vision_model"), _CLIP),
    "gpt2": Family(
        *("h", "attn", "ln_1", "layer"), fused="c_attn", transposed=True, counts=("n_layer", "n_head", "n_head")
    ),
}
"""Maps the `model_type` of a transformers configuration to its names."""

UNETS = ("UNet2DConditionModel", "UNetSpatioTemporalConditionModel")
AUTOENCODERS = ("AutoencoderKL", "AutoencoderKLTemporalDecoder")
ROTATIONS = ("default", "linear", "dynamic", "llama3")
"""Types of rotary embeddings that only rotate; others (YaRN, LongRoPE) also scale q and k."""


def supported(config: dict[str, Any]) -> bool:
    """Return whether the architecture of a configuration is known here."""
    names = str(config.get("model_type")), str(config.get("_class_name"))
    return names[0] in FAMILIES or names[1] in UNETS + AUTOENCODERS


def find_layers(source: Source) -> list[Layer]:
    """Return all attention layers of a model.

    Raises
    ------
    NotImplementedError
        The architecture is unknown, the weights are quantised, or a rotary embedding also scales q and k.
    ValueError
        A tensor is missing, or the configuration lacks an entry that is needed.
    """
    config = source.config
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method", "?") if isinstance(quantised, dict) else quantised
        raise NotImplementedError(
            f"{source.label}: quantised weights ({method}) are not supported: pass the unquantised checkpoint"
        )
    name = config.get("model_type") or config.get("_class_name")
    if not supported(config):
        known = ", ".join((*FAMILIES, *UNETS, *AUTOENCODERS))
        raise NotImplementedError(f"{source.label}: architecture {name!r} is not supported; known: {known}")
    if name in FAMILIES:
        layers = list(_language_model(source, FAMILIES[name]))
    elif name in UNETS:
        layers = list(_unet(source))
    else:
        layers = list(_autoencoder(source))
    if not layers:
        raise ValueError(f"{source.label}: no attention layer of {name!r} is among its {len(source.names)} tensors")
    return layers


def _language_model(source: Source, family: Family) -> Iterator[Layer]:
    layers, heads, kv_heads = (_count(source, name) for name in family.counts)
    pattern = re.compile(rf"((?:.*\.)?{family.blocks}\.(\d+))\.{family.attention}\.")
    blocks = {int(match[2]): match[1] for match in map(pattern.match, source.names) if match}
    if beyond := sorted(index for index in blocks if index >= layers):
        raise ValueError(f"{source.label}: attention layer {beyond[0]} is there, and its config says {layers} layers")
    for index in range(layers):
        if index not in blocks:
            raise ValueError(f"{source.label}: attention layer {index} of {layers} is missing")
        path, norm = f"{blocks[index]}.{family.attention}", f"{blocks[index]}.{family.norm}"
        rotary = _rotary(source, heads) if family.rotary else 0
        if family.head_norms:
            query, key = (part(source, f"{path}.{name}") for name in family.head_norms)
            yield Layer(path, query, key, heads, kv_heads, "", "head", rotary)
        else:
            query, key = _projections(source, family, path, heads, kv_heads)
            yield Layer(path, query, key, heads, kv_heads, norm, family.kind, rotary, _epsilon(source))


def _epsilon(source: Source) -> float:
    """Return the epsilon of a model's layer norms."""
    named = [source.config[name] for name in ("layer_norm_epsilon", "layer_norm_eps") if name in source.config]
    if named and not isinstance(named[0], (int, float)):
        raise ValueError(f"{source.label}: its config says layer_norm_eps={named[0]!r}, which is no number")
    return float(named[0]) if named else EPSILON


def _count(source: Source, name: str) -> int:
    value = source.config.get(name)
    if value is None and name == "num_key_value_heads":
        value = source.config.get("num_attention_heads")
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{source.label}: its config says {name}={value!r}")
    return value


def _projections(source: Source, family: Family, path: str, heads: int, kv_heads: int) -> tuple[Part, Part]:
    """Return the projections of q and k of a layer, which may be stored apart or in one matrix with v."""
    fused = f"{path}.{family.fused}"
    if f"{fused}.weight" not in source.names:
        return part(source, f"{path}.{family.query}"), part(source, f"{path}.{family.key}")
    dim = _head_dim(source, heads)
    rows = (0, heads * dim), (heads * dim, (heads + kv_heads) * dim)
    whole = part(source, fused)
    query, key = (Part(whole.weight, whole.bias, each, family.transposed) for each in rows)
    return query, key


def part(source: Source, path: str) -> Part:
    """Return the projection at `path`, whose weight must exist, with its bias if there is one."""
    weight, bias = f"{path}.weight", f"{path}.bias"
    if weight not in source.names:
        near = sorted(name for name in source.names if name.startswith(f"{path}."))
        hint = f"; found {near[0]}: quantised, or an adapter that is not merged" if near else ""
        raise ValueError(f"{source.label}: {weight} is missing{hint}")
    return Part(weight, bias if bias in source.names else None)


def _head_dim(source: Source, heads: int) -> int:
    config = source.config
    hidden = config.get("hidden_size") or config.get("n_embd")
    dim = config.get("head_dim") or (hidden // heads if isinstance(hidden, int) else None)
    if not isinstance(dim, int) or dim < 1:
        raise ValueError(f"{source.label}: its config says neither head_dim nor hidden_size that {heads} heads share")
    return dim


def _rotary(source: Source, heads: int) -> int:
    """Return the number of rotated dimensions of a head; refuse embeddings that do more than rotate."""
    config = source.config
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{source.label}: its config says rope_parameters={rope!r}")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROTATIONS:
        raise NotImplementedError(f"{source.label}: rope_type={kind!r} also scales q and k, which is not supported")
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    dims = int(_head_dim(source, heads) * share) if isinstance(share, (int, float)) else 0
    if dims < 2 or dims % 2:
        raise ValueError(f"{source.label}: rotary embeddings turn pairs, not {dims} of a head's dimensions")
    return dims


def _unet(source: Source) -> Iterator[Layer]:
    """Yield the attention layers of a UNet's transformer blocks.

    attn1 is self-attention after norm1. attn2 attends to encoder states, which no norm bounds.
    """
    pattern = re.compile(r"(.*transformer_blocks\.\d+)\.(attn([12]))\.to_q\.weight$")
    yield from _others(source, pattern)
    for match in sorted(filter(None, map(pattern.match, source.names)), key=lambda match: match[0]):
        path, norm = f"{match[1]}.{match[2]}", f"{match[1]}.norm{match[3]}"
        heads = _unet_heads(source, path)
        unknown = _unet_unknown(source, path, norm, cross=match[3] == "2")
        query, key = part(source, f"{path}.to_q"), part(source, f"{path}.to_k")
        yield Layer(path, query, key, heads, heads, norm, "layer", unknown=unknown)


def _unet_unknown(source: Source, path: str, norm: str, *, cross: bool) -> str:
    """Return why no weight bounds the scores of a UNet's attention layer; "" if its norm bounds them."""
    only_cross = [source.config.get(name) for name in ("only_cross_attention", "mid_block_only_cross_attention")]
    if cross or any(any(each) if isinstance(each, (list, tuple)) else each for each in only_cross):
        return "its keys are made of encoder states, whose length no weight bounds"
    if f"{norm}.weight" not in source.names:
        return "its norm depends on other inputs"
    extra = [part for part in ("norm_q", "norm_k", "add_k_proj") if f"{path}.{part}.weight" in source.names]
    return f"{extra[0]} is not understood" if extra else ""


def _unet_heads(source: Source, path: str) -> int:
    """Return the number of heads of an attention layer by the block that it is in.

    If `num_attention_heads` is missing, `attention_head_dim` holds the number of heads, despite its name.
    """
    counts = source.config.get("num_attention_heads") or source.config.get("attention_head_dim")
    if isinstance(counts, int):
        return counts
    if not counts:
        raise ValueError(f"{source.label}: its config says neither num_attention_heads nor attention_head_dim")
    if match := re.match(r"(down|up)_blocks\.(\d+)\.", path):
        index = int(match[2])
        return int(counts[index] if match[1] == "down" else counts[len(counts) - 1 - index])
    return int(counts[-1])


def _autoencoder(source: Source) -> Iterator[Layer]:
    """Yield the attention layers of an autoencoder's middle blocks: one head over all channels, after a group norm.

    The first checkpoints call the projections "query" and "key" instead of "to_q" and "to_k".
    """
    pattern = re.compile(r"(.*mid_block\.attentions\.\d+)\.(to_q|query)\.weight$")
    yield from _others(source, pattern)
    for match in sorted(filter(None, map(pattern.match, source.names)), key=lambda match: match[0]):
        path, key = match[1], "to_k" if match[2] == "to_q" else "key"
        query, key_part = part(source, f"{path}.{match[2]}"), part(source, f"{path}.{key}")
        yield Layer(path, query, key_part, 1, 1, f"{path}.group_norm", "group", epsilon=GROUP_EPSILON)


def _others(source: Source, known: re.Pattern[str]) -> Iterator[Layer]:
    """Yield attention layers in unknown places of the model, for which no bound is known."""
    for name in sorted(source.names):
        if name.endswith(".to_q.weight") and not known.match(name):
            query = part(source, name.removesuffix(".weight"))
            yield Layer(name.removesuffix(".to_q.weight"), query, query, 1, 1, unknown="its place is not understood")
