"""A few small calls through the Triton kernels of attention, for a tool that watches each of their memory accesses.

    python -m tests.sanitize [NAME ...]
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m tests.sanitize

Run it once without the tool, so that kernels are compiled. Without PyTorch's cache every tensor is an allocation of its
own, and an access beyond its end shows. Nothing is tuned, and beside copies, fills and casts no kernel but ours runs on
the device: results are judged on the CPU. racecheck knows no mbarrier and initcheck no TMA. `control`, which runs only
if it is named, and only on Hopper, shows what they say of a kernel that is right and made of TMA, mbarriers and
specialised warps. One warp brings tiles into two places by TMA and leaves a word behind an mbarrier; four wait for a
tile, read it, give its place back, and write it, times that word, by TMA.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pasa import golden_attention
from pasa.eval.kit.exits import leave
from pasa.eval.random_calls import attention, kernels
from pasa.eval.random_calls.backends import TRITON
from pasa.eval.random_calls.cases import SEED, Params, broken
from pasa.eval.random_calls.inputs import make
from pasa.eval.random_calls.judge import count_faults
from pasa.eval.random_calls.truth import find_truth
from pasa.ops.attention.call import Call
from pasa.ops.attention.sdpa.backend import attend_visible
from pasa.ops.attention.triton.anchor_launch import shift_exact
from pasa.ops.attention.triton.guard.launch import attend_guarded

BOUND = 2.0**-5  # coarse: that a call computes the right thing is for `pasa bench soak` to say
SIZES = ("heads", "groups", "rows", "keys", "dim")
PAPER = {"recovery": "paper"}
CALLS: dict[str, tuple[tuple[int, ...], Params]] = {
    "portable-fast": ((1, 2, 40, 300, 80), {"causal": True, "block_k": 64}),
    "portable-careful": ((1, 2, 40, 300, 80), {"causal": True, "block_k": 64, "bias": 200}),
    "portable-descriptors": ((1, 2, 70, 300, 128), {"block_k": 64}),
    "portable-wide": ((1, 1, 40, 300, 256), {"block_k": 64, "bias": 200}),
    "portable-bool": ((1, 2, 40, 301, 64), {"causal": True, "mask": "bool", "bias": 20}),
    "portable-float": ((1, 2, 40, 301, 72), {"mask": "float"}),
    "portable-packed": ((1, 2, 70, 150, 64), {"causal": True, "bias": 200, "packed": True}),
    "paper": ((1, 2, 40, 150, 64), {"mask": "float", **PAPER}),
    "paper-packed": ((1, 2, 40, 150, 80), {"causal": True, "packed": True, "accumulate": "fp16", **PAPER}),
    "decode-lanes": ((1, 4, 1, 1100, 128), {}),
    "decode-lanes-careful": ((1, 7, 2, 700, 64), {"causal": True, "bias": 200}),
    "decode-tiles": ((1, 8, 5, 700, 128), {"causal": True, "bias": 200}),
    "decode-mask": ((1, 2, 3, 400, 256), {"mask": "bool"}),
    "short-decode": ((1, 4, 3, 300, 64), {"causal": True, "bias": 200}),
    "short": ((2, 2, 25, 25, 64), {"bias": 200}),
    "short-mask": ((1, 2, 70, 30, 128), {"causal": True, "mask": "float"}),
    "hopper": ((1, 2, 200, 300, 128), {}),
    "hopper-shifted": ((1, 2, 70, 300, 64), {"causal": True, "bias": 200, "garbage": "value", "where": "hidden"}),
    "hopper-pair": ((1, 28, 900, 260, 128), {}),
    "hopper-padded": ((1, 2, 200, 300, 72), {"causal": True, "bias": 200}),
    "hopper-wide": ((1, 2, 200, 300, 256), {"bias": 200}),
    "hopper-wide-padded": ((1, 2, 200, 300, 136), {"causal": True, "garbage": "value", "where": "hidden"}),
}
"""Key heads, query heads for each, rows, keys and head dim; `bias` is added to 16 channels of Q and K.

With `block_k` 64 no kernel for Hopper serves a call. A mask over 301 keys is copied.
"""


def main(names: Sequence[str] = ()) -> int:
    """Run the calls of these names, or all but `control`; return 1 if one is wrong."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    others = {"shift-before": shift_before, **GUARDED, "control": control}
    if unknown := set(names) - CALLS.keys() - others.keys():
        raise ValueError(f"{', '.join(sorted(unknown))}: choose among {', '.join((*CALLS, *others))}")
    wrong = False
    for name in names or [*CALLS, "shift-before", *GUARDED]:
        bounds = others[name](device) if name in others else run(name, device)
        wrong |= bool(bounds)
        print(f"{name:24} {'WRONG: ' + ', '.join(bounds) if bounds else 'right'}")
    return int(wrong)


