"""The counts of sampled rows, by torch and by the kernels, are exactly those of the definitions in FP64."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pasa.ops.attention.spec import watch
from pasa.ops.attention.triton.watch import launch as watch_launch
from tests.inputs import DEVICE

STEP = 127
COUNTERS = {"torch": (watch.count_scores, "cpu"), "triton": (watch_launch.count_scores, DEVICE)}
CASES = {  # batch, query heads, key heads, Sq, Skv, D, causal, mask
    "one row": (1, 1, 1, 1, 1, 64, False, None),
    "grouped": (2, 4, 2, 130, 300, 32, True, None),
    "more rows than keys": (1, 3, 1, 300, 129, 16, True, None),
    "several shares": (1, 2, 2, 127, 900, 80, False, None),
    "bool": (1, 4, 4, 70, 64, 64, False, "bool"),
    "float": (2, 2, 1, 257, 400, 64, True, "float"),
}


def sampled(q, first):
    return range(first, q.shape[:3].numel(), STEP)


@pytest.fixture(params=COUNTERS)
def count(request):
    """Return a function of `watch.count_scores`'s arguments, except the totals, that returns counts by name.

    It takes the first row in place of the rows, and samples every `STEP`-th, because small calls have more of
    those than of every `STRIDE`-th.
    """
    function, device = COUNTERS[request.param]

    def call(q, k, mask, causal, scale, first):
        totals = torch.zeros(5, dtype=torch.int64, device=device)
        mask = None if mask is None else mask.to(device)
        function(q.to(device), k.to(device), mask, totals, causal, scale, sampled(q, first))
        return dict(zip(watch.FIELDS, totals.tolist(), strict=True))

    return call


def whole_numbers(case, size, seed=0):
    """Return q, k, mask for which q.k, and multiples by 1/8, are exact in FP32 in any order of summation."""
    batch, heads, kv_heads, rows, keys, dim, causal, kind = CASES[case]
    g = torch.Generator().manual_seed(seed)
    q = torch.randint(-size, size + 1, (batch, heads, rows, dim), generator=g).half()
    k = torch.randint(-size, size + 1, (batch, kv_heads, keys, dim), generator=g).half()
    if size == 1:
        q[..., 8:] = 0  # few different scores, so that maxima repeat
    keep = torch.rand(batch, 1, rows, keys, generator=g) < 0.3
    added = torch.randint(-9, 10, (1, heads, rows, keys), generator=g).float().where(keep[:1], -torch.inf)
    return q, k, {None: None, "bool": keep, "float": added}[kind], causal


def defined(q, k, mask, causal, scale, first):
    """Return the counts by the definitions, row by row, in FP64."""
    rows, keys = q.shape[2], k.shape[2]
    products = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    scores = products * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        scores = scores.masked_fill(~torch.ones(rows, keys).bool().tril(keys - rows), -torch.inf)
    result = dict.fromkeys(watch.FIELDS, 0)
    for row, product in list(zip(scores.flatten(0, 2), products.flatten(0, 2), strict=True))[first::STEP]:
        seen = row > -torch.inf
        if not seen.any():
            continue
        head = row[:128][seen[:128]]
        result["rows"] += 1
        result["repeated"] += int((row >= row.max() - 1e-3).sum()) > 1
        result["runaway"] += len(head) > 0 and bool(row.max() - head.max() > 8)
        result["scores"] += int(seen.sum())
        result["saturated"] += int((product[seen].abs() > 65504).sum())
    return result


# Sizes of the numbers, each with the first row: maxima repeat, scores run away, or scores exceed FP16.
SIZES = [(1, 0), (12, 5), (200, 63)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("size", "first"), SIZES)
def test_counts_are_those_of_the_definitions(count, case, size, first):
    q, k, mask, causal = whole_numbers(case, size)
    assert count(q, k, mask, causal, 0.125, first) == defined(q, k, mask, causal, 0.125, first)


def test_the_cases_have_all_that_is_counted():
    result = [defined(*whole_numbers(case, size), 0.125, first) for case in CASES for size, first in SIZES]
    for name in watch.FIELDS:
        assert sum(each[name] > 0 for each in result) >= 3, name
    assert any(0 < each["repeated"] < each["rows"] for each in result)
    assert any(0 < each["runaway"] < each["rows"] for each in result)


def test_a_maximum_repeated_in_another_share_of_the_keys_is_found(count):
    q, k = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 900, 16)
    q[..., 0], k[0, 0, 3, 0] = 1, 1
    assert count(q.half(), k.half(), None, False, 1.0, 0)["repeated"] == 0
    k[0, 0, 870, 0] = 1
    assert count(q.half(), k.half(), None, False, 1.0, 0)["repeated"] == 1
    k[0, 0, 870, 0] = 1 - 2.0**-9  # more than 1e-3 below
    assert count(q.half(), k.half(), None, False, 1.0, 0)["repeated"] == 0


@pytest.mark.parametrize("window", [(20, 0), (-1, 40), (0, 0), (50, -1)], ids=str)
def test_windows_count_as_masks_do(window):
    q, k, _, causal = whole_numbers("grouped", 60)
    ahead = torch.arange(300) - torch.arange(130)[:, None] - 170
    inside = ((ahead >= -window[0]) | (window[0] < 0)) & ((ahead <= window[1]) | (window[1] < 0))
    totals = torch.zeros(5, dtype=torch.int64)
    watch.count_scores(q, k, None, totals, causal, 0.125, sampled(q, 7), window)
    assert dict(zip(watch.FIELDS, totals.tolist(), strict=True)) == defined(q, k, inside, causal, 0.125, 7)


def test_scores_are_counted_after_their_cap():
    """Capped, two large scores repeat a row's maximum; products beyond FP16 still count as saturated."""
    q, k = torch.full((1, 1, 1, 16), 100.0).half(), torch.zeros(1, 1, 900, 16).half()
    k[0, 0, 3], k[0, 0, 700] = 500.0, 100.0
    totals = torch.zeros(2, 5, dtype=torch.int64)
    for row, softcap in zip(totals, (0.0, 30.0), strict=True):
        watch.count_scores(q, k, None, row, False, 0.125, range(0, 1, STEP), softcap=softcap)
    assert totals.tolist() == [[1, 0, 0, 900, 2], [1, 1, 0, 900, 2]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_dtypes_and_layouts_give_the_same_counts(count, dtype):
    q, k, mask, causal = whole_numbers("grouped", 60)
    expected = count(q, k, mask, causal, 0.125, 7)
    q, k = (x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    assert count(q, k, mask, causal, 0.125, 7) == expected


def test_scores_that_are_not_finite_count_as_hidden(count):
    q, k, _, _ = whole_numbers("bool", 3)
    k[0, 0, 5, 0], k[0, 1, 6, 0] = torch.nan, torch.inf
    hidden = torch.ones(1, 4, 1, 64, dtype=torch.bool)
    hidden[0, 0, 0, 5] = hidden[0, 1, 0, 6] = False
    k_clean = k.nan_to_num(0.0, 0.0)
    expected = defined(q, k_clean, hidden.expand(-1, -1, 70, -1), False, 0.125, 3)
    assert (expected["rows"], expected["scores"]) == (3, 3 * 64 - 2)
    assert count(q, k, None, False, 0.125, 3) == expected


def test_calls_go_on_where_the_last_one_ended():
    """Sampling continues where the last call ended: many short calls sample the rows of one long call."""
    lengths, counted, result = (5, 505, 1, 1, 3000, 90, 2500, 1020), 0, []
    for length in lengths:
        result += [counted + row for row in watch.sample(counted, length)]
        counted += length
    assert result == list(range(510, counted, 1021))
    assert not watch.sample(511, 1020)


class NoReading(TorchDispatchMode):
    """Fail where a tensor's value is read."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", ["grouped", "bool", "float"])
def test_nothing_is_read_while_counting(case):
    q, k, mask, causal = whole_numbers(case, 9)
    totals = torch.zeros(5, dtype=torch.int64)
    with NoReading():
        watch.count_scores(q, k, mask, totals, causal, 0.125, sampled(q, 0))
    assert totals[0] > 0
    with pytest.raises(AssertionError), NoReading():
        totals[0].item()
