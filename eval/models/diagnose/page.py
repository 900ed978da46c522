"""The report as one page that asks for nothing: no script, no font, no request; pictures are in it."""

from __future__ import annotations

import base64
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2

from pasa.eval.models.diagnose import plots, words
from pasa.eval.models.diagnose.maps import HeadMaps, Picture
from pasa.eval.models.diagnose.statistics import FP16_MAX

LIMITS = (0.001, 0.01, 0.1, 0.5, 1.0, 2.0, 10.0)
"""Where a cell of the map changes its colour: max |Q K^T| over 65504. At 1 FP16 ends."""
SHOWN = 15
"""Heads in the table of the page; JSON has all."""
RAMP = 9  # colours in the legend of the matrices


def render_page(result: dict[str, Any], maps: Sequence[HeadMaps]) -> str:
    """HTML of a result of `run_diagnose`; every text in it is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        result=result,
        verdict=words.verdict(result),
        facts=facts(result),
        columns={name: column.meaning for name, column in words.COLUMNS.items()},
        rows=words.rows(result["records"][:SHOWN]),
        left=max(0, len(result["records"]) - SHOWN),
        grid=grid(result),
        legend=legend(),
        heads=[head_section(each, result) for each in maps],
        ramp=ramp(),
        measured=words.how_measured(result),
        origin=words.origin(result),
    )


def facts(result: dict[str, Any]) -> dict[str, str]:
    """The numbers that are to be seen first."""
    found, first = result["summary"], result["runs"]["fp16"]["first_nonfinite"]
    if found["worst"] is None:
        return {}
    return {
        "heads beyond FP16": f"{found['heads_beyond']} of {found['heads']}",
        "layers beyond FP16": f"{found['modules_beyond']} of {found['modules']}",
        "peak QKᵀ": words.number(found["worst"]["max_score"]),
        "over 65504": f"{words.ratio(found['worst']['max_score'])} ×",
        "largest score PASA stores": words.number(found["stored"]),
        "FP16 scores": "break the model" if first else "do not break it",
    }


def grid(result: dict[str, Any]) -> dict[str, Any]:
    """Layers, in the order of their first call, against heads: (text, level of colour, meaning) a cell."""
    cells: dict[str, dict[int, tuple[str, int, str]]] = {name: {} for name in result["modules"]["calls"]}
    for each in result["records"]:
        level = bisect_right(LIMITS, each["max_score"] / FP16_MAX)
        meaning = f"head {each['head']}: peak {words.number(each['max_score'])}"
        cells[each["module"]][each["head"]] = (words.ratio(each["max_score"]) if level else "", level, meaning)
    heads = 1 + max((head for row in cells.values() for head in row), default=-1)
    return {"heads": heads, "layers": {name: [row.get(head) for head in range(heads)] for name, row in cells.items()}}


def legend() -> list[str]:
    """The range of every level, lowest first."""
    inner = [f"{low:g} to {high:g}" for low, high in pairwise(LIMITS)]
    return [f"below {LIMITS[0]:g}", *inner, f"{LIMITS[-1]:g} and more"]


def head_section(maps: HeadMaps, result: dict[str, Any]) -> dict[str, Any]:
    """Title, text and pictures of one head."""
    record = next(r for r in result["records"] if (r["module"], r["head"]) == (maps.module, maps.head))
    cells = dict(zip(words.COLUMNS, words.rows([record])[0], strict=True))
    lags = {None: "no phase beyond chance", 0: "in phase, 0°", 180: "in opposition, 180°"}
    return {
        "module": maps.module,
        "head": maps.head,
        "text": (
            f"Call {maps.call}. Peak {cells['peak QKᵀ']}, {cells['× 65504']} × 65504. "
            f"Sequence bias {cells['bias']}; resonance {cells['resonance']} ({lags[record['phase']]})."
        ),
        "figures": [_figure(name, picture) for name, picture in maps.pictures.items()],
    }


def _figure(name: str, picture: Picture) -> dict[str, Any]:
    down, across = plots.axes_of(name)
    height, width = picture.values.shape
    rows, columns = picture.shape
    return {
        "name": plots.title(name),
        "source": f"data:image/png;base64,{base64.b64encode(plots.to_png(picture)).decode()}",
        "width": width,
        "height": height,
        "low": words.number(picture.low),
        "high": words.number(picture.high),
        "axes": f"{rows:,} × {columns:,}: down {down}, across {across}",
    }


def ramp() -> str:
    """Colours of the matrices, lowest first, as CSS writes them."""
    from matplotlib.colors import to_hex

    return ", ".join(to_hex(plots.colours()(step / (RAMP - 1))) for step in range(RAMP))
