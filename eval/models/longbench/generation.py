"""Run prompts through a model: greedy answers of a batch, and counts of the scores that FP16 cannot store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pasa.eval.kit.attention_calls import AttentionCalls
from pasa.ops.numerics.formats import FORMATS

BEYOND_FP16 = FORMATS["fp16"].overflow_threshold  # 65,520: from here on rounding to FP16 gives infinity
ROWS = 512  # queries whose scores are formed at once: with 28 heads and 8,192 keys these are 470 MB
GREEDY = {"do_sample": False, "num_beams": 1, "temperature": None, "top_p": None, "top_k": None}  # None: unset


class _Watch:
    """Looks at the logits of every step: a logits processor and a stopping criterion of transformers in one."""

    def __init__(self, size: int, ends: Sequence[int], device: torch.device) -> None:
        self.ends = torch.tensor(ends, dtype=torch.long, device=device)
        self.ended = torch.zeros(size, dtype=torch.bool, device=device)
        self.broken = self.ended.clone()
        self.tokens = self.ended.long()
        self.first = 0.0  # time of the first logits

    def see(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Note which rows are NaN; after its end a row of a batch is padding, and its logits are ignored."""
        if self.first:
            self.ended |= torch.isin(ids[:, -1], self.ends)
        self.broken |= scores.isnan().any(-1) & ~self.ended
        self.tokens += ~(self.broken | self.ended)
        if not self.first:
            self.broken.cpu()  # waits for the device
            self.first = time.perf_counter()
        return scores

    def stop(self, ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
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

    size, longest = len(prompts), max(map(len, prompts))
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    ids = torch.tensor([[padding] * (longest - len(row)) + row for row in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts], device=model.device)
    ends = _ends(model, tokenizer, ends_at_newline)
    watch = _Watch(size, ends, ids.device)
    started = time.perf_counter()
    output = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=max_new_tokens,
        min_new_tokens=1 if ends_at_newline else None,
        eos_token_id=ends or None,
        pad_token_id=padding,
        logits_processor=LogitsProcessorList([watch.see]),
        stopping_criteria=StoppingCriteriaList([watch.stop]),
        **GREEDY,
    )
    rows, lengths, broken = output[:, longest:].tolist(), watch.tokens.tolist(), watch.broken.tolist()
    ended = time.perf_counter()
    return [
        {
            "pred": tokenizer.decode(row[:length], skip_special_tokens=True),
            "broken": breaks,
            "prompt_tokens": len(prompt),
            "new_tokens": length,
            "prefill_s": (watch.first - started) / size,
            "decode_s": (ended - watch.first) / size,
        }
        for prompt, row, length, breaks in zip(prompts, rows, lengths, broken, strict=True)
    ]


def _ends(model: Any, tokenizer: Any, newline: bool) -> list[int]:
    """Return the model's end tokens, else the tokenizer's; with `newline` the tokenizer's and the line break."""
    known = None if newline else model.generation_config.eos_token_id
    known = tokenizer.eos_token_id if known is None else known
    ends = list(known) if isinstance(known, (list, tuple)) else [] if known is None else [known]
    return [*ends, tokenizer.encode("\n", add_special_tokens=False)[-1]] if newline else ends


@torch.no_grad()
def count_overflow(model: Any, ids: Tensor) -> list[dict[str, Any]]:
    """Run a prompt (1, n) through a decoder that is patched with PASA; return :func:`count_scores` of each layer.

    The activations are those that PASA keeps finite. Without it, all are NaN behind the first layer that overflows.
    """
    layers: list[dict[str, Any]] = []
    with AttentionCalls(lambda q, k: layers.append(count_scores(q, k))):
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    return layers


def count_scores(q: Tensor, k: Tensor) -> dict[str, Any]:
    """Count over the visible pairs of causal q (B, Hq, S, D) and k (B, Hkv, S, D).

    Returns ``max_score`` (the largest unscaled abs(q.k), in FP32), ``overflows`` (scores that FP16 stores as infinity)
    and ``scores`` (all of them).
    """
    length, group = k.shape[2], q.shape[1] // k.shape[1]
    keys = k.float().repeat_interleave(group, 1).mT
    largest, beyond = 0.0, 0
    for start in range(0, length, ROWS):
        scores = (q[:, :, start : start + ROWS].float() @ keys).abs_().tril_(start)  # a masked score is 0
        largest = max(largest, float(scores.max()))
        beyond += int((scores >= BEYOND_FP16).sum())
    return {"max_score": largest, "overflows": beyond, "scores": q[..., 0].numel() * (length + 1) // 2}
