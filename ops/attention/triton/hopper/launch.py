"""Launch the Hopper kernel: tensor maps, grids and compiled variants.

The host must be faster than the kernels, which take 30 us for a short sequence. What all calls on
tensors of one geometry share is kept as a `Plan`. Compiled kernels go directly to Triton's C
launcher, because its Python layers would specialise each argument again and fill the same tensor
maps twice.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from pasa.ops.attention.triton.anchor_kernel import anchor_kernel
from pasa.ops.attention.triton.anchor_launch import anchor_warps
from pasa.ops.attention.triton.hopper.kernel import attention_kernel
from pasa.ops.attention.triton.kernel_call import KernelCall, output_dtype
from pasa.ops.attention.triton.launcher import Ready
from pasa.ops.attention.triton.tile_math import SLICE
from pasa.ops.attention.triton.tiles import processors

QUERY_BOX, KEY_BOX = 64, 128  # query rows of a warpgroup, keys of a block
BOXES = (QUERY_BOX, KEY_BOX, KEY_BOX, QUERY_BOX)  # of Q, K, V and O
SECOND_WARPGROUPS = 3
STAGES = {64: 3, 128: 2}  # copies of K and V in flight: as many as 227 KiB of shared memory hold beside Q
L2_BYTES = 2**25  # K and V of the heads that run together: about half of the 50 MB L2 cache of an H100 or H200
LOG2E = 1.4426950408889634
# Time of a tile of two warpgroups, relative to a tile of three. At 0.667, time per row would be
# equal. H200, D = 128, no mask.
PAIR_TIME = 0.70
SWIZZLE = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
PLANS = 1024  # the most geometries that are cached
MAPS = 64  # the most sets of addresses cached for one geometry


def hopper_attention(call: KernelCall) -> tuple[Tensor, Tensor]:
    """Attend without a dense mask on sm_90, with FP32 softmax; D is 64 or 128.

    Three launches: norms and anchors of the keys, plain attention with FP32 softmax, and an exact
    pass over the tiles that the plain pass gave up, with anchors subtracted where needed. Rows that
    are not contiguous and aligned to 16 bytes are copied.

    Returns
    -------
    out : Tensor (B, Hq, Sq, D), FP16, or BF16 where 16 bits are dropped
    lse : Tensor (B, Hq, Sq), FP32
        Natural logarithm; -inf, and 0 in `out`, for a row that sees no key.
    """
    q, k, v = call.q, call.k, call.v
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
        q, k, v = (x.clone() if x.data_ptr() % 16 else x for x in (q, k, v))
    plan = plan_for(q.shape, k.shape, q.stride(), k.stride(), v.stride(), call.is_causal, call.dropped, q.device)
    if plan is None:
        return hopper_attention(replace(call, q=q.contiguous(), k=k.contiguous(), v=v.contiguous()))
    return plan.run(q, k, v, call.scale)


class Plan:
    """Hold the three launches for tensors of one geometry."""

    def __init__(self, q_shape: torch.Size, k_shape: torch.Size, strides: list[list[int]], is_causal: bool,
                 dropped: int, device: torch.device) -> None:  # fmt: skip
        batch, heads, rows, dim = q_shape
        heads_kv, keys = k_shape[1:3]
        self.device, self.shapes, self.lse_shape = device, (q_shape, k_shape, k_shape, q_shape), (batch, heads, rows)
        self.dtype = output_dtype(dropped)
        self.strides = [*strides, [heads * rows * dim, rows * dim, dim, 1]]
        group, blocks = heads // heads_kv, -(-keys // KEY_BOX)
        section = min(batch * heads, max(1, L2_BYTES // (4 * keys * dim)) * group)
        ragged = is_causal or keys % KEY_BOX != 0
        self.passes = []
        for second in (False, True):
            consumers = SECOND_WARPGROUPS if second else warpgroups(batch * heads, rows, dim, is_causal, device)
            tiles = -(-rows // (QUERY_BOX * consumers))
            work = tiles * batch * heads
            programs = min(work, processors(device)) if second else work
            sizes = (heads, group, batch * heads, section, rows, keys, tiles, work)
            self.passes.append((programs, sizes, (is_causal, ragged, second, consumers, STAGES[dim], dropped)))
        # K and V for anchor_kernel, whose norms, mark and anchors share one buffer
        self.blocks = batch * heads_kv * blocks
        self.anchor_offset = -(-(4 * self.blocks + 4) // 16) * 16
        self.anchor_sizes = (
            *strides[1][:3], *strides[2][:3], 0, heads_kv, keys, blocks,
            dim, dim, SLICE, KEY_BOX, False, is_causal, False, True,
        )  # fmt: skip
        self.ready: tuple[Ready, ...] = ()
        self.maps: list[tuple[Any, ...]] = []
        self.filled: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def run(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return O (B, Hq, Sq, D) and the log-sum-exp (B, Hq, Sq)."""
        dim = self.shapes[0][3]
        # On the host, new_empty and empty_like take a third of the time of torch.empty with a dtype
        # and a device.
        buffer = q.new_empty(self.anchor_offset // 2 + dim * self.blocks)
        if not self.ready:
            self._compile(q, k, v, buffer, scale)
        stream = driver.active.get_current_stream(self.device.index)
        anchor, *passes = self.ready
        pq, pk, pv, norms = q.data_ptr(), k.data_ptr(), v.data_ptr(), buffer.data_ptr()
        marked, anchors = norms + 4 * self.blocks, norms + self.anchor_offset
        anchor.run((self.blocks, 1, 1), stream, pk, pv, pk, norms, norms, anchors, norms, marked, *self.anchor_sizes)
        # from here on the device is busy, so host time is hidden
        out = torch.empty_like(q, dtype=self.dtype, memory_format=torch.contiguous_format)
        lse = q.new_empty(self.lse_shape, dtype=torch.float32)
        common = (*self._maps_of(pq, pk, pv, out.data_ptr()), norms, anchors, marked, lse.data_ptr())
        for ready, (programs, sizes, variant) in zip(passes, self.passes, strict=True):
            ready.run((programs, 1, 1), stream, *common, *sizes, scale * LOG2E, *variant)
        return out, lse

    def _maps_of(self, *pointers: int) -> tuple[Any, ...]:
        """Return tensor maps with their sizes and strides, cached because the allocator tends to reuse memory."""
        filled = self.filled.get(pointers)
        if filled is None:
            if len(self.filled) >= MAPS:
                self.filled.clear()
            fill = driver.active.utils.fill_tma_descriptor
            maps = ((fill(at, *kind), *tail) for at, (kind, tail) in zip(pointers, self.maps, strict=True))
            filled = self.filled[pointers] = tuple(chain.from_iterable(maps))
        return filled

    def _compile(self, q: Tensor, k: Tensor, v: Tensor, buffer: Tensor, scale: float) -> None:
        """Compile what is not yet compiled for tensors like these, without launching anything."""
        dim = q.shape[3]
        lse = torch.empty(self.lse_shape, dtype=torch.float32, device=self.device)
        norms, anchors = buffer[: 2 * self.blocks].view(torch.float32), buffer[self.anchor_offset // 2 :]
        marked = buffer[2 * self.blocks :][:2].view(torch.int32)
        anchor = anchor_kernel.warmup(
            k, v, k, norms, norms, anchors, norms, marked, *self.anchor_sizes,
            num_warps=anchor_warps(KEY_BOX, dim), grid=(self.blocks,),
        )  # fmt: skip
        kernels = [anchor]
        for programs, sizes, variant in self.passes:
            key = (self.device, dim, variant)
            if key not in _kernels:
                maps = [
                    TensorDescriptor(x, list(shape), stride, [1, 1, box, dim], SWIZZLE)
                    for x, shape, stride, box in zip((q, k, v, q), self.shapes, self.strides, BOXES, strict=True)
                ]
                _kernels[key] = attention_kernel.warmup(
                    *maps, norms, anchors, marked, lse, *sizes, scale * LOG2E, *variant,
                    num_warps=4, launch_pdl=True, grid=(programs,),
                )  # fmt: skip
            kernels.append(_kernels[key])
        maps = []
        for meta, shape, stride in zip(kernels[1].metadata.tensordesc_meta, self.shapes, self.strides, strict=True):
            element = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
            kind = (meta["swizzle"], meta["elem_size"], element, meta["block_size"], list(shape), stride, 0)
            maps.append((kind, (*shape, *stride)))
        # set `ready` last, because other threads test it
        self.maps, self.ready = maps, tuple(Ready.of(kernel, spelled_out=True) for kernel in kernels)


_kernels: dict[tuple[Any, ...], Any] = {}  # compiled variants by device, head dimension and compile-time arguments


@lru_cache(maxsize=PLANS)
def plan_for(
    q_shape: torch.Size, k_shape: torch.Size, q_stride: tuple[int, ...], k_stride: tuple[int, ...],
    v_stride: tuple[int, ...], is_causal: bool, dropped: int, device: torch.device,
) -> Plan | None:  # fmt: skip
    """Return the plan of a geometry, or None for strides that a tensor map cannot express.

    TMA reads rows of contiguous elements at multiples of 16 bytes, and no repeated dimension
    (stride 0). Strides of dimensions of size 1 are never used, but are checked.
    """
    dim = q_shape[3]
    strides = [
        [*[dim if size == 1 else step for size, step in zip(shape[:3], stride[:3], strict=True)], stride[3]]
        for shape, stride in ((q_shape, q_stride), (k_shape, k_stride), (k_shape, v_stride))
    ]
    if any(stride[3] != 1 or any(step <= 0 or step % 8 for step in stride[:3]) for stride in strides):
        return None
    return Plan(q_shape, k_shape, strides, is_causal, dropped, device)


@cache
def warpgroups(heads: int, rows: int, dim: int, is_causal: bool, device: torch.device) -> int:
    """Return three consumer warpgroups or two, whichever needs less time for all waves of tiles.

    Two are considered only for calls where they were measured to be faster.
    """
    if dim != 128 or is_causal:
        return 3
    waves = {n: -(-heads * -(-rows // (QUERY_BOX * n)) // processors(device)) for n in (2, 3)}
    return 2 if waves[2] * PAIR_TIME < waves[3] else 3
