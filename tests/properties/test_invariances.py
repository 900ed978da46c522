"""Invariances of attention: shifts, order, blocks, halves, decoding, masked garbage.

Non-finite inputs that a row does see must show in its output.
"""

import functools

import pytest
import torch

import pasa
from pasa import PasaConfig
from tests.inputs import KERNEL_MODES, KERNEL_SLACK, MODES, Mode, fp16_naive_error, max_error, normal_qkv, rmse
from tests.unlike_keys import BLOCK, CASES, MASKED, allowed, later_keys_of_the_block
from tests.unlike_keys import found as truth_of

EVERY = pytest.mark.parametrize("mode", MODES, ids=str)
DEFAULT = Mode("reference", PasaConfig())
DEFAULTS = pytest.mark.parametrize("mode", [DEFAULT, *KERNEL_MODES], ids=str)
HALF_ULP = 2.0**-11


@EVERY
@pytest.mark.parametrize("keys", [1, 129, 1407])
def test_values_of_one_give_one(mode, keys):
    q, k, v = normal_qkv((2, 1), (9, keys), 80)
    out = mode.out(q * 3, k, torch.ones_like(v))
    assert (out - 1).abs().max() <= (KERNEL_SLACK if mode in KERNEL_MODES else 0.0)


@EVERY
@pytest.mark.parametrize("shift", [0.0, 8.0, 16.0, 104.0, 1000.0, 10_000.0])
def test_constant_added_to_every_key_changes_nothing(mode, shift):
    """A constant added to every key changes nothing.

    Keys are on the grid of the largest shift (2^3 at 10^4), so that adding the shift is exact. Then bits may
    change only through the FP32 product with the anchor, which all keys share.
    """
    q, _, v = normal_qkv((2, 1), (33, 300), 64)
    g = torch.Generator().manual_seed(5)
    k = 8.0 * torch.randint(-2, 3, (1, 1, 300, 64), generator=g)
    direction = 8.0 * torch.randint(-1, 2, (64,), generator=g)
    moved = (k + shift / 8 * direction).half()
    assert torch.equal(moved.float() - k, (shift / 8 * direction).expand_as(k))
    golden, _ = pasa.golden_attention(q, k.half(), v)
    base = max_error(mode.out(q, k.half(), v), golden)
    assert max_error(mode.out(q, moved, v), golden) <= 1.1 * base + HALF_ULP


@EVERY
def test_order_of_keys_does_not_matter(mode):
    q, k, v = normal_qkv((2, 1), (33, 300), 64)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    golden, _ = pasa.golden_attention(q, k, v)
    bound = 4 * fp16_naive_error(q, k, v, golden)
    out, permuted = (mode.out(q, *kv) for kv in ((k, v), (k[:, :, order], v[:, :, order])))
    assert max_error(out, permuted.double()) <= bound + 4 * HALF_ULP


@pytest.mark.parametrize("block", [32, 64, 128, 256])
@pytest.mark.parametrize("offset", [0.0, 20.0])
def test_block_sizes_agree(block, offset):
    q, k, v = (x + offset for x in normal_qkv((2, 1), (65, 700), 128))
    golden, _ = pasa.golden_attention(q, k, v)
    fp32 = pasa.attention(q, k, v, config=PasaConfig(precision="fp32"))
    out = pasa.attention(q, k, v, config=PasaConfig(block_q=block, block_k=block))
    assert rmse(out, golden) <= 2 * rmse(fp32, golden)


@functools.cache
def whole_call(mode, offset):
    """Return inputs, output and log-sum-exp in FP64, and those of a mode."""
    q, k, v = (x + offset for x in normal_qkv((2, 1), (65, 700), 128))
    return (q, k, v), pasa.golden_attention(q, k, v), mode.attend(q, k, v)


