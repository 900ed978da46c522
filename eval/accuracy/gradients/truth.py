"""The yardsticks: gradients of the golden attention in FP64, and a plain backward pass in FP32."""

from __future__ import annotations

import torch
from torch import Tensor

import pasa
from pasa.eval.accuracy.gradients.cases import Inputs

Gradients = tuple[Tensor, Tensor, Tensor]


def full_mask(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return what is added to the scores, 0 in fully masked rows, and which rows (..., Sq, 1) see a key; FP64.

    The derivative of a softmax over no key is NaN, so fully masked rows see all keys and their results are zeroed.
    """
    rows, keys = inputs.q.shape[2], inputs.k.shape[2]
    mask = torch.zeros(rows, keys, dtype=torch.float64, device=inputs.q.device)
    if inputs.causal:
        mask = mask.masked_fill(torch.ones_like(mask, dtype=torch.bool).triu(keys - rows + 1), -torch.inf)
    if inputs.mask is not None:
        mask = mask.where(inputs.mask, -torch.inf) if inputs.mask.dtype == torch.bool else mask + inputs.mask
    seen = (mask > -torch.inf).any(-1, keepdim=True)
    return mask.where(seen, 0.0), seen


def exact_gradients(inputs: Inputs) -> Gradients:
    """Return dQ, dK and dV by torch's autograd of the definition, in FP64."""
    mask, seen = full_mask(inputs)
    q, k, v = (x.detach().double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    out, lse = pasa.golden_attention(q, k, v, attn_mask=mask)
    total = (out * seen * inputs.grad.double()).sum()
    if inputs.grad_lse is not None:
        total = total + (lse * seen.squeeze(-1) * inputs.grad_lse.double()).sum()
    dq, dk, dv = torch.autograd.grad(total, (q, k, v))
    return dq, dk, dv


def plain_gradients(inputs: Inputs) -> Gradients:
    """Form gradients as flash attention does, in FP32 up to the last rounding, where kernels round P and dS as well.

    P = exp(S - lse) with the saved log-sum-exp (FP32), delta = rowsum(dO * O) with the saved output (16 bits). Both
    come from FP64, so that the forward pass adds no error.
    """
    mask, seen = full_mask(inputs)
    saved, lse = pasa.golden_attention(inputs.q, inputs.k, inputs.v, attn_mask=mask)
    heads, groups = inputs.k.shape[1], inputs.q.shape[1] // inputs.k.shape[1]
    q, grad, scale = inputs.q.float(), inputs.grad.float(), inputs.q.shape[-1] ** -0.5
    k, v = (x.float().repeat_interleave(groups, 1) for x in (inputs.k, inputs.v))
    weights = torch.exp(q @ k.mT * scale + mask.float() - lse.float().unsqueeze(-1)) * seen
    delta = (grad * (saved * seen).to(inputs.q.dtype).float()).sum(-1, keepdim=True)
    frame = delta if inputs.grad_lse is None else delta - inputs.grad_lse.unsqueeze(-1)
    slopes = weights * (grad @ v.mT - frame)
    dq, dk, dv = slopes @ k * scale, slopes.mT @ q * scale, weights.mT @ grad
    dk, dv = (x.unflatten(1, (heads, -1)).sum(2) for x in (dk, dv))  # over the query heads that share keys
    dq, dk, dv = (x.to(inputs.q.dtype) for x in (dq, dk, dv))
    return dq, dk, dv
