"""Architectures of transformers: which there are, how each is built, its inputs, and which calls it is judged by.

Configurations are made small by the names and the defaults of their fields. A cap for each kind of field keeps what
belongs together equal (all widths are 64, all heads 4). A list of layer types keeps one layer of each type. Windows get
fewer keys than the inputs have, so that they show. Of few experts all are taken, so that no rounding changes which.

Which optional inputs a model cannot do without its signature does not say: `candidates` yields sets of inputs, the
smallest first, and the first that the model accepts is taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pasa.eval.models.zoo.building import FIELDS, Inputs, cap, find, first_that_runs, parameters, required, small
from pasa.eval.models.zoo.judging import Case, Generated

CAUSAL, BASE, SEQUENCE = "causal", "base", "encoder-decoder"
MAPPINGS = {
    CAUSAL: ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",),
    BASE: ("MODEL_MAPPING_NAMES",),
    SEQUENCE: ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"),
}
NEW_TOKENS = 8
PAD = 0
PADDED = 3  # positions
PADDABLE = frozenset({"input_ids", "decoder_input_ids", "pixel_values", "bbox"})
HEADS, KV_HEADS, LAYERS, PIXELS = 4, 2, 2, 32
FIRST_TOKEN, LAST_TOKEN = 40, 180  # token ids with a meaning are moved behind the last
LEVELS = ("all", "widths kept", "heads kept")
"""How much is made small; the next is tried where a model of the one before cannot be built or run."""
CAPS = ("transformers", "transformers heads", "transformers widths")
CAPS_OF = {
    level: [rule for name in CAPS[: len(CAPS) - place] for rule in FIELDS["caps"][name]]
    for place, level in enumerate(LEVELS)
}
TOKEN_ID = re.compile(r"_(token|tokens?_?id|token_index|id|ids|index)$|token_id|token_index")
ONE_OF_EACH = re.compile(r"layer_types$|layers_block_type$|block_types$|attention_layers$")
DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
BATCH, LENGTH = 2, 9
OPTIONAL = ("decoder_input_ids", "pixel_values", "input_features", "input_values", "bbox", "input_ids")
"""Inputs that some models need although their signature says nothing of it, in the order in which they are tried."""


def classes(kind: str) -> list[str]:
    """Return the class names of one kind, each once."""
    from transformers.models.auto import modeling_auto

    listed = [names for mapping in MAPPINGS[kind] for names in getattr(modeling_auto, mapping).values()]
    return list(dict.fromkeys(name for names in listed for name in ([names] if isinstance(names, str) else names)))


def build(name: str) -> tuple[Any, Inputs] | str:
    """Return a small model with inputs that it accepts, or why there is none."""
    import transformers

    return first_that_runs(LEVELS, partial(small_model, getattr(transformers, name)), candidates)


def small_model(cls: Any, level: str = LEVELS[0], **fields: Any) -> Any:
    """Return the model, with these fields in place of small ones."""

    def make() -> Any:
        config = small_config(cls.config_class, level)
        config.update(fields)
        return cls(config)

    return small(make)


def small_config(cls: type, level: str = LEVELS[0]) -> Any:
    """Return a small configuration of a class of transformers, at one of `LEVELS`."""
    fields = cls().to_dict()
    ids = sorted({value for value in token_ids(fields) if value > FIRST_TOKEN})
    moved = {value: LAST_TOKEN + 1 + place for place, value in enumerate(ids)}
    small = without_dropped(shrunk(fields, level, moved))
    small.pop("model_type", None)
    return cls(**small)


def without_dropped(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that a configuration can be made of."""
    return {name: value for name, value in fields.items() if name not in FIELDS["dropped"]}


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
        elif value is None and name in FIELDS["absent"] and level == LEVELS[0]:
            new[name] = FIELDS["absent"][name]
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
    heads = [each for field, each in fields.items() if re.search(r"attention_heads$|n_head$", field)]
    kv_heads = HEADS if value in heads else KV_HEADS
    return int(min(value, cap(name, CAPS_OF[level], layers=layers, pixels=pixels(fields), kv_heads=kv_heads)))


def pixels(fields: dict[str, Any]) -> int:
    """Return the size of a picture, twice as large where stages halve it again and again."""
    return 2 * PIXELS if "depths" in fields or "hidden_sizes" in fields else PIXELS


def candidates(model: Any) -> Iterator[Inputs]:
    """Yield sets of inputs to try."""
    known = parameters(type(model).forward)
    main = model.main_input_name if model.main_input_name in known else next(iter(known), "")
    decoder = [name for name in ("future_values", "future_time_features") if name in known]
    first = list(dict.fromkeys([main, *required(known), *decoder]))
    more = [name for name in OPTIONAL if name in known and name not in first]
    for names in [first, *([*first, name] for name in more), [*first, *more]]:
        values = {name: made(name, model.config) for name in names}
        if "grid_thw" in names or "image_grid_thw" in names:
            values |= {name: [patches(model.config)] for name in names if name in ("hidden_states", "pixel_values")}
        if all(values.values()):
            for turn in range(min(6, max(len(options) for options in values.values()))):
                yield {name: options[min(turn, len(options) - 1)] for name, options in values.items()}


