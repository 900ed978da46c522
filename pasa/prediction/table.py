"""What a prediction says, head by head, worst first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Verdict = Literal["certain", "unknown", "at risk", "unlikely", "safe"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)  # worst first
PATCHED: tuple[Verdict, ...] = ("certain", "unknown", "at risk")
"""What `patch_pipeline(policy="auto")` patches; its guard watches the others."""

MEANINGS: Mapping[Verdict, str] = {
    "certain": "the constant part of some scores alone is beyond the limit, by more than inputs are likely to undo",
    "unknown": "no weight bounds these scores",
    "at risk": "the probable bound is beyond the limit",
    "unlikely": "the probable bound is within the limit, the proven one is not",
    "safe": "the proven bound is within the limit: whatever the input",
}


@dataclass(frozen=True)
class HeadPrediction:
    """One head, or a whole module where nothing can be said of its heads (`head` is None).

    Attributes
    ----------
    module : str
        Path of the attention module.
    head : int or None
    verdict, verdict_fp8 : str
        Of unscaled scores q.k in FP16 (65504: NPUs store them before scaling), and of scaled ones in E4M3 (448).
    proven : float
        Bound on |q.k| for every input.
    probable : float
        Bound on |q.k| with probability 1 - delta for the whole model, for inputs of uniform direction.
    certain : float
        Some |q.k| are above it with that probability.
    constant : float
        Part of q.k that no input changes.
    naive, interaction : float
        max |q| max |k|, and the bound that pairs q and k as the weights do; `proven` is the former under rotary
        embeddings, the smaller one without, and what FP16 can add to it by rounding.
    fp8_scale : float
        What scaled scores are divided by before E4M3, so that the probable bound takes 0.8 of its range.
    note : str
    """

    module: str
    head: int | None
    verdict: Verdict
    verdict_fp8: Verdict
    proven: float
    probable: float
    certain: float
    constant: float
    naive: float
    interaction: float
    fp8_scale: float
    note: str = ""


@dataclass(frozen=True)
class Prediction:
    """Rows of a model, worst first, and what they rest on.

    Attributes
    ----------
    model : str
    rows : tuple of HeadPrediction
    settings : dict
        ``delta``, ``limit``; ``parts``: by the prefix of each model its ``seq_len``, ``heads`` and ``layers``.
    skipped : tuple of (str, str)
        Parts of a pipeline that are not predicted, with the reason.
    """

    model: str
    rows: tuple[HeadPrediction, ...]
    settings: dict[str, Any]
    skipped: tuple[tuple[str, str], ...] = ()

    def modules(self, *verdicts: Verdict) -> tuple[str, ...]:
        """Modules one of whose heads has one of these verdicts, worst first; all modules when none is given."""
        wanted = verdicts or VERDICTS
        return tuple(dict.fromkeys(row.module for row in self.rows if row.verdict in wanted))

    def as_dict(self) -> dict[str, Any]:
        """Return plain containers, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        counts = ", ".join(f"{len(self.modules(each))} {each}" for each in VERDICTS if self.modules(each))
        lines = [f"{self.model}: {len(self.modules())} attention modules by their heads: {counts}"]
        lines += [
            f"  {row.verdict:8}  {row.module}{'' if row.head is None else f' head {row.head}'}: "
            f"probable {row.probable:,.0f}, proven {row.proven:,.0f}{' (' + row.note + ')' if row.note else ''}"
            for row in self.rows[:20]
        ]
        lines += [f"  skipped   {name}: {reason}" for name, reason in self.skipped]
        return "\n".join(lines)


def order(row: HeadPrediction) -> tuple[int, float, float]:
    """Sort key: worst first."""
    return VERDICTS.index(row.verdict), -row.probable, -row.proven
