"""Every flag, barrier, buffer and rule of the 310P's kernels is needed, and it is noticed when one is missing.

A mutant is caught if a launch ends in a fault, saturates a number, or returns other bits than the unchanged kernel.
Sources that are shared with Atlas A2 have their mutants in test_mutants.py; those that hold rules of this chip, or that
its decoding shares, have them here, too.
"""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from tests.adversaries import stalled, sunken
from tests.ascend_c.decode_runs import launch_decode
from tests.ascend_c.kernel_runs import BLOCK, Call, launch_product_probe
from tests.ascend_c.mutants import RULES as A2_RULES
from tests.ascend_c.mutants import tried_now, write_mutants
from tests.ascend_c.runs_310p import launch_attention, launch_shift
from tests.ascend_c.test_mutants import (
    DECODED,
    Attempt,
    anchors_far_apart,
    begins_anywhere,
    below_the_guess,
    check_mutants,
    drawn_mask,
    extreme_keys,
    in_all_ways,
    mixed_batch,
    opposite_blocks,
    random_call,
    unchanged,
    unlike,
)
from tests.ascend_c.twin_build import FAST, PROGRAMS, Program, build

LEAST = 200  # how many there are to be
# Rules of sources that decoding shares with Atlas A2: head_frame.h and decode_task.h.
SHARED = (
    "a column stays in a frame that is far from a key",
    "keys above a frame are not tested",
    "keys below a frame are not tested",
    "the common frame is that of the first part above 0",
    "the common frame is that of the first part below 0",
    "tokens of a sequence in pages are aligned to the end of its table",
    "page numbers are not clamped",
)
RULES = {name: A2_RULES[name] for name in SHARED} | {
    "a reference is not carried into the next frame": ("seeing.Add(reference, reference, Number(kScratch));", ""),
    "a row is carried into a frame of keys that it does not see": (
        "seeing.Subtract(Number(kScratch), Number(kFrame), Number(kFramed));",
        "all.Subtract(Number(kScratch), Number(kFrame), Number(kFramed)); seeing = all;",
    ),
    "a log-sum-exp is in the first frame": (
        "seeing.Scale(Number(kFrame), Number(kFramed), 1.0f);",
        "RowMath(j == 0 ? now : 0).Scale(Number(kFrame), Number(kFramed), 1.0f);",
    ),
    "anchors are taken for their frames": (
        "TakeOffsets(Number(kOffset), anchor_row + 1, anchor_rows_, t_.scale);",
        "all.Set(Number(kOffset), 0.0f);",
    ),
    "the first block has the offset of its mean": ("if (block == 0) {", "if (false)"),
    "offsets are made once": ("if (j == 0 || block >= offset_block_ + kAnchorBlocks)", "if (j == 0)"),
    "weights are not bounded by the largest score of their tile": (
        "all.Larger(Number(kGap), Number(kGap), raised);",
        "",
    ),
    "a reference falls": ("all.Larger(raised, raised, reference);", ""),
    "a reference is 15 ln 2 below the largest score": (
        "all.Lower(raised, top, kBelowLargest);",
        "all.Lower(raised, top, 10.397207708f);",
    ),
    "the output so far is not rescaled": ("Rescale();", ""),
    "l is not rescaled": ("RowMath(0, rows_).Multiply(Number(kSum), Number(kSum), Number(kKeep));", ""),
    "keys that do not exist are seen": ("if (count < kBlockKeys) {", "if (false)"),
    "a row sees a key too many": (
        "tile.HideInRow(r, seen > first_key ? seen - first_key : 0, kHiddenNats);",
        "tile.HideInRow(r, seen > first_key ? seen - first_key + 1 : 0, kHiddenNats);",
    ),
    "a fully masked row keeps the sum of masked keys": ("never.Set(Number(kSum), 1.0f);", ""),
    "a fully masked row keeps the result of masked keys": (
        "AscendC::Duplicate(output_[r * kFractal], 0.0f, kFractal, dim_ / kFractal, 1, group_ / kFloatBlock);",
        "",
    ),
    "a fully masked row has a log-sum-exp": ("never.SetBits(lse, kMinusInfinity);", ""),
    "a fully masked row has a largest score": ("never.SetBits(largest, kMinusInfinity);", ""),
    "a largest score is that of the last block": (
        "seeing.Larger(Number(kBest), Number(kBest), Number(kScratch));",
        "seeing.Scale(Number(kBest), Number(kScratch), 1.0f);",
    ),
    "a largest score is not carried into the next frame": (
        "seeing.Add(Number(kBest), Number(kBest), Number(kScratch));",
        "",
    ),
    "a window's left edge is not applied": (
        "if (tasks_.Before(task, first_row + rows_ - 1) <= first_key)",
        "if (true)",
    ),
    "a window hides its first key": (
        "tile.HideBeforeInRow(r, Least(before - first_key, kBlockKeys), kHiddenNats);",
        "tile.HideBeforeInRow(r, Least(before - first_key + 1, kBlockKeys), kHiddenNats);",
    ),
    "a mask is not applied": ("tile.Keep(bits, kHiddenNats);", ""),
    "a mask is that of the first tile": ("at += task.lane[0].first_row / kHalfRows * t_.mask.row_stride;", ""),
    "a mask is that of the first head": ("at += task.head % t_.heads * t_.mask.head_stride;", ""),
    "a mask is that of the first batch entry": ("at += task.batch * t_.mask.batch_stride;", ""),
    "sinks are counted over batch entries": (
        "AscendC::DataCopy(sinks, sinks_[FirstRow(task.head % t_.heads, task)], rows_);",
        "AscendC::DataCopy(sinks, sinks_[FirstRow(task.head, task)], rows_);",
    ),
    "a sink far above all scores saturates": ("all.AtLeast(apart, apart, -kFarthestSink);", ""),
    "a row without keys has no sink": ("never.Scale(lse, Number(kKeep), 1.0f);", ""),
    "heads of a token see keys one after the other": (
        "return tiling_.token_rows == 1 ? row : row / tiling_.token_rows;",
        "return row;",
    ),
    "a part has the steps of the first": (
        "task.skipped = static_cast<uint32_t>(steps * part / tiling_.parts);",
        "task.skipped = 0;",
    ),
    "rows that see no key of a part take its frame": (
        "here |= tasks_.Seeing(part, 0, j, part.lane[0].rows);",
        "here = RowsBetween(0, rows_);",
    ),
    "parts are not carried into a common frame": ("seeing.Add(Number(kReference), Number(kReference), carried);", ""),
    "the largest score of parts is not carried into a common frame": (
        "seeing.Add(Number(kBest), Number(kBest), carried);",
        "",
    ),
    "the frame of a part is not taken": ("seeing.Scale(Number(kFrame), frame, 1.0f);", ""),
    "a largest score is that of the last part": (
        "seeing.Larger(Number(kBest), Number(kBest), best);",
        "seeing.Scale(Number(kBest), best, 1.0f);",
    ),
    "a reference falls from part to part": (
        "seeing.Larger(raised, Number(kReference), reference);",
        "seeing.Scale(raised, reference, 1.0f);",
    ),
    "parts are not weighed": ("seeing.Exponential(Number(kGap), Number(kGap));", "seeing.Set(Number(kGap), 1.0f);"),
    "sums of parts are not weighed": ("all.Multiply(sum, sum, Number(kGap));", ""),
    "outputs may pass the largest number": (
        "AscendC::Mins(output_, output_, kHalfLargest, numbers);",
        "",
    ),
    "outputs may pass the lowest number": (
        "AscendC::Maxs(output_, output_, -kHalfLargest, numbers);",
        "",
    ),
    "rows behind the last key are not filled up": ("if (rest > 0) {", "if (false)"),
    "blocks of values are read from behind a length": ("if (first < keys) {", "if (true)"),
    "a reference is not carried where columns leave a frame": (
        "RowMath(0, rows_).Add(Number(kReference), Number(kReference), Number(kFramed));",
        "",
    ),
    "a decoded frame is carried again and again": ("AscendC::Sub(frame, frame, moved, a_.dim);", ""),
    "columns leave the frame of the first 128": ("frame_.Shrink(first, width);", "frame_.Shrink(0, width);"),
    "a decoded log-sum-exp lacks its frame": (
        "TakeRowProduct(Number(kFrame));",
        "TakeRowProduct(Number(kTop));",
    ),
    "decoded parts are not brought into a common frame": ("if (frame_.HasMoved(work_))", "if (false)"),
    "decoded parts are not weighed": ("all.Exponential(other, other);", "all.Set(other, 1.0f);"),
    "sums of decoded parts are not weighed": ("all.Multiply(sum, sum, other);", ""),
    "decoded parts of a core share their place": ("StorePart(s.starts);", "StorePart(false);"),
    "a token sees keys behind its own": ("if (seen < count)", "if (false)"),
    "sinks are those of the first key head": (
        "RowMath(r, r + 1).Set(Number(kKeep), sinks_.GetValue(item.head * t_.group + r % t_.group));",
        "RowMath(r, r + 1).Set(Number(kKeep), sinks_.GetValue(r % t_.group));",
    ),
    "rows behind a piece are not filled up": ("if (rest == 0)", "if (true)"),
    "queries of the first key head are read": (
        "LoadRows(in, q_[FirstRow(item) * a_.dim + first], count, width, a_.dim);",
        "LoadRows(in, q_[first], count, width, a_.dim);",
    ),
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
    random_call(2, 2, 1, 100, 300, 32, window=(60, 0), sinks=torch.tensor([4.0, 2000.0]), largest=True),
    random_call(2, 3, 1, 90, 70, 64, causal=True, sinks=torch.tensor([4.0, 12.0, -(2.0**126)])),
    replace(begins_anywhere(sparse=True), largest=True),
    random_call(2, 2, 1, 70, 200, 32, mask=drawn_mask(2, 2, 70, 200)),
    random_call(
        1, 1, 1, 20, 66 * BLOCK, 16, window=(40 * BLOCK, -1)
    ),  # offsets are loaded again behind the first block
]
# Heads of a token as rows, and keys in parts that end in different frames.
DECODING = [
    (random_call(1, 1, 1, 21, 300, 32, causal=True), {"token_rows": 3}),
    (random_call(1, 1, 1, 21, 300, 32, window=(150, 0)), {"token_rows": 3, "parts": 2}),
    (replace(begins_anywhere(), largest=True), {"parts": 3}),
    (replace(opposite_blocks(1), largest=True), {"parts": 2}),
    (random_call(1, 2, 1, 130, 500, 128, causal=True, sinks=torch.tensor([1.0, 3.0]), largest=True), {"parts": 3}),
]
# Decoding where a cache is; on this chip all numbers are rounded to nearest.
CACHES = [each for each in DECODED if each[0].unbiased is None] + [(*mixed_batch(16), 4)]
PRODUCTS = ((128, 128, 128), (20, 24, 64))
LONG = [extreme_means(65504.0), extreme_means(-65504.0)]  # seconds each, so they are launched in one way only


