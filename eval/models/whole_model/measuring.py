"""Compares a language model in some precision with the same model in FP32, token by token."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pasa.first_nonfinite import NonFiniteWatch

FEW_ROWS = 16  # torch's FP16 products with so few rows, as in decoding, are as fast as FP32's
ROWS = 4  # of logits that are in FP64 at a time: 8 MB for 262,144 tokens, which caches hold
FP16_MAX = torch.finfo(torch.float16).max


class TensorCoreProducts(TorchFunctionMode):
    """Compute FP16 linear layers from FP16 operands with FP32 sums, rounded to FP16 once, as tensor cores do.

    torch's own FP16 product on a CPU does the same, 4 times as slowly where the CPU has no FP16 instructions. Values
    beyond FP16 become infinite in both.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace `torch.nn.functional.linear` of FP16 tensors on a CPU alone."""
        linear = torch.nn.functional.linear
        if func is not linear or kwargs or args[0].dtype != torch.float16 or args[0].device.type != "cpu":
            return func(*args, **(kwargs or {}))
        x, weight, bias = (*args, None)[:3]
        if x.shape[:-1].numel() <= FEW_ROWS:
            return linear(x, weight, bias)
        return linear(x.float(), weight.float(), bias if bias is None else bias.float()).half()


@dataclass
class Comparison:
    """Sums over the tokens that have been compared with FP32."""

    tokens: int = 0
    nonfinite_logits: int = 0
    logits: int = 0
    losses: list[float] = field(default_factory=list)
    differing: list[float] = field(default_factory=list)  # FP32's gap in nats where the most probable token differs
    divergences: list[float] = field(default_factory=list)

    def add(self, logits: torch.Tensor, ids: torch.Tensor, reference: torch.Tensor | None) -> None:
        """Add a chunk: logits (n, vocabulary) of ids (n,), which predict n - 1 tokens, and FP32's logits.

        Losses and divergences are taken in FP64.
        """
        self.tokens += len(ids) - 1
        self.logits += logits[:-1].numel()
        blocks = range(0, len(ids) - 1, ROWS)
        for rows in (slice(start, min(start + ROWS, len(ids) - 1)) for start in blocks):
            ours = logits[rows]
            self.nonfinite_logits += int((~torch.isfinite(ours)).sum())
            q = ours.double().log_softmax(-1)
            self.losses += (-q.gather(1, ids[1:][rows, None])[:, 0]).tolist()
            if reference is not None:
                p = reference[rows].double().log_softmax(-1)
                best = p.topk(2)
                differs = ours.argmax(-1) != best.indices[:, 0]
                self.differing += (best.values[:, 0] - best.values[:, 1])[differs].tolist()
                self.divergences += (p.exp() * (p - q)).sum(-1).tolist()

    def summary(self, compared: bool) -> dict[str, Any]:
        """Return means; None for those that NaN leaves without meaning."""
        loss, finite = math.fsum(self.losses) / self.tokens, not self.nonfinite_logits
        return {
            "tokens": self.tokens,
            "nonfinite_logits": self.nonfinite_logits / self.logits,
            "loss": loss if finite else None,
            "perplexity": math.exp(loss) if finite else None,
            "top1_agreement": 1 - len(self.differing) / self.tokens if compared and finite else None,
            "top1_gaps": sorted(self.differing) if compared and finite else None,
            "kl": math.fsum(self.divergences) / self.tokens if compared and finite else None,
            "kl_max": max(self.divergences) if compared and finite else None,
        }


@contextmanager
def residual_peaks(layers: Sequence[torch.nn.Module]) -> Iterator[list[float]]:
    """Yield a list that holds, for each layer, the largest magnitude of the residual stream that it has returned."""
    peaks = [0.0] * len(layers)

    def record(index: int, module: Any, args: Any, output: Any) -> None:
        stream = output[0] if isinstance(output, tuple) else output
        peaks[index] = max(peaks[index], float(stream.nan_to_num(math.inf).abs().max()))

    with ExitStack() as stack:
        for index, layer in enumerate(layers):
            stack.callback(layer.register_forward_hook(partial(record, index)).remove)
        yield peaks


@torch.no_grad()
def measure(
    model: Any, chunks: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Run a model on chunks of ids; return its record and, if `reference` (FP32's logits) is empty, its logits.

    The first module with a non-finite output is looked for in every module and chunk. FP32's record says in
    ``rounded_logits`` what rounding its logits to FP16 costs, which no FP16 model can undercut.
    """
    started, comparison, rounded, kept = time.perf_counter(), Comparison(), Comparison(), []
    with NonFiniteWatch({"": model}) as watch, residual_peaks(model.get_decoder().layers) as peaks:
        for index, ids in enumerate(chunks):
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
            comparison.add(logits, ids, reference[index] if reference else None)
            if not reference:
                rounded.add(logits.half(), ids, logits)
                kept.append(logits)
    record = {
        "first_nonfinite": watch.first,
        "residual_peak": max(peaks),
        "layer_peaks": peaks,
        "layers_beyond_fp16": sum(not peak <= FP16_MAX for peak in peaks),
        **comparison.summary(bool(reference)),
        **({} if reference else {"rounded_logits": rounded.summary(compared=True)}),
        "seconds": round(time.perf_counter() - started, 1),
    }
    return record, kept


@torch.no_grad()
def best_gaps(model: Any, ids: torch.Tensor, tokens: Sequence[int]) -> list[float]:
    """Return, for each of the `tokens` that follow ids (n,), how far the two best logits are apart there, in nats."""
    whole = torch.cat([ids, torch.tensor(list(tokens), dtype=ids.dtype, device=ids.device)])
    best = model(input_ids=whole[None], use_cache=False).logits[0, len(ids) - 1 : -1].double().topk(2).values
    return [float(gap) for gap in best[:, 0] - best[:, 1]]


def compare_texts(tokens: Sequence[int], reference: Sequence[int], gaps: Sequence[float]) -> dict[str, Any]:
    """Return how many greedy tokens equal FP32's, and FP32's gap in nats where they first differ (None if nowhere)."""
    equal = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(tokens, reference, strict=False))))
    same = equal == len(reference) == len(tokens)
    return {"greedy_equal": equal, "greedy_gap": None if same or equal >= len(gaps) else gaps[equal]}
