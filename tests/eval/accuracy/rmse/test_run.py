"""The experiment at reduced size: Table 4, saturation, gates, and the form of the result."""

import dataclasses
import json
import math
from typing import Any

import pytest
import torch

import pasa
from pasa.eval.accuracy.rmse import bias, report, resonance, run
from pasa.eval.accuracy.rmse.cases import ARITHMETICS, PAPER_CASES, Arithmetic, RandomCase
from pasa.eval.kit import output

HEADS, SEQ = 1, 512
BY_NAME = {arithmetic.name: arithmetic for arithmetic in ARITHMETICS}


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return run.run_rmse(heads=HEADS, seq=SEQ)


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
    """The published recovery with too small a beta: scores of 115,000 stay as they are."""
    bad = Arithmetic("bad", pasa.PasaConfig(recovery="paper", beta=0.0), "no shift at all")
    case = dataclasses.replace(PAPER_CASES[2], shape=(1, 1, 256, 128))
    jobs: list[run.Job] = [(case, 0, "inf")]
    wanted = (BY_NAME["fp32"], BY_NAME["partial"], BY_NAME["pasa-exact"], bad)
    records = {each["arithmetic"]: each for each in run.run_jobs(jobs, wanted)}
    assert "c" in records["bad"]["failed_gates"]
    assert records["pasa-exact"]["failed_gates"] == ""
    assert "rmse" in run.why(records["bad"])


def test_verdict_names_case_seed_mode_gate_and_number() -> None:
    entry = {
        "case": "uniform(20,5)",
        "seed": 3,
        "overflow": "inf",
        "arithmetic": "pasa-exact",
        "failed_gates": "b",
        "max_error_ratio": 2.5,
    }
    gate = run.verdict([entry])
    assert not gate["passed"]
    assert gate["failures"] == [
        {"case": "uniform(20,5)", "seed": 3, "overflow": "inf", "why": "(b) max error 2.5 x the yardstick, limit 2"}
    ]
    assert run.verdict([entry | {"arithmetic": "partial"}])["passed"], "only the default arithmetic decides"


def test_rows_touched_agree_with_a_direct_count() -> None:
    q, k, v = dataclasses.replace(PAPER_CASES[7], shape=(1, 2, 300, 128)).tensors(0)
    config = dataclasses.replace(BY_NAME["partial"].config, overflow="saturate")
    stored = (q.float() @ k.float().mT).half().float().abs()
    touched = (stored >= 65504).any(-1).double().mean()
    assert run.touched_rows(q, k, v, config) == pytest.approx(float(touched))


def test_a_case_alone_gives_the_same_numbers() -> None:
    alone = run.run_rmse(heads=1, seq=130, cases=PAPER_CASES[5:6], overflow="inf")
    among = run.run_rmse(heads=1, seq=130, cases=PAPER_CASES[4:7], overflow="inf")
    assert alone["records"] == select(among, case=PAPER_CASES[5].name)


def test_result_is_json_with_origin_and_one_record_per_line(result: dict[str, Any]) -> None:
    text = output.to_json(result)
    read = json.loads(text)
    assert {"schema", "experiment", "note", "environment", "duration_s", "gate", "records", "cases"} <= set(read)
    assert {"processor", "threads", "torch", "pasa", "commit"} <= set(read["environment"])
    assert len(read["records"]) == (15 + 6) * len(ARITHMETICS)
    assert all(set(each) == set(read["records"][0]) for each in read["records"])
    overflowed = next(each for each in read["records"] if each["nonfinite_share"])
    assert overflowed["rmse"] is None, "JSON has no NaN"
    assert sum(line.startswith('  {"case"') for line in text.splitlines()) == len(read["records"])


def test_csv_and_markdown_hold_every_record_and_case(result: dict[str, Any]) -> None:
    lines = output.to_csv(result["records"]).splitlines()
    assert len(lines) == 1 + len(result["records"])
    page = report.to_markdown(result)
    assert all(f"| {case.name} |" in page for case in PAPER_CASES)
    assert output.NOTE in page
    assert "8.14 %" in page, "the paper's share stands beside the measured one"


def test_stored_results_show_the_same_tables(result: dict[str, Any]) -> None:
    """Story: JSON has no NaN, and the tables of a stored result met None where they expected it."""
    read = json.loads(output.to_json(result))
    for stored, fresh in zip(report.tables(read), report.tables(result), strict=True):
        assert (stored.title, stored.header, len(stored.rows)) == (fresh.title, fresh.header, len(fresh.rows))
        assert [["NaN" in cell for cell in row] for row in stored.rows] == [
            ["NaN" in cell for cell in row] for row in fresh.rows
        ]


def test_several_seeds_are_reported_each_and_worst() -> None:
    both = run.run_rmse(heads=1, seq=130, seeds=(0, 1), cases=PAPER_CASES[1:2], overflow="inf")
    page = report.to_markdown(both)
    assert "worst of 2 seeds" in page
    assert "## Per seed" in page
    assert {each["seed"] for each in both["records"]} == {0, 1}


def test_progress_counts_to_the_end() -> None:
    seen: list[tuple[int, int]] = []
    run.run_rmse(heads=1, seq=16, cases=PAPER_CASES[:2], progress=lambda done, total, label: seen.append((done, total)))
    assert seen == [(0, 2), (1, 2), (2, 2)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": 0}, "heads=0"),
        ({"dim": -1}, "dim=-1"),
        ({"seeds": ()}, r"seeds=\(\)"),
        ({"overflow": "wrap"}, "overflow='wrap'"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run.run_rmse(**arguments)


def test_large_bias_never_does_worse_than_fp32_flash() -> None:
    """FP16 score tiles, referenced and shifted: no case of the table may lose more than a tenth to FP32 scores."""
    found = bias.run_large_bias(heads=1, seq=384, seeds=(0, 1))
    assert [row["case"] for row in found["ratios"]] == [f"bias({b})" for b in (32, 80, 200, 500, 2000)]
    assert all(row["worst_to_fp32"] <= 1.1 for row in found["ratios"])
    assert len(report.tables(found)[0].rows) == 5
    assert report.tables(json.loads(output.to_json(found)))[0].rows == report.tables(found)[0].rows


def test_resonance_is_tamed_by_both_shifts() -> None:
    found = resonance.run_resonance(heads=1, seq=256, overflow="both")
    for case, ranges in found["ranges"].items():
        assert max(map(abs, ranges["S = Q K^T"])) > 65504, case
        assert max(map(abs, ranges["S' (paper)"])) < 65504, case
        assert max(map(abs, ranges["S' (exact)"])) < 65504, case
    for each in found["records"]:
        if each["arithmetic"] == "partial":
            assert "a" in each["failed_gates"]
        if each["arithmetic"] == "pasa-exact":
            assert each["failed_gates"] == ""


def test_maps_agree_with_what_attention_stores() -> None:
    """The maps drive the score model themselves: their extreme must be the one that attention records."""
    case = dataclasses.replace(resonance.RESONANCE_CASES[0], shape=(1, 1, 256, 128))
    maps = resonance.make_maps(case, 0)
    with pasa.record_diagnostics() as entries:
        pasa.attention(*case.tensors(0), config=resonance.VARIANTS["paper"])
    assert float(maps.stored_scores["paper"].abs().max()) == float(entries[0].max_score_after.max())
