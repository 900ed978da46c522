"""The gate of LongBench, and agreement of answers."""

import pytest

from pasa.eval.models.longbench import report
from pasa.eval.models.longbench.tasks import TASKS

GOOD = {"broken": 0, "items": 6, "agreement": 1.0}
PRECISIONS = {"fp32": GOOD, "fp16-eager": GOOD | {"broken": 6}, "pasa": GOOD}


@pytest.mark.parametrize(
    ("name", "change", "failed"),
    [
        ("fp32", {"broken": 1}, ["reference_finite"]),
        ("pasa", {"broken": 1}, ["pasa_finite"]),
        ("pasa", {"agreement": 0.97}, ["pasa_agrees"]),
        ("pasa", {"agreement": 0.98}, []),
        ("fp16-eager", {"broken": 4}, ["fp16_collapses"]),
    ],
)
def test_every_check_can_fail(name, change, failed):
    gate = report.judge({**PRECISIONS, name: PRECISIONS[name] | change}, injected=True)
    assert [check for check, passed in gate["checks"].items() if not passed] == failed
    assert gate["passed"] == (not failed)


@pytest.mark.parametrize(("agreement", "passes"), [(0.95, True), (0.93, False)])
def test_what_the_rest_of_an_fp16_model_loses_is_not_held_against_pasa(agreement, passes):
    """An FP16 model kept 77 of 80 answers with FP32 scores, and as many with PASA: 98 % was out of reach."""
    precisions = PRECISIONS | {"fp16-sdpa": GOOD | {"agreement": 0.96}, "pasa": GOOD | {"agreement": agreement}}
    assert report.judge(precisions, injected=True)["checks"]["pasa_agrees"] == passes


@pytest.mark.parametrize(
    ("dataset", "fp32", "pasa", "broken", "equal"),
    [
        ("hotpotqa", "a", "a", False, True),
        ("hotpotqa", "a\nb", "a\nc", False, False),
        ("hotpotqa", "a", "a", True, False),  # it might have gone on otherwise
        ("hotpotqa", "", "", True, False),
        ("trec", "NUM\nmore", "NUM\nother", False, True),  # few-shot answers run on into the next example
        ("trec", "HUM", "LOC", False, False),
        ("lcc", "# a", "# b", False, False),  # nothing is scored of either
        ("lcc", "# a", "# a", False, True),
        ("lcc", "# a\nx", "# b\nx", False, True),
    ],
)
def test_agreement_is_that_of_what_is_scored(dataset, fp32, pasa, broken, equal):
    line, reference = {"pred": pasa, "broken": broken}, {"pred": fp32, "broken": False}
    assert report.agrees(TASKS[dataset], line, reference) == equal
