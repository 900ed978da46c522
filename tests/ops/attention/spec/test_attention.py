"""The reference operator agrees with FP64 in every precision, shape class, mask and layout.

Bounds: inputs and output are FP16 and P is rounded to FP16, so even `fp32` errs by about 2^-11 max|V|. The others
are held to `error <= c * error of the same-precision naive` (Q K^T stored in FP16), c = 2, as in FlashAttention's
tests.
"""

import pytest
import torch

import pasa
from pasa import PasaConfig
from tests.inputs import ODD_LENGTHS, fp16_naive_error, max_error, normal_qkv, rmse

CONFIGS = {
    "exact": PasaConfig(),
    "exact-fp16": PasaConfig(accumulate="fp16"),
    "paper": PasaConfig(recovery="paper"),
    "paper-fp16": PasaConfig(recovery="paper", accumulate="fp16"),
    "fp32": PasaConfig(precision="fp32"),
    "partial": PasaConfig(precision="partial"),
    "fp16": PasaConfig(precision="fp16"),
    "prescaled": PasaConfig(precision="prescaled"),
    "smooth_k": PasaConfig(precision="smooth_k"),
}
HALF_ULP = 2.0**-11  # of an output near 1; every arithmetic may lose this much, whatever the naive one does
# Storing O and l in FP16 rounds once per block and at every step of the row sum. `paper` multiplies the rounding
# of the block mean (K' and, in FP16, the mean itself) by the invariance 64. The naive error includes neither.
FACTOR = dict.fromkeys(CONFIGS, 2.0) | {"fp16": 8.0, "exact-fp16": 8.0, "paper": 8.0, "paper-fp16": 32.0}
# Scores here stay below 8, where one rounding to FP16 costs at most 2^-8 / 2; the mean of `paper` counts 64 times.
LSE_BOUND = dict.fromkeys(CONFIGS, 2.0**-8) | {"fp32": 1e-5, "fp16": 6 * 2.0**-8}
LSE_BOUND |= {"paper": 8 * 2.0**-8, "paper-fp16": 24 * 2.0**-8}


def check(q, k, v, config_name, **how):
    golden, golden_lse = pasa.golden_attention(q, k, v, **how)
    out, lse = pasa.attention(q, k, v, config=CONFIGS[config_name], return_lse=True, **how)
    assert out.dtype == q.dtype
    assert out.shape == q.shape
    naive = fp16_naive_error(q, k, v, golden, **how)
    assert max_error(out, golden) <= FACTOR[config_name] * (naive + 2 * HALF_ULP)
    seen = golden_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, seen)
    assert (lse.double() - golden_lse)[seen].abs().max() <= LSE_BOUND[config_name]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("lengths", ODD_LENGTHS, ids=lambda n: f"{n[0]}x{n[1]}")
def test_odd_lengths_with_grouped_heads(name, lengths):
    check(*normal_qkv((4, 2), lengths, 64), name)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dim", [16, 72, 80, 96, 128, 160, 256, 512])
def test_head_dims(name, dim):
    check(*normal_qkv((2, 2), (65, 140), dim), name)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("lengths", ODD_LENGTHS, ids=lambda n: f"{n[0]}x{n[1]}")
