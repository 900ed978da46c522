"""The formula of the gradients in FP64 against finite differences."""

import pytest
import torch

from pasa.ops.attention.call import Call
from pasa.ops.attention.spec.exact_fp64 import golden_attention
from pasa.ops.attention.spec.gradients import gradients
from tests.inputs import normal_qkv


class Exact(torch.autograd.Function):
    """The definition in FP64 as a differentiable function, with pasa's backward pass."""

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
        result = gradients(Call(q, k, v, 0.3, is_causal=ctx.is_causal, mask=mask), grad_out, seen, grad_mask)
        return *result, None if grad_mask is None else grad_mask.reshape(mask.shape), None


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
    """Gradients of output and log-sum-exp together agree with finite differences.

    With 3 queries over 5 keys the causal band is aligned to the bottom right. In two of the masks one row sees
    nothing.
    """
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
