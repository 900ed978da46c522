"""Makes configurations of transformers small, by the names and the defaults of their fields.

No architecture is known here by name but those of `FIELDS`: a cap for each kind of field keeps what belongs together
equal (all widths are `WIDTH`, all heads `HEADS`), and a list of layer types keeps one layer of each type.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from pasa.eval.models.zoo.building import FIELDS

WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 4, 2, 16, 2
VOCABULARY, FIRST_TOKEN, LAST_TOKEN = 320, 40, 180  # token ids with a meaning are moved behind the last
POSITIONS, PIXELS, PATCH, EXPERTS = 128, 32, 8, 2  # of few experts all are taken: no rounding changes which
WINDOW = 4  # keys: less than the inputs have, so that it shows
LEVELS = ("all", "widths kept", "heads kept")
"""How much is made small; the next is tried where a model of the one before cannot be built or run."""

Cap = float | Callable[[int, dict[str, Any], int], float]  # of the value, of all fields, and of the layers kept
CAPS: tuple[tuple[str, Cap], ...] = (
    (r"^(?!.*type).*vocab_size", VOCABULARY),
    (r"experts_per_tok|^(moe_topk|moe_k|top_k_experts)$|^(?!.*shared).*experts", EXPERTS),
    (r"^(n_group|topk_group|num_expert_groups?)$", 1),
    (r"^num_(kv_shared|nextn_predict)_layers$", 0),
    (r"^(sliding_window|attention_chunk_size|local_attention)$", WINDOW),
    (r"^mamba_(n|num)_heads$", 8),
    (r"^(mamba_d_head|mamba_head_?dim|rotary_dim)$", HEAD_DIM),
    (r"^mamba_d_ssm$", 2 * WIDTH),
    (r"feat_extract", math.inf),
    (
        r"(^|_)(num_hidden_|num_)?(layers?|n_layers?|blocks)$|^depth$|_depth$|^n_layer$",
        lambda value, fields, layers: layers,
    ),
    (r"position", POSITIONS),
    (r"image_size$", lambda value, fields, layers: pixels(fields)),
    (r"patch_size$", PATCH),
)
"""Patterns of fields and their largest values; of a field that several match, the first decides."""
HEAD_CAPS: tuple[tuple[str, Cap], ...] = (
    (r"(key_value|kv)_heads$", lambda value, fields, layers: HEADS if value in heads(fields) else KV_HEADS),
    (r"heads$|n_head$", HEADS),
)
WIDTH_CAPS: tuple[tuple[str, Cap], ...] = (
    (r"head_dim$|^d_kv$|lora_rank$", HEAD_DIM),
    (
        r"num_channels|in_channels|out_channels$|kernel|stride|(^|_)window|chunk|block_size|pool|mel|spatial|"
        r"input_dim$|sampling|codebook_size|feature_size|^input_size|num_labels|type_vocab|freq|hop|tokens?_per|"
        r"audio_channels|num_input_channels|temporal|group_size|merge|bias|batch",
        math.inf,
    ),
    (
        r"(size|dims?|width|channels|units|d_model|d_ff|n_embd|n_inner|filters|features|conv_pos_embeddings)$",
        WIDTH,
    ),
)
CAPS_OF = dict(zip(LEVELS, (CAPS + HEAD_CAPS + WIDTH_CAPS, CAPS + HEAD_CAPS, CAPS), strict=True))
TOKEN_ID = re.compile(r"_(token|tokens?_?id|token_index|id|ids|index)$|token_id|token_index")
ONE_OF_EACH = re.compile(r"layer_types$|layers_block_type$|block_types$|attention_layers$")
DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")

ABSENT = {"head_dim": HEAD_DIM, "num_experts_per_tok": EXPERTS, "n_routed_experts": EXPERTS, "n_shared_experts": 1}
"""Fields without a default that some models cannot do without."""
DROPPED = {"transformers_version", "architectures", "_name_or_path", "id2label", "label2id", "dtype"} | {
    *("stage_names", "out_features", "out_indices", "qk_head_dim", "hybrid_layer_ids", "intermediate_layer_indices")
}
"""Fields that describe a file and not a model, and those that a configuration makes from others."""


def small_config(cls: type, level: str = LEVELS[0]) -> Any:
    """Return a small configuration of a class of transformers, at one of `LEVELS`."""
    fields = cls().to_dict()
    ids = sorted({value for value in token_ids(fields) if value > FIRST_TOKEN})
    moved = {value: LAST_TOKEN + 1 + place for place, value in enumerate(ids)}
    small = without_dropped(shrunk(fields, level, moved))
    return cls(**{name: value for name, value in small.items() if name != "model_type"})


def without_dropped(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that a configuration can be made of."""
    return {name: value for name, value in fields.items() if name not in DROPPED}


