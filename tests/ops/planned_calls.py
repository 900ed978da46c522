"""Calls that plans repeat, for tests of what they return and of the work that they leave to the host."""

import torch

import pasa
from pasa.ops import plans
from tests.inputs import DEVICE


def kept():
    """Return the plans of this test: None for a call that cannot be repeated."""
    return list(plans._plans.values())


def attend(*tensors, **how):
    return pasa.attention(*(x.to(DEVICE) for x in tensors), return_lse=True, backend="triton", **how)


def differentiate(q, k, v, **how):
    q, k, v = (x.to(DEVICE).requires_grad_() for x in (q, k, v))
    out = pasa.attention(q, k, v, backend="triton", **how)
    return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))


def masked(q, k, v, **how):
    return attend(q, k, v, attn_mask=torch.arange(k.shape[2], device=DEVICE)[None, None, None] > k.shape[2] // 3, **how)


def attend_as_models(*tensors, **how):
    return attend(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors), **how)


CASES = {  # what is called, heads, lengths, head dimension, options, and the launches of each plan
    "decode": (attend, (4, 2), (1, 400), 64, {}),
    "decode some rows": (attend, (4, 2), (3, 400), 64, {"is_causal": True}),
    "decode wide": (attend, (4, 2), (1, 400), 256, {}),
    "decode masked": (masked, (4, 2), (2, 400), 64, {}),
    "decode window": (attend, (4, 2), (3, 400), 64, {"window": (100, 0)}),
    "decode soft cap": (attend, (4, 2), (3, 400), 64, {"softcap": 20.0}),
    "prefill": (attend, (2, 1), (70, 300), 80, {"is_causal": True}),
    "prefill of models": (attend_as_models, (2, 1), (70, 300), 80, {"is_causal": True}),
    "short": (attend, (2, 1), (25, 25), 64, {}),
    "short of models": (attend_as_models, (2, 1), (25, 25), 64, {}),
    "unbiased": (attend, (2, 1), (70, 300), 64, {"config": pasa.PasaConfig(softmax="unbiased")}),
    "gradients": (differentiate, (2, 1), (70, 300), 64, {"is_causal": True}),
}
