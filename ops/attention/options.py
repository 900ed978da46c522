"""The plain arguments of the attention operator, and the values that each accepts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from pasa.ops.numerics.formats import OVERFLOWS, Overflow

CHOICES: dict[str, tuple[str, ...]] = {  # the default first
    "precision": ("pasa", "fp32", "partial", "fp16", "prescaled", "smooth_k"),
    "recovery": ("exact", "paper"),
    "softmax": ("safe", "unbiased", "unbiased_paper"),
    "overflow": OVERFLOWS,
    "accumulate": ("fp32", "fp16"),
}


@dataclass(frozen=True)
class AttentionOptions:
    """Hold and validate what an operator call needs beside its tensors; `pasa.PasaConfig` documents the values.

    Raises
    ------
    ValueError
        For a value that is not accepted, with its name.
    """

    precision: str = "pasa"
    recovery: str = "exact"
    beta: float | None = None
    block_q: int = 128
    block_k: int = 128
    softmax: str = "safe"
    overflow: Overflow = "inf"
    accumulate: str = "fp32"
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name}={value!r} is not one of {allowed}")
        for name in ("block_q", "block_k"):
            value = getattr(self, name)
            # More keys in a block would push their equal shares (accumulate="fp16") below 2^-16,
            # where FP16 has few bits.
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**16:
                raise ValueError(f"{name}={value!r} is not an integer from 1 to 65536")
        if not isinstance(self.batch_invariant, bool):
            raise ValueError(f"batch_invariant={self.batch_invariant!r} is neither True nor False")
        if self.beta is None:
            return
        if self.precision != "pasa" or self.recovery != "paper":
            raise ValueError(f"beta={self.beta!r} is only used by precision='pasa', recovery='paper'")
        if not isinstance(self.beta, (int, float)) or not 0 <= self.beta < 1:
            raise ValueError(f"beta={self.beta!r} is not in [0, 1)")

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Return the values in the order of the fields, which is the operator's; `dataclasses.asdict` takes 5 us."""
        return tuple([getattr(self, name) for name in NAMES])


NAMES = tuple(each.name for each in fields(AttentionOptions))
