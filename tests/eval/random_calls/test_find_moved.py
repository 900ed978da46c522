"""The story: where scores reach 2e5 nats, FP32 numbers lie 0.03 nats apart, and a row with two rivals for its maximum
came out four times as far from the truth as in the emulation. Any other order of the same sum did as much."""

import pytest
import torch

from pasa.eval.random_calls import attention, judge, kernels
from pasa.eval.random_calls.cases import broken
from pasa.eval.random_calls.inputs import Call, make
from pasa.eval.random_calls.judge import find_moved, summed_error
from pasa.eval.random_calls.truth import find_truth, prepare
from pasa.ops.attention.triton import tile_math

CASE = attention.SIMPLEST | {"groups": 2, "dim": 80, "data": "mean", "scale": 30.0, "tile": 0, "poisoned": False}
CASE |= {"lse": True, "data_seed": 1}


def rivals(middle=10.0, reach=5.0):
    """Numbers of 5 to 15. Keys have twins, a last bit higher in one channel and lower in another: by a nat or so."""
    source = torch.Generator().manual_seed(0)
    q, k = (
        middle + reach * (2 * torch.rand(1, heads, n, 80, generator=source) - 1) for heads, n in ((2, 150), (1, 64))
    )
    twin = k.half().clone()
    twin[..., 10] += middle * 2.0**-10
    twin[..., 70] -= middle * 2.0**-10
    v = torch.randn(1, 1, 128, 80, generator=source)
    return Call(q.half(), torch.cat([k.half(), twin], 2), v.half(), None, False, 30.0)


def one_by_one(q, k):
    total = torch.zeros(*q.shape[:-1], k.shape[-2])
    for channel in range(q.shape[-1]):
        total = total + q[..., channel, None] * k[..., None, :, channel]
    return total


def by_blocks(q, k, truncated=False):
    """16 exact products and what there is, to nearest or towards zero: a tensor core's steps."""
    total = torch.zeros(*q.shape[:-1], k.shape[-2])
    for start in range(0, q.shape[-1], judge.MMA_DEPTH):
        part = slice(start, start + judge.MMA_DEPTH)
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
    """A call with all that its judge needs, which takes scores in place of a kernel's result."""

    def __init__(self, call):
        self.truth, self.emulated, self.part = find_truth(call), kernels.attend(CASE, call), prepare(call)
        self.errors = summed_error(self.part, call.scale)
        self.moved = find_moved(call, self.truth)

    def compared(self, scores, with_order=True):
        out = (torch.softmax(scores.double(), -1) @ self.part.v).half()
        moved = self.moved if with_order else None
        return judge.compare(self.truth, (out, self.truth.lse), self.emulated, moved, torch.float16, None)


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
    # Without the term the bound depends on the judge. Every row has rivals, so that the RMSE shows it first.
    assert huge.compared(scores, with_order=False)["emulated-rmse"] > 2
    worst = ((scores - huge.part.scores).abs() / huge.errors).max()
    assert worst <= (1 if name in ("blocks", "truncated") else 2)  # one by one: d is 1.5 standard deviations and more


WORSE = {
    "eight times": lambda scores, errors: scores + 8 * errors * sign(scores),
    "FP32 less five bits": lambda scores, errors: torch.round(scores * 2) / 2,
    "infinity and NaN": lambda scores, errors: scores.half(),
    "saturated": lambda scores, errors: scores.clamp(max=65504),
    "the heaviest key of a row dropped": lambda scores, errors: scores.index_fill(
        -1, scores[0, 0, 0].argmax(), -torch.inf
    ),
}


@pytest.mark.parametrize("name", WORSE)
def test_a_kernel_that_loses_more_is_found(huge, name):
    assert broken(huge.compared(huge.part.scores)) == []
    assert "emulated-max" in broken(huge.compared(WORSE[name](huge.part.scores, huge.errors)))


def test_keys_that_have_to_be_anchored_are_judged_without_their_mean():
    """Numbers of 63 to 65: a kernel that multiplies whole keys is found in any order, one that centres them passes."""
    centred = Judged(rivals(middle=64.0, reach=1.0))
    q, k = centred.part.q.float(), centred.part.k.float()
    for sum_up in ORDERS.values():
        assert broken(centred.compared(sum_up(q, k - 64) * 30)) == []
        assert "emulated-max" in broken(centred.compared(sum_up(q, k) * 30))


@pytest.mark.parametrize("how", [{}, {"causal": True}, {"mask": "float"}, {"mask": "padding", "batch": 2}], ids=str)
def test_errors_of_that_size_move_outputs_no_further(how):
    """Adversarial signs: every key of a larger value is too high, in one column."""
    call = make(CASE | {"rows": 40, "keys": 63} | how)
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
    call = make(CASE | {"rows": 150, "keys": 128, "data": "randn", "scale": None})
    truth = find_truth(call)
    assert 0 < (find_moved(call, truth) / (truth.high - truth.low)).max() < 1e-5


def test_the_judge_knows_when_kernels_take_anchors():
    assert tile_math.ANCHOR_GAIN.value == judge.ANCHOR_GAIN
    assert tile_math.ANCHOR_LIMIT.value == judge.ANCHOR_LIMIT
