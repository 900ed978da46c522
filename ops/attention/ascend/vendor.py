"""Call the vendor's fused attention in its high-precision mode, behind the signature of pasa's kernels.

`torch_npu.npu_fused_infer_attention_score` is not PASA. Its documentation does not say that scores
never overflow, so its results have no guarantee. This module was written from that documentation
(op-plugin, torch_npu), and was never run on an NPU.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from pasa.ops.attention.ascend.inputs import attend_packed, pad_head_dim
from pasa.ops.attention.call import Call, Results, to_fp16

MOST_HEADS, LARGEST_GROUP = 256, 64  # the documented limits of the vendor's function
# Values of inner_precise; the second one corrects rows that see no key.
HIGH_PRECISION, HIGH_PRECISION_MASKED_ROWS = 0, 2
# A value of sparse_mode. It requires a mask of shape (MASK_SIDE, MASK_SIDE), True = masked out, for all sequence
# lengths.
BOTTOM_RIGHT_CAUSAL = 3
MASK_SIDE = 2048


def missing() -> str | None:
    """Return why the installed torch_npu lacks the vendor's function, or None."""
    import torch_npu

    lacks = not hasattr(torch_npu, "npu_fused_infer_attention_score")
    return "torch_npu has no npu_fused_infer_attention_score" if lacks else None


def attend(call: Call) -> Results:
    """Compute attention without a mask and without PASA's guarantee.

    Packed sequences of equal lengths share a launch.
    """
    if call.cu_q is None:
        half = to_fp16(call.q, "q"), to_fp16(call.k, "k"), to_fp16(call.v, "v")
        out, lse = _fused(*half, call.is_causal, call.scale)
        out = out.to(call.q.dtype)
    else:
        out, lse = attend_packed(
            call, lambda *lengths: lengths, lambda q, k, v, keys: _fused(q, k, v, call.is_causal, call.scale)
        )
    return Results(out, lse)


def _fused(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attend in as many launches as the limits on heads require: parts of each group, then parts of the key heads."""
    outputs, lses = [], []
    for part in q.unflatten(1, (k.shape[1], -1)).split(LARGEST_GROUP, 2):
        group = part.shape[2]
        pieces = zip(*(x.split(MOST_HEADS // group, 1) for x in (part, k, v)), strict=True)
        launched = [_launch(x.flatten(1, 2), keys, values, is_causal, scale) for x, keys, values in pieces]
        out, lse = (torch.cat(each, 1).unflatten(1, (-1, group)) for each in zip(*launched, strict=True))
        outputs.append(out)
        lses.append(lse)
    return torch.cat(outputs, 2).flatten(1, 2), torch.cat(lses, 2).flatten(1, 2)


def _launch(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Call the vendor's function once; return the output and the log-sum-exp."""
    import torch_npu

    rows, keys, dim = q.shape[2], k.shape[2], q.shape[3]
    q, k, v = (pad_head_dim(x) for x in (q, k, v))
    needs_mask = is_causal and rows > 1  # a single row sees every key
    masked_rows = max(0, rows - keys) if needs_mask else 0  # the first rows, if there are more rows than keys
    out, lse = torch_npu.npu_fused_infer_attention_score(
        q, k, v, num_heads=q.shape[1], num_key_value_heads=k.shape[1], input_layout="BNSD", scale=scale,
        atten_mask=_causal_mask(q.device) if needs_mask else None, sparse_mode=BOTTOM_RIGHT_CAUSAL if needs_mask else 0,
        inner_precise=HIGH_PRECISION_MASKED_ROWS if masked_rows else HIGH_PRECISION, softmax_lse_flag=True,
    )  # fmt: skip
    out, lse = out[..., :dim].clone(), lse.reshape(q.shape[:3]).clone()
    # Set pasa's values for fully masked rows, whatever the vendor returns.
    out[:, :, :masked_rows], lse[:, :, :masked_rows] = 0.0, -torch.inf
    return out, lse


@cache
def _causal_mask(device: torch.device) -> Tensor:
    """Return the mask that `BOTTOM_RIGHT_CAUSAL` requires."""
    return torch.ones(MASK_SIDE, MASK_SIDE, dtype=torch.bool, device=device).triu(1)
