"""The correctness gate: logits of every way to generate beside FP32's, on a model of the same width with few layers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pasa.eval.kit.output import error_line
from pasa.eval.models.generation.runs import PASA, PLAIN, SDPA, Marks, Prompts, Run, forget_compiled
from pasa.eval.models.video.clip import whole_fp32

Record = dict[str, Any]
FACTOR = 1.5  # the error of patched FP16 over that of the same model in FP16 with torch's attention
LAYERS, BATCH, PROMPT, TOKENS = 4, 3, 300, 12  # of the model and the prompts that are judged


def judge(original: Any, attentions: Sequence[str], ways: Sequence[str]) -> list[Record]:
    """Return a record for each attention, way and kind of prompt: error of the logits, tokens equal to FP32's.

    ``limit`` is `FACTOR` times the error of SDPA in the same way; None where SDPA has none.
    """
    records: list[Record] = []
    precise = Run.of(copy.deepcopy(original).float(), SDPA, PLAIN)
    for padded in (False, True):
        prompts = Prompts.draw(BATCH, PROMPT, padded, original.config.vocab_size, original.device)
        with whole_fp32():
            golden = _tokens_and_logits(precise, prompts)
        for way in ways:
            forget_compiled()
            of_way = {name: _compare(original, name, way, prompts, golden) for name in attentions}
            error = of_way[SDPA]["error"]
            described = {"way": way, "padded": padded, "limit": None if error is None else FACTOR * error}
            records += [{"attention": name, **described, **each} for name, each in of_way.items()]
    forget_compiled()
    return records


def _compare(original: Any, name: str, way: str, prompts: Prompts, golden: tuple[Tensor, Tensor]) -> Record:
    """Return how one attention's logits and tokens compare with FP32's; why, if it cannot run."""
    try:
        run = Run.of(original, name, way)
        made = _tokens_and_logits(run, prompts)
    except Exception as error:  # a backend of torch may refuse a mask or a head dimension
        return {"error": None, "equal": None, "nonfinite": None, "why": error_line(error)}
    return {**logit_errors(made, golden), "why": ""}


def _tokens_and_logits(run: Run, prompts: Prompts) -> tuple[Tensor, Tensor]:
    """Return the tokens written (B, T), and the logits from which each was chosen (B, T, vocabulary)."""
    marks = Marks(prompts.ids.device)
    made = run.first(prompts, TOKENS, marks, return_dict_in_generate=True, output_logits=True)
    return made.sequences[:, prompts.ids.shape[1] :], torch.stack(made.logits, 1)


def logit_errors(made: tuple[Tensor, Tensor], golden: tuple[Tensor, Tensor]) -> Record:
    """Return the relative error of the logits, and the number of tokens before each row's first difference.

    A token that differs is a near tie, or an error of the logits that chose it. Rows are compared up to and with the
    logits of that token; from there on, two different texts go on.
    """
    (tokens, logits), (golden_tokens, golden_logits) = made, golden
    same = (tokens == golden_tokens).long().cumprod(1).bool()  # equal so far
    asked = torch.cat([torch.ones_like(same[:, :1]), same[:, :-1]], 1)  # the same text was read
    ours, theirs = logits[asked].double(), golden_logits[asked].double()
    nonfinite = int((~ours.isfinite()).sum())
    error = None if nonfinite else float((ours - theirs).norm() / theirs.norm())
    return {"error": error, "nonfinite": nonfinite, "equal": int(same.sum()), "of": same.numel()}


def right(record: Record) -> bool:
    """Return whether logits are finite and as accurate as those of torch's attention in the same FP16."""
    return record["error"] is not None and record["limit"] is not None and record["error"] <= record["limit"]


def passes(records: Sequence[Record]) -> bool:
    """Return whether patched attention ran in every way, and is right."""
    ours = [each for each in records if each["attention"] == PASA]
    return bool(ours) and all(right(each) for each in ours)


def wrong(records: Sequence[Record], name: str, way: str) -> bool:
    """Return whether an attention ran in a way, and is not right. Its times would say nothing."""
    return any(
        not right(each) for each in records if (each["attention"], each["way"]) == (name, way) and not each["why"]
    )
