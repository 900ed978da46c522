"""The guarantee: finite FP16 in, finite out, and every output within [min V, max V] of its column up to rounding.

O is a mean of values with weights P / sum(P), with the same rounded P above and below the fraction bar. So an
output can leave the interval only by FP32 accumulation (n terms, 2^-24 each of max |V|) and one rounding to
FP16, which is monotone. With accumulate="fp16" every block's product and every stored mean is rounded to FP16
as well.
"""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pasa
from pasa import PasaConfig
from pasa.eval.random_calls.inputs import Call
from pasa.eval.random_calls.truth import find_truth
from pasa.ops.attention.spec import scores
from tests.inputs import KERNEL_MODES, KERNEL_SLACK, MODES, REFERENCE_MODES, max_error, normal_qkv, rmse

SUBNORMAL = 2.0**-24  # the smallest step of FP16
KINDS = ("any_bits", "largest", "denormal", "constant_key", "resonance", "wide", "outliers", "opposed_blocks")


def adversary(kind, shape, g):
    """Return finite FP16 tensors that provoke overflow, underflow, cancellation or ties."""
    if kind == "any_bits":
        x = torch.randint(-(2**15), 2**15, shape, generator=g, dtype=torch.int32).to(torch.int16).view(torch.float16)
        return torch.where(torch.isfinite(x), x, torch.tensor(65504.0, dtype=torch.float16))
    sign = torch.randint(0, 2, shape, generator=g) * 2.0 - 1
    normal = torch.randn(shape, generator=g)
    if kind == "largest":
        return (65504.0 * sign).half()
    if kind == "denormal":
        return (normal * 2.0**-20).half()
    if kind == "constant_key":
        return normal[..., :1, :].expand(shape).half()
    if kind == "resonance":
        phase = torch.arange(shape[-1]) * 0.7
        return (300 * torch.sin(phase) * sign[..., :1] + normal).half()
    if kind == "wide":
        return (normal * 2.0 ** torch.randint(-20, 14, shape, generator=g)).clamp(-65504, 65504).half()
    if kind == "outliers":
        return (normal + 30000 * sign * (torch.rand(shape, generator=g) < 0.02)).half()
    ramp = torch.where(torch.arange(shape[-2]) % 64 < 32, -60000.0, 60000.0)
    return (ramp[:, None] + 16 * normal).half()


@st.composite
def calls(draw):
    kinds = [draw(st.sampled_from(KINDS)) for _ in range(3)]
    dim = draw(st.sampled_from([16, 64, 80, 128]))
    rows, keys = draw(st.sampled_from([1, 3, 17])), draw(st.sampled_from([1, 2, 31, 100, 200]))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    q, k, v = (adversary(kind, (1, 2, n, dim), g) for kind, n in zip(kinds, (rows, keys, keys), strict=True))
    config = PasaConfig(
        block_k=draw(st.sampled_from([16, 32, 128])),
        block_q=draw(st.sampled_from([1, 16])),
        overflow=draw(st.sampled_from(["inf", "saturate"])),
        accumulate=draw(st.sampled_from(["fp32", "fp16"])),
    )
    causal = draw(st.booleans()) and rows <= keys
    scale = draw(st.sampled_from([None, None, 1e-4, 1.0, 30.0]))
    return q, k, v, causal, scale, config


