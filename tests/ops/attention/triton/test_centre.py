"""The pass over the keys subtracts exactly, makes no key longer, and counts only where all keys allow it."""

from itertools import pairwise

import pytest
import torch

from pasa.ops.attention.triton.anchor_launch import centre_keys
from pasa.ops.attention.triton.centre_kernel import SAMPLE, SPREAD
from pasa.ops.attention.triton.kernel_call import Packing
from pasa.ops.packed import tile_table
from tests.inputs import DEVICE

BATCH, HEADS, BLOCK = 2, 3, 128
MARGIN = 2.0**-9  # of a norm, which the kernel raises by 2^-10


def run(k, **how):
    """Return K', anchors without padding, and the longest key of each head in K and in K'."""
    centred = centre_keys(k.to(DEVICE), BLOCK, **how)
    assert centred.marked.item() == 0
    norms = centred.norms.amax(-1)
    assert (centred.shared[norms[:, :, 1].isfinite()][:, k.shape[-1] :] == 0).all(), "padding takes part in nothing"
    return centred.shifted.cpu(), centred.shared[..., : k.shape[-1]].cpu(), norms.cpu()


def keys(n, dim, bias=0.0, seed=0):
    noise = torch.randn(BATCH, n, HEADS, dim, generator=torch.Generator().manual_seed(seed))
    return (noise + bias).half().transpose(1, 2)  # heads are not contiguous


def lengths(k):
    return k.double().norm(dim=-1).amax(-1)


@pytest.mark.parametrize("dim", [32, 40, 64, 72, 80, 128])
@pytest.mark.parametrize("n", [1, 31, 64, 65, 300])
def test_a_bias_that_all_keys_share_is_subtracted_exactly(n, dim):
    k = keys(n, dim, bias=20.0)
    shifted, anchors, norms = run(k)
    assert (anchors > 0).all()
    assert torch.equal(shifted.double() + anchors.double().unsqueeze(2), k.double())
    for longest, true in ((norms[:, :, 0], lengths(k)), (norms[:, :, 1], lengths(shifted))):
        assert (longest >= true).all()
        assert (longest <= true * (1 + MARGIN)).all()
    assert (norms[:, :, 1] < 0.5 * norms[:, :, 0]).all()


@pytest.mark.parametrize("dim", [64, 80])
def test_columns_without_a_bias_are_left_alone(dim):
    """Only columns whose sampled keys have one sign and differ little get an anchor; no key becomes longer."""
    k = keys(300, dim)
    k[..., :5] += 80
    k[..., 5] -= 80
    shifted, anchors, norms = run(k)
    assert (anchors[..., :5] > 70).all()
    assert (anchors[..., 5] < -70).all()
    assert (anchors[..., 6:] == 0).all()
    assert torch.equal(shifted.double() + anchors.double().unsqueeze(2), k.double())
    assert (shifted.double().abs() <= k.double().abs()).all()
    assert norms.isfinite().all()


