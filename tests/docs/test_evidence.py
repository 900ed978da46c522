"""The table of docs/evidence.md: every number is one of the stored run's."""

import random
import re
from collections.abc import Iterator
from typing import Any

import evidence
import pytest

from pasa.eval.kit.stored import ROOT, stored

LINES = pytest.mark.parametrize("line", evidence.LINES, ids=lambda line: line.question)
NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?")
NOT_NUMBERS = re.compile(
    r"exact [\d.]+ %|NaN in \d+ of \d+ cases|\+ [\d,]+|at [\d,]+(?= tokens|:)"
)  # of the tables; tested below
SELECTED = {"tokens", "bias", "offset", "dim"}  # records are found by these
BY_QUESTION = {line.question: line for line in evidence.LINES}


def disturbed(value: Any, source: random.Random) -> Any:
    """Every number changed, each by its own factor, but zeros and what selects a record."""
    if isinstance(value, dict):
        return {key: item if key in SELECTED else disturbed(item, source) for key, item in value.items()}
    if isinstance(value, list):
        return [disturbed(item, source) for item in value]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value:
        return value
    factor = source.uniform(1.3, 2.9)
    return int(value * factor) + 1 if isinstance(value, int) else value * factor


def lengths(value: Any) -> Iterator[str]:
    """Return the lengths of all lists and tables inside."""
    if isinstance(value, (dict, list)):
        yield str(len(value))
        for item in value.values() if isinstance(value, dict) else value:
            yield from lengths(item)


def changed(line: evidence.Line, field: str, value: Any, **only: Any) -> str:
    """The answer were `field` of some records another."""
    result = stored(line.run)
    records = [each | {field: value} if only.items() <= each.items() else each for each in result["records"]]
    return line.answer({**result, "records": records})


@LINES
def test_numbers_follow_the_stored_run(line: evidence.Line) -> None:
    """All numbers of an answer change with those of its run, but zeros and how many records there are."""
    result = stored(line.run)
    answers = [line.answer(each) for each in (result, disturbed(result, random.Random(1)))]
    before, after = (NUMBER.findall(NOT_NUMBERS.sub("", answer)) for answer in answers)
    assert len(before) == len(after)
    kept = {old for old, new in zip(before, after, strict=True) if old == new}
    assert kept <= {"0", *lengths(result)}
    assert len(kept) < len(before) or line.kind == evidence.NOT_RUN


def test_zeros_follow_the_stored_run() -> None:
    assert "751 heads: 8 beyond" in changed(BY_QUESTION["More than one model"], "beyond_proven", 1)
    sides = BY_QUESTION["Shift K, Q or both?"]
    assert "bias in K: none 15.6 %, K 50 %" in changed(sides, "overflowed", 2 * 1024**2 // 2, case="K", shift="K")
    ended = BY_QUESTION["The same, scores beyond FP16"]
    assert changed(ended, "nonfinite_logits", 1).endswith("not finite: pasa, sdpa, eager")
    soak, gradients = (stored(name) for name in ("soak", "gradients"))
    soak["gate"]["failed"], gradients["gate"]["failures"] = 3, ["one"]
    assert BY_QUESTION["Random calls"].answer(soak).startswith("2997 of 3000")
    assert BY_QUESTION["Gradients"].answer(gradients).startswith("80 of 81")


def test_cases_that_overflow_are_those_of_the_paper() -> None:
    """Table 4 has six of the 15 cases, and no error is taken over them."""
    result = stored("rmse")
    overflowing = {case["name"] for case in result["cases"] if case["paper_nan_share"] is not None}
    stored_in_fp16 = BY_QUESTION["Baseline: scores stored in FP16"]
    assert stored_in_fp16.answer(result).startswith(f"NaN in {len(overflowing)} of {len(result['cases'])} cases; ")
    finite = [each for each in result["records"] if each["case"] not in overflowing]
    cases = [case for case in result["cases"] if case["name"] not in overflowing]
    assert stored_in_fp16.answer({**result, "cases": cases, "records": finite}).startswith("1 to 238 times")


def test_packages_that_were_not_run_are_named() -> None:
    line = BY_QUESTION["Baselines as packages"]
    assert changed(line, "status", "ok", implementation="sageattention").startswith("flash-attn, flash-attn-3: not")


@LINES
def test_how_is_what_the_run_says(line: evidence.Line) -> None:
    """Measured is what names a GPU as its device, and nothing else does; a model says that it is one."""
    result = stored(line.run)
    on_gpu = result["environment"].get("device", "cpu") != "cpu"
    assert on_gpu == (line.kind in (evidence.GPU, evidence.NOT_RUN))
    assert ("model, not measured" in result.get("note", "")) == (line.kind == evidence.MODELLED)
    assert ("emulated" in result.get("note", "")) <= (line.kind == evidence.EMULATED)


@LINES
def test_links_lead_somewhere(line: evidence.Line) -> None:
    page = ROOT / "docs" / "evidence.md"
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    anchors = {"#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert line.link in anchors or (page.parent / line.link).is_file()
