"""Every flag, barrier, buffer and rule of the kernels is needed, and it is noticed when one is missing.

A mutant is caught if a launch ends in a fault or returns other bits than the unchanged kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from tests import unlike_keys
from tests.adversaries import sunken
from tests.ascend_c.decode_runs import Pages, launch_decode, put_into_pages
from tests.ascend_c.kernel_runs import (
    BLOCK,
    Call,
    Run,
    launch_attention,
    launch_product_probe,
    launch_shift,
    launch_vector_probe,
    means,
    means_with_biased_bits,
    shifted_by_reference,
)
from tests.ascend_c.mutants import tried_now, write_mutants
from tests.ascend_c.test_packed import packed_call
from tests.ascend_c.twin_build import FAST, PROGRAMS, Program, build

LEAST = 40  # how many there are to be


def random_call(batch, heads, kv_heads, rows, keys, dim, seed=0, spread=1.0, **how):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(batch, n, s, dim, generator=g) for n, s in ((heads, rows), (kv_heads, keys), (kv_heads, keys))
    )
    return Call((q * spread).half(), (k * spread + 3).half(), v.half(), **how)


def opposite_blocks(sign):
    """Blocks so far apart that a row's second tile lies beyond FP16's reach, and its reference beyond 131008."""
    x = random_call(1, 1, 1, 70, 256, 64)
    x.q.add_(150)
    x.k[:, :, :128] += 150 * sign
    x.k[:, :, 128:] -= 150 * sign
    return x


def anchors_far_apart():
    """Return a call whose two blocks have frames 2^30 nats apart, where FP32's rounding exceeds any weight."""
    x = random_call(1, 1, 1, 70, 256, 64)
    x.q.add_(10000 * (1 + 0.01 * torch.arange(70.0).view(1, 1, 70, 1)).half())
    x.k.mul_(50)
    x.k[:, :, :128] -= 10000
    x.k[:, :, 128:] += 10000
    return x


def extreme_keys():
    """Columns whose anchors are 120000 or 9999 apart, subnormal, or lost when FP32 subtracts them."""
    x = random_call(1, 1, 1, 20, 384, 64)
    x.q.mul_(0.01)
    x.k[:, :, :, 0::4] = torch.tensor([60000.0, -60000.0, 0.0]).repeat_interleave(128).view(1, 1, 384, 1)
    x.k[:, :, :, 1::4] = torch.tensor([10000.0, 1.001, 0.5]).repeat_interleave(128).view(1, 1, 384, 1)
    x.k[:, :, :, 2::4] *= 2.0**-22
    x.k[:, :, 200:, 3::4] = -60000.0
    x.k[:, :, 300, 3::4] = 2.0**-24
    return x


def unlike(name, bias):
    """Keys of which some rows see none, or which have no weight."""
    case = unlike_keys.CASES[name](bias)
    return Call(*case[:3], causal=case.how.get("is_causal", False))


def many_blocks():
    """A frame that ends at the second block, and anchors near it behind the 129th, which are found in another turn."""
    x = random_call(1, 1, 1, 2, 132 * BLOCK, 16)
    x.k.mul_(0.01)
    x.k.add_(10)
    x.k[:, :, BLOCK : 2 * BLOCK].sub_(10)
    return x


def far_guess():
    """The mean of a block's keys, which has no anchor, is 90,000 nats above those that the first rows see."""
    x = unlike("later keys of the block", 1000.0)
    x.k[:, :, :32, 0] = 2.0**-10 * x.k[:, :, :32, 1]
    return x


def tiny_scale():
    """Scores beyond -65504 have weight: they are 6.5 nats, since the unit that K' could hold would round it."""
    x = random_call(1, 1, 1, 40, 140, 64, scale=1e-4)
    x.q.mul_(105)
    x.k.mul_(30)
    x.k[..., ::8] *= 1e-4
    return x


def rising():
    """Keys without anchors, of which the fourth block moves references that had been kept."""
    x = random_call(1, 1, 1, 40, 7 * BLOCK, 64)
    x.q.copy_((x.q * 128).round() / 128)
    x.k.copy_(((x.k - 3) * 32).round() / 128)
    x.k[:, :, 3 * BLOCK : 4 * BLOCK] *= 8
    return x


def below_the_guess():
    """The first row sees one key of two, 20 nats below their mean; the other row sees no difference."""
    x = random_call(1, 1, 1, 2, 2, 64, causal=True)
    x.k[:, :, 1] = -x.k[:, :, 0]
    x.q[:, :, 0] = x.k[:, :, 1] * 1.7
    x.q[:, :, 1] = 0
    return x