def test_causal_is_bottom_right(name, lengths):
    """The causal band is aligned to the bottom right; with Sq > Skv the first rows see nothing and give 0 and -inf."""
    q, k, v = normal_qkv((2, 1), lengths, 64)
    check(q, k, v, name, is_causal=True)
    out, lse = pasa.attention(q, k, v, is_causal=True, config=CONFIGS[name], return_lse=True)
    fully_masked = max(0, lengths[0] - lengths[1])
    assert torch.equal(out[:, :, :fully_masked], torch.zeros_like(out[:, :, :fully_masked]))
    assert torch.all(lse[:, :, :fully_masked] == -torch.inf)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("shape", [(2, 4, 40, 150), (1, 1, 40, 150), (2, 1, 1, 150), (40, 1), (150,), (4, 1, 150)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_broadcast(name, shape, kind):
    q, k, v = normal_qkv((4, 2), (40, 150), 32, batch=2)
    g = torch.Generator().manual_seed(3)
    keep = torch.rand(shape, generator=g) < 0.6
    mask = keep if kind == "bool" else torch.where(keep, torch.randn(shape, generator=g), -torch.inf)
    check(q, k, v, name, attn_mask=mask)


@pytest.mark.parametrize("name", CONFIGS)
def test_fully_masked_rows_are_zero(name):
    q, k, v = normal_qkv((2, 2), (9, 140), 64)
    mask = torch.ones(9, 140, dtype=torch.bool)
    mask[[0, 5]] = False
    out, lse = pasa.attention(q, k, v, attn_mask=mask, config=CONFIGS[name], return_lse=True)
    assert torch.all(out[:, :, [0, 5]] == 0)
    assert torch.all(lse[:, :, [0, 5]] == -torch.inf)
    assert torch.isfinite(out).all()
    check(q, k, v, name, attn_mask=mask)


@pytest.mark.parametrize("name", CONFIGS)
def test_batch_entry_without_any_key(name):
    q, k, v = normal_qkv((2, 2), (9, 40), 64, batch=2)
    mask = torch.ones(2, 1, 1, 40, dtype=torch.bool)
    mask[1] = False
    out, lse = pasa.attention(q, k, v, attn_mask=mask, config=CONFIGS[name], return_lse=True)
    assert torch.all(out[1] == 0)
    assert torch.all(lse[1] == -torch.inf)
    alone = pasa.attention(q[:1], k[:1], v[:1], config=CONFIGS[name])
    assert torch.equal(out[:1], alone)


def test_causal_and_mask_combine():
    q, k, v = normal_qkv((4, 2), (70, 150), 64, batch=2)
    mask = torch.ones(2, 1, 1, 150, dtype=torch.bool)
    mask[1, ..., :90] = False  # left padding: its first rows see only padding
    band = torch.ones(70, 150, dtype=torch.bool).tril(80)
    both = pasa.attention(q, k, v, attn_mask=mask, is_causal=True)
    assert torch.equal(both, pasa.attention(q, k, v, attn_mask=mask & band))
    golden, _ = pasa.golden_attention(q, k, v, attn_mask=mask, is_causal=True)
    assert max_error(both, golden) <= 2 * fp16_naive_error(q, k, v, golden, attn_mask=mask, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_input_dtypes(dtype):
    q, k, v = (x.to(dtype) for x in normal_qkv((2, 1), (33, 130), 64))
    out = pasa.attention(q, k, v)
    assert out.dtype == dtype
    half = pasa.attention(q.half(), k.half(), v.half())
    assert torch.equal(out, half.to(dtype))  # BF16 and FP32 are converted to FP16 first


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_value_beyond_fp16_is_reported(name):
    """A value beyond FP16 is reported. BF16 reaches 3e38, and silent conversion would make 70000 inf, or 65504."""
    tensors = {n: torch.ones(1, 1, 4, 16, dtype=torch.bfloat16) for n in "qkv"}
    tensors[name][0, 0, 2, 3] = 70000.0
    with pytest.raises(ValueError, match=rf"^{name} has 1 values beyond the FP16 range \(largest 70144 > 65504\)"):
        pasa.attention(**tensors)


def test_layouts_agree():
    q, k, v = normal_qkv((4, 2), (33, 70), 64)
    heads_first = pasa.attention(q, k, v, is_causal=True)
    for layout in ("NHD", "BSND"):
        out, lse = pasa.attention(
            *(x.transpose(1, 2).contiguous() for x in (q, k, v)), is_causal=True, tensor_layout=layout, return_lse=True
        )
        assert torch.equal(out.transpose(1, 2), heads_first)
        assert lse.shape == (1, 4, 33)
    assert torch.equal(pasa.attention(q, k, v, is_causal=True, tensor_layout="BNSD"), heads_first)


def test_non_contiguous_inputs():
    q, k, v = normal_qkv((4, 2), (33, 70), 64)
    strided = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    assert torch.equal(pasa.attention(*strided), pasa.attention(q, k, v))


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 0.05, 1.0, 37.0])
def test_any_scale(scale):
    q, k, v = normal_qkv((2, 2), (40, 300), 64)
    golden, _ = pasa.golden_attention(q, k, v, scale=scale)
    fp32 = pasa.attention(q, k, v, scale=scale, config=PasaConfig(precision="fp32"))
    out = pasa.attention(q, k, v, scale=scale)
    assert rmse(out, golden) <= 2 * rmse(fp32, golden)


def test_varlen_equals_sequences_one_by_one():
    lengths_q, lengths_k = [5, 0, 129, 3, 1], [5, 7, 64, 0, 300]
    q, k, v = normal_qkv((4, 2), (sum(lengths_q), sum(lengths_k)), 64)
    packed = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    cu_q, cu_k = (torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0) for lengths in (lengths_q, lengths_k))
    out, lse = pasa.attention_varlen(*packed, cu_q, cu_k, 129, 300, is_causal=True, return_lse=True)
    for i in (0, 2, 4):
        one = [x[:, :, cu[i] : cu[i + 1]] for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k))]
        alone, alone_lse = pasa.attention(*one, is_causal=True, return_lse=True)
        assert torch.equal(out[cu_q[i] : cu_q[i + 1]].transpose(0, 1), alone[0])
        assert torch.equal(lse[cu_q[i] : cu_q[i + 1]].T, alone_lse[0])
    assert torch.all(out[cu_q[3] : cu_q[4]] == 0)
    assert torch.all(lse[cu_q[3] : cu_q[4]] == -torch.inf)


