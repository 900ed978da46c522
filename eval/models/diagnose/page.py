"""The report as one page that asks for nothing: no script, no font, no request; pictures are in it."""

from __future__ import annotations

import base64
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2

from pasa.eval.models.diagnose import maps, report
from pasa.eval.models.diagnose.maps import HeadMaps, Picture
from pasa.eval.models.diagnose.statistics import FP16_MAX

LIMITS = (0.001, 0.01, 0.1, 0.5, 1.0, 2.0, 10.0)
"""Where a cell of the map changes its colour: max |Q K^T| over 65504. At 1 FP16 ends."""
SHOWN = 15  # heads in the table of the page; JSON has all
RAMP = 9  # colours in the legend of the matrices


def render_page(result: dict[str, Any], heads: Sequence[HeadMaps]) -> str:
    """Return the HTML of a result of `run_diagnose`; every text in it is escaped."""
    from matplotlib.colors import to_hex

    template: Any = jinja2.Template(
        Path(__file__).with_name("page.html").read_text(encoding="utf-8"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    modules = result["modules"]
    left_out = {
        "Not looked at": [f"{layer}: {reason}" for layer, reason in modules["skipped"]],
        "Never called in this run": modules["uncalled"],
        "Queries or keys that were not finite": [f"{x}: {n} calls, left out" for x, n in modules["broken"].items()],
    }
    html: str = template.render(
        result=result,
        verdict=report.verdict(result),
        facts=facts(result),
        columns={name: meaning for name, (_, meaning) in report.COLUMNS.items()},
        rows=report.rows(result["records"][:SHOWN]),
        left=max(0, len(result["records"]) - SHOWN),
        grid=grid(result),
        legend=legend(),
        heads=[head_section(each, result) for each in heads],
        ramp=", ".join(to_hex(maps.colours()(step / (RAMP - 1))) for step in range(RAMP)),
        measured=report.how_measured(result),
        left_out=left_out,
        origin=report.origin(result),
    )
    return html


def facts(result: dict[str, Any]) -> dict[str, str]:
    """Return the numbers that are to be seen first."""
    summary, first = result["summary"], result["runs"]["fp16"]["first_nonfinite"]
    if summary["worst"] is None:
        return {}
    return {
        "heads beyond FP16": f"{summary['heads_beyond']} of {summary['heads']}",
        "layers beyond FP16": f"{summary['modules_beyond']} of {summary['modules']}",
        "peak QKᵀ": report.number(summary["worst"]["max_score"]),
        "over 65504": f"{report.ratio(summary['worst']['max_score'])} ×",
        "largest score PASA stores": report.number(summary["stored"]),
        "FP16 scores": "break the model" if first else "do not break it",
    }


def grid(result: dict[str, Any]) -> dict[str, Any]:
    """Return layers, in the order of their first call, against heads: (text, level of colour, meaning) a cell."""
    cells: dict[str, dict[int, tuple[str, int, str]]] = {name: {} for name in result["modules"]["calls"]}
    for each in result["records"]:
        level = bisect_right(LIMITS, each["max_score"] / FP16_MAX)
        meaning = f"head {each['head']}: peak {report.number(each['max_score'])}"
        cells[each["module"]][each["head"]] = (report.ratio(each["max_score"]) if level else "", level, meaning)
    heads = 1 + max((head for row in cells.values() for head in row), default=-1)
    return {"heads": heads, "layers": {name: [row.get(head) for head in range(heads)] for name, row in cells.items()}}


def legend() -> list[str]:
    """Return the range of every level, lowest first."""
    inner = [f"{low:g} to {high:g}" for low, high in pairwise(LIMITS)]
    return [f"below {LIMITS[0]:g}", *inner, f"{LIMITS[-1]:g} and more"]


def head_section(head: HeadMaps, result: dict[str, Any]) -> dict[str, Any]:
    """Return the title, the text and the pictures of one head."""
    record = next(r for r in result["records"] if (r["module"], r["head"]) == (head.module, head.head))
    cells = dict(zip(report.COLUMNS, report.rows([record])[0], strict=True))
    phases = {None: "no phase beyond chance", 0: "in phase, 0°", 180: "in opposition, 180°"}
    return {
        "module": head.module,
        "head": head.head,
        "text": (
            f"Call {head.call}. Peak {cells['peak QKᵀ']}, {cells['× 65504']} × 65504. "
            f"Sequence bias {cells['bias']}; resonance {cells['resonance']} ({phases[record['phase']]})."
        ),
        "figures": [_figure(name, picture) for name, picture in head.pictures.items()],
    }


def _figure(name: str, picture: Picture) -> dict[str, Any]:
    title, down, across = maps.MATRICES[name]
    height, width = picture.values.shape
    return {
        "name": title,
        "source": f"data:image/png;base64,{base64.b64encode(maps.to_png(picture)).decode()}",
        "width": width,
        "height": height,
        "low": report.number(picture.low),
        "high": report.number(picture.high),
        "axes": f"{picture.shape[0]:,} × {picture.shape[1]:,}: down {down}, across {across}",
    }