def drawn_mask(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(3)) < 0.5


def begins_anywhere(sparse=False):
    """Return a call whose rows begin at any block, for which anchors and frames differ.

    Some rows see nothing. If it is sparse, later blocks are visited where some rows still see nothing, and one tile's
    first block is not the first one.
    """
    x = random_call(1, 1, 1, 390, 640, 64)
    row, key = torch.arange(390).unsqueeze(1), torch.arange(640)
    first = row * 7 % 5 * 128 + row * 29 % 128  # some rows see one key of their first block
    mask = (key >= first) & (row % 50 > 0)
    if sparse:
        mask &= (key // 128 + row // 7) % 3 > 0
        mask[128:256, :200] = False
        mask[256:, 128:384] = False
    biases = torch.tensor([40.0, -30.0, 60.0, 50.0, 0.0]).repeat_interleave(128)
    x.k.add_(biases.view(1, 1, 640, 1))
    return replace(x, mask=mask.expand(1, 1, 390, 640).contiguous())


def begins_without_anchors():
    """Keys without anchors, whose references are kept, and rows that begin after two blocks which move none."""
    x = rising()
    row, key = torch.arange(40).unsqueeze(1), torch.arange(7 * BLOCK)
    return replace(x, mask=(key >= row % 2 * 4 * BLOCK).view(1, 1, 40, 7 * BLOCK))


def added_mask(*shape, lowest=False):
    """Return numbers to be added, and -inf; or FP32's lowest number for all keys of every third row."""
    g = torch.Generator().manual_seed(5)
    mask = (3 * torch.randn(*shape, generator=g)).masked_fill(torch.rand(*shape, generator=g) < 0.3, -torch.inf)
    if lowest:
        mask[..., ::3, :] = torch.finfo(torch.float32).min
    return mask


def begins_anywhere_with_numbers():
    """Return a call whose rows begin at any block, with a mask that adds hundreds of nats."""
    x = begins_anywhere(sparse=True)
    added = 100 * torch.randn(x.mask.shape, generator=torch.Generator().manual_seed(6))
    return replace(x, mask=added.masked_fill(~x.mask, -torch.inf), largest=True)


def beyond_fp16(overflow):
    """Return scores that FP16 does not hold, far below their rows' references, to be counted."""
    x = random_call(1, 1, 1, 70, 3 * BLOCK - 9, 64, overflow=overflow, counts=True)
    x.k.sub_(3)
    x.q[..., :2] = torch.tensor([128.0, 1.0])
    x.k[..., :2] = 0
    x.k[:, :, -60:, 0] = -4094
    x.k[:, :, -60:, 1] = 20 * torch.arange(60) - 600  # some of 65504, some infinite
    return x


def saturating():
    """Scores of the published recovery beyond FP16."""
    x = random_call(1, 1, 1, 70, 300, 64, exact=False, overflow="saturate")
    x.q.mul_(300)
    x.k[:, :, ::7] *= 3000
    return x


def above_the_largest():
    """Return a call with outputs of 65504 and up to a spacing more: FP16 rounds weights up, but not their sums."""
    x = random_call(1, 1, 1, 64, 128, 64, exact=False, unbiased=torch.float16)
    x.q[:] = 1 + torch.arange(64.0).view(1, 1, 64, 1) / 64
    x.k[:] = 0
    x.k[:, :, 0] = 0.1
    x.v[:] = 65504
    return x


# Two lanes, several tasks for a group, tiles in FP32 and in FP16, rows that see nothing, a head dimension in two parts.
CALLS = [
    random_call(1, 2, 1, 300, 290, 64, causal=True),
    means_with_biased_bits(),
    means(1, 130, 130, 48, causal=True, unbiased=torch.bfloat16),
    means(1, 20, 20, 144, causal=True, unbiased=torch.float16),
    above_the_largest(),
    random_call(1, 2, 1, 256, 300, 128, spread=3.0),
    random_call(1, 2, 1, 256, 257, 128, exact=False, causal=True),
    random_call(1, 1, 1, 129, 640, 256),
    random_call(1, 1, 1, 50, 55, 64),  # nine fractals of scores: the largest product that a barrier must order
    below_the_guess(),
    saturating(),
    opposite_blocks(1),
    opposite_blocks(-1),
    extreme_keys(),
    anchors_far_apart(),
    tiny_scale(),
    Call(*sunken(BLOCK)),
    Call(*sunken(BLOCK, blocks=4)),  # references of later blocks are no guesses
    rising(),
    random_call(1, 1, 1, 20, 130, 64, exact=False, scale=100.0),  # scores too large to subtract a few nats from
    random_call(1, 1, 1, 20, 130, 64, scale=1e-5),  # a unit whose inverse FP16 does not hold
    unlike("later keys of the block", 1000.0),
    unlike("mixed signs", 1000.0),
    unlike("more and more biased", 1000.0),
    unlike("late rows", 4096.0),
    many_blocks(),
    far_guess(),
    random_call(2, 3, 1, 90, 70, 64, causal=True, sinks=torch.tensor([4.0, 12.0, -torch.inf])),  # rows that see nothing
    random_call(1, 1, 1, 300, 300, 64, window=(40, 3)),  # rows that begin at any block
    begins_anywhere(),
    begins_anywhere(sparse=True),
    begins_without_anchors(),
    replace(begins_anywhere(), largest=True),
    replace(opposite_blocks(1), largest=True),
    random_call(1, 1, 1, 70, 130, 64, causal=True, largest=True),  # a frame that stays
    random_call(2, 2, 1, 65, 183, 64, mask=drawn_mask(2, 2, 65, 183)),
    random_call(1, 1, 1, 129, 183, 256, mask=drawn_mask(1, 1, 1, 183)),
    random_call(2, 2, 1, 65, 183, 80, mask=added_mask(2, 2, 65, 183, lowest=True)),
    random_call(1, 1, 1, 70, 300, 256, mask=added_mask(1, 1, 1, 300)),
    begins_anywhere_with_numbers(),
    replace(begins_anywhere_with_numbers(), counts=True),
    replace(begins_anywhere(), counts=True),
    random_call(1, 1, 1, 65, 140, 64, mask=added_mask(1, 1, 1, 140), counts=True),
    beyond_fp16("inf"),
    beyond_fp16("saturate"),
    random_call(2, 2, 2, 130, 255, 64, causal=True, exact=False),
    random_call(1, 1, 1, 40, 30, 64, causal=True, exact=False),  # one tile, and rows in it that see nothing
    random_call(1, 1, 1, 40, 30, 64, causal=True, scale=1e-5),  # the same, and masked scores that are not far below
    packed_call([(70, 130), (130, 140), (20, 150)], bias=20.0, causal=True),  # every place of a piece has keys
]


def wrong_starts(queries, keys):
    """Return a call of 130 rows and 150 keys with lengths that are wrong, but give no row to two sequences."""
    return replace(packed_call([(130, 150)]), starts=torch.tensor([queries, keys]))


# Packed sequences with places of anchors that hold nothing, which shift_keys leaves as they were.
PACKED = [
    packed_call([(0, 40), (130, 0), (65, 140), (1, 3)], heads=2, bias=20.0, window=(40, 3)),
    replace(
        packed_call([(70, 150), (60, 20), (70, 20)], sinks=torch.tensor([4.0, -1.0])),
        starts=torch.tensor([[0, 70, 130], [0, 150, 170]]),
    ),
    wrong_starts([0, 100, 5000], [0, 100, 5000]),
    wrong_starts([60, 0, 60], [60, 0, 100]),
]


def leaving_columns():
    """Keys with a bias in all columns, which leave the frame at different blocks, upwards and downwards."""
    x = random_call(1, 5, 1, 3, 7 * BLOCK + 9, 128, causal=True)
    x.q.mul_(0.2)
    x.k.copy_((x.k - 3) / 8 + 30 * (1 - 2 * (torch.arange(128) % 2)))
    for block, column in ((0, 1), (2, 4), (3, 70), (4, 125), (6, 8)):
        x.k[:, :, block * BLOCK : (block + 1) * BLOCK, column] *= (block % 2) * 2
    return x


def mixed_batch(slots):
    """A token, a prompt, no query, a prompt longer than its keys, and a sequence without keys."""
    x = random_call(5, 4, 2, 40, 290, 64, causal=True, lengths=torch.tensor([290, 200, 50, 10, 0]))
    return x, put_into_pages(x, slots, [0, 1, 34, 34, 51, 53])


def wrong_pages():
    """Page numbers beyond the cache at either end."""
    x = random_call(1, 2, 1, 1, 300, 64)
    pages = put_into_pages(x, 64)
    pages.table[0, 1], pages.table[0, 3] = 100000, -1
    return x, Pages(pages.q, pages.k.nan_to_num(), pages.v.nan_to_num(), pages.table, pages.lengths)


# Calls of decoding, their pages if any, and numbers of groups: parts that are merged, several items for a group.
DECODED = [
    (random_call(1, 7, 1, 1, 600, 128, spread=3.0), None, 3),
    (random_call(1, 8, 1, 8, 300, 256, causal=True), None, 1),
    (leaving_columns(), None, 1),
    (leaving_columns(), None, 4),
    (random_call(3, 6, 2, 21, 20, 16, causal=True, sinks=torch.tensor([4.0, 12.0, -1.0, 0.0, 5.0, 2.0])), None, 2),
    (random_call(3, 1, 1, 1, 140, 144, lengths=torch.tensor([140, 0, 7])), None, 1),
    (*mixed_batch(48), 2),
    (*wrong_pages(), 1),
    (random_call(1, 2, 1, 3, 280, 64, causal=True, overflow="saturate", unbiased=torch.float16), None, 2),
    (packed_call([(1, 300), (0, 40), (3, 150), (5, 2)], heads=4, causal=True), None, 2),
    (packed_call([(1, 0), (1, 0), (3, 40)], heads=1), None, 1),  # a vector core without rows, and no keys
]
LAUNCHES = [("eager", 0), ("eager", 1), ("deferred", 0), ("deferred", 1), ("deferred", 2), ("deferred", 3)]


@pytest.fixture
def mutated(programs_folder, tmp_path):
    folder = tmp_path / "mutants"
    mutants = write_mutants(folder)
    source, define = PROGRAMS / "kernels.cpp", ["PASA_CPU_TWIN", "PASA_MUTANTS"]
    return Program(build(source, programs_folder, optimise=FAST, include=[folder], define=define), tmp_path), mutants


@dataclass(frozen=True)
class Attempt:
    """Hold one launch of one kernel, and a function that returns the bits of the unchanged kernel."""

    launch: Callable[..., Run]
    expected: Callable[[], list[Tensor]]

    def catches(self, number):
        """Return if the mutant ends in a fault, or not at all, or returns other bits."""
        result = bits(self.launch, number)
        return result is None or not all(torch.equal(a, b) for a, b in zip(result, self.expected(), strict=True))


def bits(launch, number):
    """Return the arrays of a launch, or None if it ended in a fault or not at all."""
    try:
        result = launch(mutant=number)
    except AssertionError:  # the process died
        return None
    if not result.report["ok"] or any(result.report["undefined"].values()):
        return None
    return [values for name, values in result.arrays.items() if name != "scores"]


def unchanged(launch):
    """Return a function that launches the unchanged kernel when it is first called, and returns its bits."""

    @cache
    def expected():
        result = bits(launch, 0)
        assert result is not None, launch
        return result

    return expected


def attempts(program):
    """Return every launch of the kernels on every call; kernels with few launches come first."""
    kernels = [partial(launch_vector_probe, program, probe) for probe in range(7)]
    kernels += [partial(launch_product_probe, program, *sizes) for sizes in ((128, 128, 128), (20, 24, 64))]
    kernels += [partial(launch_decode, program, x, pages, groups=groups) for x, pages, groups in DECODED]
    kernels += [partial(launch_attention, program, x, shifted_by_reference(x), groups=1) for x in PACKED]
    for x in CALLS:
        kernels.append(partial(launch_shift, program, x, cores=2))
        kernels.append(partial(launch_attention, program, x, shifted_by_reference(x), groups=1))
    return in_all_ways(kernels)


def in_all_ways(kernels):
    """Return the attempts of launches in all interleavings."""
    expected = list(map(unchanged, kernels))
    return [
        Attempt(partial(launch, mode=mode, seed=seed), right)
        for mode, seed in LAUNCHES
        for launch, right in zip(kernels, expected, strict=True)
    ]


def is_caught(tried, number):
    """Return if an attempt catches the mutant, and move that attempt to the front.

    It often catches the next mutant too, which then needs one process only.
    """
    for i, attempt in enumerate(tried):
        if attempt.catches(number):
            tried.insert(0, tried.pop(i))
            return True
    return False


def check_mutants(tried, mutants):
    """Check that an attempt catches each mutant, and that those attempts do not catch the unchanged kernels."""
    survivors = [str(mutant) for mutant in mutants if not is_caught(tried, mutant.number)]
    assert not survivors, "\n".join(survivors)
    caught_some = tried[: len(mutants)]  # and perhaps others
    assert not is_caught(caught_some, 0), "the unchanged kernels return their own bits"


def test_every_mutant_is_caught(mutated):
    program, mutants = mutated
    assert len(mutants) >= LEAST
    check_mutants(attempts(program), tried_now(mutants))
