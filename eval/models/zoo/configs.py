"""Makes configurations of transformers small, by the names and the defaults of their fields.

No architecture is known here by name but those of `OWN`: a rule for each kind of field keeps what belongs together
equal (all widths are `WIDTH`, all heads `HEADS`), and a list of layer types keeps one layer of each type.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 4, 2, 16, 2
VOCABULARY, FIRST_TOKEN, LAST_TOKEN = 320, 40, 180  # token ids with a meaning are moved behind the last
POSITIONS, PIXELS, PATCH, EXPERTS = 128, 32, 8, 2  # of few experts all are taken: no rounding changes which
WINDOW = 4  # keys: less than the inputs have, so that it shows
LEVELS = ("all", "widths kept", "heads kept")
"""How much is made small; the next is tried where a model of the one before cannot be built or run."""

LAYER_COUNTS = re.compile(r"(^|_)(num_hidden_|num_)?(layers?|n_layers?|blocks)$|^depth$|_depth$|^n_layer$")
WIDTHS = re.compile(
    r"(size|dims?|width|channels|units|d_model|d_ff|n_embd|n_inner|filters|features|conv_pos_embeddings)$"
)
KEPT = re.compile(
    r"num_channels|in_channels|out_channels$|kernel|stride|(^|_)window|chunk|block_size|pool|mel|spatial|input_dim$|"
    r"sampling|codebook_size|feature_size|^input_size|num_labels|type_vocab|freq|hop|tokens?_per|audio_channels|"
    r"num_input_channels|temporal|group_size|merge|bias|batch"
)
TOKEN_ID = re.compile(r"_(token|tokens?_?id|token_index|id|ids|index)$|token_id|token_index")
ONE_OF_EACH = re.compile(r"layer_types$|layers_block_type$|block_types$|attention_layers$")

MROPE = {"rope_theta": 10000.0, "rope_type": "default", "mrope_section": [2, 3, 3]}
HORIZON = {"prediction_length": 4, "context_length": 12}
OWN: dict[str, dict[str, Any]] = {
    **{name: {"rope_parameters": MROPE} for name in ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text")},
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), HORIZON),
    "mamba2": {"num_heads": 8, "head_dim": HEAD_DIM},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 2},
    "xmod": {"default_language": "en_XX"},
    "gpt_neo": {"window_size": 4, "attention_types": [[["global", "local"], 1]]},
    "zamba2": {"attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * WIDTH // HEADS, "n_mamba_heads": 8},
    "kimi_linear": {"num_local_experts": 8},
    "bailing_hybrid": {"num_experts": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "falcon_h1": {"mamba_n_heads": 16, "mamba_d_ssm": 2 * WIDTH},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "nemotron": {"num_key_value_heads": KV_HEADS},
    "bamba": {"attn_layer_indices": [1]},
    "dbrx": {"attn_config": {"kv_n_heads": 1, "rope_theta": 10000.0, "clip_qkv": 8.0}},
}
"""Fields that an architecture needs beside the rules, by model type."""

DERIVED = (
    "stage_names",
    "out_features",
    "out_indices",
    "qk_head_dim",
    "hybrid_layer_ids",
    "intermediate_layer_indices",
)
"""Fields that a configuration makes from others."""

ABSENT = {"head_dim": HEAD_DIM, "num_experts_per_tok": EXPERTS, "n_routed_experts": EXPERTS, "n_shared_experts": 1}
"""Fields without a default that some models cannot do without."""


def small_config(cls: type, level: str = LEVELS[0]) -> Any:
    """A small configuration of this class.

    Parameters
    ----------
    cls : type
        A configuration class of transformers.
    level : one of LEVELS
    """
    fields = cls().to_dict()
    ids = sorted({value for value in token_ids(fields) if value > FIRST_TOKEN})
    moved = {value: LAST_TOKEN + 1 + place for place, value in enumerate(ids)}
    return cls(**without_names(shrunk(fields, level, moved)))


def without_names(fields: dict[str, Any]) -> dict[str, Any]:
    """Without what describes a file and not a model."""
    dropped = {"transformers_version", "architectures", "_name_or_path", "id2label", "label2id", "dtype", "model_type"}
    dropped |= set(DERIVED)
    return {name: value for name, value in fields.items() if name not in dropped}


def token_ids(fields: dict[str, Any]) -> list[int]:
    """All values of fields that are token ids, in sub-configurations too."""
    found: list[int] = []
    for name, value in fields.items():
        if isinstance(value, dict):
            found += token_ids(value)
        elif isinstance(name, str) and TOKEN_ID.search(name) and isinstance(value, int) and not isinstance(value, bool):
            found.append(value)
    return found


def shrunk(fields: dict[str, Any], level: str, moved: dict[int, int]) -> dict[str, Any]:
    """The fields, small; those of sub-configurations as well."""
    layers = chosen_layers(fields)
    new: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            new[name] = small_dict(name, value, level, moved, layers)
        elif isinstance(value, list) and len(value) > 1 and len(value) == depth(fields):
            new[name] = [value[index] for index in layers]
        elif isinstance(value, (list, tuple)) and name.endswith("image_size"):
            new[name] = type(value)(pixels(fields) for _ in value)
        elif isinstance(value, (list, tuple)):
            new[name] = type(value)(1 for _ in value) if name == "depths" else value
        elif value is None and name in ABSENT and level == LEVELS[0]:
            new[name] = ABSENT[name]
        elif isinstance(value, int) and not isinstance(value, bool):
            new[name] = small_number(name, value, fields, level, moved, len(layers))
        else:
            new[name] = value
    return {**new, **OWN.get(str(fields.get("model_type")), {})}


def chosen_layers(fields: dict[str, Any]) -> list[int]:
    """Indices of the layers that are kept: the first of each type, and a second where there is one type alone."""
    lists = [value for name, value in fields.items() if ONE_OF_EACH.search(name) and isinstance(value, list)]
    types = list(zip(*(each for each in lists if 1 < len(each) == depth(fields)), strict=False))
    first = {str(each): index for index, each in reversed(list(enumerate(types)))}.values()
    return sorted(first) if len(first) > 1 else list(range(LAYERS))


def small_dict(name: str, value: dict[Any, Any], level: str, moved: dict[int, int], layers: list[int]) -> Any:
    """A sub-configuration, rotary parameters, what is said of single layers, or what is left alone."""
    if name.startswith("rope"):
        return value | {"mrope_section": [2, 3, 3]} if "mrope_section" in value else value
    if all(str(key).isdecimal() for key in value):
        kept = {layers.index(int(key)): each for key, each in value.items() if int(key) in layers}
        return {
            key: shrunk(each, level, moved) if isinstance(each, dict) else each for key, each in kept.items()
        } or None
    if "model_type" in value or name.endswith("config"):
        return shrunk(without(value), level, moved)
    return value


def without(fields: dict[str, Any]) -> dict[str, Any]:
    """As `without_names`, but for the type, by which a sub-configuration finds its class."""
    kept = without_names(fields)
    return kept | ({"model_type": fields["model_type"]} if "model_type" in fields else {})


def depth(fields: dict[str, Any]) -> int:
    """Layers, as this configuration counts them."""
    for name in ("num_hidden_layers", "num_layers", "n_layer", "n_layers"):
        if isinstance(fields.get(name), int):
            return int(fields[name])
    return -1


def small_number(name: str, value: int, fields: dict[str, Any], level: str, moved: dict[int, int], layers: int) -> int:
    """One field."""
    rules: list[tuple[bool, Callable[[], int]]] = [
        (TOKEN_ID.search(name) is not None, lambda: moved.get(value, value)),
        ("vocab_size" in name and "type" not in name, lambda: min(value, VOCABULARY)),
        ("experts_per_tok" in name or name in ("moe_topk", "moe_k", "top_k_experts"), lambda: min(value, EXPERTS)),
        ("experts" in name and "shared" not in name, lambda: min(value, EXPERTS)),
        (name in ("n_group", "topk_group", "num_expert_group", "num_expert_groups"), lambda: min(value, 1)),
        (name in ("num_kv_shared_layers", "num_nextn_predict_layers"), lambda: 0),
        (name in ("sliding_window", "attention_chunk_size", "local_attention"), lambda: min(value, WINDOW)),
        (name in ("mamba_n_heads", "mamba_num_heads"), lambda: 8),
        (name in ("mamba_d_head", "mamba_head_dim", "mamba_headdim", "rotary_dim"), lambda: min(value, HEAD_DIM)),
        (name == "mamba_d_ssm", lambda: 2 * WIDTH),
        ("feat_extract" in name, lambda: value),
        (LAYER_COUNTS.search(name) is not None, lambda: min(value, layers)),
        ("position" in name and value > POSITIONS, lambda: POSITIONS),
        (name.endswith("image_size"), lambda: pixels(fields)),
        (name.endswith("patch_size") and value >= PATCH, lambda: PATCH),
    ]
    if level != LEVELS[2]:
        rules += [
            (re.search(r"(key_value|kv)_heads$", name) is not None, lambda: kv_heads(value, fields)),
            (re.search(r"heads$|n_head$", name) is not None, lambda: min(value, HEADS)),
        ]
    if level == LEVELS[0]:
        rules += [
            (re.search(r"head_dim$|^d_kv$|lora_rank$", name) is not None, lambda: min(value, HEAD_DIM)),
            (KEPT.search(name) is not None, lambda: value),
            (WIDTHS.search(name) is not None and value >= WIDTH, lambda: WIDTH),
        ]
    return next((rule() for holds, rule in rules if holds), value)


def kv_heads(value: int, fields: dict[str, Any]) -> int:
    """Fewer than heads where they were fewer."""
    heads = [v for n, v in fields.items() if re.search(r"attention_heads$|n_head$", n) and isinstance(v, int)]
    return HEADS if value in heads and value >= HEADS else min(value, KV_HEADS)


def pixels(fields: dict[str, Any]) -> int:
    """Twice the size where stages halve it again and again."""
    return 2 * PIXELS if "depths" in fields or "hidden_sizes" in fields else PIXELS
