"""Launch the kernel for calls with few keys."""

from __future__ import annotations

from torch import Tensor

from pasa.ops.attention.triton.kernel_call import KernelCall, strides_of
from pasa.ops.attention.triton.launcher import launch
from pasa.ops.attention.triton.short.kernel import short_kernel
from pasa.ops.attention.triton.tiles import pad_dim

ROW_LIMIT = 64  # the most rows of a tile of Q, and of a tile of K
KEY_TILE = 4096  # the most elements of the tile of K; beyond, kernels that split keys or rows are as fast
# The most elements of a tile of Q or K that one warp holds; larger tiles get four warps (H200:
# fastest of 1, 2, 4, 8).
ONE_WARP = 2048


def is_short(call: KernelCall) -> bool:
    """Return whether all keys of a head fit into one tile."""
    limit = min(ROW_LIMIT, KEY_TILE // pad_dim(call.q.shape[-1]))
    return call.cu_k is None and 0 < call.keys <= limit


def short_attention(call: KernelCall) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return output, log-sum-exp and row maxima, computed in one launch."""
    batch, heads, rows, dim = call.q.shape
    pad = pad_dim(dim)
    out, lse = call.outputs()
    top = call.row_maxima(lse)
    block_m, block_n = (max(16, 1 << (size - 1).bit_length()) for size in (min(rows, ROW_LIMIT), call.keys))
    tiles = -(-rows // block_m)
    launch(
        short_kernel, (batch * heads * tiles, 1, 1),
        (call.q, call.k, call.v, out, lse, lse if call.mask is None else call.mask,
         lse if call.sinks is None else call.sinks, lse if top is None else top),
        (*strides_of(call.q), *strides_of(call.k), *strides_of(call.v), *strides_of(out),
         *strides_of(lse.unsqueeze(-1)), *call.mask_strides, heads, call.group, tiles, rows, call.keys, *call.limits,
         call.unit, call.ratio),
        {"MASK": call.mask_kind, "CAUSAL": call.is_causal, "D": dim, "D_PAD": pad, "BLOCK_M": block_m,
         "BLOCK_N": block_n, "DROPPED": call.dropped, **call.flags, "SINKS": call.sinks is not None,
         "MAXIMA": call.max_logits},
        num_warps=1 if max(block_m, block_n) * pad <= ONE_WARP else 4, num_stages=1,
    )  # fmt: skip
    return out, lse, top