def made(name: str, config: Any) -> list[Any]:
    """Return values to try for an input, by its name; none for a name that is not known."""
    if name.endswith("input_ids"):
        ids = tokens(config, 7 if name.startswith("decoder") else LENGTH)
        rows = config.num_codebooks if config.model_type in ("musicgen_decoder", "musicgen_melody_decoder") else 1
        return [ids.repeat_interleave(rows, 0)]
    if name in ("pixel_values", "pixel_values_videos"):
        return pictures(config)[:: -1 if "video" in name else 1]
    if name in ("input_features", "audio_values", "audio_input_features"):
        return spectrograms(config)
    if name in ("input_values", "audio_mel"):
        return [torch.randn(BATCH, 2000), torch.randn(BATCH, 1, 2000), *spectrograms(config)]
    if name == "bbox":
        return [torch.randint(0, 30, (BATCH, LENGTH, 2)).repeat(1, 1, 2).sort(-1).values]
    if name in ("inputs_embeds", "hidden_states", "decoder_inputs_embeds", "query_embeds", "encoder_hidden_states"):
        return [torch.randn(BATCH, LENGTH, find(config, "hidden_size", "d_model", "n_embd", default=64))]
    if name in ("grid_thw", "image_grid_thw"):
        return [torch.tensor([[1, 4, 4], [1, 4, 8]])]
    if name == "freq":
        return [torch.zeros(BATCH, 1, dtype=torch.long)]
    return series(name, config)


def tokens(config: Any, length: int = LENGTH) -> Tensor:
    """Return ids without a meaning of their own."""
    vocabulary = find(config, "vocab_size", default=LAST_TOKEN)
    first, last = (FIRST_TOKEN, LAST_TOKEN) if vocabulary >= LAST_TOKEN else (vocabulary // 4, vocabulary // 2)
    return torch.randint(first, max(last, first + 1), (BATCH, length))


def pictures(config: Any) -> list[Tensor]:
    """Return pictures, then clips."""
    size = find(config, "image_size", "img_size", "input_size", default=2 * PIXELS)
    channels = find(config, "num_channels", "in_channels", "in_chans", default=3)
    frames = find(config, "num_frames", "frames", default=2)
    return [torch.randn(BATCH, channels, size, size), torch.randn(BATCH, frames, channels, size, size)]


def spectrograms(config: Any) -> list[Tensor]:
    """Return (B, mels, T), (B, T, mels) and (B, 1, T, mels), in the length that a fixed table of positions needs."""
    mels = find(config, "num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels", "input_dim", default=80)
    length = 2 * find(config, "max_source_positions", "max_length", default=32)
    lengths = dict.fromkeys((length, 64, find(config, "max_length", "spec_size", default=1024)))
    plain = [torch.randn(BATCH, mels, steps) for steps in lengths]
    return [y for x in plain for y in (x, x.transpose(1, 2).contiguous(), x.transpose(1, 2)[:, None].contiguous())]


def patches(config: Any) -> Tensor:
    """Return the pixels of all patches of the pictures that `grid_thw` speaks of."""
    size = find(config, "patch_size", default=14)
    each = find(config, "in_channels", "in_chans", "num_channels", default=3) * size * size
    return torch.randn(48, each * find(config, "temporal_patch_size", default=1))


def series(name: str, config: Any) -> list[Tensor]:
    """Return values to try for an input of a forecaster."""
    past = find(config, "context_length", default=32) + max([0, *(getattr(config, "lags_sequence", None) or [])])
    future = find(config, "prediction_length", default=8)
    channels = find(config, "num_input_channels", "input_size", default=1)
    several = (channels,) if channels > 1 or hasattr(config, "num_input_channels") else ()
    times = getattr(config, "num_time_features", 0) or 0
    sizes: dict[str, list[tuple[int, ...]]] = {
        "past_values": [(past, *several), (past,)],
        "past_observed_mask": [(past, *several)],
        "past_time_features": [(past, times)],
        "future_time_features": [(future, times)],
        "future_values": [(future, *several)],
        "past_values_padding": [(past,)],
    }
    fill = torch.ones if name.endswith("mask") else torch.zeros if name.endswith("padding") else torch.randn
    return [fill(BATCH, *size) for size in sizes.get(name, [])]


def cases(kind: str, model: Any, inputs: Inputs) -> Iterator[Case]:
    """Yield the calls by which a model is judged: as it is, padded on both sides, and continued word by word."""
    yield Case("plain", partial(model, **inputs))
    masks = "attention_mask" in parameters(type(model).forward)
    if "input_ids" in inputs and set(inputs) <= PADDABLE and masks:
        for side in ("left", "right") if kind == CAUSAL else ("right",):
            yield _padded(model, inputs, side)
    if kind != BASE and hasattr(model, "generate"):
        prompts = {name: value for name, value in inputs.items() if not name.startswith("decoder")}
        yield Case("generate", partial(greedy, model, prompts))
        if kind == CAUSAL and masks and set(prompts) == {"input_ids"}:
            mask = _mask(prompts["input_ids"], "left").long()
            yield Case("generate, left padding", partial(greedy, model, {**prompts, "attention_mask": mask}))


def _mask(ids: torch.Tensor, side: str) -> torch.Tensor:
    """Return which positions are no padding: of the first sequence all but `PADDED`."""
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, slice(0, PADDED) if side == "left" else slice(-PADDED, None)] = False
    return mask


def _padded(model: Any, inputs: Inputs, side: str) -> Case:
    mask = _mask(inputs["input_ids"], side)
    ids = torch.where(mask, inputs["input_ids"], PAD)
    call = partial(model, **{**inputs, "input_ids": ids, "attention_mask": mask.long()})
    return Case(f"{side} padding", call, mask if "decoder_input_ids" not in inputs else None)


def greedy(model: Any, inputs: Inputs) -> Generated:
    """Return `NEW_TOKENS` greedy tokens, and the logits at each of them."""
    done = model.generate(
        **inputs, do_sample=False, num_beams=1, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
        pad_token_id=PAD, eos_token_id=None, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    logits = torch.stack(done.logits, 1)
    return Generated(done.sequences[:, -logits.shape[1] :], logits)
