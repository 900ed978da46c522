"""Every bound notices an error that is planted, and passes what is right."""

import dataclasses

import pytest
import torch

import pasa
from pasa.eval.random_calls.soak import judge
from pasa.eval.random_calls.soak.cases import draw_case, make_inputs
from pasa.eval.random_calls.soak.families import draw_families
from pasa.eval.random_calls.soak.judge import Result
from pasa.eval.random_calls.soak.order import find_moved
from pasa.eval.random_calls.soak.run import call
from pasa.eval.random_calls.soak.truth import find_truth, plain

CPU = torch.device("cpu")


def a_case(data="randn", garbage="none", where="hidden", **family):
    """Causal, 2 entries, 4 heads on 2, 21 rows and 45 keys, D = 16; no randomness but the data's."""
    shape = {"batch": 2, "heads": 4, "kv_heads": 2, "dim": 16, "causal": True, "packed": False, "mask": "none"}
    plain_family = {"layout": "contiguous", "dtype": "float16", "recovery": "exact", "accumulate": "fp32"}
    drawn = dataclasses.replace(draw_families(0)[0], **shape | plain_family | {"block_k": 32} | family)
    what = {"data": data, "values": "randn", "scale": None, "garbage": garbage, "where": where, "poisoned": False}
    return dataclasses.replace(draw_case(0, 1), family=drawn, rows=(21,), keys=(45,), emulated=True, **what)


def judged(case, spoil=lambda out, lse: None):
    """Numbers of the reference's result after `spoil` has changed it."""
    inputs = make_inputs(case, CPU)
    truth, found = find_truth(plain(case, inputs)), call(case, inputs, "reference")
    out, lse = found.out.clone(), found.lse.clone()
    spoil(out, lse)
    return judge.judge(case, truth, Result(out, lse), True)


@pytest.mark.parametrize("data", ["randn", "bias", "wide", "largest", "constant"])
@pytest.mark.parametrize("mask", ["none", "bool", "float", "padding-float"])
def test_what_is_right_passes(data, mask):
    assert judge.failures(judged(a_case(data, mask=mask))) == []


def test_a_wrong_value_inside_the_range_breaks_the_error_bound():
    def spoil(out, lse):
        out[1, 2, 20, 3] = 0.5 if out[1, 2, 20, 3] < 0 else -0.5

    assert judge.failures(judged(a_case(), spoil)) == ["error"]


def test_a_value_outside_of_the_range_is_found():
    def spoil(out, lse):
        out[0, 3, 7, 11] = 9.0

    assert {"range", "error"} == set(judge.failures(judged(a_case(), spoil)))


def test_a_future_value_is_outside_of_the_range_of_an_earlier_row():
    """Rows are judged by the values up to the last key that they see."""
    case = a_case()
    inputs = make_inputs(case, CPU)
    inputs.v[..., -1, :] = 100.0
    truth = find_truth(plain(case, inputs))
    assert truth.high[..., -1, :].min() == 100
    assert truth.high[..., :-1, :].max() < 10


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_leak_is_found(bad):
    """A NaN in the last key, which row 20 alone sees, has reached row 5."""

    def spoil(out, lse):
        out[0, 0, 5] = bad

    assert judged(a_case(garbage="key"))["finite"] == 0
    assert judged(a_case(garbage="key"), spoil)["finite"] == 16


def test_a_missing_nan_is_found():
    """A value's NaN, which all rows see, is a number in one of them; a key's does not show in the log-sum-exp."""
    case = a_case(garbage="value", where="seen")
    inputs = make_inputs(case, CPU)
    inputs.v[:, :, 0, 4] = torch.inf
    truth, found = find_truth(plain(case, inputs)), call(case, inputs, "reference")
    assert torch.isnan(found.out[..., 4]).all()
    assert judge.failures(judge.judge(case, truth, found, True)) == []
    found.out[1, 1, 9, 4] = 0.0
    assert judge.judge(case, truth, found, True)["nan"] == 1
    inputs.k[0, 1, 2, 0] = torch.nan
    truth, found = find_truth(plain(case, inputs)), call(case, inputs, "reference")
    assert judge.judge(case, truth, found, True)["nan"] == 0
    found.lse[0, 2:] = 1.0
    assert judge.judge(case, truth, found, True)["nan"] == 2 * 21


