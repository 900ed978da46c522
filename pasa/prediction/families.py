"""Find the attention layers of a checkpoint: their tensors, their numbers of heads, and the norm before them.

Each language model is a row of `FAMILIES`; UNets and VAEs of diffusers have functions of their own below. Any other
architecture is refused by name, because weights that mean something else would give a wrong bound.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from pasa.prediction.checkpoint import Source

EPSILON = 1e-5
"""Epsilon of a layer norm whose configuration names none: the default of PyTorch, GPT-2, CLIP and a UNet's blocks."""
LARGEST = 2**31 - 1  # largest count in a configuration that is believed; formulas of larger ones leave FP64
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


def architecture(config: dict[str, Any]) -> object:
    """Return what a configuration names as its architecture, which in a file from others may be anything."""
    return config.get("model_type") or config.get("_class_name")


def supported(config: dict[str, Any]) -> bool:
    """Return whether the architecture of a configuration is known here."""
    name = architecture(config)
    return isinstance(name, str) and name in (*FAMILIES, *UNETS, *AUTOENCODERS)


def is_count(value: object) -> TypeGuard[int]:
    """Return whether an entry of a configuration is a number of things."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST


def wrong(source: Source, name: str, expected: str) -> ValueError:
    """Return the error for an entry of a configuration that is not what is expected."""
    value = shown(source.config.get(name))
    return ValueError(f"{source.label}: its config says {name}={value}, which is not {expected}: correct config.json")


def shown(value: object) -> str:
    """Return a value of a configuration as text of at most 60 letters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


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
    name = architecture(config)
    if not isinstance(name, str) or not supported(config):
        known = ", ".join((*FAMILIES, *UNETS, *AUTOENCODERS))
        raise NotImplementedError(f"{source.label}: architecture {shown(name)} is not supported; known: {known}")
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
            _check_heads(source, f"{path}.{family.query}.weight", query, heads)
            _check_heads(source, f"{path}.{family.key}.weight", key, kv_heads)
            yield Layer(path, query, key, heads, kv_heads, "", "head", rotary)
        else:
            query, key = _projections(source, family, path, heads, kv_heads)
            yield Layer(path, query, key, heads, kv_heads, norm, family.kind, rotary, _epsilon(source))


def _check_heads(source: Source, projection: str, gain: Part, heads: int) -> None:
    """Check that a projection has the rows of the configuration's heads, which the gain of a head alone cannot show."""
    if projection in source.names and source.shape(projection)[0] != heads * source.shape(gain.weight)[0]:
        raise ValueError(
            f"{source.label}: {projection} is {source.shape(projection)}, which {heads} heads of "
            f"{source.shape(gain.weight)[0]} do not fit: a part of a model, or another config"
        )


def _epsilon(source: Source) -> float:
    """Return the epsilon of a model's layer norms."""
    for name in ("layer_norm_epsilon", "layer_norm_eps"):
        if name in source.config:
            value = source.config[name]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise wrong(source, name, "a number from 0 to 1")
            return float(value)
    return EPSILON


def _count(source: Source, name: str) -> int:
    value = source.config.get(name)
    if value is None and name == "num_key_value_heads":
        value = source.config.get("num_attention_heads")
    if not is_count(value):
        raise wrong(source, name, f"an integer from 1 to {LARGEST}")
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
    dim = config.get("head_dim") or (hidden // heads if is_count(hidden) else None)
    if not is_count(dim):
        raise ValueError(f"{source.label}: its config says neither head_dim nor hidden_size that {heads} heads share")
    return dim


def _rotary(source: Source, heads: int) -> int:
    """Return the number of rotated dimensions of a head; refuse embeddings that do more than rotate."""
    config = source.config
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{source.label}: its config says rope_parameters={shown(rope)}")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROTATIONS:
        raise NotImplementedError(
            f"{source.label}: rope_type={shown(kind)} also scales q and k, which is not supported"
        )
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    whole = _head_dim(source, heads)
    if not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise ValueError(f"{source.label}: its config says partial_rotary_factor={shown(share)}, not a part of 1")
    dims = int(whole * share)
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
    name = "num_attention_heads" if source.config.get("num_attention_heads") else "attention_head_dim"
    counts = source.config.get(name)
    if not counts:
        raise ValueError(f"{source.label}: its config says neither num_attention_heads nor attention_head_dim")
    counts = counts if isinstance(counts, (list, tuple)) else [counts]
    if not all(map(is_count, counts)):
        raise wrong(source, name, "a number of heads, or a list of them")
    match = re.match(r"(down|up)_blocks\.(\d+)\.", path)
    index = int(match[2]) if match and len(counts) > 1 else 0
    if index >= len(counts):
        raise wrong(
            source, name, f"a list of {index + 1} numbers or more, as block {match[0] if match else path} needs"
        )
    heads: int = counts[index if match and match[1] == "down" else len(counts) - 1 - index]
    return heads


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
