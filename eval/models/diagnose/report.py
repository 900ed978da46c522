"""The words, cells and tables of a diagnosis: the terminal, Markdown and the page are made of the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from pasa.eval.kit.device import origin
from pasa.eval.kit.tables import Table, percent
from pasa.ops.numerics.formats import FORMATS

FP16_MAX = FORMATS["fp16"].max
Record = dict[str, Any]
SHOWN = 10  # heads in the terminal and in Markdown; JSON has all
SHORT = ("layer", "head", "peak QKᵀ", "× 65504", "stored", "bias", "resonance")  # what 80 characters hold


BREAKS = {
    "own": "The model breaks by itself, first in {}.",
    "pasa": "With PASA {} is the first to break.",
    "fp16": "With scores stored in FP16, {} is the first to break.",
}


def number(value: float | None) -> str:
    """Return four digits of a number; None stands for infinity in a stored result."""
    if value is None or not math.isfinite(value):
        return "infinite"
    return (f"{float(f'{value:.4g}'):,.0f}" if abs(value) >= 1000 else f"{value:.4g}").replace("-", "−")


def ratio(score: float) -> str:
    """Return a score over the largest number of FP16."""
    value = score / FP16_MAX
    return "< 0.001" if value < 0.001 else f"{value:.3f}" if value < 0.1 else f"{value:,.2f}"


def signed(value: float | None, form: str = ".3f", unit: str = "") -> str:
    """Return the number with a real minus sign; – for None."""
    return "–" if value is None else f"{value:{form}}{unit}".replace("-", "−")


def _tiles_in_fp32(r: Record) -> str:
    return percent(r["rescued_tiles"] / r["tiles"]) if r["tiles"] else "–"


COLUMNS: dict[str, tuple[Callable[[Any], str], str]] = {
    "layer": (lambda r: r["module"], ""),
    "head": (lambda r: str(r["head"]), ""),
    "peak QKᵀ": (lambda r: number(r["max_score"]), "largest magnitude of an unscaled score, of any call"),
    "× 65504": (lambda r: ratio(r["max_score"]), "1 is where FP16 ends"),
    "beyond": (lambda r: percent(r["overflow_share"]), "share of the sampled scores beyond 65504"),
    "stored": (lambda r: number(r["stored"]), "largest score as PASA stores it, in its tile's own units"),
    "in FP32": (_tiles_in_fp32, "tiles that PASA keeps in FP32"),
    "K": (lambda r: " … ".join(map(number, r["keys"])), "range of the keys"),
    "K′": (lambda r: " … ".join(map(number, r["shifted_keys"])), "range of the shifted keys, in the units of K"),
    "bias": (lambda r: signed(r["sequence_bias"]), "length of the mean key over that of the keys, 1 if all are alike"),
    "resonance": (lambda r: signed(r["resonance"]), "correlation of mean query and mean key along the head dimension"),
    "phase": (lambda r: signed(r["phase"], "d", "°"), "0° in phase, 180° in opposition, – chance"),
    "call": (lambda r: str(r["call"]), "of the module, from 1, with the largest score"),
    "queries × keys": (lambda r: f"{r['queries']:,} × {r['keys_seen']:,}", ""),
}
"""How a record becomes a cell of each column, and what the column means."""
OTHERS = ("layer", "head", *(name for name in COLUMNS if name not in SHORT))  # in Markdown, in a second table


def meanings(columns: Sequence[str]) -> str:
    """Return the meanings of the columns, a sentence each."""
    return " ".join(f"{name}: {COLUMNS[name][1]}." for name in columns if COLUMNS[name][1])


def head_table(result: Record, columns: Sequence[str] = SHORT, most: int = SHOWN) -> Table:
    """Return the worst heads, a row each."""
    left = len(result["records"]) - most
    note = f"{meanings(columns)} {left} more in the JSON." if left > 0 else meanings(columns)
    cells = {name: COLUMNS[name][0] for name in columns}
    return Table.of(f"{result['model']}: heads, worst first", result["records"][:most], cells, note, wraps="layer")


def verdict(result: Record) -> str:
    """Return which heads overflow, by how much, what PASA leaves of it, and what breaks without it."""
    summary, worst = result["summary"], result["summary"]["worst"]
    if worst is None:
        return "No attention was seen."
    first = "No score of {heads} heads in {modules} layers leaves FP16: at most"
    if summary["heads_beyond"]:
        first = "{heads_beyond} of {heads} heads, in {modules_beyond} of {modules} layers, form scores that "
        first += "FP16 cannot hold: up to"
    largest = number(summary["stored"])
    stored = "as infinite only those of weight 0" if largest == "infinite" else f"none larger than {largest}"
    sentences = [
        f"{first.format(**summary)} {number(worst['max_score'])}, {ratio(worst['max_score'])} times FP16's largest "
        f"number ({worst['module']}, head {worst['head']}).",
        f"PASA stores {stored} and keeps {_tiles_in_fp32(summary)} of the tiles in FP32.",
    ]
    for name, text in BREAKS.items():
        if broken := result["runs"][name]["first_nonfinite"]:
            sentences.append(text.format(f"{broken['module']} (call {broken['call']} of its model)"))
        elif name == "fp16":
            sentences.append("With scores stored in FP16 all modules stay finite.")
    return " ".join(sentences)


def how_measured(result: Record) -> list[str]:
    """Return method and limits, a paragraph each."""
    settings, made = result["settings"], "The overflow is made: biases in q and k add a constant to the scores."
    return [
        *[made] * bool(result["fixture"]),
        "Scores are those of healthy activations: they are recorded in a run with PASA, which does not overflow. The "
        "largest score is taken over all pairs that a mask leaves, of all calls.",
        f"Other numbers are of the call with the largest score, from at most {settings['rows']} queries and "
        f"{settings['batch']} batch entries against all keys, hidden by a mask or not. They can miss the largest pair.",
        "A single key has no bias or resonance of its own: softmax makes its weight 1 whatever its score.",
        "The first module to break has finite inputs and an output that is not.",
        cost(result),
    ]


def cost(result: Record) -> str:
    """Return what recording takes: it is done in the second run."""
    own, probed = (result["runs"][name]["seconds"] for name in ("own", "pasa"))
    threads = result["environment"]["threads"]
    return (
        f"On {threads} thread{'s' * (threads > 1)} one run took {own:.1f} s with the model's own attention and "
        f"{probed:.1f} s with PASA emulated and recorded."
    )


def report(result: Record) -> list[Table | str]:
    """Return the worst heads, the verdict, and how it was measured."""
    method = "\n".join(f"- {line}" for line in how_measured(result))
    return [head_table(result), verdict(result), method, origin(result)]
