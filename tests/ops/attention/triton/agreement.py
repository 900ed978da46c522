"""Compare the Triton kernels with FP64, and with the reference's emulation of the same mode.

Bound: `error <= 2 x error of the emulation`, whose tiles are FP16 where the kernel's are FP32, plus half an ulp of the
FP16 output; log-sum-exp within 1e-3 for the exact recovery.
"""

import torch

import pasa
from pasa import PasaConfig
from pasa.ops.attention.call import Call
from pasa.ops.attention.spec.masking import dense_mask
from tests.inputs import DEVICE, max_error, rmse

CONFIGS = {
    "exact": PasaConfig(),
    "exact-fp16": PasaConfig(accumulate="fp16"),
    "paper": PasaConfig(recovery="paper"),
    "paper-fp16": PasaConfig(recovery="paper", accumulate="fp16"),
    "fp32": PasaConfig(precision="fp32"),
}
HALF_ULP = 2.0**-11  # of an output near 1
LSE_BOUND = 1e-3


def on_device(*tensors):
    return [None if x is None else x.to(DEVICE) for x in tensors]


def emulate(q, k, v, config, attn_mask=None, is_causal=False):
    """Return the reference's output and log-sum-exp, with the kernel's blocks of keys.

    The reference removes keys that no query sees. Its blocks then hold other keys than the kernel's, and the
    published recovery errs otherwise. One more query, which sees every key, keeps them in.
    """
    if attn_mask is None or config.recovery != "paper":
        how = {"attn_mask": attn_mask, "is_causal": is_causal}
        return pasa.attention(q, k, v, config=config, return_lse=True, backend="reference", **how)
    mask = dense_mask(Call(q, k, k, 1.0, is_causal=is_causal), attn_mask).expand(-1, -1, q.shape[2], k.shape[2])
    all_seeing = torch.ones_like(mask[:, :, :1]) if mask.dtype == torch.bool else torch.zeros_like(mask[:, :, :1])
    q, mask = torch.cat([q, q[:, :, :1]], 2), torch.cat([mask, all_seeing], 2)
    out, lse = pasa.attention(q, k, v, attn_mask=mask, config=config, return_lse=True, backend="reference")
    return out[:, :, :-1], lse[:, :, :-1]


def check(q, k, v, name, **how):
    """Check that the kernel's errors are at most twice those of its emulation."""
    config = CONFIGS[name]
    golden, golden_lse = pasa.golden_attention(q, k, v, **how)
    emulated, emulated_lse = emulate(q, k, v, config, **how)
    mask = how.pop("attn_mask", None)
    q, k, v, mask = on_device(q, k, v, mask)
    out, lse = pasa.attention(q, k, v, attn_mask=mask, config=config, return_lse=True, backend="triton", **how)
    assert out.dtype == q.dtype
    assert out.shape == q.shape
    out, lse = out.cpu(), lse.cpu()
    assert torch.isfinite(out).all()
    assert max_error(out, golden) <= 2 * max_error(emulated, golden) + HALF_ULP
    if golden.norm() > 0:
        assert rmse(out, golden) <= 2 * rmse(emulated, golden) + 2.0**-13
    seen = golden_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, seen)
    if seen.any():
        emulation = float((emulated_lse - golden_lse)[seen].abs().max())
        # D/16 steps and two offsets, each truncated by a tensor core, of scores up to twice as large in the first
        # block's frame.
        rounding = (q.shape[-1] / 16 + 2) * 2.0**-23 * 2 * float(golden_lse[seen].abs().max())
        bound = (2 * emulation if "paper" in name else 0.0) + LSE_BOUND + rounding
        assert float((lse - golden_lse)[seen].abs().max()) <= bound
