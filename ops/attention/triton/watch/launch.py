"""Launch the kernels that count large and repeated scores of sampled query rows."""

from __future__ import annotations

import torch
from torch import Tensor

from pasa.ops.attention.spec.repeated_maxima import EPSILON
from pasa.ops.attention.spec.watch import FIRST_BLOCK, RUNAWAY
from pasa.ops.attention.triton.kernel_call import KernelCall, strides_of
from pasa.ops.attention.triton.launcher import launch, workspace
from pasa.ops.attention.triton.tiles import pad_dim, processors
from pasa.ops.attention.triton.watch.kernel import FIELDS, watch_kernel, watch_totals_kernel
from pasa.ops.devices import on_device

ROW_LIMIT = 64  # the most rows of a tile: what four warps give to Hopper's matrix unit at once
BLOCK_N = 64  # keys of a tile
LEAST_SHARE = 2 * FIRST_BLOCK  # the fewest keys of a program


def count_scores(
    q: Tensor, k: Tensor, attn_mask: Tensor | None, totals: Tensor, is_causal: bool, scale: float, sampled: range
) -> None:
    """Count as `watch.count_scores` does, for head dimensions that the kernels serve."""
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q.detach(), k.detach()))
    (batch, heads, rows, dim), (kv_heads, keys) = q.shape, k.shape[1:3]
    mask = attn_mask.view(torch.uint8) if attn_mask is not None and attn_mask.dtype == torch.bool else attn_mask
    mask = None if mask is None else mask.expand(batch, heads, rows, keys)
    call = KernelCall(q, k, k, scale, is_causal=is_causal, mask=mask)
    length = call.group * rows
    sampled_rows = -(-length // sampled.step)  # sampled rows that share a key head
    block_m = min(ROW_LIMIT, max(16, 1 << (sampled_rows - 1).bit_length()))
    tiles = -(-sampled_rows // block_m)
    work = batch * kv_heads * tiles
    share = _share(keys, max(1, processors(q.device) // work))
    shares = -(-keys // share)
    with on_device(q):
        (part,) = workspace(q.device, (shares * FIELDS.value * work * block_m, torch.float32))
        launch(
            watch_kernel, (work, shares, 1), (q, k, q if call.mask is None else call.mask, part),
            (*strides_of(q), *strides_of(k), *call.mask_strides, kv_heads, call.group, tiles, rows, keys, share,
             sampled.start, scale),
            {"MASK": call.mask_kind, "CAUSAL": is_causal, "STRIDE": sampled.step, "D": dim, "D_PAD": pad_dim(dim),
             "BLOCK_M": block_m, "BLOCK_N": BLOCK_N},
            num_warps=4, num_stages=2 if pad_dim(dim) > 128 else 3,
        )  # fmt: skip
        launch(
            watch_totals_kernel, (work, 1, 1), (totals, part),
            (length, tiles, shares, sampled.start, EPSILON, RUNAWAY),
            {"STRIDE": sampled.step, "BLOCK_M": block_m}, num_warps=1,
        )  # fmt: skip


def _share(keys: int, programs: int) -> int:
    """Return the keys of each program when `programs` programs share all keys: a multiple of the first block's size."""
    return max(LEAST_SHARE, -(-keys // (programs * FIRST_BLOCK)) * FIRST_BLOCK)
