"""The judge of random calls: correct results pass every bound, and each planted error breaks its bound."""

import dataclasses
import math

import pytest
import torch

import pasa
from pasa.eval.random_calls import attention, judge, kernels, truth
from pasa.eval.random_calls.cases import broken
from pasa.eval.random_calls.inputs import Call, make
from pasa.eval.random_calls.truth import find_truth

FP16 = judge.Arithmetic(torch.float16)


def a_case(**changes):
    """Return parameters of a causal case: 2 batch entries, 4 query heads on 2 key heads, 21 rows, 45 keys, D = 16."""
    shape = {"batch": 2, "heads": 2, "groups": 2, "rows": 21, "keys": 45, "dim": 16, "causal": True, "block_k": 32}
    how = {"where": "hidden", "lse": True, "tile": 0, "poisoned": False, "twice": False, "emulated": True}
    return attention.SIMPLEST | shape | how | {"data_seed": 1} | changes


def attended(params):
    """Return a call, its truth, and the result of the reference backend."""
    call = make(params)
    return call, find_truth(call), tuple(x.clone() for x in kernels.attend(params, call))


def judged(params, change=lambda out, lse: None):
    """Return the measures of the reference's result, after `change` has altered output or log-sum-exp."""
    _, true, (out, lse) = attended(params)
    change(out, lse)
    return judge.judge(true, out, lse, attention.arithmetic_of(params, params["keys"]))


def put(place, value, which=0):
    def change(*result):
        result[which][place] = value

    return change


MORE_ROWS = {"rows": 45, "keys": 21}  # the first rows see no key
RIGHT = [{"data": data, "mask": mask} for data in ("randn", "bias", "wide", "largest", "constant")
         for mask in ("none", "bool", "float", "padding-float")]  # fmt: skip


@pytest.mark.parametrize(
    "how", [*RIGHT, MORE_ROWS, *({"garbage": name} for name in ("query", "key", "value"))], ids=str
)
def test_what_is_right_passes(how):
    assert broken(judged(a_case(**how))) == []


@pytest.mark.parametrize(
    ("how", "change", "expected"),
    [
        ({}, lambda out, lse: out[1, 2, 20].mul_(-1).sub_(0.1), ["error"]),
        ({}, put((0, 3, 7, 11), 9.0), ["range", "heavy", "error"]),
        # The last key is NaN. Only row 20 sees it, but NaN (or infinity) is planted in row 5.
        ({"garbage": "key"}, put((0, 0, 5), math.nan), ["finite", "range", "heavy", "error"]),
        ({"garbage": "key"}, put((0, 0, 5), math.inf), ["finite", "range", "heavy", "error"]),
        (MORE_ROWS, put((0, 0, 3, 2), 1e-6), ["blind", "range", "heavy", "error"]),
        (MORE_ROWS, put((1, 1, 4), -1e30, which=1), ["blind"]),
        ({}, lambda out, lse: lse[0, 1, 4].add_(0.05), ["lse"]),
    ],
    ids=["value", "range", "nan", "infinity", "row without keys", "its log-sum-exp", "log-sum-exp"],
)
def test_what_is_wrong_breaks_its_bound(how, change, expected):
    assert broken(judged(a_case(**how), change)) == expected


def test_a_value_without_weight_is_outside_of_the_range_of_those_that_have_some():
    """Key 1 lies 40 nats below key 0, so no output may contain its value. At such scores, only `heavy` can tell."""
    q, k, v = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 2, 16), torch.zeros(1, 1, 2, 16)
    q[..., :2], k[..., 0], k[..., 0, 1], v[..., 1, :] = 1000.0, 1000.0, 0.04, 1.0
    true = find_truth(Call(q.half(), k.half(), v.half(), None, False, 1.0))
    measures = judge.judge(true, torch.full_like(true.out, 0.5), true.lse, FP16)
    assert broken(measures) == ["heavy"]


def test_a_row_is_judged_by_the_values_that_it_sees():
    """Values of later keys do not count, nor those of a key that a mask hides from this row only."""
    call = make(a_case())
    call.v[..., -1, :] = 100.0
    true = find_truth(call)
    assert true.high[..., -1, :].min() == 100
    assert true.high[..., :-1, :].max() < 10
    mask = torch.ones(21, 45, dtype=torch.bool)
    mask[20, 44] = False
    assert find_truth(dataclasses.replace(call, mask=mask)).high.max() < 10


def test_a_missing_nan_is_found():
    """First a NaN from a value is missing in one output; then a NaN from a key is missing in log-sum-exps."""
    params = a_case()
    call = make(params)
    call.v[:, :, 0, 4] = torch.inf
    true, (out, lse) = find_truth(call), kernels.attend(params, call)
    assert torch.isnan(out[..., 4]).all()
    assert broken(judge.judge(true, out, lse, FP16)) == []
    out[1, 1, 9, 4] = 0.0
    assert judge.judge(true, out, lse, FP16)["nan"] == 1
    call.k[0, 1, 2, 0] = torch.nan
    true, (out, lse) = find_truth(call), kernels.attend(params, call)
    assert judge.judge(true, out, lse, FP16)["nan"] == 0
    lse[0, 2:] = 1.0
    assert judge.judge(true, out, lse, FP16)["nan"] == 2 * 21


