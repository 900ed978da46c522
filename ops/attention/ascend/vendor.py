"""Call the vendor's fused attention in its high-precision mode, behind the signature of pasa's kernels.

`torch_npu.npu_fused_infer_attention_score` is not PASA. Nowhere is it documented that its scores
never overflow, so its results carry no guarantee. Written from its documentation (op-plugin,
torch_npu); never run on an NPU.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor

from pasa.ops.attention.ascend.inputs import attend_packed, pad_head_dim
from pasa.ops.attention.inputs import to_fp16
from pasa.ops.attention.options import AttentionOptions

LABEL = "the vendor's fused attention in high precision, without the guarantee against overflow"
MOST_HEADS, LARGEST_GROUP = 256, 64  # the documented limits of the vendor's function
# Values of inner_precise; the second one corrects rows that see no key.
HIGH_PRECISION, HIGH_PRECISION_BLIND_ROWS = 0, 2
# A value of sparse_mode. It requires a mask of MASK_SIDE squared, True = masked out, whatever the
# lengths.
BOTTOM_RIGHT_CAUSAL = 3
MASK_SIDE = 2048


def missing(heads: int, kv_heads: int) -> str | None:
    """Return why the vendor's attention cannot serve calls with that many heads here, or None."""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    import torch_npu

    if not hasattr(torch_npu, "npu_fused_infer_attention_score"):
        return "torch_npu has no npu_fused_infer_attention_score"
    if heads > MOST_HEADS or heads // kv_heads > LARGEST_GROUP:
        return f"{heads} query heads for {kv_heads} key heads are more than it takes"
    return None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    options: AttentionOptions,
    diagnose: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend as `reference.attention`, without masks and without the guarantee."""
    out, lse = _fused(to_fp16(q, "q"), to_fp16(k, "k"), to_fp16(v, "v"), is_causal, scale)
    return out.to(q.dtype), lse, lse.new_empty(0, dtype=torch.float64)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    is_causal: bool,
    scale: float,
    options: AttentionOptions,
    diagnose: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend as `reference.attention_varlen`, without the guarantee; sequences of equal lengths share a launch."""

    def attend(q: Tensor, k: Tensor, v: Tensor, keys: list[int]) -> tuple[Tensor, Tensor]:
        return _fused(q, k, v, is_causal, scale)

    out, lse = attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, lambda *lengths: lengths, attend)
    return out, lse, lse.new_empty(0, dtype=torch.float64)


def _fused(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    import torch_npu

    rows, keys, dim = q.shape[2], k.shape[2], q.shape[3]
    q, k, v = (pad_head_dim(x) for x in (q, k, v))
    banded = is_causal and rows > 1  # a single row sees every key
    blind = max(0, rows - keys) if banded else 0
    out, lse = torch_npu.npu_fused_infer_attention_score(
        q, k, v, num_heads=q.shape[1], num_key_value_heads=k.shape[1], input_layout="BNSD", scale=scale,
        atten_mask=_causal_mask(q.device) if banded else None, sparse_mode=BOTTOM_RIGHT_CAUSAL if banded else 0,
        inner_precise=HIGH_PRECISION_BLIND_ROWS if blind else HIGH_PRECISION, softmax_lse_flag=True,
    )  # fmt: skip
    out, lse = out[..., :dim].clone(), lse.reshape(q.shape[:3]).clone()
    # Set pasa's values for fully masked rows, whatever the vendor returns.
    out[:, :, :blind], lse[:, :, :blind] = 0.0, -torch.inf
    return out, lse


@cache
def _causal_mask(device: torch.device) -> Tensor:
    return torch.ones(MASK_SIDE, MASK_SIDE, dtype=torch.bool, device=device).triu(1)
