"""Answers a batch of prompts greedily, with the times of prefill and decode apart."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch


class _Watch:
    """Looks at the logits of every step: a logits processor and a stopping criterion of transformers in one."""

    def __init__(self, size: int, ends: Sequence[int], device: torch.device) -> None:
        self.ends = torch.tensor(ends, dtype=torch.long, device=device)
        self.ended = torch.zeros(size, dtype=torch.bool, device=device)
        self.broken = torch.zeros(size, dtype=torch.bool, device=device)
        self.tokens = torch.zeros(size, dtype=torch.long, device=device)
        self.first: float | None = None

    def see(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Note which rows are NaN (a suppressed token is -inf, which is not NaN), and the time of the first logits.

        After its end a row of a batch is padding, and its logits are ignored.
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
        """End the rows that are broken, because the largest of NaN would be token 0 for ever."""
        return self.broken


@torch.no_grad()
def answer(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], max_new_tokens: int, *, ends_at_newline: bool = False
) -> list[dict[str, Any]]:
    """Continue prompts greedily with the model's own ``generate``, as LongBench does, padded on the left.

    With `ends_at_newline` (samsum) the tokenizer's end of text or a line break ends the answer, and its first token may
    be neither. Returns for each prompt ``pred`` (the text without special tokens), ``broken`` (logits were NaN; the
    answer ends before the token that they would have given), ``prompt_tokens``, ``new_tokens``, and its share of the
    batch's seconds: ``prefill_s`` to the first logits, ``decode_s`` from them to the end.
    """
    from transformers.generation import LogitsProcessorList, StoppingCriteriaList

    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    longest = max(map(len, prompts))
    ids = torch.tensor([[padding] * (longest - len(row)) + row for row in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts], device=model.device)
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
        pad_token_id=padding,
        logits_processor=LogitsProcessorList([watch.see]),
        stopping_criteria=StoppingCriteriaList([watch.stop]),
    )
    lengths = watch.tokens.tolist()
    ended = time.perf_counter()
    first = ended if watch.first is None else watch.first
    rows, broken = output[:, longest:].tolist(), watch.broken.tolist()
    return [
        {
            "pred": tokenizer.decode(rows[index][: lengths[index]], skip_special_tokens=True),
            "broken": broken[index],
            "prompt_tokens": len(prompt),
            "new_tokens": lengths[index],
            "prefill_s": (first - started) / len(prompts),
            "decode_s": (ended - first) / len(prompts),
        }
        for index, prompt in enumerate(prompts)
    ]


def _ends(model: Any, tokenizer: Any, newline: bool) -> list[int]:
    """Return the model's end tokens, else the tokenizer's; with `newline` the tokenizer's and the line break."""
    known = None if newline else model.generation_config.eos_token_id
    known = tokenizer.eos_token_id if known is None else known
    ends = list(known) if isinstance(known, (list, tuple)) else [] if known is None else [known]
    return [*ends, tokenizer.encode("\n", add_special_tokens=False)[-1]] if newline else ends
