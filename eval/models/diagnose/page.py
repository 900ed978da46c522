"""The report as one page that asks for nothing: no script, no font, no request; pictures are in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from pasa.eval.kit.device import origin
from pasa.eval.models.diagnose import maps, report

SHOWN = 15  # heads in the table of the page; JSON has all


def render_page(result: dict[str, Any], heads: Sequence[maps.HeadMaps]) -> str:
    """Return the HTML of a result of `run_diagnose`; every text in it is escaped."""
    template: Any = jinja2.Template(
        Path(__file__).with_name("page.html").read_text(encoding="utf-8"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    records = {(each["module"], each["head"]): each for each in result["records"]}
    html: str = template.render(
        result=result,
        map=maps.draw_map(result) if records else "",
        table=report.head_table(result, tuple(report.COLUMNS), SHOWN),
        meanings={name: meaning for name, (_, meaning) in report.COLUMNS.items() if meaning},
        heads=[(each, records[each.module, each.head]) for each in heads],
        matrices=maps.MATRICES,
        left=max(0, len(records) - SHOWN),
        verdict=report.verdict(result),
        measured=report.how_measured(result),
        origin=origin(result),
        **{name: getattr(report, name) for name in ("number", "ratio", "signed")},
    )
    return html
