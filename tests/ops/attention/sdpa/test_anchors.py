"""Tests of anchors: they are subtracted only where that is exact, and lengthen no key."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pasa
from pasa.ops.attention.call import Call
from pasa.ops.attention.sdpa import anchors
from pasa.ops.attention.sdpa.anchors import LEAST_KEYS, LEAST_ROWS, head_anchors
from tests.inputs import DEVICE, normal_qkv, rmse

KEYS = LEAST_KEYS + 44


def anchors_of(k, mask=None, rows=LEAST_ROWS):
    q = torch.zeros(*k.shape[:2], rows, k.shape[-1], dtype=torch.float16)
    return head_anchors(Call(q, k, k, 1.0, mask=mask))


@settings(max_examples=60, deadline=None)
@given(
    bias=st.sampled_from([2.0**-22, 2.0**-14, 0.1, 3.0, 80.0, 1000.0, 30000.0]),
    spread=st.sampled_from([0.0, 0.01, 0.3, 0.49, 0.5, 0.51, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_keys_and_anchors_give_the_keys_back(bias, spread, seed):
    """K - a is exact in FP16, in every column, and no longer than K; it holds for any range of keys."""
    g = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (1, 2, 1, 8), generator=g) * 2 - 1
    k = (signs * bias * (1 + spread * (2 * torch.rand(1, 2, KEYS, 8, generator=g) - 1))).clamp(-65504, 65504).half()
    subtracted = anchors_of(k)
    if subtracted is None:
        assert spread > 0.4 or bias < 2.0**-20
        return
    shifted = k - subtracted
    assert torch.equal((shifted.double() + subtracted.double()).half(), k)
    assert torch.equal(shifted.double(), k.double() - subtracted.double())
    assert (shifted.abs() <= k.abs()).all()


def test_one_key_off_the_bias_keeps_its_column_as_it_is():
    """An attention sink is such a key."""
    k = torch.full((1, 1, KEYS, 4), 80.0).half()
    k[:, :, 0, 1], k[:, :, 0, 2], k[:, :, 0, 3] = 0.0, -80.0, torch.nan
    assert anchors_of(k).flatten().tolist() == [80.0, 0.0, 0.0, 0.0]


def test_keys_that_no_row_sees_enter_no_anchor():
    k = torch.full((2, 1, KEYS, 4), 80.0).half()
    k[1, :, 5] = -3.0
    mask = torch.ones(2, 1, 1, KEYS, dtype=torch.bool)
    mask[1, ..., 5] = False
    assert (anchors_of(k, mask) == 80.0).all()
    assert anchors_of(k)[1].abs().max() == 0.0


def test_short_calls_and_decoding_read_their_keys_once():
    k = torch.full((1, 1, KEYS, 4), 80.0).half()
    assert anchors_of(k, rows=LEAST_ROWS - 1) is None
    assert anchors_of(k[:, :, : LEAST_KEYS - 1]) is None


def test_a_shared_bias_costs_no_accuracy(monkeypatch):
    """8000 on 16 of 128 channels: FP32 sums of plain attention lose digits of each score to it."""
    monkeypatch.setattr(anchors, "LEAST_ROWS_ON_GPU", LEAST_ROWS)  # so few rows have anchors there, too
    q, k, v = (x.to(DEVICE) for x in normal_qkv((2, 2), (1024, 1280), 128))
    k[..., :16] += 8000
    golden, golden_lse = pasa.golden_attention(q, k, v)
    out, lse = pasa.attention(q, k, v, return_lse=True, backend="sdpa")
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert rmse(out, golden) <= 0.7 * rmse(plain, golden)
    torch.testing.assert_close(lse, golden_lse.float(), atol=2e-3, rtol=1e-6)
