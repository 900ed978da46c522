"""Masks are judged by the log-sum-exp in FP64, which shows the weight of a single key.

The tolerance of an output hides such a weight.

No test here compares pasa's code with pasa's code. What all backends share could be wrong in all of them:
which keys are dropped, which rows a block is skipped for, how a mask is broadcast.
"""

import pytest
import torch

import pasa
from pasa import PasaConfig
from tests.inputs import KERNEL_MODES, Mode, max_error, normal_qkv

REFERENCE = Mode("reference", PasaConfig())
DEFAULTS = pytest.mark.parametrize("mode", [REFERENCE, *KERNEL_MODES], ids=str)
ROWS, KEYS = 40, 200
# One of 200 keys of equal weight is 0.005; rounding P and scores to FP16 moves the log-sum-exp by 0.0003.
LSE_BOUND = 2.0**-10
OUT_BOUND = 2.0**-9


def check(mode, q, k, v, dirty=None, rows=slice(None), **how):
    """Check that the call, on `dirty` keys and values if any, equals FP64 on clean ones, for these rows."""
    golden, golden_lse = pasa.golden_attention(q, k, v, **how)
    out, lse = mode.attend(q, *(dirty or (k, v)), **how)
    golden, golden_lse, out, lse = (x[:, :, rows] for x in (golden, golden_lse, out, lse))
    fully_masked = golden_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, fully_masked)
    assert (out[fully_masked] == 0).all()
    assert max_error(lse.masked_fill(fully_masked, 0.0), golden_lse.masked_fill(fully_masked, 0.0)) <= LSE_BOUND
    assert max_error(out, golden) <= OUT_BOUND


def calm_qkv(heads, lengths, dim=32, batch=1):
    """Return tensors with scores of about a quarter, so that all keys have nearly one weight."""
    q, k, v = normal_qkv(heads, lengths, dim, batch=batch)
    return (q / 4).half(), k, v


@DEFAULTS
@pytest.mark.parametrize("junk", [torch.nan, torch.inf, 65504.0], ids=str)
@pytest.mark.parametrize("where", ["padding", "future", "hole", "combined"])
def test_junk_under_a_mask_has_no_weight(mode, where, junk):
    """Junk under a mask has no weight.

    Story: tests only required that a hidden key does not make its row infinite. As a key of score 0 it had a weight of
    1 in 200, within the tolerance of the output.
    """
    q, k, v = calm_qkv((2, 1), (ROWS, KEYS))
    mask = torch.ones(ROWS, KEYS, dtype=torch.bool)
    at = {"padding": slice(150, 200), "future": slice(190, 191), "hole": slice(17, 18), "combined": slice(199, 200)}[
        where
    ]
    if where == "padding":
        mask[:, at] = False
    if where == "hole":
        mask[:30, at] = False
    if where == "combined":  # the mask hides the last key from the only row that causality lets see it
        mask[39, at] = False
    rows = slice(0, {"padding": 40, "future": 30, "hole": 30, "combined": 40}[where])
    dirty_k, dirty_v = k.clone(), v.clone()
    dirty_k[:, :, at] = junk
    dirty_v[:, :, at] = junk
    check(mode, q, k, v, (dirty_k, dirty_v), rows, attn_mask=mask, is_causal=where in ("future", "combined"))


@DEFAULTS
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_keys_are_hidden_per_batch_entry(mode, kind):
    """Keys are hidden per batch entry: left padding, right padding, a hole, all keys and none may differ by entry."""
    q, k, v = calm_qkv((4, 2), (5, KEYS), batch=5)
    keep = torch.ones(5, 1, 1, KEYS, dtype=torch.bool)
    keep[0, ..., :131] = False
    keep[1, ..., 97:] = False
    keep[2, ..., 60:61] = False
    keep[4] = False
    mask = keep if kind == "bool" else torch.zeros(keep.shape).masked_fill(~keep, -torch.inf)
    junk = [x.masked_fill(~keep.transpose(2, 3), torch.nan) for x in (k, v)]
    for dirty in (None, junk):
        check(mode, q, k, v, dirty, attn_mask=mask)
    rows = keep.expand(-1, -1, 5, -1).clone()
    rows[:, :, 2, 140] = False  # also hide one key of one row
    check(mode, q, k, v, attn_mask=rows)
    check(mode, q, k, v, attn_mask=rows, is_causal=True)


SHAPES = [
    (3, 4, 1, 1),
    (3, 1, 33, 1),
    (1, 4, 33, KEYS),
    (1, 1, 1, KEYS),
    (3, 4, 33, KEYS),
    (4, 1, KEYS),
    (33, 1),
    (KEYS,),
]


@pytest.mark.parametrize("mode", [REFERENCE, KERNEL_MODES[0]], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_masks_are_broadcast_from_the_right(mode, shape):
    q, k, v = calm_qkv((4, 2), (33, KEYS), 16, batch=3)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.7
    check(mode, q, k, v, attn_mask=mask)
    check(mode, q, k, v, attn_mask=mask, is_causal=True)


@DEFAULTS
@pytest.mark.parametrize("lengths", [(200, 150), (197, 129), (151, 150), (300, 65)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_more_queries_than_keys_than_a_block_holds(mode, lengths, masked):
    """Row i sees keys up to i + Skv - Sq, so with more queries than keys the first rows see none.

    There are several blocks of keys, each of which begins at another row. An error of one key is 1 in i.
    """
    mode = mode._replace(config=PasaConfig(accumulate=mode.config.accumulate, block_k=64 if mode is REFERENCE else 128))
    q, k, v = calm_qkv((2, 1), lengths, batch=2)
    mask = None
    if masked:
        mask = torch.ones(2, 1, *lengths, dtype=torch.bool)
        mask[0, :, :, :40] = False
        mask[1, :, :, 63] = False
    check(mode, q, k, v, attn_mask=mask, is_causal=True)
    check(mode, q, k, v, attn_mask=mask)


@DEFAULTS
@pytest.mark.parametrize("bias", [0.0, 20.0, 400.0])
@pytest.mark.parametrize("rows", [3, 65])
def test_a_nan_in_a_query_stays_out_of_a_row_without_keys(mode, bias, rows):
    """A NaN in the query of a row without keys stays out of the result, which is 0 and -inf.

    Story: if keys share a bias, decoding added q.(change of the frame) to the running maximum of -inf, and so
    the NaN of the query.
    """
    q, k, v = (x + shift for x, shift in zip(calm_qkv((4, 2), (rows, 300), 64), (bias, bias, 0.0), strict=True))
    mask = torch.rand(1, 1, rows, 300, generator=torch.Generator().manual_seed(4)) < 0.9
    mask[:, :, 0] = False
    q[:, :, 0, 3] = torch.nan
    out, lse = mode.attend(q, k, v, attn_mask=mask)
    assert torch.equal(out[:, :, 0], torch.zeros_like(out[:, :, 0]))
    assert (lse[:, :, 0] == -torch.inf).all()
    assert torch.isfinite(out[:, :, 1:]).all()
