"""Launch of the Hopper kernel: tensor maps, grid and the compiled variants."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pasa.ops.attention.hopper_kernel import attention_kernel

HEAD_DIMS = (64, 128)
TILE_ROWS, QUERY_BOX, KEY_BOX = 192, 64, 128  # query rows of a CTA and of a warpgroup, keys of a block
STAGES = {64: 3, 128: 2}  # copies of K and V in flight; what 227 KiB of shared memory hold beside Q
L2_BYTES = 2**25  # K and V of the heads that run together: about half of the 50 MB of an H100 or H200
LOG2E = 1.4426950408889634
# Bound of |score| (norm times norm, nats) up to which FP16 scores are used; N(0, 1) inputs give about 15. Provisional:
# meant to keep the error within twice that of the emulation which stores scores and output in FP16, and not yet backed
# by a stored run.
HALF_LIMIT = 32.0
SWIZZLE = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


class _Map(NamedTuple):
    """What the launcher reads of a tensor map; `TensorDescriptor` would validate it at every call."""

    base: Tensor
    shape: list[int]
    strides: list[int]
    padding: str


_kernels: dict[tuple[Any, ...], Any] = {}  # compiled variants by device and compile-time arguments


def _strides(x: Tensor) -> list[int]:
    """Strides that a tensor map accepts: those of a dimension of size 1 are never used, but are checked."""
    return [*[x.shape[3] if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)][:3], 1]


def _mappable(x: Tensor) -> bool:
    """TMA reads 16-byte aligned rows of contiguous elements; a repeated dimension (stride 0) is copied instead."""
    return x.data_ptr() % 16 == 0 and x.stride(3) == 1 and all(s > 0 and s % 8 == 0 for s in _strides(x)[:3])


def hopper_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    anchors: Tensor,
    stats: Tensor,
    is_causal: bool,
    scale: float,
    fp16_scores: bool,
) -> tuple[Tensor, Tensor]:
    """Attention without a dense mask on sm_90; FP32 softmax by default.

    A head whose statistics ask for no shift is served by the plain FP32-softmax kernel of this schedule: nothing of
    the shift runs in it, so its time is that kernel's time.

    Parameters
    ----------
    q : Tensor (B, Hq, Sq, D)
        FP16, D = 64 or 128; rows are contiguous and 16-byte aligned, other strides are free.
    k, v : Tensor (B, Hkv, Skv, D)
        Likewise; Hq a multiple of Hkv.
    anchors : Tensor (B, Hkv, nb, D), FP16, contiguous
        a_j of the nb = ceil(Skv / 128) key blocks: subtractable from its keys without rounding, or 0, by column.
    stats : Tensor (B, Hkv, nb, 4), FP32, contiguous
        max ||k - a_j||, max ||k||, 1.0 if the block's keys must be treated (a_j not 0, or a key that is not finite),
        1.0 if a value of the block is not finite (needed with `is_causal`).
    is_causal : bool
        Bottom-right aligned: row i sees keys up to i + Skv - Sq.
    scale : float
        Above 0.
    fp16_scores : bool
        Scores and weights in FP16 where the norms bound the scores by `HALF_LIMIT`.

    Returns
    -------
    out : Tensor (B, Hq, Sq, D), FP16
    lse : Tensor (B, Hq, Sq), FP32
        Natural logarithm; -inf, and 0 in `out`, for a row that sees no key.
    """
    if not scale > 0:
        raise ValueError(f"scale must be above 0, got {scale!r}")
    q, k, v = (x if _mappable(x) else x.contiguous() for x in (q, k, v))
    batch, heads, rows, dim = q.shape
    heads_kv, keys = k.shape[1:3]
    out = torch.empty((batch, heads, rows, dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, rows), dtype=torch.float32, device=q.device)
    tiles, group = -(-rows // TILE_ROWS), heads // heads_kv
    section = min(batch * heads, max(1, L2_BYTES // (4 * keys * dim)) * group)
    boxes = ((q, QUERY_BOX), (k, KEY_BOX), (v, KEY_BOX), (out, QUERY_BOX))
    numbers = (heads, group, batch * heads, section, rows, keys, tiles, scale * LOG2E)
    variant = (is_causal, is_causal or keys % KEY_BOX != 0, HALF_LIMIT if fp16_scores else 0.0, STAGES[dim])
    grid = (tiles * batch * heads, 1, 1)
    with torch.cuda.device(q.device):
        kernel = _kernels.get((q.device.index, dim, variant))
        if kernel is None:
            maps = (TensorDescriptor(x, list(x.shape), _strides(x), [1, 1, box, dim], SWIZZLE) for x, box in boxes)
            kernel = attention_kernel[grid](*maps, anchors, stats, lse, *numbers, *variant, num_warps=4)
            _kernels[(q.device.index, dim, variant)] = kernel
        else:
            maps = (_Map(x, list(x.shape), _strides(x), "zero") for x, _ in boxes)
            kernel[grid](*maps, anchors, stats, lse, *numbers, *variant)
    return out, lse
