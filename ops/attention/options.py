"""The plain arguments of the attention operator, their values and what each stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pasa.ops.numerics.formats import OVERFLOWS, Overflow

PRECISIONS = ("pasa", "fp32", "partial", "fp16", "prescaled", "smooth_k")
RECOVERIES = ("exact", "paper")
SOFTMAXES = ("safe", "unbiased", "unbiased_paper")
ACCUMULATES = ("fp32", "fp16")
__all__ = ["ACCUMULATES", "OVERFLOWS", "PRECISIONS", "RECOVERIES", "SOFTMAXES", "AttentionOptions"]


@dataclass(frozen=True)
class AttentionOptions:
    """What an operator is told beside its tensors; `pasa.PasaConfig` validates it, backends read it."""

    precision: str = "pasa"
    recovery: str = "exact"
    beta: float | None = None
    block_q: int = 128
    block_k: int = 128
    softmax: str = "safe"
    overflow: Overflow = "inf"
    accumulate: str = "fp32"

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Its values in the operator's order. `dataclasses.asdict` would copy each, which takes 5 us."""
        return (
            self.precision,
            self.recovery,
            self.beta,
            self.block_q,
            self.block_k,
            self.softmax,
            self.overflow,
            self.accumulate,
        )
