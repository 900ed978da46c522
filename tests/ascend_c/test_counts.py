"""Diagnostics of the exact recovery on the CPU twin, against the reference's and FP64.

The kernels decide for 64 rows, so the reference gets tiles of 64 rows. Its scores are FP32 sums in another order. So a
largest score may differ by 2 (D + 2) 2^-24 of |q| |k|, and by half an FP16 ulp where FP16 stored it.
"""

import pytest
import torch

import pasa
from pasa.ops.attention.spec.diagnostics import FIELDS
from tests.ascend_c.kernel_runs import BLOCK, launch_attention, shifted_by_reference
from tests.ascend_c.test_added_masks import drawn
from tests.ascend_c.test_attention import make_call
from tests.inputs import normal_qkv

NUMBER = {name: index for index, name in enumerate(FIELDS)}


def record_of(call, backend, **options):
    with pasa.record_diagnostics() as records:
        call(backend=backend, config=pasa.PasaConfig(block_q=64, **options))
    return records[0]


def wide_blocks(rows, keys, bias):
    """Return inputs whose blocks of keys have other biases, and some queries 100 times as long."""
    q, k, v = normal_qkv((2, 1), (rows, keys), 64)
    for number, block in enumerate(k.split(128, 2)):
        block.add_(bias * (number % 3 - 1))
    q[:, :, ::7] *= 100
    return q, k, v


CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window": (150, 0)},
    "mask": {"attn_mask": torch.rand(200, 400, generator=torch.Generator().manual_seed(2)) < 0.6},
    "float mask": {"attn_mask": drawn(200, 400, size=3.0)},
    "float mask of all rows": {"attn_mask": drawn(1, 400, size=3.0, kept=1.0)},
    "sinks": {"sinks": torch.tensor([1.0, 30.0])},
}


@pytest.mark.parametrize("overflow", ["inf", "saturate"])
@pytest.mark.parametrize("bias", [0.0, 40.0])
@pytest.mark.parametrize("name", CALLS)
def test_counts_agree_with_the_reference(npu, name, bias, overflow):
    q, k, v = wide_blocks(200, 400, bias)

    def call(**how):
        pasa.attention(q, k, v, **CALLS[name], **how)

    found, expected = (record_of(call, backend, overflow=overflow) for backend in ("npu", "reference"))
    sums = (66 * 2.0**-23) * float(q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max())
    torch.testing.assert_close(found.max_score_before, expected.max_score_before, atol=sums, rtol=2.0**-22)
    torch.testing.assert_close(found.max_score_after, expected.max_score_after, atol=sums, rtol=2.0**-11)
    assert torch.equal(found.tiles, expected.tiles)
    assert torch.equal(found.rescued_tiles, expected.rescued_tiles)
    assert torch.equal(found.flushed_tiles, expected.flushed_tiles)
    for field in ("nonfinite", "saturated"):
        difference = (getattr(found, field) - getattr(expected, field)).abs()
        assert (difference <= 0.01 * getattr(expected, field) + 1).all(), field


@pytest.mark.parametrize("hidden", [False, -torch.inf])
def test_keys_that_no_row_sees_do_not_count(npu, hidden):
    """The longest keys are hidden, by a row of a mask that all rows share."""
    q, k, v = wide_blocks(130, 300, 0.0)
    k[:, :, ::3] *= 50
    mask = torch.where(torch.arange(300) % 3 == 0, hidden, 1.0 if hidden else True)
    mask = mask if hidden else mask.bool()
    found = record_of(lambda **how: pasa.attention(q, k, v, attn_mask=mask, **how), "npu")
    kept = k[:, :, torch.arange(300) % 3 > 0].double()
    right = (q.double() @ kept.mT).abs().amax((-1, -2))
    torch.testing.assert_close(found.max_score_before, right, atol=0, rtol=1e-5)


@pytest.mark.parametrize("overflow", ["inf", "saturate"])
def test_scores_that_fp16_does_not_hold_are_counted(kernels, overflow):
    """They are as many as the kernel stored. The third block has 60 scores around -65504, the lowest of FP16."""
    x = make_call(1, 1, 1, 100, 3 * BLOCK, 64, False, counts=True, overflow=overflow)
    x.q[..., :2] = torch.tensor([128.0, 1.0])
    x.k[..., :2] = 0
    x.k[:, :, -60:, 0] = -511.75
    x.k[:, :, -60:, 1] = 200 * torch.rand(60, generator=torch.Generator().manual_seed(1)) - 70
    result = launch_attention(kernels, x, shifted_by_reference(x))
    assert result.report["ok"], result.report["fault"]
    counts = result["counts"][:, 0, 0]
    stored = result["scores"][0, 0, :, -BLOCK:].abs()
    assert counts[NUMBER["rescued_tiles"]].sum() <= 4, "the third tiles must stay in FP16"
    assert torch.equal(counts[NUMBER["nonfinite"]], stored.isinf().sum(-1).float())
    assert torch.equal(counts[NUMBER["saturated"]], (stored == 65504).sum(-1).float())
    assert (counts[NUMBER["saturated"]] > 5).all()
    assert (stored < 65504).sum() > 100 * (BLOCK - 60)


@pytest.mark.parametrize("overflow", ["inf", "saturate"])
def test_results_do_not_depend_on_it(kernels, overflow):
    how = {"mask": drawn(1, 2, 130, 300)} if overflow == "inf" else {"window": (200, 3)}
    plain, counted = (
        make_call(1, 2, 1, 130, 300, 64, False, bias=3.0, overflow=overflow, counts=counts, **how)
        for counts in (False, True)
    )
    shifted = shifted_by_reference(plain)
    first = launch_attention(kernels, plain, shifted)
    for mode, seed in (("eager", 0), ("eager", 3), ("deferred", 1), ("deferred", 2)):
        result = launch_attention(kernels, counted, shifted, mode=mode, seed=seed, groups=1 + seed % 2)
        assert result.report["ok"], result.report["fault"]
        assert sum(result.report["undefined"].values()) == 0
        assert all(torch.equal(result[name], first[name]) for name in ("out", "lse"))


def test_packed_sequences_are_joined(npu):
    """One has no keys, and one no queries."""
    edges_q, edges_k = torch.tensor([0, 5, 9, 44, 44, 74]), torch.tensor([0, 10, 10, 140, 143, 153])
    q, k, v = (x[0].transpose(0, 1) for x in normal_qkv((4, 2), (74, 153), 32))

    def call(**how):
        pasa.attention_varlen(q, k + 5, v, edges_q, edges_k, 35, 130, **how)

    found, expected = (record_of(call, backend) for backend in ("npu", "reference"))
    assert found.tiles.shape == (1, 4)
    for name in ("rescued_tiles", "flushed_tiles", "tiles"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    torch.testing.assert_close(found.max_score_before, expected.max_score_before, atol=1e-3, rtol=1e-5)


def test_the_published_recovery_has_none(npu):
    q, k, v = normal_qkv((1, 1), (6, 40), 16)
    with (
        pasa.record_diagnostics(),
        pytest.raises(NotImplementedError, match="diagnostics are served with recovery exact"),
    ):
        pasa.attention(q, k, v, backend="npu", config=pasa.PasaConfig(recovery="paper"))
