"""Shifts of K, of Q and of both: what each does to scores in FP16."""

from typing import Any

import pytest
import torch

from pasa.eval.accuracy.rmse import report
from pasa.eval.accuracy.rmse import shift_sides as sides
from pasa.eval.kit.tables import short

Records = dict[tuple[str, str, str], dict[str, Any]]
ONCE, STEPS = sides.STEPS


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return sides.run_sides(heads=1, seq=512, seeds=(0,))


@pytest.fixture(scope="module")
def records(result: dict[str, Any]) -> Records:
    return {(each["case"], each["shift"], each["sums"]): each for each in result["records"]}


@pytest.mark.parametrize("side", list(sides.SIDES.values()))
def test_a_shift_changes_rows_by_a_constant(side: str) -> None:
    """Against FP64, which is Q K^T unshifted: what is off must be the same for all keys, up to roundings.

    Both differences and the tile round to FP16 once, each by 2^-11 of its size at most; the constant is taken off by
    centring, which doubles a bound. FP32 sums are 2^-12 of that. Without q_mean . k_j this is off by tens.
    """
    q, k, _ = sides.SideCase("both", 3, 5).tensors((1, 1, 255, 128), 1)
    tile, added = sides.stored_scores(q, k, side, None, "inf")
    q, k = q.double(), k.double()
    wrong = tile.double() + added.double() - q @ k.mT
    small_q, small_k = (x - x.mean(2, keepdim=True) if name in side else x for x, name in ((q, "q"), (k, "k")))
    rounded = 2**-11 * (q.abs() @ small_k.abs().mT * ("k" in side) + small_q.abs() @ k.abs().mT * ("q" in side))
    bound = 2 * 1.01 * (rounded + 2**-11 * tile.abs()).max()
    assert (wrong - wrong.mean(-1, keepdim=True)).abs().max() <= bound
    assert bound < 5


@pytest.mark.parametrize(
    ("case", "helping"), [("none", {"none", "K", "Q", "both"}), ("K", {"K", "both"}), ("Q", {"Q", "both"})]
)
def test_a_shift_helps_the_side_that_is_biased(records: Records, case: str, helping: set[str]) -> None:
    for sums in (ONCE, STEPS):
        assert {shift for shift in sides.SIDES if not records[case, shift, sums]["overflowed"]} == helping


def test_of_a_shared_bias_either_side_is_enough(records: Records) -> None:
    assert records["both", "none", ONCE]["overflowed"] == 512 * 512
    assert not any(records["both", shift, ONCE]["overflowed"] for shift in ("K", "Q", "both"))
    assert records["both", "both", ONCE]["rmse"] < records["both", "K", ONCE]["rmse"] / 4


@pytest.mark.parametrize("case", [case.biased for case in sides.CASES])
def test_the_operator_is_right_under_every_bias(records: Records, case: str) -> None:
    """Weights and output are rounded by 2^-11 at most each. A bias of Q alone spreads scores over more than FP16."""
    ours = records[case, sides.OURS, ONCE]
    assert ours["nonfinite_share"] == 0
    assert ours["rmse"] < 2**-10
    assert (ours["overflowed"] > 0) == (case == "Q")


def test_sums_in_fp16_are_rounded_at_every_step(records: Records) -> None:
    """Story: a sum that leaves FP16 half way and returns is infinite there, and finite where it is stored once."""
    q = torch.full((1, 1, 1, 128), 100.0).half()
    k = torch.zeros(1, 1, 1, 128).half()
    k[..., :16], k[..., 16:32] = 100.0, -90.0
    once, _ = sides.stored_scores(q, k, "", None, "inf")
    steps, _ = sides.stored_scores(q, k, "", 16, "inf")
    assert once.item() == 16000
    assert steps.item() == torch.inf
    assert records["none", "none", STEPS]["rmse"] > 1.2 * records["none", "none", ONCE]["rmse"]


def test_verdict_names_what_overflowed(result: dict[str, Any]) -> None:
    assert result["gate"] == {"passed": True, "failures": []}
    bad = [each | {"overflowed": 7} for each in result["records"] if (each["case"], each["shift"]) == ("K", "K")]
    assert not sides.verdict(bad)["passed"]
    assert sides.verdict(bad)["failures"][0] == "bias in K, shift K, seed 0: 7 scores beyond FP16"


def test_table_shows_the_worst_seed_and_what_overflowed(result: dict[str, Any]) -> None:
    worse = [each | {"seed": 1, "overflowed": 512 * 512 // 4, "rmse": 0.5} for each in result["records"]]
    table = report.sides_table({**result, "records": result["records"] + worse[:-1]})
    assert len(table.rows) == 4
    assert table.rows[0][0] == "none: Q 0, K 0"
    assert set(table.rows[0][1:]) == {"5.0e-1 (25 %)"}
    assert table.header[1:3] == ["none", "none, fp16 sums"]
    assert table.rows[-1][-1] == short(result["records"][-1]["rmse"])
