"""The rounded forward pass against FP64, the backward pass against autograd, and what each arm does to tied rows."""

import pytest
import torch

import pasa
from pasa.eval.research.rounding_training.attention import ARMS, Record, RoundedAttention, attend, output_bias
from pasa.ops.numerics.formats import round_to

BY_NAME = {arm.name: arm for arm in ARMS}
ROWS = 63


def inputs(seed: int, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, ROWS, 16, generator=generator) * scale for _ in range(3)]


def golden(q, k, v):
    return pasa.golden_attention(q, k, v, is_causal=True)[0]


def test_fp32_arm_is_attention():
    """FP32 products of 16 and sums of 63 terms: a few units of 2^-24 of sums of at most sqrt(16) and 4."""
    q, k, v = inputs(0)
    done = attend(q, k, v, BY_NAME["fp32"])
    assert (done.out - golden(q, k, v)).abs().max() <= 32 * 2**-24 * v.abs().max()


@pytest.mark.parametrize("arm", ARMS[1:], ids=lambda arm: arm.name)
def test_rounded_arms_err_by_their_roundings(arm):
    """Relative to |V|: half a spacing each of S (times |S|, at most 8), P, the product and O, and l's share of P's."""
    half = 2.0**-9 if arm.fmt == "bf16" else 2.0**-12
    q, k, v = (round_to(x, arm.fmt) for x in inputs(1))
    scores = (q @ k.mT).abs().max() * q.shape[-1] ** -0.5
    error = (attend(q, k, v, arm).out - golden(q, k, v)).abs().max()
    drawn = 2.0 if arm.rule == "unbiased" and arm.place == "quotient" else 1.0
    assert 0 < error <= (2 * scores + 4 * drawn) * half * v.abs().max()


def test_backward_of_the_fp32_arm_is_autograds():
    q, k, v = (x.requires_grad_() for x in inputs(2))
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(3))
    own = torch.autograd.grad(RoundedAttention.apply(q, k, v, BY_NAME["fp32"], Record()), (q, k, v), grad)
    right = torch.autograd.grad(golden(q, k, v), (q, k, v), grad.double())
    for name, a, b in zip("qkv", own, right, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max(), name


@pytest.mark.parametrize("name", ["product", "quotient-ours"])
def test_recorded_error_is_what_delta_puts_on_dq(name):
    """Equation 1 of the paper: dQ less what the same scores give with FP32's O, which autograd forms here."""
    arm = BY_NAME[name]
    q, k, v = (round_to(x, arm.fmt) for x in inputs(4))
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(5))
    record, leaf = Record(), q.clone().requires_grad_()
    [own] = torch.autograd.grad(RoundedAttention.apply(leaf, k, v, arm, record), leaf, grad)
    hidden = torch.ones(ROWS, ROWS, dtype=torch.bool).triu(1)
    scores = round_to(q @ k.mT * 0.25, arm.fmt).masked_fill(hidden, -torch.inf).requires_grad_()
    [scores_grad] = torch.autograd.grad(torch.softmax(scores, -1) @ v, scores, grad)
    difference = own - 0.25 * scores_grad @ k
    assert difference.abs().max() > 1e-4 * own.abs().max(), "delta's error is seen"
    assert (record.query_error - difference).abs().max() <= 1e-5 * own.abs().max()
    error = ((attend(q, k, v, arm).out - attend(q, k, v, arm).exact) * grad).sum((0, 2, 3))
    assert torch.allclose(record.delta_error, error, atol=1e-3)


def tied_inputs(score: float, seed: int = 0) -> list[torch.Tensor]:
    """Rows whose maximum, `score` to 1.3 times as much, two keys share; values of one sign in each column.

    Rows of one maximum would all get the same bounded shift, and one that makes their weights 192 / 256, as that of 12
    does, leaves two fifths of the bias.
    """
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.zeros(64, 4, ROWS, 16), 0.1 * torch.randn(64, 4, ROWS, 16, generator=generator)
    q[..., 0], k[..., 0] = 4 + 1.2 * torch.rand(64, 4, ROWS, generator=generator), 0.0
    k[..., :2, :] = 0.0
    k[..., :2, 0] = score
    q[..., 1:] = torch.randn(64, 4, ROWS, 15, generator=generator)
    sign = torch.randn(64, 4, 1, 16, generator=generator).sign()
    v = sign * (1 + torch.rand(64, 4, ROWS, 16, generator=generator))
    return [round_to(x, "bf16") for x in (q, k, v)]


def test_tied_rows_err_to_one_side_and_ours_do_not():
    """Two weights of 1 and a small rest: ties of P V round away from zero. Half of the columns tie, by half of a
    spacing: a mean of a quarter of 2^-7 to 2^-8 |P V|, less what values of other binades take away."""
    found = {name: output_bias(attend(*tied_inputs(12.0), arm)) for name, arm in BY_NAME.items() if arm.fmt == "bf16"}
    assert found["product"] > 2**-11
    for name in ("product-ours", "product-published", "quotient-ours"):
        assert abs(found[name]) <= found["product"] / 5, name


@pytest.mark.parametrize("score", [20.0, 100.0])
def test_published_rule_loses_tied_rows_in_fp16_and_ours_none(score):
    """exp(-20) is below half of FP16's smallest number, 2^-25."""
    published, ours = (attend(*tied_inputs(score), BY_NAME[name]) for name in ("fp16-published", "fp16-ours"))
    assert published.lost[:, :, 1:].all()
    assert published.out[:, :, 1:].isnan().all()
    assert not ours.lost.any()
    assert ours.out.isfinite().all()
