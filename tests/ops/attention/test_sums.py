"""Check the README's statements on rounding sums and shares, whose negations would fail.

- The row sum is that of the rounded weights that multiply V, so a constant V comes out unchanged. Here 15 keys of 16
  have a weight just below halfway between two FP16 numbers. Weights summed before rounding would exceed those that
  multiply V by 2^-11, and a constant would come out one spacing smaller.
- Shares are rounded towards zero, so that they never sum to more than 1.
"""

import math

import pytest
import torch

import pasa
from pasa import PasaConfig
from pasa.ops.attention.spec import attention as reference
from tests.inputs import DEVICE
from tests.pages import make_pages

WEIGHT = 0.5 * (1 + 2.0**-11 * 0.97)  # FP16 rounds it to 0.5
LARGEST = 65504.0


def scores(rows, keys, dim, heads=1):
    """Return q, k and a scale by which every 16th key, one in each split, has the score 0, and others log(WEIGHT)."""
    q, k = torch.zeros(1, heads, rows, dim).half(), torch.zeros(1, heads, keys, dim).half()
    q[..., 0], k[..., 0], k[:, :, ::16, 0] = 1.0, -1.0, 0.0
    return q, k, -math.log(WEIGHT)


def check(out, lse, keys, value):
    """Check for the constant, and for the sum of the rounded weights, which is 2^-11 below that of the weights."""
    assert torch.equal(out, torch.full_like(out, value))
    ones = -(-keys // 16)
    assert (lse - math.log(ones + 0.5 * (keys - ones))).abs().max() < 2.0**-14


@pytest.mark.parametrize("value", [1.0, LARGEST])
@pytest.mark.parametrize(
    ("rows", "keys", "dim", "masked", "backend"),
    [
        (20, 130, 16, False, "reference"),
        (20, 300, 16, True, "triton"),  # the exact pass, which takes what the fast one leaves
        (20, 50, 16, False, "triton"),  # few keys, all in one block
        (2, 300, 64, False, "triton"),  # few keys in several blocks
        (2, 400, 64, False, "triton"),  # decoding by lanes
        (2, 400, 160, True, "triton"),  # decoding by tiles
        (2, 400, 160, False, "triton"),  # without a mask, which would take the slower exponent
    ],
    ids=["reference", "exact", "short", "few-keys-in-blocks", "lanes", "tiles", "plain-tiles"],
)
def test_a_constant_comes_out_unchanged(rows, keys, dim, masked, backend, value):
    """A constant V comes out unchanged; it would not if weights were summed before FP16 rounds them."""
    q, k, scale = scores(rows, keys, dim)
    v = torch.full_like(k, value)
    mask = torch.zeros(rows, keys) if masked else None
    device = DEVICE if backend == "triton" else "cpu"
    tensors = [x.to(device) for x in (q, k, v)]
    how = {"attn_mask": None if mask is None else mask.to(device), "scale": scale, "return_lse": True}
    out, lse = pasa.attention(*tensors, **how, backend=backend)
    check(out.cpu(), lse.cpu(), keys, value)


@pytest.mark.parametrize("value", [1.0, LARGEST])
@pytest.mark.parametrize("anchored", [False, True])
def test_a_constant_comes_out_of_pages_unchanged(anchored, value):
    """A constant V comes out of the passes over pages unchanged.

    With anchors, column 1 adds 4,800 nats to all scores.
    """
    pages = make_pages([130], (1, 1), 64)
    q, k, scale = scores(1, 130, 64)
    if anchored:
        q[..., 1], k[..., 1] = 100.0, 70.0
    pages = pages._replace(q=q[0].transpose(0, 1).contiguous(), k=k[0].transpose(0, 1).contiguous())
    pages.k_cache.view(-1, 1, 64)[pages.slots] = pages.k
    pages.v[:] = value
    pages.v_cache.view(-1, 1, 64)[pages.slots] = pages.v
    out, lse = (pages.anchored() if anchored else pages).attend(DEVICE, backend="triton", scale=scale)
    assert torch.equal(out, torch.full_like(out, value))
    if not anchored:  # beside 4,800 nats the log-sum-exp does not have that digit
        check(out, lse, 130, value)


def test_shares_are_rounded_towards_zero():
    """Shares are rounded towards zero.

    Rounded to nearest, their sum may exceed 1. P V of the largest values would then saturate, and after division
    by the sum of the shares be less than every value.
    """
    q = torch.zeros(1, 1, 3, 16).half()
    for keys in range(2, 40):
        share = (torch.ones(()) / keys).half()
        if float(share) * keys < 1 + 2.0**-12:  # rounded to nearest they would not sum to more than 1
            continue
        k, v = torch.zeros(1, 1, keys, 16).half(), torch.full((1, 1, keys, 16), LARGEST).half()
        out = pasa.attention(q, k, v, config=PasaConfig(accumulate="fp16"), backend="reference")
        assert torch.equal(out, v[:, :, :3].expand_as(out))


def test_shares_sum_to_no_more_than_1(monkeypatch):
    """The shares that multiply V sum to at most 1, checked directly."""
    result = []
    times = reference._times_values
    monkeypatch.setattr(reference, "_times_values", lambda p, v: result.append(p) or times(p, v))
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 50, 16, generator=g).half() for _ in range(3))
    pasa.attention(q, k, v, config=PasaConfig(accumulate="fp16"), backend="reference")
    assert len(result) == 1
    sums = result[0].double().sum(-1)
    assert (sums <= 1).all()
    assert (sums > 1 - 50 * 2.0**-11).all()
