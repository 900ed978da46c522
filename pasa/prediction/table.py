"""The result of a prediction: a table of heads with their bounds and verdicts, worst first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from pasa.ops.numerics.formats import FP16_MAX

Verdict = Literal["certain", "unknown", "at risk", "unlikely", "safe"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)  # worst first
PATCHED: tuple[Verdict, ...] = ("certain", "unknown", "at risk")
"""The verdicts whose modules `patch_pipeline(policy="auto")` patches; its guard watches the others."""

MEASURE = "measure it with pasa diagnose, or run pasa to-fp16"
"""Advice where a bound proves nothing."""

MEANINGS: Mapping[Verdict, str] = {
    "certain": "the constant part of some scores alone is beyond the limit, by more than inputs are likely to undo",
    "unknown": "no weight bounds these scores",
    "at risk": "the probable bound is beyond the limit",
    "unlikely": "the probable bound is within the limit, the proven one is not",
    "safe": "the proven bound is within the limit: whatever the input",
}


@dataclass(frozen=True)
class HeadPrediction:
    """The bounds and verdicts of one head, or of a whole module if its heads cannot be judged (`head` is None).

    Attributes
    ----------
    module : str
        Path of the attention module.
    head : int or None
    verdict, verdict_fp8 : str
        Verdicts on unscaled scores q.k in FP16 (limit 65504; NPUs store them before scaling), and on scaled scores in
        E4M3 (limit 448).
    proven : float
        Bound on |q.k| for every input.
    probable : float
        Bound on |q.k| that holds with probability 1 - delta for the whole model, if inputs have uniform directions.
    certain : float
        With the same probability, some |q.k| exceeds this value.
    constant : float
        Largest part of q.k that does not depend on the input.
    naive, interaction : float
        `naive` is max |q| max |k|; `interaction` is the bound with q and k paired as the weights pair them. `proven` is
        `naive` with rotary embeddings, and the smaller of the two without, plus what rounding to FP16 can add.
    fp8_scale : float
        Divisor of scaled scores before E4M3 that maps the probable bound to 0.8 of E4M3's range.
    note : str
        Condition or reason of the verdict; "" if there is none.
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
class StreamPrediction:
    """Proven bounds on one decoder layer outside of attention, or on a whole model if there are none.

    Attributes
    ----------
    layer : str
        Path of the layer, or of the model.
    residual : float
        Bound on the residual stream within the layer and after it, for every input; infinite if there is none, as
        behind attention whose values may pass 65504.
    mlp : float
        Bound on what the MLP reads, on gate and up, and on their product.
    verdict : {"safe", "not proven"}
        "safe" if both are within 65504. The bounds are loose, so "not proven" says nothing about real inputs.
    note : str
        Reason why there is no bound; "" if there is one.
    """

    layer: str
    residual: float
    mlp: float
    verdict: Literal["safe", "not proven"]
    note: str = ""


@dataclass(frozen=True)
class Prediction:
    """The rows of a model, worst first, with the settings that they were computed with.

    Attributes
    ----------
    model : str
    rows : tuple of HeadPrediction
    settings : dict
        ``delta``, ``limit``, and ``parts``, which maps the prefix of each model to its ``seq_len``, ``heads`` and
        ``layers``.
    skipped : tuple of (str, str)
        Parts of a pipeline without a prediction, each with the reason.
    streams : tuple of StreamPrediction
        Bounds on residual streams and MLPs, layer by layer; empty unless they were asked for.
    """

    model: str
    rows: tuple[HeadPrediction, ...]
    settings: dict[str, Any]
    skipped: tuple[tuple[str, str], ...] = ()
    streams: tuple[StreamPrediction, ...] = ()

    def modules(self, *verdicts: Verdict) -> tuple[str, ...]:
        """Return the modules with a head of one of these verdicts, worst first; all modules if no verdict is named."""
        chosen = verdicts or VERDICTS
        return tuple(dict.fromkeys(row.module for row in self.rows if row.verdict in chosen))

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
        return "\n".join([*lines, *(f"  {line}" for line in describe_streams(self.streams))])


def order(row: HeadPrediction) -> tuple[int, float, float]:
    """Return the sort key of a row: worst verdict first, then the largest bounds."""
    return VERDICTS.index(row.verdict), -row.probable, -row.proven


def describe_streams(streams: Sequence[StreamPrediction], limit: float = FP16_MAX) -> list[str]:
    """Return a line on residual streams and one on MLPs: the largest bound, and the first layer beyond the limit."""
    lines = [f"{each.layer}: residual stream and MLP: no bound: {each.note}" for each in streams if each.note]
    for part, words in {"residual": "residual stream", "mlp": "MLP"}.items():
        bounds = {each.layer: float(getattr(each, part)) for each in streams if not each.note}
        beyond = [layer for layer, bound in bounds.items() if not bound <= limit]
        if not bounds:
            continue
        text = f"{words}: bounded by {max(bounds.values()):,.0f}"
        lines.append(f"{text}, from {beyond[0]} on beyond 65504: not proven; {MEASURE}" if beyond else f"{text}: safe")
    return lines