def run(name: str, device: torch.device) -> list[str]:
    """Return the bounds that a call breaks."""
    sizes, how = CALLS[name]
    params: Params = attention.SIMPLEST | {"backend": TRITON, "tile": 0, "poisoned": False, "lse": True, SEED: 0}
    params |= dict(zip(SIZES, sizes, strict=True)) | how
    if how.get("packed"):  # the second of three sequences has no keys
        (rows, keys), third = (params["rows"], params["keys"]), params["rows"] // 3
        params["row_lengths"] = [third, rows // 2 - third, rows - rows // 2]
        params["key_lengths"] = [keys // 2, 0, keys - keys // 2]
    call = make(params)
    for x in (call.q, call.k):
        x[..., :16] += how.get("bias", 0)
    out, lse = (x.cpu() for x in kernels.attend(params, call.to(device)))
    truth = find_truth(call, fp16_scores=False)
    error = (out.double() - truth.out).abs().where(~truth.bad, 0.0).max()
    return broken(count_faults(truth, out, lse) | {"error": float(error) / BOUND})


def shift_before(device: torch.device) -> list[str]:
    """Run the kernel that writes K' for an NPU: K' and the anchors lack nothing of K."""
    k = (torch.randn(1, 2, 150, 80, generator=torch.Generator().manual_seed(0)) + 20).half()
    shifted, anchor = (x.cpu().float() for x in shift_exact(k.to(device), 128))
    left = shifted + anchor.repeat_interleave(128, 2)[:, :, :150] - k.float()
    return ["error"] if float(left.abs().max()) > 0 else []


def guarded(device: torch.device, kind: str, anchored: bool) -> list[str]:
    """Run the kernels that guard a fused attention, here one on the CPU, that loses a row and a row without keys."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, n, 72, generator=g).half() for heads, n in ((4, 90), (2, 700), (2, 700)))
    mask = None
    if kind != "none":
        keep = torch.rand(2, 1, 90, 700, generator=g) < 0.5
        keep[1, 0, 7] = False
        mask = keep if kind == "bool" else torch.zeros(keep.shape).half().masked_fill(~keep, -torch.inf)
    call = Call(q, k + 20.0 * anchored, v, 0.1, mask=mask)

    def attend(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        mask = None if call.mask is None else call.mask.cpu()
        out, lse = attend_visible(replace(call, q=call.q.cpu(), k=call.k.cpu(), v=call.v.cpu(), mask=mask))
        out[0, 1, 40] = torch.nan
        return out.to(device), lse.to(device)

    def fused(q, k, v, bias, is_causal, scale):  # type: ignore[no-untyped-def]
        return attend(Call(q, k, v, scale, mask=bias))

    there = replace(call, **{x: getattr(call, x).to(device) for x in ("q", "k", "v")})
    there = replace(there, mask=None if mask is None else mask.to(device))
    out, lse = attend_guarded(there, attend, fused, anchored=anchored)
    golden, golden_lse = golden_attention(call.q, call.k, call.v, attn_mask=mask, scale=0.1)
    wrong = {
        "error": float((out.cpu() - golden).abs().max()),
        "lse": float((lse.cpu().double().clamp(min=-1e6) - golden_lse.clamp(min=-1e6)).abs().max()),
    }
    return [name for name, error in wrong.items() if not error <= BOUND]


GUARDED = {
    "-".join(["guard", *([] if kind == "none" else [kind]), *["anchored"] * anchored]): partial(
        guarded, kind=kind, anchored=anchored
    )
    for kind in ("none", "bool", "float")
    for anchored in (False, True)
}


# ---- a kernel that is known to be correct

ROWS, COLUMNS, TILES, STAGES = 64, 64, 8, 2
WORD = gl.constexpr(3)


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


def control(device: torch.device) -> list[str]:
    """Run the kernel that is known to be correct."""
    source = torch.randn(TILES * ROWS, COLUMNS, device=device).half()
    out = torch.empty_like(source)
    layout = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], gl.float16)
    maps = [TensorDescriptor(x, list(x.shape), list(x.stride()), [ROWS, COLUMNS], layout) for x in (source, out)]
    scale_tiles[(1,)](*maps, TILES, STAGES, num_warps=4)
    return [] if torch.equal(out.cpu(), (source.float() * WORD.value).half().cpu()) else ["error"]


if __name__ == "__main__":
    leave(lambda: main(sys.argv[1:]))