def test_anchors_come_from_keys_that_are_spread_over_the_head():
    k = keys(300, 64, bias=20.0)
    _, anchors, _ = run(k)
    places = torch.arange(SAMPLE.value) * (300 // SAMPLE.value)
    places += torch.minimum(torch.arange(SAMPLE.value), torch.tensor(300 % SAMPLE.value))
    sample = k[:, :, places].double()
    low, high = sample.amin(2), sample.amax(2)
    assert (high <= SPREAD.value * low).float().mean() > 0.5
    shared = high <= SPREAD.value * low
    expected = torch.where(shared, (low + high) / 2, 0.0).half()
    assert torch.equal(anchors, expected)


def test_one_key_off_the_bias_switches_its_head_off():
    """K' does not count for a head with a key that is not half to twice the anchor; other heads keep theirs."""
    k = keys(300, 64, bias=20.0)
    k[0, 1, 299, 7] = 0.5  # no sampled key
    _, _, norms = run(k)
    finite = norms[:, :, 1].isfinite()
    assert not finite[0, 1]
    assert finite.sum() == BATCH * HEADS - 1
    assert norms[:, :, 0].isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("bias", [0.0, 20.0])
@pytest.mark.parametrize("place", [0, 150, 299])
def test_a_key_that_is_not_finite_makes_both_norms_infinite(bad, bias, place):
    k = keys(300, 64, bias=bias)
    k[1, 2, place, 3] = bad
    _, _, norms = run(k)
    assert norms[1, 2].isinf().all()
    assert norms[0].isfinite().all() or bias == 0.0
    assert norms[0, :, 0].isfinite().all()


def test_largest_and_smallest_numbers():
    """Sums of the largest FP16 numbers, and differences of subnormal ones, are exact as well."""
    for low, high in ((40000.0, 65504.0), (2.0**-24, 2.0**-23), (2.0**-14, 1.5 * 2.0**-14)):
        k = torch.empty(1, 1, 100, 64).uniform_(low, high, generator=torch.Generator().manual_seed(0)).half()
        shifted, anchors, norms = run(k)
        if norms[0, 0, 1].isfinite():
            assert torch.equal(shifted.double() + anchors.double().unsqueeze(2), k.double())
            assert (shifted.abs() <= k.abs()).all()
        assert norms[0, 0, 0].isfinite()


def test_keys_that_no_row_sees_do_not_count():
    """A padded batch keeps its K': zeros, NaN or keys from far away under the mask change no anchor and no norm."""
    k = keys(300, 64, bias=20.0)
    seen = torch.ones(BATCH, 5, 300, dtype=torch.uint8)
    seen[0, :, :70] = 0
    seen[1, 1:] = 0  # one group sees the keys from 150 on, and no group others
    seen[1, 0, :150] = 0
    hidden = ~seen.bool().any(1)[:, None, :, None]
    for garbage in (0.0, torch.nan, torch.inf, -60000.0):
        shifted, anchors, norms = run(
            k.masked_fill(hidden, garbage), visible=seen.to(DEVICE)[:, None].expand(BATCH, HEADS, 5, 300)
        )
        restored = shifted.double() + anchors.double().unsqueeze(2)
        assert torch.equal(restored.masked_fill(hidden, 0.0), k.double().masked_fill(hidden, 0.0))
        assert shifted.isfinite().all()
        assert ((norms[:, :, 0] - lengths(k.masked_fill(hidden, 0.0))).abs() <= MARGIN * norms[:, :, 0]).all()
        assert (norms[:, :, 1] < 0.5 * norms[:, :, 0]).all()


def test_each_head_has_keys_that_its_own_rows_see():
    """Masks may differ by head: a key that rows of another head see changes no anchor and no norm."""
    k = keys(300, 64, bias=20.0)
    seen = torch.ones(BATCH, HEADS, 5, 300, dtype=torch.uint8)
    seen[:, 1, :, 200:] = 0
    k[:, 1, 200:] = torch.nan
    _, _, norms = run(k, visible=seen.to(DEVICE))
    assert norms.isfinite().all()
    _, _, norms = run(k, visible=seen.roll(1, 1).contiguous().to(DEVICE))
    assert norms[:, 1].isposinf().all()
    assert norms[:, [0, 2]].isfinite().all()


@pytest.mark.parametrize("dim", [64, 160])
def test_packed_sequences_have_anchors_of_their_own(dim):
    """Each sequence has anchors of its own, at its first block; tokens behind the last sequence have none."""
    edges = [0, 130, 130, 131, 400]
    bias = torch.repeat_interleave(torch.tensor([20.0, 60.0, -30.0, 0.0]), torch.tensor([130, 1, 269, 12]))
    k = torch.randn(412, HEADS, dim, generator=torch.Generator().manual_seed(3)) + bias[:, None, None]
    k = k.half().to(DEVICE)
    cu = torch.tensor(edges, dtype=torch.int32, device=DEVICE)
    packing = Packing(*tile_table(cu, BLOCK, len(k)), cu)
    centred = centre_keys(k, BLOCK, packing=packing)
    parts = BLOCK // centred.part
    for sequence, (begin, end) in enumerate(pairwise(edges)):
        if end > begin:
            first = int(packing.first[sequence])
            anchors = centred.shared[:, first, :dim].double()
            rest = centred.shifted[begin:end].double()
            assert torch.equal(rest + anchors, k[begin:end].double())
            blocks = -(-(end - begin) // BLOCK)
            norms = centred.norms[0, :, 1, first * parts : (first + blocks) * parts].amax(-1)
            assert ((norms - rest.norm(dim=-1).amax(0)).abs() <= MARGIN * norms).all()
