"""`recovery="paper"` is the published algorithm: the order of its roundings, and how its authors fill a ragged block.

The paper prints equations; its authors' script decides the rest. `published` follows both, rounds every operation
of the vector unit, and shares no code with the reference.
"""

import pytest
import torch

import pasa
from pasa import PasaConfig
from tests.inputs import DEVICE, rmse

BLOCK, BETA = 128, 0.9375  # BETA is the script's: the rounded M has exactly this beta
LENGTHS = [1280, 1407, 1345, 1281, 300, 128, 127, 5, 1]


def published(q, k, v, rows=torch.float16):
    """Run Algorithm 1 with row vectors and outputs in the dtype `rows`."""
    real, missing = k.shape[2], -k.shape[2] % BLOCK
    if real < BLOCK:  # fill with zeros
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, missing)) for x in (k, v))
    else:  # repeat the last keys
        k, v = (torch.cat([x, x[:, :, real - missing :]], 2) for x in (k, v))
    matrix = ((torch.eye(BLOCK) - BETA / BLOCK) * q.shape[-1] ** -0.5).half().float()
    factor = torch.tensor(BETA / (1 - BETA)).to(rows)
    for j, start in enumerate(range(0, k.shape[2], BLOCK)):
        keys, values = (x[:, :, start : start + BLOCK].float() for x in (k, v))
        s = (q.float() @ (matrix @ keys).half().float().mT).half().to(rows)
        mean = s.float().mean(-1, keepdim=True).to(rows)
        s[..., real - start :] = -torch.inf
        top = s.amax(-1, keepdim=True)
        weights = (s - top).float().exp().to(rows)
        total, product = weights.sum(-1, keepdim=True), (weights.half().float() @ values).to(rows)
        if j == 0:
            frame, largest, row_sum, out = mean, top, total, product
            continue
        one, others = (torch.tensor(x, dtype=torch.float64).to(rows) for x in (1 / (j + 1), j / (j + 1)))
        moved = mean * one + frame * others
        before, shift = (frame - moved) * factor, (mean - moved) * factor
        new = torch.maximum(largest + before, top + shift)
        keep, gain = ((x - new + by).float().exp().to(rows) for x, by in ((largest, before), (top, shift)))
        row_sum, out = keep * row_sum + gain * total, keep * out + gain * product
        frame, largest = moved, new
    return (out / row_sum).half()


def biased(mean, length, rows=64, amplitude=0.5, dim=128):
    g = torch.Generator().manual_seed(length)
    q, k, v = ((2 * torch.rand(1, 2, n, dim, generator=g) - 1) * amplitude + mean for n in (rows, length, length))
    return q.half(), k.half(), v.half()


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(("mean", "keys"), [(100, 6144), (200, 384)])
def test_the_mean_of_the_means_is_within_reach_of_fp16(mean, keys, backend):
    """The mean of the block means stays within FP16.

    Story: F_j was formed as (j F + s) / (j + 1), infinite once |F| > 65504 / j. The authors form s / (j + 1) + F
    j / (j + 1), which lies between F and s. So our table of their algorithm's overflow was a table of our order
    of operations.
    """
    q, k, v = biased(mean, keys, rows=16)
    config = PasaConfig(recovery="paper", accumulate="fp16", beta=BETA)
    out = pasa.attention(*(x.to(DEVICE) for x in (q, k, v)), config=config, backend=backend).cpu()
    assert torch.isfinite(out).all()
    golden, _ = pasa.golden_attention(q, k, v)
    assert rmse(out, golden) <= 1.25 * rmse(published(q, k, v), golden)


def test_a_block_far_longer_than_the_keys_costs_no_more_than_they_do():
    """A block far longer than the keys costs no more than the keys: its matrix would take 16 GiB, its beta minutes.

    The block has 65,536 keys.
    """
    q, k, v = biased(20, 300)
    golden, _ = pasa.golden_attention(q, k, v)
    long, whole = (
        pasa.attention(q, k, v, config=PasaConfig(recovery="paper", block_k=n), backend="reference")
        for n in (65536, 384)
    )
    assert torch.equal(long, whole)
    assert rmse(long, golden) < 2.0**-8


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("low", [True, False], ids=["fp16", "fp32"])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_ragged_block_errs_as_the_published_one(length, low, backend):
    """A ragged block errs as the published one does.

    Story: a last block of 127 keys had an M of its own, whose beta was not the given one. At 1280 + 127 keys the
    error was 2 to 4 times that of the authors, who fill the block with the last keys, hide those, and use the one
    M.
    """
    q, k, v = biased(20, length, amplitude=10)
    golden, _ = pasa.golden_attention(q, k, v)
    config = PasaConfig(recovery="paper", accumulate="fp16" if low else "fp32", beta=BETA)
    out = pasa.attention(*(x.to(DEVICE) for x in (q, k, v)), config=config, backend=backend).cpu()
    theirs = rmse(published(q, k, v, torch.float16 if low else torch.float32), golden)
    assert rmse(out, golden) <= 1.25 * theirs + 2.0**-12
    assert rmse(out, golden) >= 0.75 * theirs - 2.0**-12


@pytest.mark.parametrize("accumulate", ["fp16", "fp32"])
def test_an_infinite_mean_of_the_first_block_reaches_the_rows_that_see_it_alone(accumulate):
    """An infinite mean of the first block reaches only rows that see the key that causes it.

    Story: the first block has no correction, but the Triton kernel formed one and multiplied it by 0. If the mean
    of S' was infinite, rows that do not see that key became NaN.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 128, 64, generator=generator).half() for _ in range(3))
    q[..., 0], k[..., 100, 0] = 40, 60000
    config = PasaConfig(recovery="paper", accumulate=accumulate)
    for backend in ("reference", "triton"):
        out = pasa.attention(q, k, v, is_causal=True, config=config, backend=backend)
        assert torch.isfinite(out[:, :, :100]).all(), backend


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("sign", [1, -1])
def test_an_infinite_mean_leaves_the_output_and_takes_the_log_sum_exp(sign, backend):
    """An infinite mean leaves the output right, but makes the log-sum-exp infinite, as documented.

    Story: 127 keys of value 90 have scores of 90,990, and their S' fits. The 128th key of the block is a zero
    that fills it; M makes it -89,000, which FP16 stores as -inf. It is hidden, so the output is right. But the
    mean of S' is infinite, and the log-sum-exp contains I times it: -inf, which means that no key is seen, or
    +inf. `PasaConfig` and ops/attention/README.md document this.
    """
    q, k = torch.full((1, 1, 2, 64), sign * 126.4).half(), torch.full((1, 1, 127, 64), 90.0).half()
    v = torch.randn(1, 1, 127, 64, generator=torch.Generator().manual_seed(0)).half()
    config = PasaConfig(recovery="paper")
    arrays = (x.to(DEVICE) for x in (q, k, v))
    out, lse = (x.cpu() for x in pasa.attention(*arrays, config=config, backend=backend, return_lse=True))
    golden, _ = pasa.golden_attention(q, k, v)
    assert rmse(out, golden) < 2.0**-10
    assert torch.equal(lse, torch.full_like(lse, -sign * torch.inf))
    _, exact = pasa.attention(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), backend=backend, return_lse=True)
    torch.testing.assert_close(exact.cpu(), torch.full_like(lse, sign * 90990.0 + 4.8442), rtol=1e-6, atol=0)
