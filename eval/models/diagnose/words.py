"""What a diagnosis says, in words and cells: the terminal, Markdown and the page are made of the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pasa.eval.kit.tables import percent
from pasa.eval.models.diagnose.maps import MODULES, POINTS
from pasa.eval.models.diagnose.statistics import FP16_MAX

Record = dict[str, Any]
INFINITE = "infinite"


@dataclass(frozen=True)
class Column:
    """How a record becomes a cell, and what the column means."""

    cell: Callable[[Record], str]
    meaning: str = ""


def number(value: float | None, form: str = ",.4g") -> str:
    """Four digits of a number, as a stored result has them; it has None in place of infinity."""
    if value is None or not math.isfinite(value):
        return INFINITE
    whole = f"{float(f'{value:.4g}'):,.0f}" if abs(value) >= 1000 else format(value, form)
    return whole.replace("-", "−")


def ratio(score: float) -> str:
    """A score over the largest number of FP16."""
    value = score / FP16_MAX
    return "< 0.001" if value < 0.001 else f"{value:.3f}" if value < 0.1 else f"{value:,.2f}"


def span(pair: Sequence[float]) -> str:
    """A range."""
    return f"{number(pair[0])} … {number(pair[1])}"


def _optional(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form).replace("-", "−")


COLUMNS = {
    "layer": Column(lambda r: r["module"]),
    "head": Column(lambda r: str(r["head"])),
    "peak QKᵀ": Column(lambda r: number(r["max_score"]), "largest magnitude of an unscaled score, of any call"),
    "× 65504": Column(lambda r: ratio(r["max_score"]), "1 is where FP16 ends"),
    "beyond": Column(lambda r: percent(r["overflow_share"]), "share of the sampled scores beyond 65504"),
    "stored": Column(lambda r: number(r["stored"]), "largest score as PASA stores it, in its tile's own units"),
    "in FP32": Column(
        lambda r: percent(r["rescued_tiles"] / r["tiles"]) if r["tiles"] else "–", "tiles that PASA keeps in FP32"
    ),
    "K": Column(lambda r: span(r["keys"]), "range of the keys"),
    "K′": Column(lambda r: span(r["shifted_keys"]), "range of the shifted keys, in the units of K"),
    "bias": Column(
        lambda r: _optional(r["sequence_bias"], ".3f"),
        "length of the mean key over that of the keys, 1 if all are alike",
    ),
    "resonance": Column(
        lambda r: _optional(r["resonance"], ".3f"), "correlation of mean query and mean key along the head dimension"
    ),
    "phase": Column(
        lambda r: "–" if r["phase"] is None else f"{r['phase']}°", "0° in phase, 180° in opposition, – chance"
    ),
    "call": Column(lambda r: str(r["call"]), "of the module, from 1, with the largest score"),
    "queries × keys": Column(lambda r: f"{r['queries']:,} × {r['keys_seen']:,}"),
}


def rows(records: Sequence[Record], columns: Sequence[str] = tuple(COLUMNS)) -> list[list[str]]:
    """A row of text for every record."""
    return [[COLUMNS[name].cell(record) for name in columns] for record in records]


def meanings(columns: Sequence[str] = tuple(COLUMNS)) -> str:
    """What the columns mean, a sentence each."""
    return " ".join(f"{name}: {COLUMNS[name].meaning}." for name in columns if COLUMNS[name].meaning)


def verdict(result: dict[str, Any]) -> str:
    """Which heads overflow, by how much, what PASA leaves of it, and what breaks without it."""
    found, runs = result["summary"], result["runs"]
    if found["worst"] is None:
        return "No attention was seen."
    worst = found["worst"]
    where = f"{worst['module']}, head {worst['head']}"
    times = f"{number(worst['max_score'])}, {ratio(worst['max_score'])} times FP16's largest number"
    if found["heads_beyond"]:
        first = (
            f"{found['heads_beyond']} of {found['heads']} heads, in {found['modules_beyond']} of {found['modules']} "
            f"layers, form scores that FP16 cannot hold: up to {times} ({where})."
        )
    else:
        first = (
            f"No score of {found['heads']} heads in {found['modules']} layers leaves FP16: at most {times} ({where})."
        )
    return " ".join([first, _what_pasa_leaves(found), *_what_breaks(runs)])


def _what_pasa_leaves(found: dict[str, Any]) -> str:
    kept = percent(found["rescued_tiles"] / found["tiles"]) if found["tiles"] else "none"
    largest = number(found["stored"])
    stored = "as infinite only those of weight 0" if largest == INFINITE else f"none larger than {largest}"
    return f"PASA stores {stored} and keeps {kept} of the tiles in FP32."


def _what_breaks(runs: dict[str, Any]) -> list[str]:
    """A sentence for every run that was not finite, and for the ordinary one in any case."""
    texts = {
        "own": "The model breaks by itself, first in {place}.",
        "pasa": "With PASA {place} is the first to break.",
        "fp16": "With scores stored in FP16, {place} is the first to break.",
    }
    said = [text.format(place=place(first)) for name, text in texts.items() if (first := runs[name]["first_nonfinite"])]
    return said if runs["fp16"]["first_nonfinite"] else [*said, "With scores stored in FP16 all modules stay finite."]


def place(first: dict[str, Any]) -> str:
    """Where a run broke."""
    return f"{first['module']} (call {first['call']} of its model)"


def how_measured(result: dict[str, Any]) -> list[str]:
    """Method and limits, a paragraph each."""
    settings = result["settings"]
    lines = [
        "Scores are looked at in a run with PASA, which does not overflow, so they are those of healthy activations. "
        "The largest score is taken over all pairs that a mask leaves, of all calls.",
        f"Ranges, shares, bias and resonance are of the call with the largest score, from at most "
        f"{settings['rows']} queries and {settings['batch']} batch entries, evenly spread, against all keys; a pair "
        "that a mask hides counts, since it is formed and stored all the same. Such samples can miss the largest pair.",
        "A single key has no bias or resonance of its own: softmax makes its weight 1 whatever its score.",
        f"Matrices are those of the worst head of each of the {MODULES} worst layers, at most {POINTS} × {POINTS} "
        "cells, each the value of largest magnitude in it.",
        f"The first module to break has finite inputs and an output that is not. "
        f"{result['note'][0].upper()}{result['note'][1:]}.",
        cost(result["runs"]),
    ]
    if result["fixture"]:
        lines.insert(0, "The overflow is made: biases in q and k add a constant to the scores, which softmax ignores.")
    return lines


def cost(runs: dict[str, Any]) -> str:
    """What looking takes: it is done in the second run."""
    own, looked = runs["own"]["seconds"], runs["pasa"]["seconds"]
    return (
        f"One run took {own:.1f} s with the model's own attention and {looked:.1f} s with PASA emulated and looked at."
    )


def origin(result: dict[str, Any]) -> str:
    """Where and with what it was run."""
    machine = result["environment"]
    threads = f"{machine['threads']} thread{'s' * (machine['threads'] > 1)}"
    return (
        f"({machine['device']}, {machine['processor']}, {threads}; torch {machine['torch']}, "
        f"transformers {machine['transformers']}, pasa {machine['pasa']}, commit {machine['commit']}.)"
    )