@DEFAULTS
@pytest.mark.parametrize("offset", [0.0, 30.0])
@pytest.mark.parametrize("cut", [1, 128, 333])
def test_halves_merged_by_lse_equal_the_whole(mode, cut, offset):
    """Halves of the keys, merged by their log-sum-exps, equal the whole call.

    The log-sum-exp is in the true frame. It is an FP32 number, so its weight errs by at most |LSE| 2^-23.
    """
    (q, k, v), (golden, golden_lse), (whole, whole_lse) = whole_call(mode, offset)
    halves = [mode.attend(q, k[:, :, part], v[:, :, part]) for part in (slice(None, cut), slice(cut, None))]
    lse = torch.stack([h[1] for h in halves]).double()
    weights = torch.softmax(lse, 0).unsqueeze(-1)
    merged = sum(w * h[0].double() for w, h in zip(weights, halves, strict=True))
    spread = float(v.double().amax() - v.double().amin())
    bound = float(golden_lse.abs().max()) * 2.0**-21 * spread + 4 * (max_error(whole, golden) + HALF_ULP)
    assert max_error(merged, golden) <= bound
    assert (torch.logsumexp(lse, 0) - whole_lse).abs().max() <= 2.0**-7 + float(golden_lse.abs().max()) * 2.0**-21


@EVERY
@pytest.mark.parametrize("offset", [0.0, 20.0])
def test_decode_row_equals_prefill_row(mode, offset):
    """A decode row equals its prefill row.

    The blocks of keys are the same. So only FP32 summation order, and the rows that share a rescued tile,
    differ.
    """
    q, k, v = (x + offset for x in normal_qkv((4, 2), (300, 300), 64))
    prefill = mode.out(q, k, v, is_causal=True)
    golden, _ = pasa.golden_attention(q, k, v, is_causal=True)
    bound = 2 * max_error(prefill, golden) + HALF_ULP
    for length in (1, 128, 129, 300):
        last = slice(length - 1, length)
        row = mode.out(q[:, :, last], k[:, :, :length], v[:, :, :length], is_causal=True)
        assert max_error(row, prefill[:, :, last].double()) <= bound


PAPER = [Mode(backend, PasaConfig(recovery="paper")) for backend in ("reference", "triton")]


@pytest.mark.parametrize("mode", [DEFAULT, *KERNEL_MODES, *PAPER], ids=lambda m: f"{m}-{m.config.recovery}")
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf])
def test_garbage_behind_a_mask_never_leaks(mode, garbage):
    """Garbage in a key or value that a row does not see never leaks: padding, a future key, a hole in a mask."""
    q, k, v = normal_qkv((2, 1), (40, 200), 64)
    for where in ("padding", "future", "hole", "combined"):
        mask = torch.ones(40, 200, dtype=torch.bool)
        at = {"padding": 150, "future": 190, "hole": 17, "combined": 199}[where]
        if where == "padding":
            mask[:, 150:] = False
        if where == "hole":
            mask[:30, at] = False
        if where == "combined":  # the mask hides the last key from the only row that causality lets see it
            mask[39, at] = False
        causal = where in ("future", "combined")
        unseen = slice(0, {"padding": 40, "future": 30, "hole": 30, "combined": 40}[where])
        dirty_k, dirty_v = k.clone(), v.clone()
        dirty_k[..., at, 3], dirty_v[..., at, 5] = garbage, garbage
        for kv in ((dirty_k, v), (k, dirty_v)):
            out, lse = mode.attend(q, *kv, attn_mask=mask, is_causal=causal)
            assert torch.isfinite(out[:, :, unseen]).all()
            assert torch.isfinite(lse[:, :, unseen]).all()
            golden, _ = pasa.golden_attention(q, k, v, attn_mask=mask, is_causal=causal)
            naive = fp16_naive_error(q, k, v, golden, attn_mask=mask, is_causal=causal)
            assert max_error(out[:, :, unseen], golden[:, :, unseen]) <= 8 * (naive + HALF_ULP)


