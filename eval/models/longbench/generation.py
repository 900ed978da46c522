"""Greedy answers of a batch of prompts, with the times of prefill and decode apart."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Answers:
    """What a batch gave.

    Attributes
    ----------
    texts : list of str
        Special tokens removed.
    broken : list of bool
        Whether logits were not numbers; such an answer ends before the token that they would have given.
    prompt_tokens, new_tokens : list of int
    prefill_s, decode_s : float
        Seconds of the batch: to the first logits, and from them to the end.
    """

    texts: list[str]
    broken: list[bool]
    prompt_tokens: list[int]
    new_tokens: list[int]
    prefill_s: float
    decode_s: float


class _Watch:
    """Looks at the logits of every step: a logits processor and a stopping criterion of transformers in one."""

    def __init__(self, size: int, ends: Sequence[int], device: torch.device) -> None:
        self.ends = torch.tensor(ends, dtype=torch.long, device=device)
        self.ended = torch.zeros(size, dtype=torch.bool, device=device)
        self.broken = torch.zeros(size, dtype=torch.bool, device=device)
        self.tokens = torch.zeros(size, dtype=torch.long, device=device)
        self.first: float | None = None

    def see(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Note which rows are no numbers (a suppressed token is -inf, which is none of that), and the time.

        Behind its end a row of a batch is padding, and what that gives is not looked at.
        """
        if self.first is not None:
            self.ended |= torch.isin(ids[:, -1], self.ends)
        self.broken |= scores.isnan().any(-1) & ~self.ended
        self.tokens += ~(self.broken | self.ended)
        if self.first is None:
            self.broken.cpu()  # waits for the device
            self.first = time.perf_counter()
        return scores

    def stop(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """End the rows that are broken: the largest of NaN is token 0 for ever."""
        return self.broken


@torch.no_grad()
def answer(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    ends_at_newline: bool = False,
) -> Answers:
    """Continue prompts greedily with the model's own ``generate``, as LongBench does.

    Parameters
    ----------
    prompts : sequence of id sequences
        Padded on the left to the longest.
    ends_at_newline : bool
        The tokenizer's end of text or a line break ends the answer, and its first token may be neither (samsum).
    """
    from transformers.generation import LogitsProcessorList, StoppingCriteriaList

    ids, mask = _pad(prompts, _padding(tokenizer))
    ids, mask = ids.to(model.device), mask.to(model.device)
    ends = _ends(model, tokenizer, ends_at_newline)
    watch = _Watch(len(prompts), ends, ids.device)
    started = time.perf_counter()
    output = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=max_new_tokens,
        min_new_tokens=1 if ends_at_newline else None,
        do_sample=False,
        num_beams=1,
        temperature=None,
        top_p=None,
        top_k=None,
        eos_token_id=ends or None,
        pad_token_id=_padding(tokenizer),
        logits_processor=LogitsProcessorList([watch.see]),
        stopping_criteria=StoppingCriteriaList([watch.stop]),
    )
    lengths = watch.tokens.tolist()
    ended = time.perf_counter()
    rows = output[:, ids.shape[1] :].tolist()
    first = watch.first if watch.first is not None else ended
    return Answers(
        texts=[tokenizer.decode(row[:n], skip_special_tokens=True) for row, n in zip(rows, lengths, strict=True)],
        broken=watch.broken.tolist(),
        prompt_tokens=[len(prompt) for prompt in prompts],
        new_tokens=lengths,
        prefill_s=first - started,
        decode_s=ended - first,
    )


def _pad(prompts: Sequence[Sequence[int]], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask (1 = a token of the prompt), (B, longest), filled on the left."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), longest), padding)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return ids, mask


def _padding(tokenizer: Any) -> int:
    """Of a tokenizer without padding: the end of text; what it is does not matter, it is masked."""
    token: int | None = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return token or 0


def _ends(model: Any, tokenizer: Any, newline: bool) -> list[int]:
    """Tokens that end an answer: the model's own, else the tokenizer's; with `newline` that one and the tokenizer's."""
    known = None if newline else model.generation_config.eos_token_id
    known = tokenizer.eos_token_id if known is None else known
    ends = list(known) if isinstance(known, (list, tuple)) else [] if known is None else [known]
    return [*ends, tokenizer.encode("\n", add_special_tokens=False)[-1]] if newline else ends
