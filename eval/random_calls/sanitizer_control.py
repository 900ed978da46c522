# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""A kernel that is known to be correct, to learn what compute-sanitizer says of the means it is made of.

    compute-sanitizer --tool racecheck python -m pasa.eval.random_calls.sanitizer_control

What a tool reports here it reports of any kernel made of TMA, mbarriers and specialised warps, as the Hopper kernel is.
One warp brings tiles into two places by TMA and leaves a word behind an mbarrier; four wait for a tile, read it, give
its place back, and write it, times that word, by TMA.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pasa.eval.kit.exits import leave

ROWS, COLUMNS, TILES, STAGES = 64, 64, 8, 2
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
    """Write what target describes, 3 times what source describes, both (TILES * ROWS, COLUMNS)."""
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


def main() -> int:
    """Return 0 if the result is right.

    Raises
    ------
    NotImplementedError
        Without a Hopper GPU.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise NotImplementedError(f"the control needs a GPU of sm_90, and torch {torch.__version__} finds none")
    source = torch.randn(TILES * ROWS, COLUMNS, device="cuda").half()
    out = torch.empty_like(source)
    layout = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], gl.float16)
    maps = [TensorDescriptor(x, list(x.shape), list(x.stride()), [ROWS, COLUMNS], layout) for x in (source, out)]
    scale_tiles[(1,)](*maps, TILES, STAGES, num_warps=4)
    right = torch.equal(out.cpu(), (source.float() * FACTOR).half().cpu())
    print("right" if right else "WRONG")
    return 0 if right else 1


if __name__ == "__main__":
    leave(main)
