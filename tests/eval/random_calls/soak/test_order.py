"""The story: where scores reach 2e5 nats, FP32 numbers lie 0.03 nats apart, and a row with two rivals for its maximum
came out four times as far from the truth as in the emulation. Any other order of the same sum did as much."""

import dataclasses

import pytest
import torch

from pasa.eval.random_calls.soak import judge, order
from pasa.eval.random_calls.soak.cases import Inputs, draw_case, make_inputs
from pasa.eval.random_calls.soak.families import draw_families
from pasa.eval.random_calls.soak.judge import Result
from pasa.eval.random_calls.soak.order import find_moved, summed_error
from pasa.eval.random_calls.soak.run import call
from pasa.eval.random_calls.soak.truth import cut, find_truth, plain
from pasa.ops.attention.triton import anchor_kernel as triton_kernel

CPU = torch.device("cpu")
SHAPE = {"batch": 1, "heads": 2, "kv_heads": 1, "dim": 80, "packed": False, "mask": "none", "layout": "contiguous"}


def a_case(rows=150, keys=128, **family):
    drawn = SHAPE | {"causal": False, "dtype": "float16", "recovery": "exact", "accumulate": "fp32", "block_k": 128}
    drawn = dataclasses.replace(draw_families(0)[0], **drawn | family)
    what = {"data": "mean", "values": "randn", "scale": 30.0, "garbage": "none", "emulated": True, "poisoned": False}
    return dataclasses.replace(draw_case(0, 1), family=drawn, rows=(rows,), keys=(keys,), **what)


