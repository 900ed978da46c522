"""One greedy generation of one model: text, perplexity of the prompt, share of logits that are not finite."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch

import pasa

ROWS_PER_CHUNK = 128
"""Rows of logits widened to FP32 at a time: 128 x 49,152 x 4 bytes = 25 MB beside the 100-200 MB they come from."""


@dataclass
class Generation:
    """The outcome of :func:`generate`."""

    tokens: list[int]  # greedy continuation, without the prompt; ends at the end-of-text token, if one came
    text: str  # the same, decoded with special tokens visible
    perplexity: float | None  # of prompt tokens 1..n-1, from the prefill's logits; None if not finite
    nonfinite_logits: float  # share of the prefill's logits that are NaN or infinite, 0..1
    stopped: str  # "length", "end of text" or "logits not finite" (argmax of NaN would repeat one token for ever)
    prefill_s: float
    decode_s: float  # all decode steps together
    scores: list[dict[str, Any]]  # per layer of the prefill, if patched


@torch.no_grad()
def generate(model: Any, tokenizer: Any, ids: torch.Tensor, new_tokens: int) -> Generation:
    """Run `model` on prompt `ids` (1, n), then continue greedily; one prefill serves text, perplexity and scores.

    If the model is patched, `scores` are those of every :func:`pasa.attention` call of the prefill.
    """
    started = time.perf_counter()
    with pasa.record_diagnostics() as records:  # of no call, unless the model is patched
        output = model(input_ids=ids, use_cache=True)
    output.logits[0, -1, -1].item()  # waits for the device
    prefill_s = time.perf_counter() - started
    losses, nonfinite = token_losses(output.logits[0], ids[0])
    loss = float(losses.double().mean())
    perplexity = math.exp(loss) if math.isfinite(loss) else None

    started = time.perf_counter()
    tokens, stopped = _continue(model, output, new_tokens, tokenizer.eos_token_id)
    decode_s, scores = time.perf_counter() - started, [_extremes(record) for record in records]
    return Generation(tokens, tokenizer.decode(tokens), perplexity, nonfinite, stopped, prefill_s, decode_s, scores)


def _continue(model: Any, output: Any, new_tokens: int, end: int | None) -> tuple[list[int], str]:
    """Take the largest logit `new_tokens` times; stop early at `end` or when the logits are not finite."""
    tokens: list[int] = []
    while True:
        logits = output.logits[0, -1].float()
        tokens.append(int(logits.argmax()))
        if not torch.isfinite(logits).all():
            return tokens, "logits not finite"
        if tokens[-1] == end:
            return tokens, "end of text"
        if len(tokens) >= new_tokens:
            return tokens, "length"
        step = torch.tensor([[tokens[-1]]], device=logits.device)
        output = model(input_ids=step, past_key_values=output.past_key_values, use_cache=True)


def token_losses(logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return the cross-entropy of each of ids[1:] (FP32, nats) and the share of non-finite logits (n, vocabulary)."""
    losses, nonfinite = [], 0
    for start in range(0, len(ids), ROWS_PER_CHUNK):
        rows = logits[start : start + ROWS_PER_CHUNK].float()
        nonfinite += int((~torch.isfinite(rows)).sum())
        targets = ids[start + 1 : start + 1 + ROWS_PER_CHUNK]
        losses.append(torch.nn.functional.cross_entropy(rows[: len(targets)], targets, reduction="none"))
    return torch.cat(losses), nonfinite / logits.numel()


def _extremes(record: Any) -> dict[str, Any]:
    """Return the largest scores of a layer, and its tiles."""
    largest = {name: float(getattr(record, name).max()) for name in ("max_score_before", "max_score_after")}
    return largest | {name: int(getattr(record, name).sum()) for name in ("rescued_tiles", "tiles")}
