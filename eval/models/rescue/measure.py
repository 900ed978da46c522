"""One greedy generation of one model: text, perplexity of the prompt, and whether the logits were numbers at all."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import pasa

ROWS_PER_CHUNK = 128
"""Rows of logits widened to FP32 at a time: 128 x 49,152 x 4 bytes = 25 MB beside the 100-200 MB they come from."""


@dataclass
class Generation:
    """Outcome of :func:`generate`.

    Attributes
    ----------
    tokens : list of int
        Greedy continuation, without the prompt; ends at the end-of-text token, if one came.
    text : str
        The same, decoded with special tokens visible.
    perplexity : float or None
        exp of the mean cross-entropy of prompt tokens 1..n-1, from the prefill's own logits; None if not finite.
    nonfinite_logits : float
        Share of the prefill's logits that are NaN or infinite, 0..1.
    stopped : str
        ``"length"``, ``"end of text"`` or ``"logits not finite"`` (argmax of NaN would repeat one token for ever).
    prefill_s, decode_s : float
        Seconds of the prefill, and of all decode steps together.
    scores : list of dict
        Per layer of the prefill, only where asked for: largest score before and after the shift, and counters.
    """

    tokens: list[int]
    text: str
    perplexity: float | None
    nonfinite_logits: float
    stopped: str
    prefill_s: float
    decode_s: float
    scores: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return plain containers, ready for JSON."""
        return asdict(self)


@torch.no_grad()
def generate(model: Any, tokenizer: Any, ids: torch.Tensor, new_tokens: int, *, diagnose: bool = False) -> Generation:
    """Run `model` on prompt `ids` (1, n), then continue greedily; one prefill serves text, perplexity and scores.

    Parameters
    ----------
    model : transformers model
        A causal language model, in evaluation mode.
    tokenizer
        Gives the end-of-text token and decodes.
    ids : Tensor
        (1, n) token ids on the model's device.
    new_tokens : int
        Upper bound on the continuation.
    diagnose : bool
        Record the scores of every :func:`pasa.attention` call of the prefill (the model must be patched).
    """
    started = time.perf_counter()
    if diagnose:
        with pasa.record_diagnostics() as records:
            output = model(input_ids=ids, use_cache=True)
        scores = [_summarise(record) for record in records]
    else:
        output, scores = model(input_ids=ids, use_cache=True), []
    last = output.logits[0, -1].float()  # also waits for the device
    finite = bool(torch.isfinite(last).all())
    prefill_s = time.perf_counter() - started
    losses, nonfinite = token_losses(output.logits[0], ids[0])
    loss = float(losses.double().mean())

    started = time.perf_counter()
    tokens, stopped = _continue(model, output.past_key_values, last, finite, new_tokens, tokenizer.eos_token_id)
    decode_s = time.perf_counter() - started
    perplexity = math.exp(loss) if math.isfinite(loss) else None
    return Generation(tokens, tokenizer.decode(tokens), perplexity, nonfinite, stopped, prefill_s, decode_s, scores)


def _continue(
    model: Any, cache: Any, logits: torch.Tensor, finite: bool, new_tokens: int, end: int | None
) -> tuple[list[int], str]:
    """Take the largest logit `new_tokens` times; stop early at `end` or when the logits are no numbers."""
    tokens: list[int] = []
    while True:
        tokens.append(int(logits.argmax()))
        if not finite:
            return tokens, "logits not finite"
        if tokens[-1] == end:
            return tokens, "end of text"
        if len(tokens) >= new_tokens:
            return tokens, "length"
        step = torch.tensor([[tokens[-1]]], device=logits.device)
        output = model(input_ids=step, past_key_values=cache, use_cache=True)
        logits, cache = output.logits[0, -1].float(), output.past_key_values
        finite = bool(torch.isfinite(logits).all())


def token_losses(logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return (cross-entropy of each of ids[1:], FP32, in nats; share of non-finite logits).

    Parameters
    ----------
    logits : Tensor (n, vocabulary)
    ids : Tensor (n,)
    """
    losses, nonfinite = [], 0
    for start in range(0, len(ids), ROWS_PER_CHUNK):
        rows = logits[start : start + ROWS_PER_CHUNK].float()
        nonfinite += int((~torch.isfinite(rows)).sum())
        targets = ids[start + 1 : start + 1 + ROWS_PER_CHUNK]
        losses.append(torch.nn.functional.cross_entropy(rows[: len(targets)], targets, reduction="none"))
    return torch.cat(losses), nonfinite / logits.numel()


def _summarise(record: Any) -> dict[str, Any]:
    """Reduce one diagnostics record, tensors of shape (B, Hq), to the layer's extremes and totals."""
    return {
        "max_score_before": float(record.max_score_before.max()),
        "max_score_after": float(record.max_score_after.max()),
        **{name: int(getattr(record, name).sum()) for name in ("nonfinite", "saturated", "rescued_tiles", "tiles")},
    }
