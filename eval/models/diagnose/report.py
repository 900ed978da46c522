"""The words, tables and drawings of a diagnosis: the terminal, Markdown and the page are made of the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from pasa.eval.kit.device import origin
from pasa.eval.kit.tables import Column, Table, percent
from pasa.eval.models.diagnose.peaks import advice
from pasa.eval.models.diagnose.streams import PARTS, REMEDY, beyond, largest, peak
from pasa.ops.numerics.formats import FP16_MAX

Record = dict[str, Any]
SHOWN = 10  # heads in the terminal and in Markdown; JSON has all
STREAMS = 5  # blocks outside of attention, in the terminal, in Markdown and unfolded on the page
SHORT = ("layer", "head", "peak QKᵀ", "× 65504", "stored", "bias", "resonance")  # what 80 characters hold

LETTER, CELL, LINE = 6.2, 26, 16  # pixels: width of a letter, width and height of a cell
SHORT_PART = 9  # letters: self_attn
LEGEND = {"≤ 0.001": 0.001, "0.01": 0.01, "0.1": 0.1, "1": 1.0, "> 1": 1.001, "≥ 10": 10.0}
STYLE = (
    "svg.map{font:11px system-ui,sans-serif;color:#1b1f24}.map text{fill:currentColor}"
    ".within{fill:#2f6fb5}.beyond{fill:#c0271d;stroke:currentColor}"
    "@media(prefers-color-scheme:dark){svg.map{color:#e6e9ec}}"
)
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
    "stored": (lambda r: number(r["stored"]), "largest distance of a score from its row's reference, as stored"),
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
STREAM_COLUMNS: dict[str, Column] = {
    "layer": "layer",
    "residual stream": lambda r: number(r["residual"]),
    "MLP": lambda r: "–" if r["mlp"] is None else number(r["mlp"]),
    "× 65504": lambda r: ratio(peak(r)),
    "margin": lambda r: number(FP16_MAX / peak(r)) if peak(r) else "–",
}
STREAM_NOTE = (
    "residual stream: largest magnitude that the layer's norms read or that it returns. MLP: largest magnitude that "
    "enters a product with weights outside of attention, such as the product of gate and up; in a ResNet block, what "
    "its convolutions read. × 65504: the larger of the two; 1 is where FP16 ends. margin: 65504 over it."
)
STREAM_METHOD = (
    "Residual streams and MLPs are those of the run with the model's own attention, repeated in FP32 if the model "
    "breaks in FP16. Sums within a layer that no norm reads are not seen."
)
MAP = "![Largest score of every head over 65504](diagnose.svg)"
FOLDED = ("layer", "head", "K", "K′", "phase", "call", "queries × keys")  # on the page, in a table that is folded away
PAGE = ("layer", "head", *(name for name in COLUMNS if name not in FOLDED))
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
    return " ".join(filter(None, [*sentences, stream_verdict(result)]))


def leaves_outside(result: Record) -> bool:
    """Return whether a value outside of attention passes 65504."""
    records = result.get("streams") or []
    return bool(result["runs"]["own"].get("beyond_fp16")) or any(beyond(records, part) for part in PARTS)


def stream_verdict(result: Record) -> str:
    """Return which residual streams and MLPs pass FP16 and what to type, or how near they come; older results: less."""
    records, module = result.get("streams") or [], result["runs"]["own"].get("beyond_fp16")
    if not (passed := [_passed(records, *part) for part in PARTS.items() if beyond(records, part[0])]):
        if module or not records:
            return advice(module)
        worst = largest(records)[0]
        return (
            f"Residual streams and MLPs stay within FP16: at most {number(peak(worst))}, {ratio(peak(worst))} times "
            f"its largest number ({worst['layer']})."
        )
    text = (
        f"FP16 cannot hold {' and '.join(passed)}: run {REMEDY}. Attention that cannot overflow does not change that."
    )
    if not module:
        return text
    return f"{text} The first module to return such values is {module['module']} ({number(module['peak'])})."


def _passed(records: Sequence[Record], part: str, words: str) -> str:
    """Return how many layers pass 65504 in the residual stream or the MLP, the first of them, and by how much."""
    passed = beyond(records, part)
    worst = max(each[part] for each in passed)
    return (
        f"the {words} of {len(passed)} of {len(records)} layers (first {passed[0]['layer']}; up to {number(worst)}, "
        f"{ratio(worst)} times its largest number)"
    )


def stream_table(result: Record, most: int | None = STREAMS) -> Table | None:
    """Return the layers with the largest residual streams and MLPs, a row each; None for an older result."""
    if not (records := largest(result.get("streams") or [])):
        return None
    left = len(records[most:]) if most else 0
    note = f"{STREAM_NOTE} {left} more in the JSON." if left else STREAM_NOTE
    return Table.of("Residual streams and MLPs, largest first", records[:most], STREAM_COLUMNS, note, wraps="layer")


def how_measured(result: Record) -> list[str]:
    """Return method and limits, a paragraph each."""
    settings, made = result["settings"], "The overflow is made: biases in q and k add a constant to the scores."
    return [
        *[made] * bool(result["fixture"]),
        "The largest score is taken over all pairs that a mask leaves, of all calls, in a run with PASA that does not "
        "overflow. The first module to break has finite inputs and an output that is not.",
        f"Other numbers are of the call with the largest score, from at most {settings['rows']} queries and "
        f"{settings['batch']} batch entries against all keys, masked out or not. They can miss the largest pair.",
        "A single key has no bias or resonance of its own: softmax makes its weight 1 whatever its score.",
        *[STREAM_METHOD] * bool(result.get("streams")),
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
    tables = filter(None, [head_table(result), stream_table(result)])
    return [verdict(result), *tables, method, origin(result)]


def draw_map(result: dict[str, Any]) -> str:
    """Return an SVG with a rectangle for each layer and head, coloured by its largest score over 65504.

    The scale is logarithmic from 0.001 to 10, and saturated outside. It is blue up to 1, where FP16 ends, and red and
    outlined beyond. Layers are in the order of their first call.
    """
    lines = {layer: LINE * (row + 3) for row, layer in enumerate(result["modules"]["calls"])}
    heads = 1 + max(each["head"] for each in result["records"])
    short = {layer: ".".join(map(_shorten, layer.split("."))) for layer in lines}
    left = LETTER * max(map(len, short.values())) + 4
    parts = [_text(left, 2 * LINE, "layer", "end"), _text(left + CELL / 2, LINE, "head")]
    parts += [_text(left + CELL * (head + 0.5), 2 * LINE, str(head), "middle") for head in range(heads)]
    parts += [
        f"<g><title>{escape(layer)}</title>{_text(left, y, short[layer], 'end')}</g>" for layer, y in lines.items()
    ]
    for each in result["records"]:
        score = f"{number(each['max_score'])}, {ratio(each['max_score'])} × 65504"
        title = f"{each['module']}, head {each['head']}: peak {score}"
        parts.append(_cell(left + CELL * (each["head"] + 0.5) - 11, lines[each["module"]], each["max_score"], title))
    bottom = LINE * (len(lines) + 4)
    parts.append(_text(left, bottom, "peak / 65504", "end"))
    for index, (label, share) in enumerate(LEGEND.items()):
        x = left + 8 + 3 * CELL * index
        parts += [_cell(x, bottom, share * FP16_MAX, label), _text(x + CELL, bottom, label)]
    width, height = left + CELL * max(heads, 3 * len(LEGEND)) + 8, bottom + LINE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="map" role="img" width="{width:.0f}" height="{height}" '
        f'aria-label="Largest score of every head over 65504"><style>{STYLE}</style>{"".join(parts)}</svg>\n'
    )


def _shorten(part: str) -> str:
    """Return a part of a layer's name as a narrow page has room for it: down_blocks as down…."""
    return part if len(part) <= SHORT_PART else f"{part[:4]}…"


def _cell(x: float, baseline: float, score: float, title: str) -> str:
    share = score / FP16_MAX
    depth = min(1.0, max(0.0, math.log10(max(share, 1e-9)) / 3 + 1 if share <= 1 else 0.5 + math.log10(share) / 2))
    return (
        f'<rect x="{x:.1f}" y="{baseline - 11:.1f}" width="22" height="14" fill-opacity="{0.15 + 0.85 * depth:.2f}" '
        f'class="{"within" if share <= 1 else "beyond"}"><title>{escape(title)}</title></rect>\n'
    )


def _text(x: float, baseline: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{baseline}" text-anchor="{anchor}">{escape(text)}</text>\n'
