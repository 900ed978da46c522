"""Launches the decode kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from pasa.ops.attention.decode_kernel import decode_kernel, merge_kernel
from pasa.ops.attention.tiles import Tile, processors
from pasa.ops.attention.triton_call import Call, strides_of
from pasa.ops.shift_keys.triton_backend import pad_dim


def decode(call: Call) -> tuple[Tensor, Tensor]:
    """Few rows: split the keys, then merge."""
    batch, heads, rows, dim = call.q.shape
    kv_heads, keys = call.k.shape[1:3]
    tile, pad = decode_tile(call.q.device, pad_dim(dim), call.group * rows), pad_dim(dim)
    blocks_each = blocks_of_a_split(call.q.device, tile.block_n, keys, batch * kv_heads)
    splits = -(-keys // (tile.block_n * blocks_each))
    out, lse = call.outputs()
    part = torch.empty((batch, kv_heads, splits, tile.block_m, dim), dtype=torch.float32, device=call.q.device)
    state = torch.empty((batch, kv_heads, splits, tile.block_m, 2), dtype=torch.float32, device=call.q.device)
    anchor = torch.empty((batch, kv_heads, splits, dim), dtype=torch.float16, device=call.q.device)
    decode_kernel[(batch * kv_heads * splits,)](
        call.q, call.k, call.v, part, state, anchor, lse if call.mask is None else call.mask,
        *strides_of(call.q), *strides_of(call.k), *strides_of(call.v), *call.mask_strides,
        kv_heads, call.group, rows, keys, splits, blocks_each, call.scale,
        MASK=call.mask_kind, CAUSAL=call.is_causal, D=dim, D_PAD=pad, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    merge_kernel[(batch * heads * rows,)](
        call.q, part, state, anchor, out, lse, *strides_of(call.q), heads, call.group, rows, splits, call.scale,
        NATS=call.mask_kind == "float", D=dim, D_PAD=pad, BLOCK_M=tile.block_m, SPLITS=1 << (splits - 1).bit_length(),
        num_warps=4,
    )  # fmt: skip
    return out, lse


def decode_tile(device: torch.device, pad: int, rows: int) -> Tile:
    """Keys of a block, warps and stages for decoding `rows` query rows of a key head together."""
    height = max(16, 1 << (rows - 1).bit_length())
    return Tile(height, 64 if height <= 32 and pad <= 128 else 32, 4, 3)


def blocks_of_a_split(device: torch.device, block: int, keys: int, pairs: int) -> int:
    """Blocks for each program, so that there are about four programs a multiprocessor."""
    blocks = -(-keys // block)
    return max(1, -(-blocks * pairs // (4 * processors(device))))
