"""Every flag, barrier, buffer and rule of the 310P's kernels is needed, and it is noticed when one is missing.

A mutant is caught if a launch ends in a fault, saturates a number, or returns other bits than the unchanged kernel.
Sources that are shared with Atlas A2 have their mutants in test_mutants.py.
"""

from functools import partial

import pytest
import torch

from tests.adversaries import stalled, sunken
from tests.ascend_c.kernel_runs import BLOCK, Call
from tests.ascend_c.mutants import tried_now, write_mutants
from tests.ascend_c.runs_310p import launch_attention, launch_shift
from tests.ascend_c.test_mutants import (
    LAUNCHES,
    Attempt,
    anchors_far_apart,
    below_the_guess,
    bits,
    extreme_keys,
    is_caught,
    opposite_blocks,
    random_call,
    unlike,
)
from tests.ascend_c.twin_build import FAST, PROGRAMS, Program, build

LEAST = 70  # how many there are to be
RULES = {
    "a reference is not carried into the next frame": ("seeing.Add(reference, reference, Number(kScratch));", ""),
    "a row is carried into a frame of keys that it does not see": (
        "seeing.Subtract(Number(kScratch), Number(kFrame), Number(kFramed));",
        "all.Subtract(Number(kScratch), Number(kFrame), Number(kFramed)); seeing = all;",
    ),
    "a log-sum-exp is in the first frame": (
        "seeing.Scale(Number(kFrame), Number(kFramed), 1.0f);",
        "RowMath(RowsWithoutKeys(task, j), j == 0 ? rows_ : 0).Scale(Number(kFrame), Number(kFramed), 1.0f);",
    ),
    "anchors are taken for their frames": (
        "TakeOffsets(Number(kOffset), anchor_row + 1);",
        "all.Set(Number(kOffset), 0.0f);",
    ),
    "the first block has the offset of its mean": ("if (j == 0) {", "if (false)"),
    "offsets are made once": ("if (j % kAnchorBlocks == 0) {", "if (j == 0)"),
    "weights are not bounded by the largest score of their tile": (
        "all.Larger(Number(kGap), Number(kGap), top);",
        "",
    ),
    "a reference falls": ("all.Larger(raised, raised, reference);", ""),
    "a reference is 15 ln 2 below the largest score": (
        "all.Lower(top, top, kBelowLargest);",
        "all.Lower(top, top, 10.397207708f);",
    ),
    "the output so far is not rescaled": ("Rescale();", ""),
    "l is not rescaled": ("RowMath(0, rows_).Multiply(Number(kSum), Number(kSum), Number(kKeep));", ""),
    "keys that do not exist are seen": ("if (count < kBlockKeys) {", "if (false)"),
    "a row sees a key too many": (
        "tile.HideInRow(r, seen > j * kBlockKeys ? seen - j * kBlockKeys : 0, kHiddenNats);",
        "tile.HideInRow(r, seen > j * kBlockKeys ? seen - j * kBlockKeys + 1 : 0, kHiddenNats);",
    ),
    "a fully masked row keeps the sum of masked keys": ("never.Set(Number(kSum), 1.0f);", ""),
    "a fully masked row keeps the result of masked keys": (
        "AscendC::Duplicate(output_[d * rows_], 0.0f, static_cast<int32_t>(without_keys * kFractal));",
        "",
    ),
    "a fully masked row has a log-sum-exp": ("never.SetBits(lse, kMinusInfinity);", ""),
    "outputs may pass the largest number": (
        "AscendC::Mins(output_, output_, kHalfLargest, static_cast<int32_t>(numbers));",
        "",
    ),
    "outputs may pass the lowest number": (
        "AscendC::Maxs(output_, output_, -kHalfLargest, static_cast<int32_t>(numbers));",
        "",
    ),
    "rows behind the last key are not filled up": ("if (rest > 0) {", "if (false)"),
    "blocks of values are read from behind a length": ("if (first < keys) {", "if (true)"),
}


def extreme_means(value):
    """Return a call whose outputs pass FP16's last number by thousands of roundings."""
    q, k, v = stalled(4200, BLOCK, dim=16, value=value)
    return Call(q, k, v, scale=1.0)


CALLS = [
    random_call(1, 2, 1, 100, 290, 64, causal=True),
    random_call(1, 1, 1, 64, 300, 128, spread=3.0),
    random_call(1, 1, 1, 129, 140, 256, causal=True),
    random_call(1, 1, 1, 20, 55, 16),
    random_call(1, 1, 1, 40, 30, 64, causal=True),  # rows that see nothing
    random_call(1, 1, 1, 40, 30, 64, causal=True, scale=1e-5),
    random_call(2, 2, 1, 70, 140, 80, causal=True, lengths=torch.tensor([140, 0])),
    random_call(1, 1, 1, 64, 34 * BLOCK, 16),  # more blocks than offsets fit
    random_call(1, 1, 1, 20, 130, 64, scale=100.0),
    below_the_guess(),
    opposite_blocks(1),
    opposite_blocks(-1),
    extreme_keys(),
    anchors_far_apart(),
    Call(*sunken(BLOCK)),
    unlike("later keys of the block", 1000.0),
    unlike("mixed signs", 1000.0),
    unlike("late rows", 4096.0),
]
LONG = [extreme_means(65504.0), extreme_means(-65504.0)]  # a second each, so they are launched in one way only


@pytest.fixture
def mutated(tmp_path):
    folder = tmp_path / "mutants"
    mutants = write_mutants(folder, "310p/*.h", RULES)
    source, define = PROGRAMS / "kernels_310p.cpp", ["PASA_CPU_TWIN", "PASA_MUTANTS"]
    return Program(build(source, tmp_path, optimise=FAST, include=[folder], define=define), tmp_path), mutants


def exact_launch(launch, *args, **options):
    """Return the result of a launch; one that saturates a number counts as a fault."""
    result = launch(*args, **options)
    result.report["ok"] &= result.report["ai"]["overflows"] == {}
    for name, values in result.arrays.items():  # bits: what nobody has written is NaN, which equals nothing
        result.arrays[name] = values.contiguous().view(torch.int16)
    return result


def attempts(program):
    """Return every launch of the kernels on every call."""
    short, long = (list(launches(program, calls)) for calls in (CALLS, LONG))
    expected = {launch: bits(launch, 0) for launch in short + long}
    assert None not in expected.values()
    ways = [Attempt(partial(each, mode=m, seed=s), expected[each]) for m, s in LAUNCHES for each in short]
    return ways + [Attempt(each, expected[each]) for each in long]


def launches(program, calls):
    """Yield the launches of the kernels on some calls."""
    for x in calls:
        shifted = launch_shift(program, x, mutant=0)
        assert shifted.report["ok"], shifted.report["fault"]
        yield partial(exact_launch, launch_shift, program, x, cores=2)
        yield partial(exact_launch, launch_attention, program, x, shifted.arrays, cores=1)


def test_every_mutant_is_caught(mutated):
    program, mutants = mutated
    assert len(mutants) >= LEAST
    tried = attempts(program)
    assert not is_caught(tried, 0), "the unchanged kernels return their own bits"
    survivors = [str(mutant) for mutant in tried_now(mutants) if not is_caught(tried, mutant.number)]
    assert not survivors, "\n".join(survivors)
