"""The yardsticks: gradients of the definition in FP64, and a plain backward pass in FP32."""

from __future__ import annotations

import torch
from torch import Tensor

from pasa.eval.accuracy.gradients.cases import Inputs

Gradients = tuple[Tensor, Tensor, Tensor]


def masked_scores(given: Inputs, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Scaled scores of keys (B, Hq, Skv, D), -inf where hidden but 0 in rows that see nothing; and what is seen."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
    keep = keep.tril(k.shape[2] - q.shape[2]) if given.causal else keep
    if given.mask is not None:
        keep = keep & (given.mask if given.mask.dtype == torch.bool else given.mask > -torch.inf)
        if given.mask.dtype != torch.bool:
            scores = scores + given.mask.where(given.mask > -torch.inf, 0.0)
    seen = keep.any(-1, keepdim=True)
    return scores.masked_fill(~keep, -torch.inf).masked_fill(~seen, 0.0), keep


def expanded(given: Inputs, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, and keys and values once per query head, in `kind`."""
    groups = given.q.shape[1] // given.k.shape[1]
    k, v = (x.to(kind).repeat_interleave(groups, 1) for x in (given.k, given.v))
    return given.q.to(kind), k, v


def _attend(given: Inputs, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; 0 and 0 in rows that see nothing."""
    scores, keep = masked_scores(given, q, k)
    out = (torch.softmax(scores, -1) * keep) @ v
    return out, torch.logsumexp(scores, -1).where(keep.any(-1), 0.0)


def _summed(given: Inputs, dq: Tensor, dk: Tensor, dv: Tensor) -> Gradients:
    """Over the query heads that share keys."""
    heads = given.k.shape[1]
    return dq, dk.unflatten(1, (heads, -1)).sum(2), dv.unflatten(1, (heads, -1)).sum(2)


def exact_gradients(given: Inputs) -> Gradients:
    """dQ, dK and dV by torch's autograd of the definition, in FP64."""
    q, k, v = (x.requires_grad_() for x in expanded(given, torch.float64))
    out, lse = _attend(given, q, k, v)
    total = (out * given.grad.double()).sum()
    if given.grad_lse is not None:
        total = total + (lse * given.grad_lse.double()).sum()
    return _summed(given, *torch.autograd.grad(total, (q, k, v)))


def plain_gradients(given: Inputs) -> Gradients:
    """As flash attention forms them, in FP32 up to the last rounding: kernels would round P and dS to 16 bits as well.

    P = exp(S - lse) with the saved log-sum-exp (FP32), delta = rowsum(dO * O) with the saved output (16 bits). Both
    come from FP64, so that the forward pass adds no error of its own.
    """
    saved, saved_lse = _attend(given, *expanded(given, torch.float64))
    q, k, v = expanded(given, torch.float32)
    grad = given.grad.float()
    scores, keep = masked_scores(given, q, k)
    weights = torch.exp(scores - saved_lse.float().unsqueeze(-1)) * keep
    delta = (grad * saved.to(given.q.dtype).float()).sum(-1, keepdim=True)
    frame = delta if given.grad_lse is None else delta - given.grad_lse.unsqueeze(-1)
    slopes = weights * (grad @ v.mT - frame)
    scale = q.shape[-1] ** -0.5
    found = _summed(given, slopes @ k * scale, slopes.mT @ q * scale, weights.mT @ grad)
    dq, dk, dv = (x.to(given.q.dtype) for x in found)
    return dq, dk, dv
