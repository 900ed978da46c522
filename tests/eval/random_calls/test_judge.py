"""The judge of random calls: correct results pass every bound, and each planted error breaks its bound."""

import dataclasses
import math
from functools import partial

import pytest
import torch

import pasa
from pasa.eval.kit.error_metrics import MMA_DEPTH
from pasa.eval.random_calls import attention, judge, kernels, truth
from pasa.eval.random_calls.cases import broken
from pasa.eval.random_calls.inputs import Call, make
from pasa.eval.random_calls.judge import find_moved, summed_error
from pasa.eval.random_calls.truth import find_truth, prepare
from pasa.ops.attention.triton import tile_math

FP16 = judge.Arithmetic(torch.float16)


def a_case(**changes):
    """Return parameters of a causal case: 2 batch entries, 4 query heads on 2 key heads, 21 rows, 45 keys, D = 16."""
    shape = {"batch": 2, "heads": 2, "groups": 2, "rows": 21, "keys": 45, "dim": 16, "causal": True, "block_k": 32}
    return attention.SIMPLEST | shape | {"where": "hidden", "lse": True, "data_seed": 1} | changes


def attended(params):
    """Return a call, its truth, and the result of the reference backend."""
    call = make(params)
    return call, find_truth(call), tuple(x.clone() for x in attention.attend(params, call))


MORE_ROWS = {"rows": 45, "keys": 21}  # the first rows see no key
RIGHT = [{"data": data, "mask": mask} for data in ("randn", "bias", "wide", "largest", "constant")
         for mask in ("none", "bool", "float", "padding-float")]  # fmt: skip
RIGHT += [MORE_ROWS, *({"garbage": name} for name in ("query", "key", "value"))]
WRONG = {
    "value": ({}, lambda out, lse: out[1, 2, 20].mul_(-1).sub_(0.1), ["error"]),
    "range": ({}, lambda out, lse: out[0, 3, 7, 11].fill_(9.0), ["range", "heavy", "error"]),
    # The last key is NaN. Only row 20 sees it, but NaN (or infinity) is planted in row 5.
    "nan": ({"garbage": "key"}, lambda out, lse: out[0, 0, 5].fill_(math.nan), ["finite", "range", "heavy", "error"]),
    "infinity": (
        {"garbage": "key"},
        lambda out, lse: out[0, 0, 5].fill_(math.inf),
        ["finite", "range", "heavy", "error"],
    ),
    "row without keys": (
        MORE_ROWS,
        lambda out, lse: out[0, 0, 3, 2].fill_(1e-6),
        ["fully-masked", "range", "heavy", "error"],
    ),
    "its log-sum-exp": (MORE_ROWS, lambda out, lse: lse[1, 1, 4].fill_(-1e30), ["fully-masked"]),
    "a key's NaN is missing": ({"garbage": "key"}, lambda out, lse: out.nan_to_num_(0.0), ["nan"]),
    "a value's NaN is missing": ({"garbage": "value"}, lambda out, lse: out.nan_to_num_(0.0), ["nan"]),
    "a key's NaN is missing in its log-sum-exp": ({"garbage": "key"}, lambda out, lse: lse.nan_to_num_(1.0), ["nan"]),
    "log-sum-exp": ({}, lambda out, lse: lse[0, 1, 4].add_(0.05), ["lse"]),
    **{str(how): (how, lambda out, lse: None, []) for how in RIGHT},
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_breaks_its_bound_and_what_is_right_none(name):
    how, change, expected = WRONG[name]
    params = a_case(**how)
    _, true, (out, lse) = attended(params)
    change(out, lse)
    assert broken(judge.judge(true, out, lse, attention.arithmetic_of(params, params["keys"]))) == expected


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


def test_a_log_sum_exp_of_ordinary_fp32_scores_is_held_against_the_sum():
    _, true, (out, _) = attended(a_case())
    lse, how = true.lse.float(), dataclasses.replace(FP16, fp32_scores=True)
    assert judge.judge(true, out, lse, how)["lse-ordinary"] < 0.01
    lse[0, 1, 4] += 2e-3
    assert broken(judge.judge(true, out, lse, how)) == ["lse-ordinary"]
    for how, fp32_scores in (({"data": "bias"}, True), ({"data": "largest"}, False), ({"backend": "reference"}, False)):
        assert attention.arithmetic_of(a_case(**{"backend": "triton"} | how), 45).fp32_scores == fp32_scores


@pytest.mark.parametrize("recovery", ["exact", "paper"])
def test_an_error_above_twice_the_emulation_is_found(recovery):
    """This is the only bound for the published recovery that kernels have to meet."""
    call, true, emulated = attended(a_case(recovery=recovery))
    paper = kernels.PAPER_SCORE if recovery == "paper" else None

    def failures(out, lse):
        return broken(judge.compare(true, (out, lse), emulated, find_moved(call, true), torch.float16, paper))

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


def test_nan_holds_no_bound_and_results_are_compared_bit_for_bit():
    """Equal bits count as equal, so NaN equals NaN, and 0 differs from -0."""
    assert broken({"error": math.nan, "fully-masked": 0.0, "lse": 1.0, "nan": 1.0}) == ["error", "nan"]
    first = torch.tensor([1.0, torch.nan, 0.0]).half(), torch.zeros(2)
    second = torch.tensor([1.0, torch.nan, -0.0]).half(), torch.tensor([0.0, 1e-45])
    assert judge.differing(first, first) == 0
    assert judge.differing(first, second) == 2


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [21, 60])
def test_truth_in_pieces_is_the_truth(monkeypatch, causal, rows):
    """The first rows of a causal call have no key if there are 60 rows and 45 keys."""
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


