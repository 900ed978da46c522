"""Inputs that were built or searched for to break the guarantee, given by their parameters; no data files."""

from random import Random

import pytest
import torch

import pasa
from pasa.eval.random_calls.cases import broken
from pasa.eval.random_calls.inputs import Call
from pasa.eval.random_calls.judge import Arithmetic, judge
from pasa.eval.random_calls.truth import find_truth
from tests.adversarial_search import Genes, badness, make, mutate, search
from tests.adversaries import specks, spikes, stalled, sunken
from tests.unlike_keys import found, two_keys

CONFIGS = [
    pasa.PasaConfig(block_k=block_k, softmax=softmax, accumulate=accumulate)
    for block_k, softmax, accumulate in ((1, "safe", "fp32"), (1, "unbiased", "fp32"), (1, "safe", "fp16"))
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.softmax}-{c.accumulate}")
def test_thousands_of_roundings_do_not_carry_a_mean_past_the_largest_number(config):
    """Thousands of roundings do not carry a mean past the largest FP16 number.

    Story: every value is 65504, and after the first key each block adds 2^-24.5 to a row sum of 1. FP32 keeps
    the sum at 1, while the output gains its last bit. After 4,096 blocks O / l was 65520, which FP16 rounds to
    infinity.
    """
    q, k, v = stalled(4200, config.block_k)
    both = torch.cat([v, -v], 1)
    q, k = (x.expand(-1, 2, -1, -1) for x in (q, k))
    out = pasa.attention(q, k, both, scale=1.0, config=config, backend="reference")
    assert torch.equal(out, both[:, :, :1])


@pytest.mark.parametrize("overflow", ["inf", "saturate"])
@pytest.mark.parametrize("scale", [5e-5, 7e-5, 1e-4])
def test_saturated_scores_at_a_tiny_scale(overflow, scale):
    """Scores that saturate at a tiny scale keep their weights.

    Story: a score of 2,000,000, stored as 65504, was 6.6 nats at a scale of 1e-4. That is not 8 above its
    reference, so its tile was kept in FP16, and two keys of very different weights got the same. With
    infinities the error was visible.
    """
    check(*spikes(100), scale, overflow)


@pytest.mark.parametrize("overflow", ["inf", "saturate"])
@pytest.mark.parametrize("scale", [2.0**30, 2.0**50, 2.0**80])
def test_products_below_fp16_at_a_large_scale(overflow, scale):
    """Products below FP16's range keep their weight at a large scale.

    Story: 2^-40 is zero in FP16, but 2^40 nats after a scale of 2^80, so all keys weighed the same.
    """
    check(*specks(100), scale, overflow)


@pytest.mark.parametrize("overflow", ["inf", "saturate"])
@pytest.mark.parametrize("scale", [2.0**-60, 0.125, 1.0, 2.0**20])
@pytest.mark.parametrize("blocks", [2, 4])
def test_scores_far_below_those_of_their_anchors(overflow, scale, blocks):
    """Scores far below those of their anchors keep their weight. The first two blocks refer to a guess, others do not.

    Story: the running maximum was 2,000,000 units below what the second block's anchor adds, further than a
    reference reaches. Clamped, the reference stood above all scores of the block. They became -inf and had no
    weight, though they equal those of the first block; stored as -65504 they took the weight of the first.
    """
    config = pasa.PasaConfig(overflow=overflow, block_k=99)
    q, k, v = sunken(99, blocks=blocks)
    out, lse = pasa.attention(q, k, v, scale=scale, config=config, return_lse=True, backend="reference")
    _, true = pasa.golden_attention(q, k, v, scale=scale)
    assert (out == 1 / blocks).all()
    assert ((lse - true).abs() <= 2.0**-21 * true.abs()).all()  # a few roundings of what the anchor adds


@pytest.mark.parametrize("overflow", ["inf", "saturate"])
def test_keys_far_below_the_hidden_ones_of_their_block(overflow):
    """Keys far below hidden ones of their block keep their weight, even if no key is extreme.

    A document ends within a block, and the keys behind it move the block's mean.
    """
    q, k = torch.zeros(1, 1, 32, 16).half(), torch.zeros(1, 1, 64, 16).half()
    q[..., 0], k[..., 0], k[:, :, 48:, 0] = 1000.0, -1000.0, 3000.0
    v = (torch.arange(64) < 32).half().view(1, 1, 64, 1).expand_as(k)
    document = torch.arange(64) < 48
    keep = torch.where(torch.arange(32) < 16, 1, 0).bool()[:, None] == document
    config = pasa.PasaConfig(overflow=overflow, block_k=32, block_q=16)
    out = pasa.attention(q, k, v, attn_mask=keep, scale=1.0, config=config, backend="reference")
    golden, _ = pasa.golden_attention(q, k, v, attn_mask=keep, scale=1.0)
    assert ((out - golden).abs() <= 2.0**-11 * golden).all()


