"""Gradients: the formula in FP64 against finite differences and against torch's autograd of the definition; in FP32
against a plain backward pass of the same precision; and those of the operators, on every backend.

Bound: `error <= 2 x error of the same-precision naive`, the autograd of softmax(scale q k^T) v in FP32, gradients
rounded to FP16, plus half an ulp of what is rounded last.
"""

import pytest
import torch

import pasa
from pasa.ops.attention.backward import attention_backward, attention_varlen_backward
from pasa.ops.attention.golden import golden_attention
from tests.inputs import biased_qkv, normal_qkv, rmse

HALF_ULP = 2.0**-11


class Exact(torch.autograd.Function):
    """The definition in FP64, with our backward pass."""

    @staticmethod
    def forward(ctx, q, k, v, mask, is_causal):
        ctx.save_for_backward(q, k, v, mask)
        ctx.is_causal = is_causal
        return golden_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=0.3)

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        q, k, v, mask = ctx.saved_tensors
        seen = grad_lse.masked_fill(golden_attention(q, k, v, attn_mask=mask, is_causal=ctx.is_causal)[1].isinf(), 0.0)
        grad_mask = torch.zeros((1,) * (4 - mask.dim()) + mask.shape).double() if ctx.needs_input_grad[3] else None
        found = attention_backward(grad_out, seen, q, k, v, mask, ctx.is_causal, 0.3, grad_mask)
        return *found, None if grad_mask is None else grad_mask.reshape(mask.shape), None


def doubles(heads, lengths, dim, seed=0):
    return [x.double().requires_grad_() for x in normal_qkv(heads, lengths, dim, seed, batch=2)]


MASKS = {
    "none": None,
    "bool": torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool(),
    "hidden keys": torch.tensor([1, 1, 0, 1, 0]).bool(),
    "float": torch.tensor([[0.5, -1, 0, 2, -torch.inf], [-torch.inf] * 5, [0, 0, 1, 0, 0]]),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
def test_gradcheck(mask, causal, heads):
    """Of output and log-sum-exp together. With 3 queries over 5 keys the band is aligned to the bottom right; one row
    sees nothing in two of the masks."""
    q, k, v = doubles(heads, (3, 5), 4)

    def seen(q, k, v):
        out, lse = Exact.apply(q, k, v, MASKS[mask], causal)
        return out, lse.masked_fill(lse.isinf(), 0.0)

    assert torch.autograd.gradcheck(seen, (q, k, v))


@pytest.mark.parametrize("shape", [(3, 5), (2, 4, 3, 5), (1, 4, 1, 5), (4, 3, 1), (5,)], ids=str)
def test_gradcheck_of_a_float_mask(shape):
    q, k, v = doubles((4, 2), (3, 5), 4)
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
    assert torch.autograd.gradcheck(lambda m: Exact.apply(q, k, v, m, True), (mask.double().detach().requires_grad_(),))


def definition(q, k, v, kind, grad, mask=None, is_causal=False):
    """Gradients by torch's autograd through softmax(scale q k^T + mask) v."""
    q, k, v = (x.detach().to(kind).requires_grad_() for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).mT * q.shape[-1] ** -0.5
    keep = torch.ones(scores.shape[-2:]).bool()
    keep = keep.tril(k.shape[2] - q.shape[2]) if is_causal else keep
    if mask is not None:
        keep = keep & (mask if mask.dtype == torch.bool else mask > -torch.inf)
        scores = scores if mask.dtype == torch.bool else scores + mask.where(mask > -torch.inf, 0.0)
    scores = scores.masked_fill(~keep, -torch.inf).masked_fill(~keep.any(-1, keepdim=True), 0.0)
    weights = torch.softmax(scores, -1) * keep
    (weights @ v.repeat_interleave(groups, 1)).backward(grad.to(kind))
    return q.grad, k.grad, v.grad


def check(q, k, v, backend="reference", mask=None, is_causal=False, dtype=torch.float16):
    """Errors of the operator's gradients are at most twice those of the naive ones in the same precision."""
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(9)).half()
    golden = definition(q, k, v, torch.float64, grad, mask, is_causal)
    naive = definition(q, k, v, torch.float32, grad, mask, is_causal)
    inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    out = pasa.attention(*inputs, attn_mask=mask, is_causal=is_causal, backend=backend)
    out.backward(grad.to(dtype))
    for ours, plain, true in zip(inputs, naive, golden, strict=True):
        assert ours.grad.dtype == dtype
        limit = 2 * (plain.half().double() - true).abs().max() + HALF_ULP * true.abs().max()
        assert (ours.grad.double() - true).abs().max() <= limit
        if true.norm() > 0:
            assert rmse(ours.grad, true) <= 2 * rmse(plain.half(), true) + 2.0**-13


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 63), (63, 129), (129, 63), (129, 300)], ids=str)
def test_odd_lengths_with_grouped_heads(dim, causal, lengths):
    """With Sq > Skv the first causal rows see nothing."""
    check(*normal_qkv((4, 2), lengths, dim), is_causal=causal)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", [(2, 4, 40, 150), (2, 1, 1, 150), (40, 1), (150,)], ids=str)