# ---- FP32 sums in another order
#
# Story: where scores reach 2e5 nats, FP32 numbers lie 0.03 nats apart, and a row with two rivals for its maximum came
# out four times as far from the truth as in the emulation. Any other order of the same sum did as much.

HUGE = attention.SIMPLEST | {"groups": 2, "dim": 80, "data": "mean", "scale": 30.0, "data_seed": 1, "lse": True}


def rivals(middle=10.0, reach=5.0):
    """Numbers of 5 to 15. Keys have twins, a last bit higher in one channel and lower in another: by a nat or so."""
    source = torch.Generator().manual_seed(0)
    shapes = (1, 2, 150, 80), (1, 1, 64, 80)
    q, k = (middle + reach * (2 * torch.rand(shape, generator=source) - 1) for shape in shapes)
    twin = k.half().clone()
    twin[..., 10] += middle * 2.0**-10
    twin[..., 70] -= middle * 2.0**-10
    v = torch.randn(1, 1, 128, 80, generator=source)
    return Call(q.half(), torch.cat([k.half(), twin], 2), v.half(), None, False, 30.0)


def add_up(q, k, depth, truncated=False):
    """Add `depth` exact products at a time to what there is, to nearest or towards zero: 16 are a tensor core's."""
    total = torch.zeros(*q.shape[:-1], k.shape[-2])
    for start in range(0, q.shape[-1], depth):
        part = slice(start, start + depth)
        exact = total.double() + q[..., part].double() @ k[..., part].double().mT
        total = exact.float()
        if truncated:
            total = torch.where(total.double() > exact, total.nextafter(torch.zeros(())), total)
    return total


ORDERS = {
    "forwards": partial(add_up, depth=1),
    "backwards": lambda q, k: add_up(q.flip(-1), k.flip(-1), depth=1),
    "blocks": partial(add_up, depth=MMA_DEPTH),
    "truncated": partial(add_up, depth=MMA_DEPTH, truncated=True),
    "library": lambda q, k: q @ k.mT,
}


class Judged:
    """A call with all that its judge needs, which takes scores in place of a kernel's result."""

    def __init__(self, call):
        self.truth, self.emulated, self.part = find_truth(call), attention.attend(HUGE, call), prepare(call)
        self.errors, self.moved = summed_error(self.part, call.scale), find_moved(call, self.truth)

    def compared(self, scores, with_order=True):
        result, moved = (torch.softmax(scores.double(), -1) @ self.part.v).half(), self.moved if with_order else None
        return judge.compare(self.truth, (result, self.truth.lse), self.emulated, moved, torch.float16, None)


