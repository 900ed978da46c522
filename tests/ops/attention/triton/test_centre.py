"""The pass over the keys on Hopper subtracts exactly, makes no key longer, and counts only where all keys allow it.

The kernel runs in Triton's interpreter; elsewhere only a GPU can run it.
"""

import pytest
import torch
import triton.language as tl

from pasa.ops.attention.triton.hopper.centre_kernel import SAMPLE, SPREAD, TILE, centre_kernel
from pasa.ops.attention.triton.tiles import hopper_pad

BATCH, HEADS = 2, 3
MARGIN = 2.0**-9  # of a norm, which the kernel raises by 2^-10


@pytest.fixture(autouse=True)
def without_early_launch(monkeypatch):
    monkeypatch.setattr(tl.extra.cuda, "gdc_launch_dependents", lambda: None)


def run(k):
    """Return K', anchors without padding, the longest key of each part in K and in K', and the mark."""
    batch, heads, keys, dim = k.shape
    pad = hopper_pad(dim)
    part = TILE.value // pad
    parts = -(-keys // part)
    shifted = torch.full((batch, heads, keys, dim), torch.nan, dtype=torch.float16)
    anchors = torch.full((batch * heads, pad), torch.nan, dtype=torch.float16)
    norms = torch.full((batch * heads, 2, parts), torch.nan)
    marked = torch.ones(1, dtype=torch.int32)
    strides = k.stride()[:3]
    centre_kernel[(batch * heads * parts, 1, 1)](
        k, shifted, anchors, norms, marked, *strides, heads, keys, parts, dim, pad, part
    )
    assert marked.item() == 0
    used = ~anchors.isnan().all(1)
    assert (anchors[used, dim:] == 0).all(), "padding takes part in nothing"
    return shifted, anchors[:, :dim].view(batch, heads, dim), norms.view(batch, heads, 2, parts).amax(-1)


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
