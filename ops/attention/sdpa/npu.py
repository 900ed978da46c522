"""Scale Q down so that q.k fits into FP16, and call an NPU's fused attention with it.

Written from the documentation of `torch_npu.npu_fused_infer_attention_score` (op-plugin). It does not say in which
format q.k is stored. Nothing here has run on an NPU; tests run it on a fake of that function.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from pasa.ops.attention.ascend.inputs import pad_head_dim

MOST_HEADS, LARGEST_GROUP, LARGEST_DIM = 256, 64, 256  # the documented limits of the function
HIGH_PRECISION, HIGH_PRECISION_MASKED_ROWS = 0, 2  # values of inner_precise; the second corrects rows without keys
ALL_KEYS, TOP_LEFT_CAUSAL = 0, 2  # values of sparse_mode
MASK_SIDE = 2048  # TOP_LEFT_CAUSAL requires a mask of this shape for all lengths, True = masked out
LARGEST_PRODUCT = 2.0**14  # a bound of |q.k| after scaling, a quarter of the range of FP16


def missing() -> str | None:
    """Return why the installed torch_npu lacks the function, or None."""
    import torch_npu

    lacks = not hasattr(torch_npu, "npu_fused_infer_attention_score")
    return "torch_npu has no npu_fused_infer_attention_score" if lacks else None


def serves(q: Tensor, bias: Tensor | None) -> bool:
    """Return whether the function takes this call: head dimensions to 256, and no float mask."""
    return (bias is None or bias.dtype == torch.bool) and q.shape[-1] <= LARGEST_DIM and missing() is None


def npu_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend as `fused_attention` does, in as many launches as the limits on heads require; reads a bound back."""
    q, scale = scaled_down(q, k, scale)
    mask = None if mask is None else (~mask).expand(*q.shape[:3], k.shape[2]).unflatten(1, (k.shape[1], -1))
    outputs, lses = [], []
    for at, part in enumerate(q.unflatten(1, (k.shape[1], -1)).split(LARGEST_GROUP, 2)):
        group = part.shape[2]
        first = at * LARGEST_GROUP
        hidden = None if mask is None else mask[:, :, first : first + group]
        pieces = [x.split(MOST_HEADS // group, 1) for x in (part, k, v)]
        masks = [None] * len(pieces[0]) if hidden is None else hidden.split(MOST_HEADS // group, 1)
        launched = [
            _launch(x.flatten(1, 2), keys, values, None if m is None else m.flatten(1, 2), causal, scale)
            for x, keys, values, m in zip(*pieces, masks, strict=True)
        ]
        out, lse = (torch.cat(each, 1).unflatten(1, (-1, group)) for each in zip(*launched, strict=True))
        outputs.append(out)
        lses.append(lse)
    return torch.cat(outputs, 2).flatten(1, 2), torch.cat(lses, 2).flatten(1, 2)


def scaled_down(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return Q times 2^-e and the scale times 2^e, with e so that q.k fits into FP16; reads a bound back.

    That is exact except for elements of Q that become subnormal, which then err by 2^-25 at most.
    """
    exponent = _exponent(q, k)
    return q * 2.0**-exponent, scale * 2.0**exponent


def _exponent(q: Tensor, k: Tensor) -> int:
    """Return e such that no |q.k| 2^-e passes LARGEST_PRODUCT: by Cauchy and Schwarz, |q.k| <= |q| |k|."""
    bound = float((q.float().norm(dim=-1).amax() * k.float().norm(dim=-1).amax()).cpu())
    if not math.isfinite(bound) or bound <= LARGEST_PRODUCT:
        return 0  # inputs that are not finite are cleaned, and attended to again
    return math.ceil(math.log2(bound / LARGEST_PRODUCT))


def _launch(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    import torch_npu

    dim = q.shape[3]
    heads, kv_heads = q.shape[1], k.shape[1]
    q, k, v = (pad_head_dim(x) for x in (q, k, v))
    out, lse = torch_npu.npu_fused_infer_attention_score(
        q, k, v, num_heads=heads, num_key_value_heads=kv_heads, input_layout="BNSD", scale=scale,
        atten_mask=causal_mask(q.device) if causal else None if hidden is None else hidden.contiguous(),
        sparse_mode=TOP_LEFT_CAUSAL if causal else ALL_KEYS,
        inner_precise=HIGH_PRECISION if hidden is None else HIGH_PRECISION_MASKED_ROWS, softmax_lse_flag=True,
    )  # fmt: skip
    return out[..., :dim], lse.reshape(q.shape[:3])


@cache
def causal_mask(device: torch.device) -> Tensor:
    """Return the mask that `TOP_LEFT_CAUSAL` requires."""
    return torch.ones(MASK_SIDE, MASK_SIDE, dtype=torch.bool, device=device).triu(1)
