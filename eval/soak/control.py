"""What a race detector says of the barriers themselves: a copy through TMA and mbarriers, right or wrong on purpose.

    compute-sanitizer --tool racecheck python -m pasa.eval.soak.control

The protocol is that of the Hopper kernel and nothing else: one warp brings tiles into two places by TMA, four warps
wait for a tile, read it and give its place back. Hazards that a tool reports here it reports of any such kernel.
"""

from __future__ import annotations

import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

ROWS, COLUMNS, TILES, STAGES = 64, 64, 8, 2


@gluon.jit
def _bring(desc, ring, full, empty, TILES: gl.constexpr, STAGES: gl.constexpr):
    for i in range(TILES):
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), desc.block_type.nbytes)
        tma.async_copy_global_to_shared(desc, [i * desc.block_shape[0], 0], full.index(stage), ring.index(stage))


@gluon.jit
def _take(p_out, ring, full, empty, TILES: gl.constexpr, STAGES: gl.constexpr):
    ROWS: gl.constexpr = ring.shape[1]
    COLUMNS: gl.constexpr = ring.shape[2]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    o_column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    for i in range(TILES):
        stage = i % STAGES
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        tile = ring.index(stage).load(LAYOUT)
        mbarrier.arrive(empty.index(stage), count=1)
        gl.store(p_out + (i * ROWS + o_row)[:, None] * COLUMNS + o_column[None, :], tile)


@gluon.jit
def copy_tiles(desc, p_out, TILES: gl.constexpr, STAGES: gl.constexpr):
    """p_out (TILES * ROWS, COLUMNS) = what desc describes."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    ring = gl.allocate_shared_memory(gl.float16, [STAGES, desc.block_shape[0], desc.block_shape[1]], desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_take, (p_out, ring, full, empty, TILES, STAGES)),
            (_bring, (desc, ring, full, empty, TILES, STAGES)),
        ],
        [1],
        [24],
    )


def main() -> int:
    """0 if the copy is right."""
    source = torch.randn(TILES * ROWS, COLUMNS, device="cuda").half()
    out = torch.empty_like(source)
    layout = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], gl.float16)
    desc = TensorDescriptor(source, list(source.shape), list(source.stride()), [ROWS, COLUMNS], layout)
    copy_tiles[(1,)](desc, out, TILES, STAGES, num_warps=4)
    right = bool((out == source).all())
    print("right" if right else "WRONG")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
