"""Launch the Hopper kernel: tensor maps, grids and compiled variants.

The host must be faster than the kernels, which take 30 us for a short sequence. What all calls on
tensors of one geometry share is kept as a `Plan`. Compiled kernels go directly to Triton's C
launcher, because its Python layers would specialise each argument again and fill the same tensor
maps twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import accumulate, count
from typing import Any, TypeAlias

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pasa.ops.attention.triton.anchor_kernel import anchor_kernel
from pasa.ops.attention.triton.anchor_launch import anchor_warps
from pasa.ops.attention.triton.c_launcher import Ready, fill_map, is_hooked, map_kinds
from pasa.ops.attention.triton.centre_kernel import TILE as CENTRE_TILE
from pasa.ops.attention.triton.centre_kernel import centre_kernel
from pasa.ops.attention.triton.hopper.exact_kernel import exact_kernel
from pasa.ops.attention.triton.hopper.plain_kernel import plain_kernel
from pasa.ops.attention.triton.kernel_call import STEP, KernelCall, output_dtype
from pasa.ops.attention.triton.launcher import ready_for
from pasa.ops.attention.triton.tile_math import SLICE
from pasa.ops.attention.triton.tiles import hopper_pad, processors
from pasa.ops.memory import MOST_BYTES, kept_memory, may_keep
from pasa.ops.recording import unrecorded

QUERY_BOX = 64  # query rows of a warpgroup
KEY_BOX = {64: 128, 128: 128, 256: 64}  # by padded head dimension: keys of a block
CENTRE_WARPS = 2
# By padded head dimension, copies of K and V in flight: as many as 227 KiB of shared memory hold beside Q.
STAGES = {64: 3, 128: 2, 256: 2}
L2_BYTES = 2**25  # K and V of the heads that run together: about half of the 50 MB L2 cache of an H100 or H200
LOG2E = 1.4426950408889634
# Time of a tile of two warpgroups, relative to a tile of three. At 0.667, time per row would be
# equal. H200, D = 128, no mask.
PAIR_TIME = 0.70
MOST_OF_TILES = 0.75  # queries of a group of heads become rows of one head where that leaves so many of the tiles
Bound: TypeAlias = tuple[Callable[..., None], tuple[Any, ...]]  # a launch, and what it takes
SWIZZLE = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
PLANS = 1024  # the most geometries that are cached
bound: dict[tuple[float, ...], tuple[Bound, ...]] = {}  # by number of the plan, stream, scale and addresses
numbers = count()
BOUND = 4096  # the most sets of addresses, of all geometries together, for which launches are kept: one for each layer


def hopper_attention(call: KernelCall) -> tuple[Tensor, Tensor]:
    """Attend without a dense mask on sm_90, with FP32 softmax; D is a multiple of 8 from 32 to 256.

    Four launches: the first subtracts from the keys what those of a head share, then comes plain attention with FP32
    softmax. The last two, anchors of key blocks and an exact pass over marked tiles, return at once where no tile was
    marked. Rows that are not contiguous and aligned to 16 bytes are copied.

    Returns
    -------
    out : Tensor (B, Hq, Sq, D), FP16, or BF16 where 16 bits are dropped
    lse : Tensor (B, Hq, Sq), FP32
        Natural logarithm; -inf, and 0 in `out`, for a row that sees no key.
    """
    return repeated(call)(call.q, call.k, call.v)


def repeated(call: KernelCall) -> Callable[..., tuple[Tensor, Any]]:
    """Return what attends as a call does to q, k and v of its geometry: shapes, strides, and addresses modulo 16.

    Called with `alone`, it may return None for the log-sum-exp.
    """
    return _stacked(call) if may_stack(call) else _repeated(call)


def may_stack(call: KernelCall) -> bool:
    """Return whether the queries of a group of heads, which share keys, may be rows of one head, and that saves tiles.

    A tile holds rows of one head, and few rows leave most of it empty: 38 heads of 14 rows are three tiles in place of
    38. Strides decide, and a layout in which a head holds the whole batch has other strides for one sequence alone. So
    batch-invariant calls keep their tiles: which rows share one decides which are computed again.
    """
    if call.options.batch_invariant:
        return False
    rows, tile = call.q.shape[2], QUERY_BOX * (2 if hopper_pad(call.q.shape[3]) == 256 else 3)
    adjacent = rows == 1 or call.q.stride(1) == rows * call.q.stride(2)
    apart, together = call.group * -(-rows // tile), -(-call.group * rows // tile)
    alike = rows == 1 or not call.is_causal  # a single row sees all keys
    return adjacent and alike and together <= MOST_OF_TILES * apart


def _stacked(call: KernelCall) -> Callable[..., tuple[Tensor, Any]]:
    """Return `_repeated` of a call whose groups of queries are rows of one head, with results as of the call itself."""
    batch, heads, rows, dim = call.q.shape
    stack = batch, call.k.shape[1], call.group * rows, dim
    with unrecorded():
        again = _repeated(replace(call, q=call.q.view(stack), is_causal=False))

    def unstacked(q: Tensor, k: Tensor, v: Tensor, alone: bool = False) -> tuple[Tensor, Any]:
        out, lse = again(q.view(stack), k, v, alone)
        return out.view(batch, heads, rows, dim), None if lse is None else lse.view(batch, heads, rows)

    return unstacked


def _repeated(call: KernelCall) -> Callable[..., tuple[Tensor, Any]]:
    """Return what `repeated` does, with queries as they are."""
    scale, options, is_causal, dropped = call.scale, call.options, call.is_causal, call.dropped
    tensors = call.q, call.k, call.v
    shapes, strides = (call.q.shape, call.k.shape), [x.stride() for x in tensors]
    plan = plan_for(*shapes, *strides, is_causal, dropped, call.q.device, options.batch_invariant)
    if plan is not None and not any(x.data_ptr() % 16 for x in tensors):
        keeps = may_keep(call.q)
        return lambda q, k, v, alone=False: plan.run(q, k, v, scale, keeps, alone)

    def copied(q: Tensor, k: Tensor, v: Tensor, alone: bool = False) -> tuple[Tensor, Any]:
        if plan is None:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        q, k, v = (x.clone() if x.data_ptr() % 16 else x for x in (q, k, v))
        return hopper_attention(KernelCall(q, k, v, scale, options, is_causal, dropped=dropped))

    return copied


class Plan:
    """Hold the four launches for tensors of one geometry."""

    def __init__(self, q_shape: torch.Size, k_shape: torch.Size, strides: list[list[int]], is_causal: bool,
                 dropped: int, device: torch.device, invariant: bool = False) -> None:  # fmt: skip
        batch, heads, rows, dim = q_shape
        heads_kv, keys = k_shape[1:3]
        pad = hopper_pad(dim)
        self.box = box = KEY_BOX[pad]
        pairs, blocks, part = batch * heads_kv, -(-keys // box), CENTRE_TILE.value // pad
        parts, ragged = -(-keys // part), is_causal or keys % box != 0
        section = min(batch * heads, max(1, L2_BYTES // (4 * keys * dim)) * (heads // heads_kv))
        self.device, self.lse_shape, self.dtype = device, (batch, heads, rows), output_dtype(dropped)
        self.shapes = {"q": q_shape, "k": k_shape, "shifted": k_shape, "v": k_shape, "o": q_shape}
        # Rows of the output lie as those of q do; K' is contiguous.
        order = [heads * rows * dim, dim, heads * dim, 1] if strides[0][1] < strides[0][2] else dense_strides(q_shape)
        self.strides = dict(zip("qkv", strides, strict=True)) | {"shifted": dense_strides(k_shape), "o": order}

        def sizes(tile: int) -> tuple[int, ...]:
            tiles = -(-rows // tile)
            return heads, heads // heads_kv, batch * heads, section, rows, keys, tiles, tiles * batch * heads

        # The height of a tile decides which rows are marked together, so an invariant call takes that of one entry.
        consumers = warpgroups(heads if invariant else batch * heads, rows, pad, is_causal, device)
        again = 2 if pad == 256 else 3  # warpgroups of the exact pass
        plain, exact = sizes(QUERY_BOX * consumers), sizes(QUERY_BOX * again)
        flags = is_causal, ragged
        # Of each launch its programs, and its integers with the compile-time arguments, or the two apart.
        self.centre = pairs * parts, (
            *strides[1][:3], 0, 0, 1, heads_kv, keys, parts, dim, pad, part, 1, False, False, True, STEP,
        )  # fmt: skip
        self.plain = plain[-1], plain, (*flags, consumers, STAGES[pad], dropped, dim)
        self.anchor = pairs * blocks, (
            *strides[1][:3], *strides[2][:3], 0, 0, 1, heads_kv, keys, blocks,
            dim, pad, SLICE, box, False, is_causal, False, True, True, STEP,
        )  # fmt: skip
        self.exact = min(exact[-1], processors(device)), exact, (*flags, again, STAGES[pad], dropped, dim)
        # One buffer holds what the passes over the keys find.
        held = (
            (1, torch.int32), (2 * pairs * parts, torch.float32), (pairs * blocks, torch.float32),
            (pairs * pad, torch.float16), (pairs * blocks * dim, torch.float16), (pairs * keys * dim, torch.float16),
        )  # fmt: skip
        ends = [*accumulate(-(-n * dtype.itemsize // 128) * 128 for n, dtype in held)]
        self.held = [(start, *each) for start, each in zip([0, *ends], held, strict=False)]
        self.bytes = ends[-1]
        self.bytes_alone = self.bytes + 4 * batch * heads * rows  # the log-sum-exp behind it, if nobody needs that
        early = {"launch_pdl": True}  # a kernel may start while the last programs of the previous one run
        self.kernels = (
            (centre_kernel, {"num_warps": CENTRE_WARPS}),
            (plain_kernel, {"num_warps": 4, **early}),
            (anchor_kernel, {"num_warps": anchor_warps(box, pad), **early}),
            (exact_kernel, {"num_warps": 4, **early}),
        )
        self.launchers: tuple[Ready, ...] = ()
        self.maps: list[tuple[Any, ...]] = []
        self.number = next(numbers)

    def run(self, q: Tensor, k: Tensor, v: Tensor, scale: float, keeps: bool,
            alone: bool) -> tuple[Tensor, Any]:  # fmt: skip
        """Return O (B, Hq, Sq, D) and the log-sum-exp (B, Hq, Sq), or None for it if O alone is needed.

        With `keeps`, the call may use kept memory.
        """
        # On the host, these take less of the time of torch.empty with a dtype and a device.
        out = torch.empty_strided(q.shape, self.strides["o"], dtype=self.dtype, device=q.device)
        if keeps and alone and self.bytes_alone <= MOST_BYTES:
            buffer = kept_memory(q, self.bytes_alone)
            self.launch(q, k, v, out, buffer.data_ptr() + self.bytes, buffer, scale)
            return out, None
        buffer = kept_memory(q, self.bytes) if keeps and self.bytes <= MOST_BYTES else q.new_empty(self.bytes // 2)
        lse = q.new_empty(self.lse_shape, dtype=torch.float32)
        self.launch(q, k, v, out, lse.data_ptr(), buffer, scale)
        return out, lse

    def launch(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: int, buffer: Tensor,
               scale: float) -> None:  # fmt: skip
        """Launch everything, with memory for O, of `bytes` bytes, and for the log-sum-exp at an address."""
        if not self.launchers:
            self._prepare(q, k, v, out, q.new_empty(self.lse_shape, dtype=torch.float32), buffer, scale)
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        pointers = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse, buffer.data_ptr()
        if is_hooked():
            for launcher, (programs, arguments) in zip(self.launchers, self._calls_at(scale, *pointers), strict=True):
                launcher.run((programs, 1, 1), stream, *arguments)
            return
        key = self.number, stream, scale, *pointers
        for launch, taken in bound.get(key) or self._bind(*key):
            launch(*taken)

    def _bind(self, number: int, stream: int, scale: float, *pointers: int) -> tuple[Bound, ...]:
        """Return the launches with all that they take; they are kept, because the allocator tends to reuse memory."""
        if len(bound) >= BOUND:
            bound.clear()
        launches = tuple(
            (launcher.launch, launcher.bound((programs, 1, 1), stream, arguments))
            for launcher, (programs, arguments) in zip(self.launchers, self._calls_at(scale, *pointers), strict=True)
        )
        key = number, stream, scale, *pointers
        bound[key] = launches
        return launches

    def _calls_at(self, scale: float, *pointers: int) -> tuple[tuple[int, tuple[Any, ...]], ...]:
        """Return programs and arguments of each launch, for the addresses of q, k, v, the results and the buffer."""
        q, k, v, out, lse, buffer = pointers
        parts = [buffer + offset for offset, *_ in self.held]
        maps = [
            (fill_map(at, *each), *each[1], *each[2])
            for at, each in zip((q, k, parts[-1], v, out), self.maps, strict=True)
        ]
        return self._calls(k, v, lse, parts, maps, scale)

    def _calls(self, k: Any, v: Any, lse: Any, parts: Sequence[Any], maps: Sequence[tuple[Any, ...]],
               scale: float) -> tuple[tuple[int, tuple[Any, ...]], ...]:  # fmt: skip
        """Return programs and arguments of each launch; tensors may be addresses, and tensor maps spelled out."""
        marked, longest, norms, shared, anchors, shifted = parts
        q_map, k_map, shifted_map, v_map, o_map = maps
        (centre, centre_sizes), (anchor, anchor_sizes) = self.centre, self.anchor
        (plain, plain_sizes, flags), (exact, exact_sizes, exact_flags) = self.plain, self.exact
        all_maps, exact_maps = (*q_map, *k_map, *shifted_map, *v_map, *o_map), (*q_map, *k_map, *v_map, *o_map)
        c = scale * LOG2E
        return (
            (centre, (k, k, marked, marked, shifted, shared, longest, marked, *centre_sizes)),
            (plain, (*all_maps, longest, shared, marked, lse, *plain_sizes, c, *flags)),
            (anchor, (k, v, k, norms, norms, anchors, norms, marked, *anchor_sizes)),
            (exact, (*exact_maps, norms, anchors, marked, lse, *exact_sizes, c, *exact_flags)),
        )

    def _views(self, buffer: Tensor) -> list[Tensor]:
        """Return the parts of the buffer."""
        raw = buffer.view(torch.uint8)
        return [raw[at : at + n * dtype.itemsize].view(dtype) for at, n, dtype in self.held]

    def _descriptors(self, *tensors: Tensor) -> list[tuple[Any, ...]]:
        """Return tensor maps of q, k, K', v and the output, as Triton takes them."""
        pad = hopper_pad(self.shapes["q"][3])  # TMA fills what is beyond the head dimension with zeros
        boxes = {name: [1, 1, QUERY_BOX if name in "qo" else self.box, pad] for name in self.shapes}
        return [
            (TensorDescriptor(x, list(shape), self.strides[name], boxes[name], SWIZZLE),)
            for (name, shape), x in zip(self.shapes.items(), tensors, strict=True)
        ]

    def _prepare(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, buffer: Tensor,
                 scale: float) -> None:  # fmt: skip
        """Compile what is not yet compiled for tensors like these, without launching anything."""
        parts = self._views(buffer)
        calls = self._calls(k, v, lse, parts, self._descriptors(q, k, parts[-1], v, out), scale)
        launchers = tuple(
            ready_for(kernel, arguments, options)
            for (kernel, options), (_, arguments) in zip(self.kernels, calls, strict=True)
        )
        kinds = map_kinds(launchers[1].kernel)
        self.maps = [
            (kind, list(shape), self.strides[name])
            for kind, (name, shape) in zip(kinds, self.shapes.items(), strict=True)
        ]
        self.launchers = launchers  # last, because other threads test it


def dense_strides(shape: torch.Size) -> list[int]:
    """Return the strides of a contiguous tensor (B, H, S, D)."""
    _, heads, rows, dim = shape
    return [heads * rows * dim, rows * dim, dim, 1]


@lru_cache(maxsize=PLANS)
def plan_for(
    q_shape: torch.Size, k_shape: torch.Size, q_stride: tuple[int, ...], k_stride: tuple[int, ...],
    v_stride: tuple[int, ...], is_causal: bool, dropped: int, device: torch.device,
    invariant: bool = False,
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
    return Plan(q_shape, k_shape, strides, is_causal, dropped, device, invariant)


@cache
def warpgroups(heads: int, rows: int, pad: int, is_causal: bool, device: torch.device) -> int:
    """Return three consumer warpgroups or two, whichever needs less time for all waves of tiles.

    Two are considered only for calls where they were measured to be faster, and where registers do not suffice for
    three.
    """
    if pad == 256:
        return 2
    if pad != 128 or is_causal:
        return 3
    waves = {n: -(-heads * -(-rows // (QUERY_BOX * n)) // processors(device)) for n in (2, 3)}
    return 2 if waves[2] * PAIR_TIME < waves[3] else 3
