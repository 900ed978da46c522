"""Launch the kernel for calls with few keys."""

from __future__ import annotations

from torch import Tensor

from pasa.ops.attention.triton.kernel_call import KernelCall, step_of, strides_of
from pasa.ops.attention.triton.launcher import at_most, launch
from pasa.ops.attention.triton.short.kernel import short_kernel
from pasa.ops.attention.triton.tiles import Tile, pad_dim, processors

DECODE_KEYS = 384  # of a short sequence that few rows attend to; beyond, kernels that split keys are as fast (H100)
BLOCK = 64  # keys, and rows, that a program holds at a time, at most
PROMPT_ELEMENTS = 4096  # of the tile that holds all keys of a head, where many rows attend to them
# The most elements of a tile of Q or K that one warp holds, where there are so many programs for each multiprocessor
# that they hide each other's waiting. Four warps have a quarter of the code, which a short call loads first.
ONE_WARP, MANY = 2048, 16
# Elements of a tile for which eight warps are faster than four (H100), where every program runs at once. On Hopper the
# second four of them would read rows that a tile of 64 rows does not have.
WIDE = 4096
ROWS = 16  # of the smallest tile
REGISTERS = 128  # of a thread, where programs wait for others: four run on a multiprocessor then, and two without limit


def is_short(call: KernelCall) -> bool:
    """Return whether one program goes through all keys of its rows."""
    most = DECODE_KEYS if call.decodes else min(BLOCK, PROMPT_ELEMENTS // pad_dim(call.q.shape[-1]))
    return call.cu_k is None and 0 < call.keys <= most


def tile_for(pad: int, rows: int, keys: int, pairs: int, places: int) -> tuple[Tile, bool]:
    """Return the tile, and whether programs wait for others.

    For a padded head dimension, the rows of all heads that share a key head, the keys, the number of key heads of all
    sequences, and the programs that run at once on one device (0: nothing may depend on the number of sequences).
    """
    block_m = max(ROWS, 1 << (min(rows, BLOCK if pad <= 128 else BLOCK // 2) - 1).bit_length())
    if pairs * -(-rows // ROWS) <= places:  # many small tiles, where all of them run at once
        block_m = ROWS
    width = BLOCK // 2 if keys > BLOCK or pad > 128 else BLOCK
    block_n = max(16, 1 << (min(keys, width) - 1).bit_length())
    programs = pairs * -(-rows // block_m)
    warps = 4
    if places and pairs * -(-rows // BLOCK) > MANY * places and max(block_m, block_n) * pad <= ONE_WARP:
        warps = 1
    elif programs <= places and block_m < BLOCK and max(block_m, block_n) * pad >= WIDE:
        warps = 8
    crowded = programs > 2 * places
    stages = 1 if keys <= block_n else 2 if crowded or pad > 128 else 3  # copies: in 99 KiB of shared memory (sm_89)
    return Tile(block_m, block_n, warps, stages), crowded


def short_attention(call: KernelCall) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return output, log-sum-exp and row maxima, computed in one launch."""
    (batch, _, rows, dim), kv_heads = call.q.shape, call.k.shape[1]
    pad = pad_dim(dim)
    out, lse = call.outputs()
    top = call.row_maxima(lse)
    pairs, rows_of_group = batch * kv_heads, call.group * rows
    places = 0 if call.options.batch_invariant else processors(call.q.device)
    tile, crowded = tile_for(pad, rows_of_group, call.keys, pairs, places)
    tiles = -(-rows_of_group // tile.block_m)
    limit = at_most(REGISTERS, call.q.device) if crowded and pad <= 128 else {}
    launch(
        short_kernel, (pairs * tiles, 1, 1),
        (call.q, call.k, call.v, out, lse, lse if call.mask is None else call.mask,
         lse if call.sinks is None else call.sinks, lse if top is None else top),
        (*strides_of(call.q), *strides_of(call.k), *strides_of(call.v), *strides_of(out),
         *strides_of(lse.unsqueeze(-1)), *call.mask_strides, kv_heads, call.group, tiles, rows, call.keys, *call.limits,
         call.unit, call.ratio),
        {"MASK": call.mask_kind, "CAUSAL": call.banded, "D": dim, "D_PAD": pad, "BLOCK_M": tile.block_m,
         "BLOCK_N": tile.block_n, "DROPPED": call.dropped, **call.flags, "SINKS": call.sinks is not None,
         "MAXIMA": call.max_logits, "STEP": step_of(call.q, call.k, call.v, out),
         "WHOLE": call.keys <= tile.block_n},
        num_warps=tile.warps, num_stages=tile.stages, **limit,
    )  # fmt: skip
    return out, lse, top
