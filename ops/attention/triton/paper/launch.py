"""Launch the kernel of the published algorithm: K' from the shifting matrix, then attention."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from pasa.ops.attention.spec.scores import paper_beta
from pasa.ops.attention.spec.shift_keys import whole_blocks
from pasa.ops.attention.triton.anchor_launch import shift_paper
from pasa.ops.attention.triton.kernel_call import KernelCall, Packing, strides_of, visible_keys, work_of
from pasa.ops.attention.triton.launcher import launch
from pasa.ops.attention.triton.paper.kernel import paper_kernel
from pasa.ops.attention.triton.tiles import pad_dim, paper_tile
from pasa.ops.numerics.formats import FORMATS, round_to
from pasa.ops.numerics.shifting import shifting_matrix


class Constants(NamedTuple):
    """Hold the diagonal and off-diagonal entries of M, the second without its sign, and the invariance."""

    diagonal: float
    off_diagonal: float
    factor: float


def paper_attention(call: KernelCall, packing: Packing | None) -> tuple[Tensor, Tensor]:
    """Run Algorithm 1: K' from the shifting matrix, then the attention kernel."""
    options, block = call.options, call.options.block_k
    *matrix, factor = _constants(block, call.scale, options.beta, options.accumulate == "fp16")
    keys, visible = call.k, visible_keys(call)
    if packing is not None:
        keys = whole_packed_blocks(keys, block, packing).transpose(0, 1).unsqueeze(0)
    else:
        keys = whole_blocks(keys, block)
        # What fills a block without earlier keys is 0, and counts in the mean.
        if visible is not None:
            visible = torch.nn.functional.pad(visible, (0, max(block - call.keys, 0)), value=True)
            visible = whole_blocks(visible.unsqueeze(-1), block).squeeze(-1)
    keys = shift_paper(keys, (matrix[0], matrix[1]), block, visible=visible)
    out, lse = call.outputs()
    heads, dim, pad = call.q.shape[1], call.q.shape[-1], pad_dim(call.q.shape[-1])
    tile = paper_tile(call.q.device, pad, block)
    tiles, work, tables = work_of(call, tile.block_m, packing, lse)
    launch(
        paper_kernel, (work, 1, 1),
        (call.q, keys, call.v, out, lse, lse if call.mask is None else call.mask, *tables),
        (factor, *strides_of(call.q), *strides_of(keys), *strides_of(call.v), *strides_of(out),
         *strides_of(lse.unsqueeze(-1)), *call.mask_strides, heads, call.group, tiles, work, call.rows, call.keys),
        {"MASK": call.mask_kind, "CAUSAL": call.is_causal, "VARLEN": packing is not None,
         "ROUND": options.accumulate == "fp16", "CLEAN": call.q.device.type == "npu",
         "DROPPED": call.dropped, "D": dim, "D_PAD": pad, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n},
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, lse


def whole_packed_blocks(k: Tensor, block: int, packing: Packing) -> Tensor:
    """Apply `whole_blocks` to every packed sequence (T, H, D), without asking the device for a number.

    A sequence begins at block `packing.first` of the result, which may end with blocks of zeros.
    """
    sequence, within = packing.table.long().unbind(1)
    used, sequence = (sequence >= 0).unsqueeze(1), sequence.clamp(min=0)
    start = packing.cu_seqlens.long()[sequence].unsqueeze(1)
    keys = packing.cu_seqlens.diff().long()[sequence].unsqueeze(1)
    at = within.unsqueeze(1) * block + torch.arange(block, device=k.device)
    at = torch.where((at < keys) | (keys < block), at, at - (-keys % block))
    real = used & (at < keys)
    index = torch.where(real, start + at, 0).flatten()
    return k[index].masked_fill(~real.flatten().view(-1, 1, 1), 0.0)


@cache
def _constants(block: int, scale: float, beta: float | None, low: bool) -> Constants:
    solved, factor = paper_beta(beta, block, scale)
    entries = shifting_matrix(block, solved, scale=scale).double()
    kept = round_to(torch.tensor(factor, dtype=torch.float64), FORMATS["fp16" if low else "fp32"])
    return Constants(float(entries[0, 0]), -float(entries[0, -1]) if block > 1 else 0.0, float(kept))