def test_a_log_sum_exp_of_ordinary_fp32_scores_is_held_against_the_sum():
    _, true, (out, _) = attended(a_case())
    lse, how = true.lse.float(), dataclasses.replace(FP16, summed=True)
    assert judge.judge(true, out, lse, how)["lse-ordinary"] < 0.01
    lse[0, 1, 4] += 2e-3
    assert broken(judge.judge(true, out, lse, how)) == ["lse-ordinary"]
    for how, summed in (({"data": "bias"}, True), ({"data": "largest"}, False), ({"backend": "reference"}, False)):
        assert attention.arithmetic_of(a_case(**{"backend": "triton"} | how), 45).summed == summed


@pytest.mark.parametrize("recovery", ["exact", "paper"])
def test_an_error_above_twice_the_emulation_is_found(recovery):
    """This is the only bound for the published recovery that kernels have to meet."""
    call, true, emulated = attended(a_case(recovery=recovery))
    paper = kernels.PAPER_SCORE if recovery == "paper" else None

    def failures(out, lse):
        return broken(judge.compare(true, (out, lse), emulated, judge.find_moved(call, true), torch.float16, paper))

    assert failures(*emulated) == []
    out, lse = (x.clone() for x in emulated)
    out[0, 0, 0, 0] += 0.05
    assert "emulated-max" in failures(out, lse)
    out[:] += 0.02
    assert "emulated-rmse" in failures(out, lse)
    lse[0, 0, 0] += 0.1
    assert ("emulated-lse" in failures(out, lse)) == (recovery == "paper")


def test_an_error_above_that_of_naive_attention_is_found():
    call, true, (out, _) = attended(a_case())
    naive = truth.naive_fp16(call)
    assert judge.against_naive(true, naive, out, FP16) <= 1
    assert judge.against_naive(true, naive, out + 0.02, FP16) > 1
    assert judge.against_naive(true, naive * math.nan, out + 0.02, FP16) == 0


def test_every_bound_can_be_broken():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 8, generator=g).half() for n in (3, 5, 5))
    k[0, 0, 1, 0] = torch.nan
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[0], mask[1, 1] = False, False
    true = find_truth(Call(q, k, v, mask, False, 1.0))
    how = dataclasses.replace(FP16, summed=True)
    measures = judge.judge(true, torch.full_like(true.out, 9.0), torch.zeros_like(true.lse) + 9, how)
    assert broken(measures) == [name for name in measures if name != "finite"]
    assert judge.judge(true, torch.full_like(true.out, torch.inf), true.lse, how)["finite"] > 0


def test_results_are_compared_bit_for_bit():
    """Equal bits count as equal, so NaN equals NaN, and 0 differs from -0."""
    first = torch.tensor([1.0, torch.nan, 0.0]).half(), torch.zeros(2)
    second = torch.tensor([1.0, torch.nan, -0.0]).half(), torch.tensor([0.0, 1e-45])
    assert judge.differing(first, first) == 0
    assert judge.differing(first, second) == 2


def test_nan_holds_no_bound():
    assert broken({"error": float("nan"), "blind": 0.0, "lse": 1.0, "nan": 1.0}) == ["error", "nan"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [21, 60])
def test_truth_in_pieces_is_the_truth(monkeypatch, causal, rows):
    """A call that is split by batch entries and rows has the same truth as the whole call.

    With 60 rows on 45 keys, the first rows of a causal call have no key.
    """
    call = make(a_case(data="bias", garbage="value", mask="float", causal=causal, rows=rows))
    whole = find_truth(call)
    monkeypatch.setattr(truth, "PIECE", 4 * 45 * 4)
    assert len(truth.pieces(call)) == 2
    assert len(truth.pieces(call)[0]) == -(-rows // 4)
    for name, value in vars(find_truth(call)).items():
        torch.testing.assert_close(value, getattr(whole, name), rtol=1e-9, atol=1e-12)
    golden = pasa.golden_attention(call.q, call.k, call.v.nan_to_num(0, 0, 0), attn_mask=call.mask, is_causal=causal)
    torch.testing.assert_close((whole.out, whole.lse), golden, rtol=1e-12, atol=1e-12)


def test_packed_sequences_have_the_truth_of_each():
    lengths = {"row_lengths": [3, 0, 5, 2], "key_lengths": [4, 2, 0, 9]}
    call = make(a_case(batch=1, rows=10, keys=15, **lengths))
    true = find_truth(call)
    out, lse = pasa.golden_attention(call.q[:, :, 8:], call.k[:, :, 6:], call.v[:, :, 6:], is_causal=True)
    torch.testing.assert_close((true.out[:, :, 8:], true.lse[:, :, 8:]), (out, lse))
    assert true.fully_masked[0, 0].tolist() == [False] * 3 + [True] * 5 + [False] * 2


def test_the_range_of_a_very_large_call_is_that_up_to_the_last_key(monkeypatch):
    """The approximate range equals the exact one under a causal mask, and contains it under any other mask."""
    for mask in ("none", "bool"):
        call = make(a_case(mask=mask))
        exact = find_truth(call)
        with monkeypatch.context() as patch:
            patch.setattr(truth, "EXACT_RANGE", 0)
            wide = find_truth(call)
        assert (wide.low <= exact.low).all()
        assert (wide.high >= exact.high).all()
        assert torch.equal(wide.low, exact.low) == (mask == "none")