@pytest.fixture(scope="module")
def huge():
    return Judged(rivals())


def sign(x):
    return torch.randint(0, 2, x.shape, generator=torch.Generator().manual_seed(1)) * 2.0 - 1


@pytest.mark.parametrize("name", ORDERS)
def test_any_order_of_a_sum_is_within_the_bound(huge, name):
    scores = ORDERS[name](huge.part.q.float(), huge.part.k.float()) * 30
    assert scores.max() > 2e5
    assert broken(huge.compared(scores)) == []
    # Without the term the bound depends on the order. Every row has rivals, so that the RMSE shows it first.
    assert huge.compared(scores, with_order=False)["emulated-rmse"] > 2
    worst = ((scores - huge.part.scores).abs() / huge.errors).max()
    assert worst <= (1 if name in ("blocks", "truncated") else 2)  # one by one: d is 1.5 standard deviations and more


@pytest.mark.parametrize(
    "worse",
    [
        lambda scores, errors: scores + 8 * errors * sign(scores),
        lambda scores, errors: torch.round(scores * 2) / 2,  # FP32 less five bits
        lambda scores, errors: scores.half(),  # infinity and NaN
        lambda scores, errors: scores.clamp(max=65504),  # saturated
        lambda scores, errors: scores.index_fill(-1, scores[0, 0, 0].argmax(), -torch.inf),  # the heaviest key dropped
    ],
)
def test_a_kernel_that_loses_more_is_found(huge, worse):
    assert broken(huge.compared(huge.part.scores)) == []
    assert "emulated-max" in broken(huge.compared(worse(huge.part.scores, huge.errors)))


def test_keys_that_have_to_be_anchored_are_judged_without_their_mean():
    """Numbers of 63 to 65: a kernel that multiplies whole keys is found in any order, one that centres them passes."""
    assert (tile_math.ANCHOR_GAIN.value, tile_math.ANCHOR_LIMIT.value) == (judge.ANCHOR_GAIN, judge.ANCHOR_LIMIT)
    centred = Judged(rivals(middle=64.0, reach=1.0))
    q, k = centred.part.q.float(), centred.part.k.float()
    for sum_up in ORDERS.values():
        assert broken(centred.compared(sum_up(q, k - 64) * 30)) == []
        assert "emulated-max" in broken(centred.compared(sum_up(q, k) * 30))


@pytest.mark.parametrize("how", [{}, {"causal": True}, {"mask": "float"}, {"mask": "padding", "batch": 2}], ids=str)
def test_errors_of_that_size_move_outputs_no_further(how):
    """Adversarial signs: every key of a larger value is too high, in one column."""
    call = make(HUGE | {"rows": 40, "keys": 63} | how)
    truth, part = find_truth(call), prepare(call)
    moved, errors = find_moved(call, truth), summed_error(part, call.scale)
    larger = (part.v[..., 3].unsqueeze(2) > truth.out[..., 3].unsqueeze(3)) * 2.0 - 1
    for signs in (larger, -larger, sign(part.scores)):
        weights = torch.softmax(part.scores + signs * errors, -1).nan_to_num(0.0)
        away = (weights @ part.v - truth.out).abs()
        assert (away[..., 3] <= moved[..., 3] * (1 + 1e-5) + 1e-9).all()
    assert (moved <= truth.high - truth.low).all()


def test_the_term_is_nothing_for_ordinary_scores_and_small_for_huge_ones(huge):
    """The term is a share of the distance between the values that a row sees."""
    assert 0.01 < (huge.moved / (huge.truth.high - huge.truth.low)).max() < 0.2
    call = make(HUGE | {"rows": 150, "keys": 128, "data": "randn", "scale": None})
    truth = find_truth(call)
    assert 0 < (find_moved(call, truth) / (truth.high - truth.low)).max() < 1e-5
