"""Launch the kernel for calls with few keys."""

from __future__ import annotations

from torch import Tensor

from pasa.ops.attention.triton.kernel_call import KernelCall, strides_of
from pasa.ops.attention.triton.launcher import launch
from pasa.ops.attention.triton.short.kernel import short_kernel
from pasa.ops.attention.triton.tiles import Tile, pad_dim

KEYS = 512  # of a short sequence; beyond, kernels that split keys, or have larger tiles, are as fast
# The most elements of a tile of Q or K that one warp holds; larger tiles get four warps (H200:
# fastest of 1, 2, 4, 8).
ONE_WARP = 2048


def is_short(call: KernelCall) -> bool:
    """Return whether one program goes through all keys of a row."""
    return call.cu_k is None and 0 < call.keys <= KEYS


def tile_for(pad: int, rows: int, keys: int) -> Tile:
    """Return the tile for a padded head dimension, the rows of all heads that share a key head, and the keys."""
    height, width = (64, 64) if pad <= 128 else (32, 32)
    block_m, block_n = (max(16, 1 << (min(a, b) - 1).bit_length()) for a, b in ((rows, height), (keys, width)))
    one_block = keys <= block_n
    return Tile(block_m, block_n, 1 if max(block_m, block_n) * pad <= ONE_WARP else 4, 1 if one_block else 2)


def short_attention(call: KernelCall) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return output, log-sum-exp and row maxima, computed in one launch."""
    (batch, _, rows, dim), kv_heads = call.q.shape, call.k.shape[1]
    pad = pad_dim(dim)
    out, lse = call.outputs()
    top = call.row_maxima(lse)
    tile = tile_for(pad, call.group * rows, call.keys)
    tiles = -(-call.group * rows // tile.block_m)
    launch(
        short_kernel, (batch * kv_heads * tiles, 1, 1),
        (call.q, call.k, call.v, out, lse, lse if call.mask is None else call.mask,
         lse if call.sinks is None else call.sinks, lse if top is None else top),
        (*strides_of(call.q), *strides_of(call.k), *strides_of(call.v), *strides_of(out),
         *strides_of(lse.unsqueeze(-1)), *call.mask_strides, kv_heads, call.group, tiles, rows, call.keys, *call.limits,
         call.unit, call.ratio),
        {"MASK": call.mask_kind, "CAUSAL": call.banded, "D": dim, "D_PAD": pad, "BLOCK_M": tile.block_m,
         "BLOCK_N": tile.block_n, "DROPPED": call.dropped, **call.flags, "SINKS": call.sinks is not None,
         "MAXIMA": call.max_logits},
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, lse, top