@DEFAULTS
def test_garbage_that_is_seen_is_reported_as_nan(mode):
    q, k, v = normal_qkv((2, 1), (40, 200), 64)
    v[..., 190, 5] = torch.inf
    out, lse = mode.attend(q, k, v, is_causal=True)
    assert torch.isnan(out[:, :, 30:, 5]).all()
    assert torch.isfinite(out[..., [0, 1, 2, 3, 4, 6]]).all()
    assert torch.isfinite(lse).all()
    q[:, 1, 7, 0], k[..., 195, 0] = torch.nan, torch.inf
    out, lse = mode.attend(q, k, v, is_causal=True)
    for bad in (out[:, :, 35:], out[:, 1, 7], lse[:, :, 35:], lse[:, 1, 7]):
        assert torch.isnan(bad).all()
    assert torch.isfinite(out[:, 0, :30]).all()


@EVERY
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_bad_number_in_a_float_mask_reaches_its_row(mode, value):
    """NaN or infinity in a float mask turns its row to NaN.

    Storing the output in FP16 between blocks once turned such a row to 0, and saturation turned it to finite
    numbers.
    """
    q, k, v = normal_qkv((2, 1), (9, 200), 64)
    mask = torch.zeros(9, 200)
    mask[3, 150] = value
    mask[4, 20] = -torch.inf
    out, lse = mode.attend(q, k, v, attn_mask=mask)
    rows = torch.arange(9) == 3
    assert torch.isnan(out[:, :, rows]).all()
    assert torch.isnan(lse[:, :, rows]).all()
    assert torch.isfinite(out[:, :, ~rows]).all()
    assert torch.isfinite(lse[:, :, ~rows]).all()


@DEFAULTS
@pytest.mark.parametrize("offset", [0.0, 20.0])
def test_future_keys_move_a_row_by_rounding_only(mode, offset):
    """Future keys change a row by rounding only, although block means include them.

    In the reference, an earlier block is not affected at all. Triton's fast pass subtracts from the keys of a head what
    all of them share, and so follows a key that is off the others' bias.
    """
    q, k, v = (x + offset for x in normal_qkv((2, 1), (256, 256), 64))
    other_k, other_v = k.clone(), v.clone()
    other_k[..., 200:, :], other_v[..., 200:, :] = 3.0, -7.0
    golden, _ = pasa.golden_attention(q[:, :, :200], k[:, :, :200], v[:, :, :200], is_causal=True)
    before, after = (mode.out(q, *kv, is_causal=True)[:, :, :200] for kv in ((k, v), (other_k, other_v)))
    if mode.backend == "reference":
        assert torch.equal(before[:, :, :128], after[:, :, :128])
    assert max_error(after, before.double()) <= 2 * max_error(before, golden) + HALF_ULP