def test_a_blind_row_is_zero_and_minus_infinity():
    """More rows than keys: the first see nothing."""
    case = dataclasses.replace(a_case(), rows=(45,), keys=(21,))
    assert judge.failures(judged(case)) == []

    def spoil(out, lse):
        out[0, 0, 3, 2], lse[1, 1, 4] = 1e-6, -1e30

    assert judged(case, spoil)["blind"] == 2


def test_a_wrong_log_sum_exp_is_found():
    def spoil(out, lse):
        lse[0, 1, 4] += 0.05

    assert judge.failures(judged(a_case(), spoil)) == ["lse"]
    case = a_case()
    inputs = make_inputs(case, CPU)
    truth, found = find_truth(plain(case, inputs)), call(case, inputs, "reference")
    exact = Result(found.out, truth.lse.float())
    assert judge.judge(case, truth, exact, False)["lse-ordinary"] < 0.01
    exact.lse[0, 1, 4] += 2e-3
    assert "lse-ordinary" in judge.failures(judge.judge(case, truth, exact, False))


@pytest.mark.parametrize("recovery", ["exact", "paper"])
def test_an_error_above_twice_the_emulation_is_found(recovery):
    """Also of the published recovery, of which nothing else is asked."""
    case = a_case(recovery=recovery)
    inputs = make_inputs(case, CPU)
    truth, emulated = find_truth(plain(case, inputs)), call(case, inputs, "reference")
    moved = find_moved(plain(case, inputs), truth)
    right = judge.compare(case, truth, emulated, emulated, moved)
    assert judge.failures(right) == []
    worse = Result(emulated.out.clone(), emulated.lse.clone())
    worse.out[0, 0, 0, 0] += 0.05
    assert "emulated-max" in judge.failures(judge.compare(case, truth, worse, emulated, moved))
    worse.out[:] += 0.02
    assert "emulated-rmse" in judge.failures(judge.compare(case, truth, worse, emulated, moved))
    worse.lse[0, 0, 0] += 0.1
    assert ("emulated-lse" in judge.failures(judge.compare(case, truth, worse, emulated, moved))) == (
        recovery == "paper"
    )


def test_results_are_compared_bit_for_bit():
    """NaN equals itself, 0 is not -0."""
    first = Result(torch.tensor([1.0, torch.nan, 0.0]).half(), torch.zeros(2))
    second = Result(torch.tensor([1.0, torch.nan, -0.0]).half(), torch.tensor([0.0, 1e-45]))
    assert judge.differing(first, first) == 0
    assert judge.differing(first, second) == 2


def test_nan_holds_no_bound():
    assert judge.failures({"error": float("nan"), "blind": 0.0, "lse": 1.0, "nan": 1.0}) == ["error", "nan"]


def test_truth_in_pieces_is_the_truth(monkeypatch):
    """By entries and rows, with a mask for each."""
    case = a_case("bias", garbage="value", mask="float")
    inputs = make_inputs(case, CPU)
    whole = find_truth(plain(case, inputs))
    monkeypatch.setattr("pasa.eval.random_calls.soak.truth.PIECE", 4 * 45 * 4)
    pieces = plain(case, inputs)
    assert len(pieces.pieces) == 2 * 6
    for name, value in vars(find_truth(pieces)).items():
        if name in ("low", "high"):  # of keys that some row of the piece sees
            continue
        torch.testing.assert_close(value, getattr(whole, name), rtol=1e-12, atol=1e-12)
    golden, lse = pasa.golden_attention(
        inputs.q, inputs.k, inputs.v.nan_to_num(0, 0, 0), attn_mask=inputs.mask, is_causal=True
    )
    torch.testing.assert_close(whole.out, golden, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(whole.lse, lse, rtol=1e-12, atol=1e-12)