def test_masks(kind, shape):
    q, k, v = normal_qkv((4, 2), (40, 150), 32, batch=2)
    g = torch.Generator().manual_seed(3)
    keep = torch.rand(shape, generator=g) < 0.6
    mask = keep if kind == "bool" else torch.where(keep, torch.randn(shape, generator=g), -torch.inf)
    check(q, k, v, mask=mask, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_have_the_type_of_the_inputs(dtype):
    """They are those at the FP16 numbers that the inputs become; BF16 rounds them more coarsely."""
    q, k, v = (x.to(dtype).requires_grad_() for x in normal_qkv((4, 2), (40, 70), 64))
    halves = [x.detach().half() for x in (q, k, v)]
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    pasa.attention(q, k, v).backward(grad)
    for x, expected in zip((q, k, v), definition(*halves, torch.float64, grad), strict=True):
        assert x.grad.dtype == dtype
        assert rmse(x.grad, expected) <= (2.0**-8 if dtype == torch.bfloat16 else 2.0**-20)


def plain_flash_backward(q, k, v, grad, dtype):
    """As flash attention does it: P from the scores and the saved log-sum-exp, delta from the saved output."""
    q, k, v, grad = (x.to(dtype) for x in (q, k, v, grad))
    out, lse = golden_attention(q, k, v)
    scale = q.shape[-1] ** -0.5
    weights = torch.exp(q @ k.mT * scale - lse.to(dtype).unsqueeze(-1))
    scores = weights * (grad @ v.mT - (grad * out.half().to(dtype)).sum(-1, keepdim=True))
    return scores @ k * scale, scores.mT @ q * scale, weights.mT @ grad


def test_scores_of_131072():
    """Story: keys that share an offset gave scores of 131,072 nats. FP32 stores such a score in steps of 2^-6, so
    weights exp(S - lse) of a backward pass were off by percents, although the forward pass had been exact; and dQ,
    which loses what the keys share, had no right digit."""
    q, k, v = normal_qkv((2, 2), (100, 200), 64)
    q[..., 0] = k[..., 0] = 1024
    assert 131060 < (q.float() @ k.float().mT / 8).max() < 131090
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(9)).half()
    golden = definition(q, k, v, torch.float64, grad)
    ours = attention_backward(grad, None, q, k, v, None, False, 0.125)
    plain = plain_flash_backward(q, k, v, grad, torch.float32)
    for mine, other, true in zip(ours, plain, golden, strict=True):
        assert rmse(other, true) > 0.01
        assert rmse(mine, true) < 2.0**-11


def test_shared_bias_leaves_query_gradients_whole():
    """dQ = dS K loses what the keys share, since rows of dS sum to 0: formed of centred keys it never meets it."""
    q, k, v = biased_qkv(80, seed=2, length=300)
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(9)).half()
    golden = definition(q, k, v, torch.float64, grad)
    ours = attention_backward(grad, None, q, k, v, None, False, 128**-0.5)
    for mine, true in zip(ours, golden, strict=True):
        assert rmse(mine, true) < 2.0**-11


def test_loss_scaling_stays_finite():
    """Gradients come in as large as FP16 goes; sums of them are FP32's, and only a result beyond 65504 is infinite."""
    q, k, v = normal_qkv((2, 2), (40, 70), 64)
    grad = 60000 * torch.sign(torch.randn(q.shape, generator=torch.Generator().manual_seed(9))).half()
    wide = attention_backward(grad, None, q.float(), k.float(), v.float(), None, False, 0.125)
    assert all(bool(torch.isfinite(x).all()) for x in wide)
    for x, true in zip(wide, definition(q, k, v, torch.float64, grad), strict=True):
        assert rmse(x, true) < 1e-5


def test_log_sum_exp_has_gradients():
    """Ring attention merges partial results by it: two halves of the keys give the gradients of the whole."""
    q, k, v = (x.float().requires_grad_() for x in normal_qkv((4, 2), (40, 130), 64))
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(9)).half()
    parts = [pasa.attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(0, 60), slice(60, None))]
    share = torch.sigmoid(parts[0][1] - parts[1][1]).unsqueeze(-1)
    (share * parts[0][0] + (1 - share) * parts[1][0]).backward(grad.float())
    for x, true in zip((q, k, v), definition(q, k, v, torch.float64, grad), strict=True):
        assert rmse(x.grad, true) < 1e-3


def test_packed_sequences_are_separate():
    q, k, v = normal_qkv((4, 2), (60, 90), 32)
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(9)).half()
    packed = [x[0].transpose(0, 1).contiguous().requires_grad_() for x in (q, k, v)]
    cu_q, cu_k = torch.tensor([0, 25, 25, 40, 60]), torch.tensor([0, 30, 50, 50, 90])
    out = pasa.attention_varlen(*packed, cu_q, cu_k, 25, 40, is_causal=True)
    out.backward(grad[0].transpose(0, 1))
    for q0, q1, k0, k1 in ((0, 25, 0, 30), (40, 60, 50, 90)):
        one = (q[:, :, q0:q1], k[:, :, k0:k1], v[:, :, k0:k1])
        expected = attention_backward(grad[:, :, q0:q1], None, *one, None, True, 32**-0.5)
        for x, true, (start, stop) in zip(packed, expected, ((q0, q1), (k0, k1), (k0, k1)), strict=True):
            assert torch.equal(x.grad[start:stop], true[0].transpose(0, 1))
    assert not packed[0].grad[25:40].any()  # their sequence has no keys
    assert not packed[1].grad[30:50].any()  # theirs has no queries
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        attention_varlen_backward(attention_backward, out, None, *packed, cu_q + 1, cu_k, True, 1.0)


def test_a_key_that_nobody_sees_reaches_no_gradient():
    """Padding may hold anything."""
    q, k, v = normal_qkv((2, 2), (9, 20), 16)
    keep = torch.arange(20) < 15
    expected = attention_backward(q, None, q, k, v, keep, False, 0.25)
    k[:, :, 15:], v[:, :, 15:] = torch.nan, torch.inf
    for x, clean in zip(attention_backward(q, None, q, k, v, keep, False, 0.25), expected, strict=True):
        assert torch.equal(x, clean)