def rounding_of(largest, keys, config):
    """Return the rounding that the top of this file states, for `keys` visible keys and values up to `largest`."""
    if config.accumulate == "fp16":
        return (2 * -(-keys // config.block_k) + 1) * (2.0**-11 * largest + SUBNORMAL)
    return keys * 2.0**-24 * largest


def assert_mean_of_values(out, call, config, kernel=False, mask=None):
    """Check that outputs lie within the range of the visible values; a kernel sums weights before FP16 rounds them."""
    q, k, v, causal = call
    true = find_truth(Call(q, k, v, mask, causal, 1.0))
    assert torch.isfinite(out).all()
    assert (out[true.fully_masked] == 0).all()
    largest = torch.maximum(true.low.abs(), true.high.abs())
    slack = rounding_of(largest, v.shape[-2], config) + kernel * KERNEL_SLACK * largest
    assert (out >= true.low - slack).all()
    assert (out <= true.high + slack).all()
    return true


@settings(max_examples=600)
@given(calls())
def test_finite_and_a_mean_of_values(call):
    q, k, v, causal, scale, config = call
    out, lse = pasa.attention(q, k, v, is_causal=causal, scale=scale, config=config, return_lse=True)
    assert_mean_of_values(out, (q, k, v, causal), config)
    assert torch.isfinite(lse).all()


@settings(max_examples=100)
@given(calls(), st.sampled_from(KERNEL_MODES), st.sampled_from([32, 128]))
def test_kernels_are_finite_and_give_a_mean_of_values(call, mode, block_k):
    q, k, v, causal, scale, _ = call
    q, k, v = (x[:, :1] for x in (q, k, v))  # the interpreter runs heads one after another
    mode = mode._replace(config=dataclasses.replace(mode.config, block_k=block_k))
    out, lse = mode.attend(q, k, v, is_causal=causal, scale=scale)
    assert_mean_of_values(out, (q, k, v, causal), mode.config, kernel=True)
    assert torch.isfinite(lse).all()


@st.composite
def masks(draw, rows, keys):
    """Return a bool or float mask (2, 1, rows, keys), in which a row or a batch entry may see nothing."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    keep = torch.rand(2, 1, rows, keys, generator=g) < draw(st.sampled_from([0.1, 0.7, 1.0]))
    if draw(st.booleans()):
        keep = keep & (torch.arange(keys) >= torch.tensor([0, keys // 2])[:, None, None, None])  # left padding
    if draw(st.booleans()):
        return keep
    size = draw(st.sampled_from([1.0, 1e4, 3e38]))
    return torch.where(keep, size * (torch.rand(keep.shape, generator=g) * 2 - 1), -torch.inf)


@settings(max_examples=300)
@given(st.data())
def test_finite_and_a_mean_of_the_values_it_sees(data):
    """The guarantee holds with masks, grouped heads and a batch.

    Hidden keys are removed, and float masks keep tiles in FP32.
    """
    q, k, v, causal, scale, config = data.draw(calls())
    q, k, v = (torch.cat([x, x.flip(-2)]) for x in (torch.cat([q, -q], 1), k, v))
    mask = data.draw(masks(q.shape[-2], k.shape[-2]))
    how = {"attn_mask": mask, "is_causal": causal, "scale": scale}
    out, lse = pasa.attention(q, k, v, config=config, return_lse=True, **how)
    fully_masked = assert_mean_of_values(out, (q, k, v, causal), config, mask=mask).fully_masked
    assert torch.all(lse[fully_masked] == -torch.inf)
    assert torch.isfinite(lse[~fully_masked]).all()


@settings(max_examples=300)
@given(calls())
def test_error_bound_on_adversaries(call):
    """Errors on adversaries are bounded: scores changed by eps move a mean by at most (e^(2 eps) - 1) spreads.

    The spread is that of the values that the row sees.

    Story: spread and rounding were taken from all values, also of keys that a causal row does not see. So a
    leak from a large value into a row of small ones was allowed.

    eps is the FP32 accumulation of q.k' and of the offset q.a, plus the rounding to FP16. The accumulation
    counts keys that the row sees and gives weight: D terms each of 2^-24 |q||k|, with |k'| up to 2 |k| and |a|
    up to 3 |k|, rarely both. The rounding applies to scores within reach, 2^-11 of 16 nats.
    """
    q, k, v, causal, scale, config = call
    golden, _ = pasa.golden_attention(q, k, v, is_causal=causal, scale=scale)
    out = pasa.attention(q, k, v, is_causal=causal, scale=scale, config=config)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    true = find_truth(Call(q, k, v, None, causal, scale))
    eps = 4 * (q.shape[-1] + 4) * 2.0**-24 * true.products.unsqueeze(-1) + 2.0**-7
    steps = v.shape[-2] // config.block_k + 2 if config.accumulate == "fp16" else 2
    rounding = steps * (2.0**-10 * torch.maximum(true.low.abs(), true.high.abs()) + SUBNORMAL)
    spread = true.high - true.low
    assert ((out.double() - golden).abs() <= torch.expm1(2 * eps).clamp(max=1.0) * spread + rounding).all()


EVERY = pytest.mark.parametrize("mode", MODES, ids=str)


def rescued(records):
    return int(records[0].rescued_tiles.sum())


@EVERY
def test_block_that_exceeds_its_reference_by_more_than_fp16_holds(mode):
    """A block that exceeds its reference by more than FP16 holds is kept in FP32, and its softmax is right.

    In this rare case block 2 is 10^6 above the running maximum, so FP16 would store +inf or 65504 for all of
    it.
    """
    q, k, v = normal_qkv((1, 1), (5, 256), 64)
    q[..., 0], k[..., 0] = 1000.0, 0.0
    k[..., 128:, 0] = 1000.0
    golden, _ = pasa.golden_attention(q, k, v)
    out = mode.out(q, k, v)
    if mode in REFERENCE_MODES:
        with pasa.record_diagnostics() as records:
            pasa.attention(q, k, v, config=mode.config)
        assert rescued(records) >= 1
        assert records[0].saturated.sum() == 0
        assert records[0].nonfinite.sum() == 0
    assert_mean_of_values(out, (q, k, v, False), mode.config, mode in KERNEL_MODES)
    fp32 = pasa.attention(q, k, v, config=PasaConfig(precision="fp32"))
    assert rmse(out, golden) <= max(1.1 * rmse(fp32, golden), 2.0**-9)


@EVERY
def test_reference_beyond_two_fp16_numbers(mode):
    """A reference beyond two FP16 numbers is clamped at 131008, and weights far below it are still zero.

    Block 2 lies 4 10^9 below block 1.
    """
    q, k, v = normal_qkv((1, 1), (3, 256), 64)
    q[..., 0], k[..., 0] = 65504.0, 30000.0
    k[..., 128:, 0] = -30000.0
    assert float(sum(scores.two_terms(torch.tensor(4e9)))) == 2 * 65504
    out = mode.out(q, k, v)
    first = mode.out(q, k[:, :, :128], v[:, :, :128])
    assert torch.equal(out, first)


@EVERY
def test_tiny_scale_gives_weight_to_scores_below_minus_65504(mode):
    """Scores below -65504 have weight at a tiny scale: with scale 2^-20 a score of -10^5 still weighs 0.9.

    So saturating such a score would be wrong, not harmless.
    """
    q, k, v = normal_qkv((1, 1), (4, 100), 64)
    q[..., 0], k[..., 0] = 400.0, -400 * torch.arange(100) / 99
    k[..., 1] *= 2.0**-14  # keys that the unit would round, so the tile stays in raw units
    golden, _ = pasa.golden_attention(q, k, v, scale=2.0**-20)
    out = mode.out(q, k, v, scale=2.0**-20)
    assert max_error(out, golden) <= 2.0**-9


@EVERY
def test_largest_values(mode):
    """The largest values are averaged: P V of a block of 65504s exceeds FP16 128 times, but their mean fits."""
    q, k, _ = normal_qkv((1, 1), (7, 300), 64)
    v = torch.full_like(k, 65504.0)
    v[..., 1::2] = -65504.0
    out = mode.out(q, k, v)
    assert torch.equal(out, v[:, :, :7])


def test_more_keys_than_fp16_can_count():
    """More keys than FP16 can count are averaged: 70,000 with equal scores.

    A row sum in FP16 would stop at 65504 or become infinite.
    """
    q = torch.zeros(1, 1, 1, 16, dtype=torch.float16)
    k, v = torch.ones(1, 1, 70_000, 16).half(), torch.ones(1, 1, 70_000, 16).half()
    for mode in MODES:
        out, lse = mode.attend(q, k, v)
        assert torch.equal(out, torch.ones_like(out))
        assert lse.item() == pytest.approx(torch.tensor(70_000.0).log().item(), abs=1e-4)