def test_saturation_is_silent_damage_where_inf_is_nan():
    """The same overflow gives NaN in one mode, a finite wrong answer in the other, and a right one with pasa."""
    q, k, v = (x + 40 for x in normal_qkv((1, 1), (64, 256), 128))
    golden, _ = pasa.golden_attention(q, k, v)
    wrong = {}
    for mode in ("inf", "saturate"):
        wrong[mode] = pasa.attention(q, k, v, config=PasaConfig(precision="partial", overflow=mode))
        ours = pasa.attention(q, k, v, config=PasaConfig(overflow=mode))
        fp32 = pasa.attention(q, k, v, config=PasaConfig(precision="fp32"))
        assert rmse(ours, golden) <= 1.1 * rmse(fp32, golden)
    assert torch.isnan(wrong["inf"]).all()
    assert torch.isfinite(wrong["saturate"]).all()
    assert rmse(wrong["saturate"], golden) > 10 * rmse(fp32, golden)


def test_negative_overflow_of_the_naive_arithmetic_is_nan_not_zero():
    """Negative overflow of FP16 attention is NaN, not 0: rows whose every score is -inf do see keys.

    Masked rows see none, and give 0.
    """
    q, k, v = normal_qkv((1, 1), (8, 64), 128)
    out = pasa.attention(q + 40, k - 40, v, config=PasaConfig(precision="partial"))
    assert torch.isnan(out).all()


def test_beta_zero_is_plain_flash_attention():
    """Beta 0 is plain flash attention: at D = 64 the scale is a power of two, so K / alpha = Q / alpha is exact."""
    q, k, v = normal_qkv((2, 2), (70, 300), 64)
    plain = pasa.attention(q, k, v, config=PasaConfig(precision="prescaled"))
    assert torch.equal(pasa.attention(q, k, v, config=PasaConfig(recovery="paper", beta=0.0)), plain)


def test_global_mean_moves_with_the_blocks():
    """The correction of the running maximum uses the mean of the earlier blocks.

    It once read the mean after it had been overwritten, so it was always 0. The paper's recovery then weighed
    blocks against each other 10 times worse than its own rounding explains.
    """
    q, k, v = (x + 10 for x in normal_qkv((2, 2), (64, 1280), 128))
    golden, _ = pasa.golden_attention(q, k, v)
    out = pasa.attention(q, k, v, config=PasaConfig(recovery="paper"))
    partial = pasa.attention(q, k, v, config=PasaConfig(precision="partial"))
    assert rmse(out, golden) < 0.5 * rmse(partial, golden)


@pytest.mark.parametrize("lengths", [(1, 300), (3, 129), (64, 1), (5, 127)])
def test_paper_ragged_block_has_its_own_matrix(lengths):
    """A ragged last block of n keys recovers its mean, which a beta and invariance of other sizes would misplace."""
    q, k, v = normal_qkv((2, 2), lengths, 128)
    q, k = q + 4, k + 4
    golden, _ = pasa.golden_attention(q, k, v)
    out = pasa.attention(q, k, v, config=PasaConfig(recovery="paper"))
    assert max_error(out, golden) <= 2 * fp16_naive_error(q, k, v, golden) + HALF_ULP
