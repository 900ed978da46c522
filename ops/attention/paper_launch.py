"""Launches the kernel of the published algorithm: K' from the shifting matrix, then attention."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from pasa.ops.attention.options import AttentionOptions
from pasa.ops.attention.paper_kernel import paper_kernel
from pasa.ops.attention.scores import paper_beta
from pasa.ops.attention.tiles import paper_tile
from pasa.ops.attention.triton_call import Call, strides_of, visible_keys, work_of
from pasa.ops.numerics.shifting import shifting_matrix
from pasa.ops.shift_keys.triton_backend import Packing, pad_dim, shift_paper
from pasa.ops.triton_launch import launch


def paper_attention(call: Call, packing: Packing | None, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Algorithm 1: K' from the shifting matrix, then the kernel."""
    matrix, factor = _tables(call, options)
    keys = shift_paper(call.k, matrix, options.block_k, visible=visible_keys(call), packing=packing)
    out, lse = call.outputs()
    heads, dim, pad = call.q.shape[1], call.q.shape[-1], pad_dim(call.q.shape[-1])
    tile = paper_tile(call.q.device, pad, options.block_k)
    tiles, work, tables = work_of(call, tile.block_m, packing, lse)
    launch(
        paper_kernel, (work, 1, 1),
        (call.q, keys, call.v, out, lse, lse if call.mask is None else call.mask, *tables[:3], factor),
        (*strides_of(call.q), *strides_of(keys), *strides_of(call.v), *strides_of(out), *strides_of(lse.unsqueeze(-1)),
         *call.mask_strides, heads, call.group, tiles, work, call.rows, call.keys),
        {"MASK": call.mask_kind, "CAUSAL": call.is_causal, "VARLEN": packing is not None,
         "ROUND": options.accumulate == "fp16", "CLEAN": call.q.device.type == "npu",
         "DROPPED": call.dropped, "D": dim, "D_PAD": pad, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n},
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, lse


def _tables(call: Call, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Entries of M (block + 1, 2) and invariance (block + 1,) for the block sizes that occur; FP32 on the device."""
    block = options.block_k
    if call.cu_k is None:
        sizes = {min(block, call.k.shape[2]), call.k.shape[2] % block}
    else:
        lengths = call.cu_k.diff().tolist()
        sizes = {size for length in lengths for size in (min(block, length), length % block)}
    return _tables_on(call.q.device, block, tuple(sorted(sizes - {0})), call.scale, options.beta)


@cache
def _tables_on(
    device: torch.device, block: int, sizes: tuple[int, ...], scale: float, beta: float | None
) -> tuple[Tensor, Tensor]:
    matrix, factor = torch.zeros(block + 1, 2), torch.zeros(block + 1)
    for n in sizes:
        solved, factor[n] = paper_beta(beta, n, scale)
        entries = shifting_matrix(n, solved, scale=scale).float()
        matrix[n, 0] = entries[0, 0]
        matrix[n, 1] = -entries[0, 1] if n > 1 else 0.0
    return matrix.to(device), factor.to(device)
