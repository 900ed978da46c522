"""Architectures of transformers: which there are, how each is built, and which calls it is judged by."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pasa.eval.models.zoo.building import accepted, first_that_runs, small
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
PADDABLE = frozenset({"input_ids", "decoder_input_ids", "pixel_values", "bbox"})


def architectures(kind: str) -> list[str]:
    """Class names of one kind, each once."""
    from transformers.models.auto import modeling_auto

    found: dict[str, None] = {}
    for mapping in MAPPINGS[kind]:
        for names in getattr(modeling_auto, mapping).values():
            found |= dict.fromkeys([names] if isinstance(names, str) else names)
    return list(found)


def build(name: str) -> tuple[Any, Inputs] | str:
    """A small model with inputs that it accepts; why not, if there is none."""
    import transformers

    cls = getattr(transformers, name, None)
    if cls is None:
        return "not exported by transformers"
    return first_that_runs(LEVELS, partial(small_model, cls), _accepted)


def small_model(cls: Any, level: str = LEVELS[0], **fields: Any) -> Any:
    """Return the model, with these fields in place of small ones."""

    def make() -> Any:
        config = small_config(cls.config_class, level)
        config.update(fields)
        return cls(config)

    return small(make)


def _accepted(model: Any) -> tuple[Inputs | None, str]:
    """Return the first candidate that the model runs on, or why the first failed."""
    inputs, reasons = accepted(model, candidates(model), ", ".join)
    return inputs, reasons[0] if reasons else ""


def cases(kind: str, model: Any, inputs: Inputs) -> list[Case]:
    """The calls by which a model is judged: as it is, padded on both sides, and continued word by word."""
    found = [Case("plain", partial(model, **inputs))]
    if "input_ids" in inputs and set(inputs) <= PADDABLE and "attention_mask" in parameters(type(model).forward):
        found += [_padded(model, inputs, side) for side in (("left", "right") if kind == CAUSAL else ("right",))]
    if kind != BASE and hasattr(model, "generate"):
        found += list(_continued(kind, model, inputs))
    return found


def _padded(model: Any, inputs: Inputs, side: str) -> Case:
    ids: Tensor = inputs["input_ids"]
    mask = torch.ones_like(ids)
    hidden = slice(0, 3) if side == "left" else slice(-3, None)
    mask[0, hidden] = 0
    given = {**inputs, "input_ids": torch.where(mask.bool(), ids, PAD), "attention_mask": mask}
    return Case(f"{side} padding", partial(model, **given), mask.bool() if "decoder_input_ids" not in inputs else None)


def _continued(kind: str, model: Any, inputs: Inputs) -> Iterator[Case]:
    """Greedy tokens, from a plain and from a padded prompt; judged by the logits at each of them."""
    prompts = {name: value for name, value in inputs.items() if not name.startswith("decoder")}
    yield Case("generate", partial(greedy, model, prompts))
    if kind == CAUSAL and "attention_mask" in parameters(type(model).forward) and set(prompts) == {"input_ids"}:
        mask = torch.ones_like(prompts["input_ids"])
        mask[0, :3] = 0
        yield Case("generate, left padding", partial(greedy, model, {**prompts, "attention_mask": mask}))


def greedy(model: Any, inputs: Inputs) -> Generated:
    """`NEW_TOKENS` greedy steps."""
    done = model.generate(
        **inputs, do_sample=False, num_beams=1, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
        pad_token_id=PAD, eos_token_id=None, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    logits = torch.stack(done.logits, 1)
    return Generated(done.sequences[:, -logits.shape[1] :], logits)