@EVERY
@pytest.mark.parametrize("bias", [100.0, 4096.0, 30000.0])
@pytest.mark.parametrize("name", MASKED)
def test_error_of_a_row_is_bounded_by_keys_that_it_sees(mode, name, bias):
    """The error of a row is bounded by the keys that it sees.

    Story: an anchor of later keys, or a frame of keys without weight, entered FP32 sums of rows whose own
    scores were small. At a bias of 4096 outputs were wrong by 0.03 to 0.9, where FP32 SDPA errs by 0.001.
    """
    case = MASKED[name](bias)
    true, _ = truth_of(case)
    out, lse = mode.attend(*case[:3], **case.how)
    low = mode.config.accumulate == "fp16" and mode.backend == "reference"
    bound, lse_bound = allowed(case, stores=2 * -(-case.k.shape[2] // BLOCK) + 1 if low else 1)
    assert ((out.double() - true.out).abs() <= bound).all()
    assert ((lse.double() - true.lse).abs() <= lse_bound)[~true.fully_masked].all()


HOPELESS = {  # the bias from which FP32 attention errs by as much as values differ
    "later keys of the block": 4096.0,
    "small integers": 4096.0,
    "documents": 4096.0,
    "biased with all weight": 4096.0,
    "less and less biased": 30000.0,
    "more and more biased": 30000.0,
}


@pytest.mark.parametrize("bias", [100.0, 1000.0, 4096.0, 30000.0])
@pytest.mark.parametrize("name", MASKED)
def test_the_bound_of_a_row_says_something(name, bias):
    """The bound of a row is meaningful: an output of zeros fails it, except where FP32 attention has no digit left.

    Story: from a bias of 1000 on, the bound allowed half of the cases any mean of their values.
    """
    case = MASKED[name](bias)
    true, _ = truth_of(case)
    bound, _ = allowed(case)
    passes = (true.out.abs() <= bound).all(-1)[~true.fully_masked].double().mean()
    assert (passes > 0.05) == (bias >= HOPELESS.get(name, float("inf")))


@EVERY
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_the_same_of_a_few_rows(mode, name, rows):
    """The same bound holds for calls of a few rows.

    Story: splits of the keys were merged in the frame of the first split that had one, which may have no
    weight.
    """
    case = CASES[name](30000.0)
    case = case._replace(q=case.q[:, :, -rows:])
    true, _ = truth_of(case)
    out, lse = mode.attend(*case[:3], **case.how)
    low = mode.config.accumulate == "fp16" and mode.backend == "reference"
    bound, lse_bound = allowed(case, stores=2 * -(-case.k.shape[2] // BLOCK) + 1 if low else 1)
    assert ((out.double() - true.out).abs() <= bound).all()
    assert ((lse.double() - true.lse).abs() <= lse_bound).all()


@EVERY
@pytest.mark.parametrize("bias", [100.0, 1000.0, 4096.0, 30000.0])
def test_biased_future_keys_move_a_row_by_rounding_only(mode, bias):
    """Biased future keys change a row by rounding only, and decoding with only the visible keys gives the same row.

    Story: rows 0 to 31 moved by 0.039 at a bias of 1000 when keys 32 to 127 changed, which they do not see.
    """
    case = later_keys_of_the_block(bias)
    plain = case.k.clone()
    plain[..., 0] = 0
    bound, _ = allowed(case._replace(k=plain))
    rows = slice(0, 32)
    before, after = (mode.out(case.q, k, case.v, is_causal=True)[:, :, rows].double() for k in (plain, case.k))
    assert ((after - before).abs() <= bound[:, :, rows]).all()
    last = slice(31, 32)
    alone = mode.out(case.q[:, :, last], case.k[:, :, :32], case.v[:, :, :32])
    assert ((alone.double() - after[:, :, last]).abs() <= bound[:, :, last]).all()


@DEFAULTS
def test_key_hidden_by_mask_and_causality_together_enters_no_mean(mode):
    """A key hidden by mask and causality together enters no mean.

    Hidden keys were once looked up in the mask alone. Such a key then moved the block mean, and BF16 data
    behind it could be refused as too large.
    """
    q, k, v = normal_qkv((2, 1), (6, 20), 64)
    mask = torch.ones(6, 20, dtype=torch.bool)
    mask[5, 19] = False
    far = k.clone()
    far[..., 19, :] = 60000.0
    expected = mode.out(q, k, v, attn_mask=mask, is_causal=True)
    assert torch.equal(mode.out(q, far, v, attn_mask=mask, is_causal=True), expected)


@DEFAULTS
def test_fully_masked_row_with_garbage_in_its_query_is_zero(mode):
    q, k, v = normal_qkv((2, 1), (3, 20), 64)
    q[..., 1, 0] = torch.nan
    mask = torch.ones(3, 20, dtype=torch.bool)
    mask[1] = False
    out, lse = mode.attend(q, k, v, attn_mask=mask)
    assert torch.all(out[:, :, 1] == 0)
    assert torch.all(lse[:, :, 1] == -torch.inf)