@pytest.fixture
def mutated(programs_folder, tmp_path):
    folder = tmp_path / "mutants"
    mutants = write_mutants(folder, "310p/*.h task.h rows.h decode_task.h head_frame.h", RULES)
    source, define = PROGRAMS / "kernels_310p.cpp", ["PASA_CPU_TWIN", "PASA_MUTANTS"]
    return Program(build(source, programs_folder, optimise=FAST, include=[folder], define=define), tmp_path), mutants


def exact_launch(launch, *args, **options):
    """Return the result of a launch; one that saturates a number counts as a fault."""
    result = launch(*args, **options)
    result.report["ok"] &= result.report["ai"]["overflows"] == {}
    for name, values in result.arrays.items():  # bits: what nobody has written is NaN, which equals nothing
        result.arrays[name] = values.contiguous().flatten().view(torch.int16)
    return result


def attempts(program):
    """Return every launch of the kernels on every call; kernels with few launches come first."""
    kernels = [partial(exact_launch, launch_product_probe, program, *sizes) for sizes in PRODUCTS]
    kernels += [partial(exact_launch, launch_decode, program, x, pages, groups=n) for x, pages, n in CACHES]
    for x, how in [(x, {}) for x in CALLS] + DECODING:
        kernels += launches(program, x, **how)
    long = [launch for x in LONG for launch in launches(program, x)]
    return in_all_ways(kernels) + [Attempt(each, unchanged(each)) for each in long]


def launches(program, x, **how):
    """Return the launches of both kernels on a call."""
    shifted = cache(partial(launch_shift, program, x, mutant=0))

    def attend(**options):
        assert shifted().report["ok"], shifted().report["fault"]
        return exact_launch(launch_attention, program, x, shifted().arrays, cores=1, **how, **options)

    return [partial(exact_launch, launch_shift, program, x, cores=2), attend]


def test_every_mutant_is_caught(mutated):
    program, mutants = mutated
    assert len(mutants) >= LEAST
    check_mutants(attempts(program), tried_now(mutants))
