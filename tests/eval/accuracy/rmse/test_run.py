"""The experiment at reduced size: Table 4, saturation, gates, and the form of the result."""

import dataclasses
import json
import math
from typing import Any

import pytest
import torch

import pasa
from pasa.eval.accuracy.rmse import measure, report, run
from pasa.eval.accuracy.rmse.cases import ARITHMETICS, PAPER_CASES, RESONANCE_CASES, Arithmetic, RandomCase
from pasa.eval.accuracy.rmse.resonance import stored_scores
from pasa.eval.kit import output

HEADS, SEQ = 1, 512
BY_NAME = {arithmetic.name: arithmetic for arithmetic in ARITHMETICS}


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    found = run.EXPERIMENT.measure(heads=HEADS, seq=SEQ)
    assert found is not None
    return found


def select(result: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    return [each for each in result["records"] if all(each[key] == value for key, value in wanted.items())]


@pytest.mark.parametrize("case", [case for case in PAPER_CASES if case.paper_nan_share is not None], ids=str)
def test_nan_share_is_that_of_table_4_up_to_sampling(case: RandomCase) -> None:
    """Rows of a head share its keys, so they are no independent samples; heads are.

    The paper's figure is itself the mean of 16 heads. With s the spread between heads, the difference of two such
    means has standard deviation s sqrt(2/16): four of these, and half of the paper's last digit.
    """
    q, k, v = case.tensors(0)
    out = pasa.attention(q, k, v, config=BY_NAME["partial"].config)
    by_head = (~torch.isfinite(out)).double().mean((0, 2, 3))
    bound = 4 * float(by_head.std()) * math.sqrt(2 / len(by_head)) + 5e-5
    assert abs(float(by_head.mean()) - (case.paper_nan_share or 0.0)) <= bound


def test_saturation_hides_the_damage(result: dict[str, Any]) -> None:
    for name in ("uniform(30,0.5)", "uniform(20,20)", "hybrid(30,10)"):
        (naive,) = select(result, case=name, overflow="saturate", arithmetic="partial")
        (fp32,) = select(result, case=name, overflow="saturate", arithmetic="fp32")
        assert naive["nonfinite_share"] == 0
        assert naive["scores_saturated_share"] > 0
        assert naive["scores_touched_rows"] >= naive["scores_saturated_share"]
        assert naive["rmse"] > 10 * fp32["rmse"]
        assert naive["failed_gates"] == "abc"


def test_default_arithmetic_never_overflows(result: dict[str, Any]) -> None:
    for each in select(result, arithmetic="pasa-exact"):
        assert "a" not in each["failed_gates"]
        assert "b" not in each["failed_gates"]


def test_competitor_passes_every_gate(result: dict[str, Any]) -> None:
    assert all(each["failed_gates"] == "" for each in select(result, arithmetic="fp32"))


def test_gates_catch_a_bad_arithmetic() -> None:
    """The published recovery with too small a beta: scores of 115,000 stay."""
    bad = Arithmetic("bad", pasa.PasaConfig(recovery="paper", beta=0.0), "no shift at all")
    case = dataclasses.replace(PAPER_CASES[2], shape=(1, 1, 256, 128))
    wanted = (BY_NAME["fp32"], BY_NAME["partial"], BY_NAME["pasa-exact"], bad)
    found = measure.compare([(case, 0, "inf")], wanted, gated="bad")
    records = {each["arithmetic"]: each for each in found["records"]}
    assert "c" in records["bad"]["failed_gates"]
    assert records["pasa-exact"]["failed_gates"] == ""
    assert "rmse" in found["gate"]["failures"][0]["why"]


def test_verdict_names_case_seed_mode_gate_and_number() -> None:
    entry = {
        "case": "uniform(20,5)",
        "seed": 3,
        "overflow": "inf",
        "arithmetic": "pasa-exact",
        "failed_gates": "b",
        "max_error_ratio": 2.5,
    }
    gate = measure.verdict([entry])
    assert not gate["passed"]
    assert gate["failures"] == [
        {"case": "uniform(20,5)", "seed": 3, "overflow": "inf", "why": "(b) max error 2.5 x the yardstick, limit 2"}
    ]
    assert report.verdict({"gate": gate}).startswith(
        "pasa-exact FAILS on 1 of its runs:\n  uniform(20,5), seed 3, inf: (b)"
    )
    assert measure.verdict([entry | {"arithmetic": "partial"}])["passed"], "only the default arithmetic decides"


def test_rows_touched_agree_with_a_direct_count() -> None:
    q, k, v = dataclasses.replace(PAPER_CASES[7], shape=(1, 2, 300, 128)).tensors(0)
    config = dataclasses.replace(BY_NAME["partial"].config, overflow="saturate")
    stored = (q.float() @ k.float().mT).half().float().abs()
    touched = (stored >= 65504).any(-1).double().mean()
    assert measure.touched_rows(q, k, v, config) == pytest.approx(float(touched))


def test_a_case_alone_gives_the_same_numbers() -> None:
    """Each case and each seed alone gives its numbers; progress counts to the end."""
    seen: list[tuple[int, int]] = []
    few = [dataclasses.replace(case, shape=(1, 1, 130, 128)) for case in PAPER_CASES[4:7]]
    alone = measure.compare([(few[1], 1, "inf")], progress=lambda done, total, label: seen.append((done, total)))
    among = measure.compare([(case, seed, "inf") for case in few for seed in (0, 1)])
    assert alone["records"] == select(among, case=few[1].name, seed=1)
    assert seen == [(0, 1), (1, 1)]
    assert among["seeds"] == [0, 1]
    assert "worst of 2 seeds" in report.rmse_table(among["records"], ["partial"]).title


def test_page_of_a_stored_result_is_the_page_of_the_run(result: dict[str, Any]) -> None:
    """Story: JSON has no NaN, and the tables of a stored result met None where they expected it."""
    text = output.to_json(result)
    assert len(text.splitlines()) == len(result) + len(result["records"]) + 3
    stored = json.loads(text)
    for one, other in zip(report.rmse(stored), report.rmse(result), strict=True):
        if isinstance(one, str) or isinstance(other, str):
            assert one == other
            continue
        assert (one.title, one.header, len(one.rows)) == (other.title, other.header, len(other.rows))
        assert [["NaN" in cell for cell in row] for row in one.rows] == [
            ["NaN" in cell for cell in row] for row in other.rows
        ]
    page = run.EXPERIMENT.markdown(stored)
    assert all(f"| {case.name} |" in page for case in PAPER_CASES)
    assert output.NOTE[1:] in page
    assert "8.14 %" in page, "the paper's share stands beside the measured one"


def test_large_bias_never_does_worse_than_fp32_flash() -> None:
    """FP16 score tiles, referenced and shifted: no case of the table may lose more than a tenth to FP32 scores."""
    found = run.run_large_bias(heads=1, seq=384, seeds=(0, 1))
    assert [row["case"] for row in found["ratios"]] == [f"bias({b})" for b in (32, 80, 200, 500, 2000)]
    assert all(row["worst_to_fp32"] <= 1.1 for row in found["ratios"])
    assert report.bias_table(json.loads(output.to_json(found))).rows == report.bias_table(found).rows


def test_resonance_is_tamed_by_both_shifts() -> None:
    for each in run.run_resonance(heads=1, seq=256)["records"]:
        assert each["scores_max_before"] > 65504
        if each["arithmetic"] in ("pasa-paper", "pasa-exact"):
            assert each["scores_max_after"] < 65504
        if each["arithmetic"] == "partial":
            assert "a" in each["failed_gates"]
        if each["arithmetic"] == "pasa-exact":
            assert each["failed_gates"] == ""


def test_stored_scores_agree_with_what_attention_stores() -> None:
    """They drive the score model themselves: their extreme must be the one that attention records."""
    q, k, v = dataclasses.replace(RESONANCE_CASES[0], shape=(1, 1, 256, 128)).tensors(0)
    config = pasa.PasaConfig(recovery="paper")
    with pasa.record_diagnostics() as entries:
        pasa.attention(q, k, v, config=config)
    assert float(stored_scores(q.float(), k.float(), config).abs().max()) == float(entries[0].max_score_after.max())
