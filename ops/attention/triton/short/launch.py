"""Launch the kernel for calls with few keys."""

from __future__ import annotations

import torch
from torch import Tensor

from pasa.ops.attention.call import capturing
from pasa.ops.attention.triton.kernel_call import KernelCall, step_of, strides_of
from pasa.ops.attention.triton.launcher import at_most, launch
from pasa.ops.attention.triton.short.kernel import short_kernel
from pasa.ops.attention.triton.tiles import Tile, device_architecture, pad_dim, processors

# Of a short sequence that few rows attend to; beyond, kernels that split keys are as fast (H100). Their three launches
# take the host longer than one, which a graph does not wait for. At head dimensions above 128 a step of the loop takes
# 3 us, and they are faster over more keys than a program holds that has a multiprocessor for itself.
DECODE_KEYS, CAPTURED_KEYS = 384, 256
# Of one that many rows attend to, where no multiprocessor has more than two tiles to do; half as many without a mask
# where the head dimension is above 128. Beyond, kernels of two passes are as fast (H100).
PROMPT_KEYS = 256
BLOCK = 64  # keys, and rows, that a program holds at a time, where there are more programs or rows
# Keys that a program of up to 32 rows holds at a time, so that it waits for memory once: where it has a multiprocessor
# for itself, or where two programs share one. K and V take 4 bytes an element of shared memory; sm_89 has 99 KiB.
ALONE_KEYS, SHARED_KEYS = 256, 128
HELD, HELD_BY_LESS = 2**15, 2**14  # elements of K
PROMPT_ELEMENTS = 4096  # of the tile that holds all keys of a head, where programs of many rows wait for others
# The most elements of a tile of Q or K that one warp holds, where there are so many programs for each multiprocessor
# that they hide each other's waiting. Four warps have a quarter of the code, which a short call loads first.
ONE_WARP, MANY = 2048, 16
# Elements of a tile for which eight warps are faster than four (H100), where every program runs at once, and has few
# rows or a head dimension above 128. On Hopper the second four would read rows that a tile of 64 rows does not have.
WIDE = 4096
ROWS = 16  # of the smallest tile
MOST_TILES = 65535  # of a key head: the second axis of a grid on CUDA
# Of a thread, where programs wait for others: four of small tiles run on a multiprocessor then, or three of larger
# ones, which would spill more of their registers (H100).
REGISTERS, MORE_REGISTERS = 128, 168


