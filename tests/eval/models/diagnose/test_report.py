"""What a diagnosis says, in the terminal and in files."""

from __future__ import annotations

import copy
import io
import json

import pytest
from rich.console import Console

from pasa.eval.kit import output
from pasa.eval.models.diagnose import report, words


def shown(result, width=80):
    console = Console(file=io.StringIO(), width=width)
    report.render(result, console)
    return console.file.getvalue()


def test_the_terminal_shows_the_worst_heads_and_the_verdict(text_diagnosis):
    result = text_diagnosis[0]
    text = " ".join(shown(result).split())
    assert "4 of 8 heads, in 1 of 2 layers, form scores that FP16 cannot hold" in text
    assert "2.00 times FP16's largest number (model.layers.1.self_attn, head" in text
    assert "With scores stored in FP16, model.layers.1.self_attn (call 1 of its model) is the first to break." in text
    assert text.index("131,1") < text.index("peak QKᵀ: largest")


@pytest.mark.parametrize("width", [80, 120])
def test_numbers_are_never_folded(video_diagnosis, width):
    """Story: in 80 columns every number was cut in two, to make room for names that were cut in twelve."""
    text = shown(video_diagnosis[0], width)
    for record in video_diagnosis[0]["records"][: report.SHOWN]:
        assert f" {words.number(record['max_score'])} " in text


def test_brackets_in_a_model_name_are_no_markup(text_diagnosis):
    assert "[bold]x[/bold]" in shown(text_diagnosis[0] | {"model": "[bold]x[/bold]"})


def test_only_the_worst_are_listed_and_the_rest_is_told(video_diagnosis):
    result = video_diagnosis[0]
    table = report.head_table(result)
    assert len(table.rows) == report.SHOWN < len(result["records"])
    assert f"{len(result['records']) - report.SHOWN} more in the JSON" in table.note


def test_files(text_diagnosis, tmp_path):
    result, maps, _ = text_diagnosis
    made = report.save(result, maps, tmp_path / "deep")
    assert {path.name for path in made} == {f"diagnose.{kind}" for kind in ("html", "json", "md", "png")}
    assert json.loads((tmp_path / "deep" / "diagnose.json").read_text())["summary"]["heads"] == 8
    text = (tmp_path / "deep" / "diagnose.md").read_text()
    assert "| model.layers.1.self_attn | " in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {len(words.COLUMNS) + 1}, "no bar inside of a cell"
    assert "![Matrices of the worst heads](diagnose.png)" in text
    assert (tmp_path / "deep" / "diagnose.png").read_bytes()[:4] == b"\x89PNG"


def test_without_attention_there_is_nothing_to_draw(text_diagnosis, tmp_path):
    result = copy.deepcopy(text_diagnosis[0])
    result["records"], result["summary"]["worst"] = [], None
    made = report.save(result, [], tmp_path)
    assert "diagnose.png" not in {path.name for path in made}
    assert words.verdict(result) == "No attention was seen."
    assert "No attention was seen." in (tmp_path / "diagnose.html").read_text()


def test_verdicts_of_other_outcomes(text_diagnosis):
    result = copy.deepcopy(text_diagnosis[0])
    broken = result["runs"]["fp16"]["first_nonfinite"]
    result["runs"] = {name: {"seconds": 1.0, "first_nonfinite": None} for name in result["runs"]}
    result["summary"] |= {"heads_beyond": 0, "modules_beyond": 0}
    said = words.verdict(result)
    assert said.startswith("No score of 8 heads in 2 layers leaves FP16: at most")
    assert said.endswith("With scores stored in FP16 all modules stay finite.")
    result["runs"]["pasa"]["first_nonfinite"] = result["runs"]["own"]["first_nonfinite"] = broken
    said = words.verdict(result)
    assert "The model breaks by itself, first in model.layers.1.self_attn" in said
    assert "With PASA model.layers.1.self_attn" in said


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-7.5, "−7.5"),
        (131393.1, "131,400"),
        (-86569.4, "−86,570"),
        (None, "infinite"),
        (float("inf"), "infinite"),
    ],
)
def test_numbers(value, text):
    assert words.number(value) == text


@pytest.mark.parametrize(
    ("score", "text"),
    [(1.0, "< 0.001"), (655.04, "0.010"), (65504.0, "1.00"), (131393.0, "2.01"), (6.5504e8, "10,000.00")],
)
def test_ratios(score, text):
    assert words.ratio(score) == text


def test_stored_results_can_be_shown(text_diagnosis):
    """None stands for infinity there."""
    stored = json.loads(output.to_json(text_diagnosis[0]))
    stored["records"][0]["stored"] = stored["summary"]["stored"] = None
    assert "infinite" in shown(stored)
    assert "PASA stores as infinite only those of weight 0" in words.verdict(stored)
