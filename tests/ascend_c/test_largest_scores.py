"""Largest scores of rows and heads on the CPU twin, against FP64.

A score may err by what FP16 rounds of its distance from its reference, 2^-7 nats within the 16 nats that have weight.
It may err further by what FP32 rounds of the frame and the offset of its block.
"""

import pytest
import torch

import pasa
from tests.ascend_c.kernel_runs import launch_attention, seen, shifted_by_reference
from tests.ascend_c.test_attention import make_call
from tests.ascend_c.test_masks import HIDING, with_holes
from tests.inputs import normal_qkv

CALLS = {
    "plain": {},
    "causal": {"causal": True},  # the first rows see no key
    "window": {"window": (30, 2)},
    "mask": {"mask": with_holes()[..., :200, :300]},
    "lengths": {"lengths": torch.tensor([129])},
}


def true_scores(x):
    groups = x.q.shape[1] // x.k.shape[1]
    scores = x.q.double() @ x.k.double().repeat_interleave(groups, 1).mT * x.softmax_scale
    return scores.masked_fill(~seen(x), -torch.inf)


@pytest.mark.parametrize("overflow", ["inf", "saturate"])
@pytest.mark.parametrize("bias", [0.0, 30.0])
@pytest.mark.parametrize("name", CALLS)
def test_largest_score_of_each_row(kernels, name, bias, overflow):
    """Blocks differ in their bias, so frames move, and tiles are kept in FP32."""
    x = make_call(1, 2, 1, 200, 300, 64, overflow=overflow, largest=True, **{"causal": False} | CALLS[name])
    for sign, block in zip((1, -1, 0.5), x.k.split(128, 2), strict=True):
        block.add_(sign * bias)
    result = launch_attention(kernels, x, shifted_by_reference(x), groups=2)
    assert result.report["ok"], result.report["fault"]
    assert sum(result.report["undefined"].values()) == 0
    right = true_scores(x).amax(-1)
    empty = right.isneginf()
    assert torch.equal(result["largest"].isneginf(), empty)
    sums = (x.q.double().abs().sum(-1) * x.k.double().abs().amax()) * x.softmax_scale
    allowed = 2.0**-7 + (x.q.shape[-1] + 2) * 2.0**-24 * sums
    assert ((result["largest"].double() - right).abs() <= allowed)[~empty].all()


def test_results_do_not_depend_on_it(kernels):
    x = make_call(1, 1, 1, 130, 300, 64, True)
    y = make_call(1, 1, 1, 130, 300, 64, True, largest=True)
    shifted = shifted_by_reference(x)
    plain, asked = (launch_attention(kernels, each, shifted) for each in (x, y))
    assert all(torch.equal(plain[name], asked[name]) for name in ("out", "lse"))


@pytest.mark.parametrize("how", ["plain", "mask", "window", "sinks"])
def test_max_logits(npu, how):
    q, k, v = normal_qkv((4, 2), (70, 300), 40, batch=2)
    given = {
        "plain": {"is_causal": True},
        "mask": {"attn_mask": HIDING["some keys for all"]},
        "window": {"window": (20, 0)},
        "sinks": {"sinks": torch.tensor([1.0, 50.0, 0.0, -torch.inf])},
    }[how]
    found, expected = (
        pasa.attention(q, k, v, backend=name, return_max_logits=True, **given)[-1] for name in ("npu", "reference")
    )
    assert found.shape == (2, 4)
    torch.testing.assert_close(found, expected, atol=2.0**-6, rtol=0)


def test_max_logits_of_packed_sequences(npu):
    """One has no keys, one no queries; padding of queries does not count."""
    edges_q, edges_k = torch.tensor([0, 5, 9, 44, 44, 74]), torch.tensor([0, 10, 10, 140, 143, 153])
    q, k, v = (x[0].transpose(0, 1) for x in normal_qkv((4, 2), (74, 153), 32))
    q[:9] -= 5  # so that scores of the first sequences are negative
    k[:10] += 9
    found, expected = (
        pasa.attention_varlen(q, k, v, edges_q, edges_k, 35, 130, backend=name, return_max_logits=True)[-1]
        for name in ("npu", "reference")
    )
    assert found.shape == (5, 4)
    assert (expected[0] < 0).all()
    torch.testing.assert_close(found, expected, atol=2.0**-5, rtol=0)


def test_a_query_that_is_not_finite_makes_its_head_nan(npu):
    q, k, v = normal_qkv((2, 1), (20, 30), 16)
    q[0, 1, 3, 5] = torch.nan
    largest = pasa.attention(q, k, v, backend="npu", return_max_logits=True)[-1]
    assert largest.isnan().tolist() == [[False, True]]


def test_the_published_recovery_has_none(npu):
    q, k, v = normal_qkv((1, 1), (6, 40), 16)
    with pytest.raises(NotImplementedError, match="max logits are served with recovery exact, not paper"):
        pasa.attention(q, k, v, return_max_logits=True, backend="npu", config=pasa.PasaConfig(recovery="paper"))
