"""Architectures of transformers: which there are, how each is built, and which calls it is judged by."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from pasa.eval.models.zoo.building import first_that_runs, small
from pasa.eval.models.zoo.configs import LEVELS, small_config
from pasa.eval.models.zoo.inputs import Inputs, candidates, parameters
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


def architectures(kind: str) -> list[str]:
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