def token_ids(fields: dict[str, Any]) -> list[int]:
    """Return all values of fields that are token ids, in sub-configurations too."""
    ids: list[int] = []
    for name, value in fields.items():
        if isinstance(value, dict):
            ids += token_ids(value)
        elif type(value) is int and TOKEN_ID.search(str(name)):
            ids.append(value)
    return ids


def shrunk(fields: dict[str, Any], level: str, moved: dict[int, int]) -> dict[str, Any]:
    """Return the fields, small; those of sub-configurations as well."""
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
        elif type(value) is int:
            is_id = TOKEN_ID.search(name) is not None
            new[name] = moved.get(value, value) if is_id else capped(name, value, fields, level, len(layers))
        else:
            new[name] = value
    return {**new, **FIELDS["transformers"].get(fields.get("model_type"), {})}


def chosen_layers(fields: dict[str, Any]) -> list[int]:
    """Return indices of the layers that are kept: the first of each type, and a second where there is one type."""
    lists = [value for name, value in fields.items() if ONE_OF_EACH.search(name) and isinstance(value, list)]
    types = list(zip(*(each for each in lists if 1 < len(each) == depth(fields)), strict=False))
    first = {str(each): index for index, each in reversed(list(enumerate(types)))}.values()
    return sorted(first) if len(first) > 1 else list(range(LAYERS))


def small_dict(name: str, value: dict[Any, Any], level: str, moved: dict[int, int], layers: list[int]) -> Any:
    """Return a sub-configuration, rotary parameters or the fields of single layers, small; another dict as it is."""
    if name.startswith("rope"):
        return value | {"mrope_section": [2, 3, 3]} if "mrope_section" in value else value
    if all(str(key).isdecimal() for key in value):
        kept = {layers.index(int(key)): each for key, each in value.items() if int(key) in layers}
        small = {key: shrunk(each, level, moved) if isinstance(each, dict) else each for key, each in kept.items()}
        return small or None
    is_config = "model_type" in value or name.endswith("config")
    return shrunk(without_dropped(value), level, moved) if is_config else value


def depth(fields: dict[str, Any]) -> int:
    """Return the number of layers, as this configuration counts them."""
    return next((int(fields[name]) for name in DEPTHS if isinstance(fields.get(name), int)), -1)


def capped(name: str, value: int, fields: dict[str, Any], level: str, layers: int) -> int:
    """Return a number, or the cap of its field if that is smaller."""
    cap = next((cap for pattern, cap in CAPS_OF[level] if re.search(pattern, name)), math.inf)
    return int(min(value, cap(value, fields, layers) if callable(cap) else cap))


def heads(fields: dict[str, Any]) -> list[Any]:
    """Return the numbers of query heads."""
    return [value for name, value in fields.items() if re.search(r"attention_heads$|n_head$", name)]


def pixels(fields: dict[str, Any]) -> int:
    """Return the size of a picture, twice as large where stages halve it again and again."""
    return 2 * PIXELS if "depths" in fields or "hidden_sizes" in fields else PIXELS
