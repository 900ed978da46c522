"""The plain arguments of the attention operator, their values and what each stands for."""

from __future__ import annotations

from dataclasses import dataclass

PRECISIONS = ("pasa", "fp32", "partial", "fp16", "prescaled", "smooth_k")
RECOVERIES = ("exact", "paper")
SOFTMAXES = ("safe",)
OVERFLOWS = ("inf", "saturate")
ACCUMULATES = ("fp32", "fp16")


@dataclass(frozen=True)
class AttentionOptions:
    """What an operator is told beside its tensors; `pasa.PasaConfig` validates it, backends read it."""

    precision: str = "pasa"
    recovery: str = "exact"
    beta: float | None = None
    block_q: int = 128
    block_k: int = 128
    softmax: str = "safe"
    overflow: str = "inf"
    accumulate: str = "fp32"