def rivals(case, middle=10.0, reach=5.0):
    """Numbers of 5 to 15. Keys have twins, a last bit higher in one channel and lower in another: by a nat or so."""
    source, dim = torch.Generator().manual_seed(0), case.family.dim
    q, k = (middle + reach * (2 * torch.rand(1, heads, n, dim, generator=source) - 1)
            for heads, n in ((2, case.rows[0]), (1, case.keys[0] // 2)))  # fmt: skip
    twin = k.half().clone()
    twin[..., 10] += middle * 2.0**-10
    twin[..., 70] -= middle * 2.0**-10
    v = torch.randn(1, 1, case.keys[0], dim, generator=source)
    return Inputs(q.half(), torch.cat([k.half(), twin], 2), v.half(), None, None, None)


def one_by_one(q, k):
    total = torch.zeros(*q.shape[:-1], k.shape[-2])
    for channel in range(q.shape[-1]):
        total = total + q[..., channel, None] * k[..., None, :, channel]
    return total


def by_blocks(q, k, truncated=False):
    """16 exact products and what there is, to nearest or towards zero: a tensor core's steps."""
    total = torch.zeros(*q.shape[:-1], k.shape[-2])
    for start in range(0, q.shape[-1], order.MMA_DEPTH):
        part = slice(start, start + order.MMA_DEPTH)
        exact = total.double() + q[..., part].double() @ k[..., part].double().mT
        total = exact.float()
        if truncated:
            total = torch.where(total.double() > exact, total.nextafter(torch.zeros(())), total)
    return total


ORDERS = {
    "forwards": one_by_one,
    "backwards": lambda q, k: one_by_one(q.flip(-1), k.flip(-1)),
    "blocks": by_blocks,
    "truncated": lambda q, k: by_blocks(q, k, truncated=True),
    "library": lambda q, k: q @ k.mT,
}


class Judged:
    """A case with all that its judge needs, which takes scores in place of a kernel's result."""

    def __init__(self, case, inputs):
        self.case, self.call = case, plain(case, inputs)
        self.truth, self.emulated = find_truth(self.call), call(case, inputs, "reference")
        self.part = cut(self.call, self.call.pieces[0])
        self.errors = summed_error(self.part, self.call.scale)
        self.moved = find_moved(self.call, self.truth)

    def compared(self, scores, with_order=True):
        out = (torch.softmax(scores.double(), -1) @ self.part.v.double()).half()
        moved = self.moved if with_order else None
        return judge.compare(self.case, self.truth, Result(out, self.truth.lse), self.emulated, moved)

    def exact(self):
        return self.part.q.double() @ self.part.k.double().mT * self.call.scale


@pytest.fixture(scope="module")
def huge():
    case = a_case()
    return Judged(case, rivals(case))


def sign(x):
    return torch.randint(0, 2, x.shape, generator=torch.Generator().manual_seed(1)) * 2.0 - 1


@pytest.mark.parametrize("name", ORDERS)
def test_any_order_of_a_sum_is_within_the_bound(huge, name):
    scores = ORDERS[name](huge.part.q, huge.part.k) * 30
    assert scores.max() > 2e5
    assert judge.failures(huge.compared(scores)) == []
    worst = ((scores - huge.exact()).abs() / huge.errors).max()
    assert worst <= (1 if name in ("blocks", "truncated") else 2)  # one by one: d is 1.5 standard deviations and more


def test_without_the_term_the_bound_depends_on_the_order(huge):
    """In these data every row has rivals, so the RMSE shows it first."""
    for sum_up in ORDERS.values():
        assert huge.compared(sum_up(huge.part.q, huge.part.k) * 30, with_order=False)["emulated-rmse"] > 2


def dropped(scores):
    """The key with most weight in some row is lost."""
    scores[..., scores[0, 0, 0].argmax()] = -torch.inf
    return scores


@pytest.mark.parametrize(
    "spoil",
    [
        lambda scores, errors: scores + 8 * errors * sign(scores),
        lambda scores, errors: torch.round(scores * 2) / 2,  # FP32 less five bits
        lambda scores, errors: scores.half(),  # infinity and NaN
        lambda scores, errors: scores.clamp(max=65504),
        lambda scores, errors: dropped(scores),
    ],
    ids=["eight times", "coarse", "overflow", "saturated", "dropped"],
)
def test_a_kernel_that_loses_more_is_found(huge, spoil):
    assert judge.failures(huge.compared(huge.exact())) == []
    assert "emulated-max" in judge.failures(huge.compared(spoil(huge.exact(), huge.errors)))


def test_keys_that_have_to_be_anchored_are_judged_without_their_mean():
    """Numbers of 63 to 65: a kernel that multiplies whole keys is found in any order, one that centres them passes."""
    case = a_case()
    found = Judged(case, rivals(case, middle=64.0, reach=1.0))
    q, k = found.part.q, found.part.k
    for sum_up in ORDERS.values():
        assert judge.failures(found.compared(sum_up(q, k - 64) * 30)) == []
        assert "emulated-max" in judge.failures(found.compared(sum_up(q, k) * 30))


@pytest.mark.parametrize("family", [{}, {"causal": True}, {"mask": "float"}, {"mask": "padding", "batch": 2}])
def test_errors_of_that_size_move_outputs_no_further(family):
    """Adversarial signs: every key of a larger value is too high, in one column."""
    case = a_case(rows=40, keys=63, **family)
    inputs = make_inputs(case, CPU)
    whole = plain(case, inputs)
    truth, part = find_truth(whole), cut(whole, whole.pieces[0])
    moved, errors = find_moved(whole, truth), summed_error(part, whole.scale)
    scores = part.q.double() @ part.k.double().mT * whole.scale + (0.0 if part.added is None else part.added)
    larger = (part.v[..., 3].unsqueeze(2) > truth.out[..., 3].unsqueeze(3)) * 2.0 - 1
    for how in (larger, -larger, sign(scores)):
        weights = torch.softmax((scores + how * errors).masked_fill(~part.seen, -torch.inf), -1).nan_to_num(0.0)
        away = (weights @ part.v.double() - truth.out).abs()
        assert (away[..., 3] <= moved[..., 3] * (1 + 1e-5) + 1e-9).all()
    assert (moved <= truth.high - truth.low).all()


def test_the_term_is_nothing_for_ordinary_scores_and_small_for_huge_ones(huge):
    """Of the distance between the values that a row sees."""
    assert 0.01 < (huge.moved / (huge.truth.high - huge.truth.low)).max() < 0.2
    case = dataclasses.replace(a_case(), data="randn", scale=None)
    whole = plain(case, make_inputs(case, CPU))
    truth = find_truth(whole)
    assert 0 < (find_moved(whole, truth) / (truth.high - truth.low)).max() < 1e-5


def test_the_judge_knows_when_kernels_take_anchors():
    assert triton_kernel.ANCHOR_GAIN.value == order.ANCHOR_GAIN
    assert triton_kernel.ANCHOR_LIMIT.value == order.ANCHOR_LIMIT
