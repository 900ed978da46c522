"""Launch the decode kernels, which split the keys of a few query rows among programs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pasa.ops.attention.triton.decode.kernel import decode_kernel, merge_kernel
from pasa.ops.attention.triton.decode.lanes_kernel import decode_lanes_kernel
from pasa.ops.attention.triton.decode.tile_math import LONG
from pasa.ops.attention.triton.kernel_call import KernelCall, step_of, strides_of
from pasa.ops.attention.triton.launcher import early, launch, launched_early, workspace
from pasa.ops.attention.triton.tiles import Tile, device_architecture, pad_dim, processors

LANES = 4  # warps of a program; one with separate keys is called a lane (lanes_kernel.py)
MERGE_TILE = 4096  # elements of O that a program of the merge holds: 32 for each thread
# The most elements of O where the program holds whole rows: 128 for each of 512 threads, which
# spills registers.
MERGE_ROW = 65536
# Overhead of a split (queries, anchor, its share of the merge), in blocks of 128 keys.
SPLIT_COST = 2
# Keys are divided for calls with more rows than `KernelCall.decodes` allows, too, if tiles of so many rows would occupy
# at most a quarter of the multiprocessors, and there are at least so many keys.
TILE_ROWS, OCCUPIED_PART, LONG_KEYS = 64, 4, 1024
# The most rows of a tile where the head dimension is above 128. With twice as many, an anchor spills registers, and
# without one a bias sends every split to the exact pass.
WIDE_ROWS = 32

# Batch-invariant calls split the keys of a sequence by its length alone: into splits of at least so many keys, twice as
# many where that makes fewer than `LONG` splits, and at most as many as occupy the device with one sequence, but no
# more than this number, because every merge has room for them. A split costs as much as `SPLIT_COST` more blocks of 64
# keys, so one of 1,024 keys costs 12 % where programs run one after another.
FIXED_KEYS, FIXED_SPLITS = 1024, 64


@dataclass(frozen=True)
class Splits:
    """Hold the buffers in which splits leave their results for the merge.

    kernel.py describes the arrays, and lanes_kernel.py those of the lanes. There are `count` splits of
    `keys` keys; the last splits have fewer keys or none. `marked` has one entry for each program of the
    lanes. `low` holds bounds of the lanes' maxima, or the low parts of maxima that pages with anchors
    need. The merge sums as if there were `room` splits, because the order of a sum depends on that number.
    """

    part: Any
    state: Any
    anchor: Any
    framed: Any
    marked: Any
    low: Any
    count: int
    keys: int
    block_m: int
    room: int

    @classmethod
    def of(cls, call: KernelCall, count: int, keys: int, block_m: int, room: int = 0) -> Splits:
        """Allocate the buffers, uninitialised; without `room` there is room for `count` splits."""
        splits, dim, device = tiles_of(call, block_m) * count, call.q.shape[-1], call.q.device
        parts = ((splits * block_m * dim, torch.float32), (splits * block_m * 2, torch.float32),
                 (splits * dim, torch.float16), (splits, torch.int32), (splits, torch.int32),
                 (splits * block_m * 2, torch.float32))  # fmt: skip
        part, state, anchor, framed, marked, low = workspace(device, *parts)
        return cls(part, state, anchor, framed, marked, low, count, keys, block_m, room or count)


def tiles_of(call: KernelCall, block_m: int) -> int:
    """Return the number of tiles of the query rows that share a key head, for all key heads."""
    return call.q.shape[0] * call.k.shape[1] * -(-call.group * call.q.shape[2] // block_m)


def rows_of_tile(call: KernelCall) -> int:
    """Return the most rows in a tile, of those that share a key head."""
    together = call.group * call.q.shape[2]
    if pad_dim(call.q.shape[-1]) > 128:
        return min(together, WIDE_ROWS)
    return together if call.decodes else min(together, TILE_ROWS)


def divides_keys(call: KernelCall) -> bool:
    """Return whether `decode` serves a call: with few rows, or with so few tiles that much of the device is idle.

    Batch-invariant calls do not count tiles, because that number depends on the batch.
    """
    if call.decodes or call.cu_q is not None or call.options.batch_invariant:
        return call.decodes
    few = tiles_of(call, TILE_ROWS) <= processors(call.q.device) // OCCUPIED_PART
    return few and call.keys >= LONG_KEYS and not call.has_window


def decode(call: KernelCall) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attend from a few rows: split the keys, redo in an exact pass the splits that a bound marks, then merge."""
    rows, dim = call.q.shape[2:]
    pad = pad_dim(dim)
    lane = keys_of_a_lane(device_architecture(call.q.device), pad)
    if lane and call.mask is None and call.group * rows <= 16 and not (call.has_window or call.softcap):
        return merge(call, _lanes(call, lane))
    tile, exact_tile = decode_tiles(device_architecture(call.q.device), pad, rows_of_tile(call))
    tiles = tiles_of(call, tile.block_m)
    blocks = -(-call.k.shape[2] // tile.block_n)
    if call.options.batch_invariant:
        each = tile.block_n * -(-blocks // fixed_splits(call.k.shape[2], *fixed_limits(call)))
    else:
        programs = processors(call.q.device) * (8 // tile.warps)
        each = tile.block_n * blocks_of_a_split(programs, blocks, tiles, split_limit(call))
    splits = Splits.of(call, -(-call.k.shape[2] // each), each, tile.block_m)
    _tiles(call, splits, tile, exact=False)
    if not call.softcap:
        _tiles(call, splits, exact_tile, exact=True)
    return merge(call, splits)


def merge(call: KernelCall, splits: Splits, shared_frame: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """Merge the results of all splits; `shared_frame` means that the splits of a head share a frame."""
    batch, heads, rows, dim = call.q.shape
    pad = pad_dim(dim)
    out, lse = call.outputs(strided=False)
    top = call.row_maxima(lse)
    padded = 1 << max(splits.room - 1, 0).bit_length()
    columns, warps = min(pad, max(16, MERGE_TILE // padded)), 4
    if call.dropped:  # a row's first columns decide how to round the others
        columns, warps = pad, min(16, max(4, padded * pad // 2048))
    launch(
        merge_kernel, (batch * heads * rows, pad // columns, 1),
        (call.q, splits.part, splits.state, splits.anchor, splits.framed, splits.low, out, lse,
         lse if call.sinks is None else call.sinks, lse if top is None else top),
        (*strides_of(call.q), heads, call.group, rows, splits.count, call.unit),
        {"NATS": call.mask_kind == "float", **sizes(dim, splits.block_m), "SPLITS": padded,
         "COLUMNS": columns, "DROPPED": call.dropped, "SHARED_FRAME": shared_frame, "PDL": early(call.q.device),
         "SINKS": call.sinks is not None, "MAXIMA": call.max_logits},
        num_warps=warps, **launched_early(call.q.device),
    )  # fmt: skip
    return out, lse, top


def _lanes(call: KernelCall, block_n: int) -> Splits:
    """Attend from a few rows without a mask; every lane of a program becomes a split."""
    kv_heads, keys = call.k.shape[1:3]
    rows, dim = call.q.shape[2:]
    device, pairs = call.q.device, call.q.shape[0] * kv_heads
    blocks = -(-keys // (LANES * block_n))
    if call.options.batch_invariant:
        each = -(-blocks // fixed_splits(keys, *fixed_limits(call)))
    else:
        each = blocks_of_a_split(processors(device), blocks, pairs, split_limit(call) // LANES)
    programs = -(-blocks // each)
    splits = Splits.of(call, programs * LANES, each * block_n, 16)
    for exact in (False, True):
        launch(
            decode_lanes_kernel, (pairs * programs * (LANES if exact else 1), 1, 1),
            (call.q, call.k, call.v, splits.part, splits.state, splits.anchor, splits.framed, splits.marked,
             splits.low),
            (*strides_of(call.q), *strides_of(call.k), *strides_of(call.v),
             kv_heads, call.group, rows, keys, programs, call.scale),
            {"EXACT": exact, "CAUSAL": call.is_causal, **sizes(dim, 16, block_n), "LANES": LANES, "PDL": early(device),
             "STEP": step_of(call.q, call.k, call.v)},
            **lane_options(device, exact),
        )  # fmt: skip
    return splits


def lane_options(device: torch.device, exact: bool) -> dict[str, Any]:
    """Return the compiler's options for a pass of the lanes; in the exact pass, one warp attends to a lane."""
    stages = 1 if exact else lane_stages(device_architecture(device))
    return {"num_warps": 1 if exact else LANES, "num_stages": stages, **launched_early(device)}


def _tiles(call: KernelCall, splits: Splits, tile: Tile, exact: bool) -> None:
    """Run the fast or the exact pass of `decode_kernel`."""
    kv_heads, keys = call.k.shape[1:3]
    rows, dim = call.q.shape[2:]
    launch(
        decode_kernel, (tiles_of(call, tile.block_m) * splits.count, 1, 1),
        (call.q, call.k, call.v, splits.part, splits.state, splits.anchor, splits.framed,
         call.q if call.mask is None else call.mask),
        (*strides_of(call.q), *strides_of(call.k), *strides_of(call.v), *call.mask_strides,
         kv_heads, call.group, rows, keys, splits.count, splits.keys, *call.limits, call.unit, call.ratio),
        {"MASK": call.mask_kind, "CAUSAL": call.banded, **sizes(dim, tile.block_m, tile.block_n),
         "EXACT": exact, "PDL": early(call.q.device), **call.flags, "STEP": step_of(call.q, call.k, call.v)},
        num_warps=tile.warps, num_stages=tile.stages, **launched_early(call.q.device),
    )  # fmt: skip


def sizes(dim: int, block_m: int, block_n: int | None = None) -> dict[str, int]:
    """Return the compile-time sizes of the decode kernels."""
    sizes = {"D": dim, "D_PAD": pad_dim(dim), "BLOCK_M": block_m}
    return sizes if block_n is None else sizes | {"BLOCK_N": block_n}


def keys_of_a_lane(architecture: str, pad: int) -> int:
    """Return the keys in a lane's block, or 0 where no kernel with lanes serves."""
    if pad > 128 or architecture == "ascend":
        return 0
    return 16 if pad > 64 else 32


def lane_stages(architecture: str) -> int:
    """Return the pipeline stages of the lanes.

    A stage is 32 KiB of K and V, and weights of columns take 16. So 4 stages take 144 KiB of shared
    memory, and 2 take 80 of the 99 KiB that sm_89 has. With 3, a multiprocessor of sm_90 runs two
    programs, which hide each other's start and end.
    """
    return {"sm_89": 2, "sm_90": 3}.get(architecture, 4)


@cache
def decode_tiles(architecture: str, pad: int, rows: int) -> tuple[Tile, Tile]:
    """Return the tiles of the fast pass and of the exact pass, for `rows` query rows of a key head together."""
    height = max(16, 1 << (rows - 1).bit_length())
    if height <= 32 and pad <= 128:
        return Tile(height, 64, 4, 3), Tile(height, 64, 4, 2)
    warps = min(8, max(4, height // 16))  # as `warps_for` on Hopper; elsewhere, 128 rows of 4 warps spill registers
    block_n, stages = 64 if architecture == "sm_90" and pad <= 128 else 32, 3
    if architecture == "sm_90" and height == 64:
        stages = 2  # two programs run on a multiprocessor; with three stages, the shared memory holds one
    if architecture == "sm_89" and pad > 128 and height > 16:  # which has 99 KiB of shared memory
        block_n, stages = 16 if height > 64 else 32, 2
    return Tile(height, block_n, warps, stages), Tile(height, min(block_n, 32), warps, 2)


def split_limit(call: KernelCall) -> int:
    """Return the most splits that the merge kernel accepts."""
    return MERGE_ROW // pad_dim(call.q.shape[-1]) if call.dropped else MERGE_ROW


def fixed_limits(call: KernelCall) -> tuple[int, int]:
    """Return the least keys of a split and the most splits of a batch-invariant call.

    They depend on the device and on the number of key heads, and the most splits are a power of two.
    """
    programs = max(1, processors(call.q.device) // call.k.shape[1])
    return FIXED_KEYS, min(FIXED_SPLITS, 1 << (programs.bit_length() - 1))


def fixed_splits(keys: int, least: int, most: int) -> int:
    """Return the number of splits of a batch-invariant call: at most `most`, as `parts_of` finds it on the device."""
    least *= 2 if keys < LONG.value * least else 1
    return min(most, max(1, -(-keys // least)))


@cache
def blocks_of_a_split(programs: int, blocks: int, pairs: int, limit: int) -> int:
    """Return the number of key blocks of a split that gives the shortest estimated time, for at most `limit` splits.

    Programs run in waves of `programs`. A program takes the time of its blocks, plus `SPLIT_COST`.
    """

    def time(splits: int) -> int:
        return -(-pairs * splits // programs) * (-(-blocks // splits) + SPLIT_COST)

    splits = min(range(1, max(1, min(blocks, limit, 4 * programs // pairs)) + 1), key=time)
    return max(1, -(-blocks // splits))