@pytest.mark.parametrize("overflow", ["inf", "saturate"])
@pytest.mark.parametrize("accumulate", ["fp32", "fp16"])
def test_rows_whose_first_block_is_hidden(overflow, accumulate):
    """Rows whose first block is hidden are as accurate as others.

    Story: the maximum of no key, minus infinity, saturated to FP32's lowest number. A row's first tile then
    referred to -131008, where FP32 numbers are 2^-7 units apart: 0.1 nats at this scale.
    """
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randint(-3, 4, (1, 1, n, 16), generator=g).half() for n in (4, 64, 64))
    keep = torch.arange(64) >= torch.tensor([0, 32, 40, 64])[:, None]
    config = pasa.PasaConfig(overflow=overflow, accumulate=accumulate, block_k=32)
    how = {"attn_mask": keep, "scale": 16.3}
    out, lse = pasa.attention(q, k, v, config=config, return_lse=True, backend="reference", **how)
    golden, true = pasa.golden_attention(q[:, :, :3], k, v, attn_mask=keep[:3], scale=16.3)
    assert (
        (lse[:, :, :3] - true).abs() <= 2.0**-22 * true.abs() + 1e-5
    ).all()  # the error of a few roundings; products are exact
    assert ((out[:, :, :3] - golden).abs() <= 4 * 2.0**-11 * 3).all()
    assert lse[0, 0, 3] == -torch.inf
    assert (out[0, 0, 3] == 0).all()


@pytest.mark.parametrize("overflow", ["inf", "saturate"])
@pytest.mark.parametrize(("sign", "before"), [(1, False), (-1, False), (-1, True)])
def test_far_references_leave_scores_near_zero_their_digits(sign, before, overflow):
    """A far reference leaves scores near zero their digits.

    Story: a reference 131008 units off, made of keys that a row does not see or gives no weight, entered the
    FP32 sum of its scores. The scores are near 0 and were rounded by 2^-8. A reference clamped at 2048 nats
    rounds them by 2^-13.
    """
    case = two_keys(sign, before)
    config = pasa.PasaConfig(overflow=overflow, block_k=32)
    out = pasa.attention(*case[:3], **case.how, config=config, backend="reference")
    true, _ = found(case)
    error = (out.double() - true.out)[:, :, :-1].abs()
    # The rounding of both weights and of the output.
    assert (error <= 2.0**-11 + 2.0**-11 * true.out[:, :, :-1].abs()).all()


def check(q, k, v, scale, overflow):
    """Check that every output lies among the values whose scores may be the largest, and check the log-sum-exp."""
    config = pasa.PasaConfig(overflow=overflow, block_k=128)
    out, lse = pasa.attention(q, k, v, scale=scale, config=config, return_lse=True, backend="reference")
    true = find_truth(Call(q, k, v, None, False, scale))
    found = judge(true, out, lse, Arithmetic(q.dtype))
    assert not broken(found), found


FOUND = [
    ("reference", pasa.PasaConfig(), Genes(keys=2, noise=0.0, ties=0.67, columns=0.98, values="subnormal")),
    (
        "reference",
        pasa.PasaConfig(overflow="saturate", accumulate="fp16"),
        Genes(keys=31, dim=32, base=6.81, noise=2e-7, columns=0.3, exponent=76.9, profile="alternate", values="signs",
              seed=350760),
    ),
    (
        "reference",
        pasa.PasaConfig(softmax="unbiased", overflow="saturate"),
        Genes(dim=64, noise=1.1e-4, outliers=0.0426, ties=0.339, columns=0.614, profile="wave", values="signs",
              seed=375077),
    ),
    (
        "reference",
        pasa.PasaConfig(softmax="unbiased", overflow="saturate", accumulate="fp16"),
        Genes(keys=129, noise=3e-4, outliers=0.083, columns=0.43, exponent=0.34, profile="sign", values="signs",
              seed=1034011),
    ),
    (
        "triton",
        pasa.PasaConfig(),
        Genes(keys=2, base=1.935, size=30395.5, columns=0.518, values="normal"),
    ),
]  # fmt: skip


# NumPy, which interprets the kernels, warns of intended infinities.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("backend", "config", "genes"), FOUND, ids=str)
def test_the_worst_that_the_search_has_found(backend, config, genes):
    assert badness(genes, backend, config) <= 1


@pytest.mark.parametrize("overflow", ["inf", "saturate"])
def test_a_short_search_finds_nothing_worse(overflow):
    worst, genes = search("reference", pasa.PasaConfig(overflow=overflow), 60, seed=2)
    assert worst <= 1, genes


def test_the_search_finds_what_overflows():
    """The search quickly finds an overflow in scores that FP16 stores before they are scaled (paper, figure 2)."""
    worst, _ = search("reference", pasa.PasaConfig(precision="partial"), 60, seed=0)
    assert worst >= 1e6


def test_mutants_are_finite():
    rng, genes = Random(0), Genes()
    for _ in range(200):
        genes = mutate(genes, rng)
        assert all(bool(torch.isfinite(x).all()) for x in make(genes))
