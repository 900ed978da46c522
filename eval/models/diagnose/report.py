"""The words, cells and tables of a diagnosis: the terminal, Markdown and the page are made of the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from pasa.eval.kit.tables import Table, percent
from pasa.eval.models.diagnose.statistics import FP16_MAX, MODULES, POINTS

Record = dict[str, Any]
INFINITE = "infinite"
SHOWN = 10  # heads in the terminal and in Markdown; JSON has all
SHORT = ("layer", "head", "peak QKᵀ", "× 65504", "stored", "bias", "resonance")  # what 80 characters hold


def number(value: float | None, form: str = ",.4g") -> str:
    """Return four digits of a number, as a stored result has them; it has None in place of infinity."""
    if value is None or not math.isfinite(value):
        return INFINITE
    whole = f"{float(f'{value:.4g}'):,.0f}" if abs(value) >= 1000 else format(value, form)
    return whole.replace("-", "−")


def ratio(score: float) -> str:
    """Return a score over the largest number of FP16."""
    value = score / FP16_MAX
    return "< 0.001" if value < 0.001 else f"{value:.3f}" if value < 0.1 else f"{value:,.2f}"


def span_text(pair: Sequence[float]) -> str:
    """Return a range."""
    return f"{number(pair[0])} … {number(pair[1])}"


def _digits(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}".replace("-", "−")


def _degrees(phase: int | None) -> str:
    return "–" if phase is None else f"{phase}°"


def _share(part: int, whole: int, without: str) -> str:
    return percent(part / whole) if whole else without


COLUMNS: dict[str, tuple[Callable[[Record], str], str]] = {
    "layer": (lambda r: r["module"], ""),
    "head": (lambda r: str(r["head"]), ""),
    "peak QKᵀ": (lambda r: number(r["max_score"]), "largest magnitude of an unscaled score, of any call"),
    "× 65504": (lambda r: ratio(r["max_score"]), "1 is where FP16 ends"),
    "beyond": (lambda r: percent(r["overflow_share"]), "share of the sampled scores beyond 65504"),
    "stored": (lambda r: number(r["stored"]), "largest score as PASA stores it, in its tile's own units"),
    "in FP32": (lambda r: _share(r["rescued_tiles"], r["tiles"], "–"), "tiles that PASA keeps in FP32"),
    "K": (lambda r: span_text(r["keys"]), "range of the keys"),
    "K′": (lambda r: span_text(r["shifted_keys"]), "range of the shifted keys, in the units of K"),
    "bias": (lambda r: _digits(r["sequence_bias"]), "length of the mean key over that of the keys, 1 if all are alike"),
    "resonance": (lambda r: _digits(r["resonance"]), "correlation of mean query and mean key along the head dimension"),
    "phase": (lambda r: _degrees(r["phase"]), "0° in phase, 180° in opposition, – chance"),
    "call": (lambda r: str(r["call"]), "of the module, from 1, with the largest score"),
    "queries × keys": (lambda r: f"{r['queries']:,} × {r['keys_seen']:,}", ""),
}
"""How a record becomes a cell of each column, and what the column means."""


def rows(records: Sequence[Record], columns: Sequence[str] = tuple(COLUMNS)) -> list[list[str]]:
    """Return a row of text for every record."""
    return [[COLUMNS[name][0](record) for name in columns] for record in records]


def meanings(columns: Sequence[str]) -> str:
    """Return the meanings of the columns, a sentence each."""
    return " ".join(f"{name}: {COLUMNS[name][1]}." for name in columns if COLUMNS[name][1])


def head_table(result: Record, columns: Sequence[str] = SHORT, most: int = SHOWN) -> Table:
    """Return the worst heads, a row each."""
    left = len(result["records"]) - most
    note = f"{meanings(columns)} {left} more in the JSON." if left > 0 else meanings(columns)
    title = f"{result['model']}: heads, worst first"
    return Table(title, list(columns), rows(result["records"][:most], columns), note, wraps="layer")


def verdict(result: Record) -> str:
    """Return which heads overflow, by how much, what PASA leaves of it, and what breaks without it."""
    summary, worst = result["summary"], result["summary"]["worst"]
    if worst is None:
        return "No attention was seen."
    times = f"{number(worst['max_score'])}, {ratio(worst['max_score'])} times FP16's largest number"
    where = f"{times} ({worst['module']}, head {worst['head']})."
    if summary["heads_beyond"]:
        first = (
            f"{summary['heads_beyond']} of {summary['heads']} heads, in {summary['modules_beyond']} of "
            f"{summary['modules']} layers, form scores that FP16 cannot hold: up to {where}"
        )
    else:
        first = f"No score of {summary['heads']} heads in {summary['modules']} layers leaves FP16: at most {where}"
    largest = number(summary["stored"])
    stored = "as infinite only those of weight 0" if largest == INFINITE else f"none larger than {largest}"
    kept = _share(summary["rescued_tiles"], summary["tiles"], "none")
    return " ".join([first, f"PASA stores {stored} and keeps {kept} of the tiles in FP32.", *_what_breaks(result)])


def _what_breaks(result: Record) -> list[str]:
    """Return a sentence for every run that was not finite, and for the one with FP16 scores in any case."""
    texts = {
        "own": "The model breaks by itself, first in {}.",
        "pasa": "With PASA {} is the first to break.",
        "fp16": "With scores stored in FP16, {} is the first to break.",
    }
    broken = {name: result["runs"][name]["first_nonfinite"] for name in texts}
    sentences = [
        text.format(f"{first['module']} (call {first['call']} of its model)")
        for name, text in texts.items()
        if (first := broken[name])
    ]
    return sentences if broken["fp16"] else [*sentences, "With scores stored in FP16 all modules stay finite."]


def how_measured(result: Record) -> list[str]:
    """Return method and limits, a paragraph each."""
    settings, made = result["settings"], []
    if result["fixture"]:
        made = ["The overflow is made: biases in q and k add a constant to the scores, which softmax ignores."]
    return [
        *made,
        "Scores are looked at in a run with PASA, which does not overflow, so they are those of healthy activations. "
        "The largest score is taken over all pairs that a mask leaves, of all calls.",
        f"Ranges, shares, bias and resonance are of the call with the largest score, from at most "
        f"{settings['rows']} queries and {settings['batch']} batch entries, evenly spread, against all keys; a pair "
        "that a mask hides counts, since it is formed and stored nevertheless. Such samples can miss the largest pair.",
        "A single key has no bias or resonance of its own: softmax makes its weight 1 whatever its score.",
        f"Matrices are those of the worst head of each of the {MODULES} worst layers, at most {POINTS} × {POINTS} "
        "cells, each the value of largest magnitude in it.",
        f"The first module to break has finite inputs and an output that is not. "
        f"{result['note'][0].upper()}{result['note'][1:]}.",
        cost(result),
    ]


def cost(result: Record) -> str:
    """Return what looking takes: it is done in the second run."""
    own, probed = (result["runs"][name]["seconds"] for name in ("own", "pasa"))
    return (
        f"One run took {own:.1f} s with the model's own attention and {probed:.1f} s with PASA emulated and looked at."
    )


def origin(result: Record) -> str:
    """Return where and with which versions a run was made."""
    machine = result["environment"]
    threads = f"{machine['threads']} thread{'s' * (machine['threads'] > 1)}"
    return (
        f"({machine['device']}, {machine['processor']}, {threads}; torch {machine['torch']}, "
        f"transformers {machine['transformers']}, pasa {machine['pasa']}, commit {machine['commit']}.)"
    )


def report(result: Record) -> list[Table | str]:
    """Return the worst heads, the verdict, and how it was measured."""
    method = "\n".join(f"- {line}" for line in how_measured(result))
    return [head_table(result), verdict(result), method, origin(result)]