def is_short(call: KernelCall) -> bool:
    """Return whether one program goes through all keys of its rows."""
    if call.cu_k is not None or call.keys == 0:
        return False
    pad, places = pad_dim(call.q.shape[-1]), places_for(call)
    if call.decodes:
        replayed = capturing(call.q) and not call.options.batch_invariant
        most = CAPTURED_KEYS if replayed else DECODE_KEYS
        return call.keys <= (most if pad <= 128 else held(call.q.device) // pad)
    if programs(1, rows_of(call)[1], tallest(pad)) > MOST_TILES:
        return False
    few = call.keys <= min(BLOCK, PROMPT_ELEMENTS // pad)
    most = PROMPT_KEYS if pad <= 128 or call.mask is not None else PROMPT_KEYS // 2
    return few or (call.keys <= most and programs(*rows_of(call), tallest(pad)) <= 2 * places)


def places_for(call: KernelCall) -> int:
    """Return how many programs run at once, one on each multiprocessor; 0 if nothing may depend on other sequences."""
    return 0 if call.options.batch_invariant else processors(call.q.device)


def rows_of(call: KernelCall) -> tuple[int, int]:
    """Return the number of key heads of all sequences, and the rows of all heads that share one."""
    return call.q.shape[0] * call.k.shape[1], call.group * call.q.shape[2]


def tallest(pad: int) -> int:
    """Return the most rows of a tile, and the keys of one that does not hold all, for a padded head dimension."""
    return BLOCK if pad <= 128 else BLOCK // 2


def programs(pairs: int, rows: int, block_m: int) -> int:
    """Return the number of tiles."""
    return pairs * -(-rows // block_m)


def held(device: torch.device) -> int:
    """Return the most elements of K that a program can hold beside as many of V."""
    return HELD_BY_LESS if device_architecture(device) == "sm_89" else HELD


def tile_for(pad: int, keys: int, pairs: int, rows: int, places: int, held: int) -> tuple[Tile, bool]:
    """Return the tile, and whether programs wait for others.

    For a padded head dimension, the keys, and the results of `rows_of`, `places_for` and `held`.
    """
    block_m = max(ROWS, 1 << (min(rows, tallest(pad)) - 1).bit_length())
    # many small tiles, where all of them run at once or, over few keys, soon (H100)
    most = 2 * places if keys <= 2 * BLOCK else places
    block_m = min([each for each in (ROWS, 2 * ROWS) if programs(pairs, rows, each) <= most], default=block_m)
    count = programs(pairs, rows, block_m)
    crowded = count > 2 * places
    together, room, warps = (ALONE_KEYS, held, 8) if count <= places else (SHARED_KEYS, held // 2, 4)
    if block_m <= 2 * ROWS and not crowded and tallest(pad) < keys <= min(together, room // pad):
        return Tile(block_m, 1 << (keys - 1).bit_length(), warps, 1), False
    wide = pad <= 128 and (keys <= BLOCK or (rows <= ROWS and not crowded))  # fewer steps, where few rows wait for each
    block_n = max(16, 1 << (min(keys, BLOCK if wide else BLOCK // 2) - 1).bit_length())
    whole = keys <= block_n
    eight = pad > 128 or (rows <= ROWS and whole)
    warps = 4
    if places and programs(pairs, rows, BLOCK) > MANY * places and max(block_m, block_n) * pad <= ONE_WARP:
        warps = 1
    elif count <= places and block_m < BLOCK and eight and max(block_m, block_n) * pad >= WIDE:
        warps = 8
    # copies of K and V: in 99 KiB of shared memory (sm_89)
    stages = 1 if whole else 2 if crowded or block_n * pad > BLOCK * BLOCK else 3
    return Tile(block_m, block_n, warps, stages), crowded


def short_attention(call: KernelCall) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return output, log-sum-exp and row maxima, computed in one launch."""
    rows, dim, kv_heads = *call.q.shape[2:], call.k.shape[1]
    pad = pad_dim(dim)
    out, lse = call.outputs()
    top = call.row_maxima(lse)
    pairs, rows_of_group = rows_of(call)
    tile, crowded = tile_for(pad, call.keys, pairs, rows_of_group, places_for(call), held(call.q.device))
    small = max(tile.block_m, tile.block_n) * pad <= ONE_WARP
    registers = REGISTERS if small else MORE_REGISTERS
    limit = at_most(registers, call.q.device) if crowded and pad <= 128 else {}
    launch(
        short_kernel, (pairs, -(-rows_of_group // tile.block_m), 1),
        (call.q, call.k, call.v, out, lse, lse if call.mask is None else call.mask,
         lse if call.sinks is None else call.sinks, lse if top is None else top),
        (*strides_of(call.q), *strides_of(call.k), *strides_of(call.v), *strides_of(out),
         *strides_of(lse.unsqueeze(-1)), *call.mask_strides, kv_heads, call.group, rows, call.keys, *call.limits,
         call.unit, call.ratio),
        {"MASK": call.mask_kind, "CAUSAL": call.banded, "D": dim, "D_PAD": pad, "BLOCK_M": tile.block_m,
         "BLOCK_N": tile.block_n, "DROPPED": call.dropped, **call.flags, "SINKS": call.sinks is not None,
         "MAXIMA": call.max_logits, "STEP": step_of(call.q, call.k, call.v, out),
         "WHOLE": call.keys <= tile.block_n},
        num_warps=tile.warps, num_stages=tile.stages, **limit,
    )  # fmt: skip
    return out, lse, top
