"""The text of a diagnosis, in the terminal and in files."""

from __future__ import annotations

import copy
import io
import json
import re

from rich.console import Console

from pasa.eval.kit import output
from pasa.eval.models.diagnose import report, run

CELL = re.compile(r'fill-opacity="([\d.]+)" class="(\w+)"><title>(.+?)</title>')


def shown(result):
    console = Console(file=io.StringIO(), width=80)
    run.EXPERIMENT.show(result, console)
    return console.file.getvalue()


def test_numbers_are_never_folded(video_diagnosis):
    """Story: in 80 columns every number was cut in two, to make room for names that were cut in twelve."""
    result = video_diagnosis[0]
    text, left = shown(result), len(result["records"]) - report.SHOWN
    assert all(f" {report.number(each['max_score'])} " in text for each in result["records"][: report.SHOWN])
    assert f"{left} more in the JSON" in report.head_table(result).note


def test_a_model_without_attention_has_no_worst_head(text_diagnosis):
    result = copy.deepcopy(text_diagnosis[0])
    result["records"], result["summary"]["worst"] = [], None
    assert report.verdict(result) == "No attention was seen."
    assert "No attention was seen." in run.render_page(result, [])


def test_verdicts(text_diagnosis):
    """The sentences on attention; those on streams, which end a verdict, are tested in test_streams.py."""
    result = copy.deepcopy(text_diagnosis[0])
    del result["streams"]
    text = report.verdict(result)
    assert text.startswith("4 of 8 heads, in 1 of 2 layers, form scores that FP16 cannot hold")
    assert "2.00 times FP16's largest number (model.layers.1.self_attn, head" in text
    assert text.endswith("in FP16, model.layers.1.self_attn (call 1 of its model) is the first to break.")
    broken = result["runs"]["fp16"]["first_nonfinite"]
    result["runs"] = {name: {"seconds": 1.0, "first_nonfinite": None} for name in result["runs"]}
    result["summary"] |= {"heads_beyond": 0, "modules_beyond": 0}
    text = report.verdict(result)
    assert text.startswith("No score of 8 heads in 2 layers leaves FP16: at most")
    assert text.endswith("With scores stored in FP16 all modules stay finite.")
    result["runs"]["pasa"]["first_nonfinite"] = result["runs"]["own"]["first_nonfinite"] = broken
    text = report.verdict(result)
    assert "The model breaks by itself, first in model.layers.1.self_attn" in text
    assert "With PASA model.layers.1.self_attn" in text


def test_numbers_and_ratios():
    numbers = {0.0: "0", -7.5: "−7.5", 131393.1: "131,400", -86569.4: "−86,570", float("inf"): "infinite"}
    assert {value: report.number(value) for value in numbers} == numbers
    ratios = {1.0: "< 0.001", 655.04: "0.010", 65504.0: "1.00", 131393.0: "2.01", 6.5504e8: "10,000.00"}
    assert {score: report.ratio(score) for score in ratios} == ratios


def test_stored_results_can_be_shown(text_diagnosis):
    """None stands for infinity there; brackets in a model name are no markup."""
    stored = json.loads(output.to_json(text_diagnosis[0])) | {"model": "[bold]x[/bold]"}
    stored["records"][0]["stored"] = stored["summary"]["stored"] = None
    assert "infinite" in shown(stored)
    assert "[bold]x[/bold]" in shown(stored)
    assert "PASA stores as infinite only those of weight 0" in report.verdict(stored)


def test_the_map_changes_its_colour_where_fp16_ends(text_diagnosis):
    """The depth of the colour is logarithmic, and saturated at 0.001 and at 10 times 65504."""
    result = text_diagnosis[0]
    cells = [(kind, title) for _, kind, title in CELL.findall(report.draw_map(result)) if "head" in title]
    assert [kind for kind, _ in cells] == ["beyond"] * 4 + ["within"] * 4
    assert cells[0][1].startswith("model.layers.1.self_attn, head ")
    assert cells[0][1].endswith(", 2.00 × 65504")
    shown = []
    for share in (0.0, 1e-4, 1e-3, 1e-2, 1.0, 1.001, 10.0, 1e4):
        records = [result["records"][0] | {"max_score": share * 65504}]
        shown.append(CELL.findall(report.draw_map(result | {"records": records}))[0][:2])
    assert [kind for _, kind in shown] == ["within"] * 5 + ["beyond"] * 3
    depths = [float(depth) for depth, _ in shown]
    assert depths[0] == depths[1] == depths[2] < depths[3] < depths[4]
    assert depths[5] < depths[6] == depths[7] == depths[4] == 1
