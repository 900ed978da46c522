"""Shifted keys: the exact variant loses no bit, and the paper's variant is what its equations say."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pasa.ops.attention.spec.shift_keys import shift_exact, shift_paper, shifts_exactly
from pasa.ops.numerics.formats import round_to
from pasa.ops.numerics.shifting import shifting_matrix


def finite_fp16(shape, seed, spread):
    g = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, shape, generator=g, dtype=torch.int32).to(torch.int16).view(torch.float16)
    bits = torch.where(torch.isfinite(bits), bits, torch.tensor(1.0, dtype=torch.float16))
    common = bits[..., :1, :].float()
    near = round_to(common * (1 + spread * torch.randn(shape, generator=g)), "fp16", overflow="saturate")
    return torch.where(torch.rand(shape, generator=g) < 0.9, near, bits.float())


@settings(max_examples=200)
@given(
    st.integers(0, 2**31), st.integers(1, 130), st.sampled_from([0.0, 1e-3, 0.1, 1.0]), st.sampled_from([1.0, 0.125])
)
def test_anchored_keys_are_the_keys_bit_for_bit(seed, n, spread, unit):
    k = finite_fp16((2, 1, n, 16), seed, spread)
    block = shift_exact(k, unit)
    assert torch.equal(block.keys / block.unit + block.anchor, k)
    for stored in (block.keys, block.anchor, block.mean_residual):
        assert torch.equal(round_to(stored, "fp16"), stored)
    assert ((block.unit == unit) | (block.unit == 1.0)).all()


@pytest.mark.parametrize("bias", [20.0, 30.0, 412.0, 2000.0, 30000.0])
def test_a_shared_bias_is_removed_in_full(bias):
    """A shared bias is removed in full: what is left of the mean is below the grid of the largest key.

    This holds where keys differ by less than their bias.
    """
    g = torch.Generator().manual_seed(0)
    k = (bias + torch.randn(1, 1, 128, 64, generator=g)).half().float()
    block = shift_exact(k, 0.125)
    grid = 2.0 ** (torch.frexp(k.abs().amax(-2)).exponent - 11)
    assert (block.anchor != 0).all()
    assert (block.keys / block.unit).mean(-2).abs().le(0.51 * grid).all()


def test_a_column_that_would_round_keeps_its_keys():
    k = torch.full((1, 1, 4, 2), 1000.0)
    k[0, 0, 2, 1] = 2.0**-14  # 1000 - 2^-14 needs 24 bits
    block = shift_exact(k, 1.0)
    assert block.anchor[0, 0, 0].tolist() == [1000.0, 0.0]


def test_a_key_that_vanishes_beside_the_anchor_is_not_shifted():
    """A key that vanishes beside the anchor is not shifted.

    2^-24 - 60000 is -60000 in FP32, an FP16 number, so the key would be lost.
    """
    k = torch.tensor([2.0**-24, 60000.0, 59008.0])
    assert shifts_exactly(k, torch.tensor(60000.0)).tolist() == [False, True, True]


@pytest.mark.parametrize("n", [1, 63, 128])
def test_paper_shift_is_the_rounded_product(n):
    g = torch.Generator().manual_seed(0)
    k = (20 + torch.randn(1, 2, n, 80, generator=g)).half()
    matrix = shifting_matrix(n, 0.96875, scale=80**-0.5)
    exact = matrix.double() @ k.double()
    got = shift_paper(k.float(), matrix.float(), "inf")
    assert torch.equal(round_to(got, "fp16"), got)
    # FP32 accumulation of n products of size 2 errs by 2^-24 * 2 n, and rounding to FP16 by half a
    # unit at most
    assert (got - exact).abs().max() <= 2.0**-23 * n + float(exact.abs().max()) * 2.0**-11


@pytest.mark.parametrize("mode", ["inf", "saturate"])
def test_paper_shift_can_itself_overflow(mode):
    """The published shift can overflow by itself: K' = K - beta mean reaches 131008 / alpha."""
    k = torch.full((1, 1, 128, 1), 65504.0)
    k[0, 0, 0] = -65504.0
    got = shift_paper(k, shifting_matrix(128, 0.984375, scale=1.0).float(), mode)[0, 0, 0, 0].item()
    assert got == (-torch.inf if mode == "inf" else -65504.0)
