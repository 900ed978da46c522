"""Counts of a forward pass: watched values beyond a limit, and outputs that are not finite."""

import math

import pytest
import torch

from pasa.fp16.counting import _Counts

LIMIT = 16376.0
BROKEN = [math.inf, -math.inf, math.nan]


@pytest.fixture
def counts():
    return _Counts(1, 1, LIMIT, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", BROKEN)
def test_an_output_that_is_not_finite_is_counted(counts, value, dtype):
    output = torch.tensor([1.0, value, -3.0], dtype=dtype)
    counts.check(1, output)
    counts.check(1, output)
    assert counts.totals[1].tolist() == [0, 2]
    assert counts.totals[0, 1] == math.inf
    assert output.isnan().any() == math.isnan(value)  # the output itself stays as it was


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_the_largest_finite_outputs_are_not_counted(counts, dtype):
    """Some models give tokens that must not be chosen the lowest finite logit."""
    largest = torch.finfo(dtype).max
    for output in ([-largest, largest], [-largest, -largest], [largest, largest], [0.0, 0.0]):
        counts.check(1, torch.tensor(output, dtype=dtype))
    assert counts.totals[1].tolist() == [0, 0]


@pytest.mark.parametrize("value", [*BROKEN, LIMIT + 8, -LIMIT - 8])
def test_a_watched_value_beyond_the_limit_counts_once_a_pass(counts, value):
    for output in (value, 1.0):  # a module that runs twice in a pass
        counts.look(0, torch.tensor([0.0, output, 2.0], dtype=torch.float16))
    counts.add()
    counts.add()  # a pass that compares nothing
    assert counts.totals[1].tolist() == [1, 0]
    largest = counts.totals[0, 0]
    assert largest.isnan() if math.isnan(value) else largest == abs(value)


def test_a_watched_value_at_the_limit_does_not_count(counts):
    counts.look(0, torch.tensor([-LIMIT, LIMIT]))
    counts.add()
    assert counts.totals[1].tolist() == [0, 0]
    assert counts.totals[0, 0] == LIMIT


def test_what_the_sample_reaches_in_fp16_is_within_the_limit(counts):
    """Story: peaks are measured in BF16; in FP16 one was larger, and the sample itself raised a warning."""
    counts.look(0, torch.tensor([LIMIT * 1.25]))
    counts.add()
    counts.start()
    assert counts.totals[:, 0].tolist() == [0, 0]
    for value, beyond in ((LIMIT * 1.25, 0), (LIMIT * 1.5, 1)):
        counts.look(0, torch.tensor([value]))
        counts.check(1, torch.tensor([value]))
        counts.add()
        assert counts.totals[1].tolist() == [beyond, 0]
