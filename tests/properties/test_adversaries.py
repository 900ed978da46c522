"""Inputs that were built or searched for to break the guarantee, by their parameters; no data files."""

import pytest
import torch

import pasa
from pasa.eval.fuzz import truth
from pasa.eval.fuzz.adversaries import specks, spikes, stalled
from pasa.eval.fuzz.cases import COUNTS

CONFIGS = [
    pasa.PasaConfig(block_k=block_k, softmax=softmax, accumulate=accumulate)
    for block_k, softmax, accumulate in ((1, "safe", "fp32"), (1, "unbiased", "fp32"), (1, "safe", "fp16"))
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.softmax}-{c.accumulate}")
def test_thousands_of_roundings_do_not_carry_a_mean_past_the_largest_number(config):
    """Story: every value is 65504, and after the first key each block adds 2^-24.5 to a row sum of 1, where FP32 stays
    at 1, while the output gains its last bit. After 4,096 blocks O / l was 65520, which FP16 rounds to infinity."""
    q, k, v = stalled(4200, config.block_k)
    out = pasa.attention(q, k, v, scale=1.0, config=config, backend="reference")
    assert torch.equal(out, v[:, :, :1])
    negative = pasa.attention(q, k, -v, scale=1.0, config=config, backend="reference")
    assert torch.equal(negative, -v[:, :, :1])


@pytest.mark.parametrize("overflow", ["inf", "saturate"])
@pytest.mark.parametrize("scale", [5e-5, 7e-5, 1e-4])
def test_saturated_scores_at_a_tiny_scale(overflow, scale):
    """Story: stored as 65504, a score of 2,000,000 was 6.6 nats at a scale of 1e-4: not 8 above its reference, so its
    tile was kept in FP16 and two keys of very different weights had the same. Infinity gave itself away."""
    check(*spikes(100), scale, overflow)


@pytest.mark.parametrize("overflow", ["inf", "saturate"])
@pytest.mark.parametrize("scale", [2.0**30, 2.0**50, 2.0**80])
def test_products_below_fp16_at_a_large_scale(overflow, scale):
    """Story: 2^-40 is zero in FP16, and 2^40 nats after a scale of 2^80: all keys weighed the same."""
    check(*specks(100), scale, overflow)


def check(q, k, v, scale, overflow):
    """Every output among the values whose scores may be the largest, and the log-sum-exp."""
    config = pasa.PasaConfig(overflow=overflow, block_k=128)
    out, lse = pasa.attention(q, k, v, scale=scale, config=config, return_lse=True, backend="reference")
    true, _ = truth.find_truth(q, k, v, None, False, scale)
    found = truth.judge(true, out, lse, truth.Arithmetic(True, 1, q.dtype, False))
    assert not [name for name, value in found.items() if value > (0 if name in COUNTS else 1)], found
