"""A bias that all keys share: FP16 attention overflows, FP32 attention loses digits, and pasa keeps them."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import pasa
from pasa import PasaConfig
from tests.inputs import KERNEL_MODES, biased_qkv, rmse

FLOOR = 2.0**-12  # of the output's norm; below it, only the rounding of O to FP16 is compared


@pytest.mark.parametrize("mode", KERNEL_MODES, ids=str)
@pytest.mark.parametrize("bias", [32, 80, 200, 500, 2000])
def test_kernels_are_at_most_a_tenth_worse_than_fp32_flash(mode, bias):
    """Kernels are at most a tenth worse than FP32 flash attention.

    accumulate="fp16" gets a wider bound, because it stores FP16 scores; the accuracy table lists it separately.
    """
    q, k, v = biased_qkv(bias, 0)
    q = q[:, :, :257]  # the interpreter runs tiles of rows one after another
    golden, _ = pasa.golden_attention(q, k, v)
    fp32 = pasa.attention(q, k, v, config=PasaConfig(precision="fp32"), backend="reference")
    bound = 1.1 * max(rmse(fp32, golden), FLOOR) if mode.config.accumulate == "fp32" else 4 * FLOOR
    assert rmse(mode.out(q, k, v), golden) <= bound


@pytest.mark.parametrize("bias", [32, 80, 200, 500, 2000])
@pytest.mark.parametrize("seed", range(5))
def test_at_most_a_tenth_worse_than_fp32_flash(bias, seed):
    q, k, v = biased_qkv(bias, seed)
    golden, _ = pasa.golden_attention(q, k, v)
    with pasa.record_diagnostics() as records:
        out = pasa.attention(q, k, v)
    assert records[0].nonfinite.sum() == records[0].saturated.sum() == 0
    assert torch.isfinite(out).all()
    fp32 = pasa.attention(q, k, v, config=PasaConfig(precision="fp32"))
    assert rmse(out, golden) <= 1.1 * max(rmse(fp32, golden), FLOOR)


def test_more_accurate_than_fp32_attention():
    """pasa is more accurate than FP32 attention under a large bias.

    At b = 200 q.k is near 6.5 10^5, where FP32 spacing is 1/16, but the shifted scores never contain that
    number. Output rows are one-hot for most seeds (both errors then are zero), so the errors of all seeds are
    pooled.
    """
    ours = theirs = 0.0
    for seed in range(12):
        q, k, v = biased_qkv(200, seed)
        golden, _ = pasa.golden_attention(q, k, v)
        ours += rmse(pasa.attention(q, k, v), golden) ** 2
        theirs += rmse(scaled_dot_product_attention(q.float(), k.float(), v.float()), golden) ** 2
    assert ours < 0.5 * theirs
