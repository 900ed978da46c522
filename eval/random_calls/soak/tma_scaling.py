# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""A kernel known to be correct, made of what the Hopper kernel is made of, for control.py.

Warps are specialised. One brings tiles into two places by TMA and leaves a word behind an mbarrier; four wait for a
tile, read it, give its place back, and write it, times that word, by TMA.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

FACTOR = 3
WORD = gl.constexpr(FACTOR)


@gluon.jit
def _bring(desc, ring, word, full, empty, TILES: gl.constexpr, STAGES: gl.constexpr):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for i in range(TILES):
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), desc.block_type.nbytes)
        tma.async_copy_global_to_shared(desc, [i * desc.block_shape[0], 0], full.index(stage), ring.index(stage))
        if i == 0:
            word.store(gl.full([1], WORD, gl.int32, ONE))
            mbarrier.arrive(full.index(STAGES), count=1)


@gluon.jit
def _take(desc, ring, back, word, full, empty, TILES: gl.constexpr, STAGES: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(full.index(STAGES), 0)
    factor = gl.max(word.load(ONE), 0).to(gl.float16)
    for i in range(TILES):
        stage = i % STAGES
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        tile = ring.index(stage).load(LAYOUT)
        mbarrier.arrive(empty.index(stage), count=1)
        back.index(i).store(tile * factor)
        fence_async_shared()
        tma.async_copy_shared_to_global(desc, [i * desc.block_shape[0], 0], back.index(i))
    tma.store_wait(0)


@gluon.jit
def scale_tiles(source, target, TILES: gl.constexpr, STAGES: gl.constexpr):
    """What target describes = 3 times what source describes, both (TILES * ROWS, COLUMNS)."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    ring = gl.allocate_shared_memory(gl.float16, [STAGES, source.block_shape[0], source.block_shape[1]], source.layout)
    back = gl.allocate_shared_memory(gl.float16, [TILES, target.block_shape[0], target.block_shape[1]], target.layout)
    word = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES + 1):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_take, (target, ring, back, word, full, empty, TILES, STAGES)),
            (_bring, (source, ring, word, full, empty, TILES, STAGES)),
        ],
        [1],
        [24],
    )
