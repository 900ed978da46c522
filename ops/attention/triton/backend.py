"""The backend `triton`: chooses the family of kernels that serves a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

from pasa.ops.attention.call import Call, Results, capturing
from pasa.ops.attention.spec import gradients as spec
from pasa.ops.attention.spec.pages import attend_gathered
from pasa.ops.attention.triton import c_launcher
from pasa.ops.attention.triton.backward.launch import attention_gradients
from pasa.ops.attention.triton.decode.launch import decode, divides_keys
from pasa.ops.attention.triton.decode.paged_launch import paged_attention
from pasa.ops.attention.triton.kernel_call import KernelCall, Packing
from pasa.ops.attention.triton.launcher import DIRECT, launch
from pasa.ops.attention.triton.paged.launch import write_pages
from pasa.ops.attention.triton.paper.launch import paper_attention
from pasa.ops.attention.triton.prefill.launch import prefill_attention
from pasa.ops.attention.triton.rounding_kernel import rounding_kernel
from pasa.ops.attention.triton.short.launch import is_short, short_attention
from pasa.ops.attention.triton.tiles import hopper_pad, pad_dim, processors
from pasa.ops.attention.triton.watch.launch import count_scores
from pasa.ops.devices import on_device
from pasa.ops.packed import tile_table
from pasa.ops.recording import repeat_whole

__all__ = ["attend", "count_scores", "gradients", "write_pages"]

# What the Hopper kernels serve: padded head dimensions, their step, and `block_k`; above D = 128 an anchor has 64 keys.
# TMA needs rows of multiples of 16 bytes.
HOPPER_PADS, HOPPER_STEP, HOPPER_BLOCK = (64, 128, 256), 8, 128
Family: TypeAlias = Callable[[KernelCall], tuple[Tensor, Tensor, Tensor | None]]
ROUNDED = 2048  # elements of a tile in the separate rounding launch; an NPU's unified buffer holds no more


def attend(call: Call) -> Results:
    """Attend as the reference does, except that the exact recovery keeps score tiles in FP32 (prefill/kernel.py).

    So accumulate="fp16" changes the published recovery alone. Cumulative lengths are checked on the
    host unless a graph is being captured. A call over pages never waits for a GPU; on an NPU its
    pages are gathered first, and lengths are read back. Anchors of pages save time and change no guarantee, so they
    are left aside where their kernel does not compile.
    """
    if call.pages is not None and call.q.device.type == "npu":
        return attend_gathered(attend, call)
    if call.pages is not None and not c_launcher.PAGE_ANCHORS:
        call = replace(call, pages=call.pages._replace(key_anchors=None))
    if call.cu_k is not None and not capturing(call.q):
        call.edges()
    with on_device(call.q):
        out, lse, top = _family(kernel_call := KernelCall.of(call))(kernel_call)
        largest = kernel_call.of_heads(top)
    return Results(out if out.dtype == call.q.dtype else out.to(call.q.dtype), lse, largest)


def _family(call: KernelCall) -> Family:
    """Return the launcher that serves a call.

    Code for an NPU cannot branch on data around a matrix product, so `portable_attention` serves all
    of its calls.
    """
    if call.pages is not None:
        return paged_attention
    exact = call.options.precision == "pasa" and call.options.recovery == "exact"
    if exact and call.q.device.type != "npu" and is_short(call):
        return short_attention
    if exact and call.q.device.type != "npu" and divides_keys(call):
        return decode
    return _hopper() if hopper_serves(call) else portable_attention


def gradients(
    call: Call, grad_out: Tensor | None, grad_lse: Tensor | None, grad_sinks: Tensor | None = None
) -> spec.Gradients:
    """Return gradients as `spec.gradients` does, with FP16 products summed in FP32, but for calls with a soft cap."""
    if call.q.device.type == "npu" or call.softcap:
        return spec.gradients(call, grad_out, grad_lse, grad_sinks=grad_sinks)
    with on_device(call.q):
        half = replace(call, q=call.q.half(), k=call.k.half(), v=call.v.half())
        return attention_gradients(KernelCall.of(half), grad_out, grad_lse, call.q.dtype, grad_sinks)


def hopper_serves(call: KernelCall) -> bool:
    """Return whether the kernels for Hopper serve this call; they need sm_90 and a version of Triton that has Gluon."""
    options = call.options
    exact = options.precision == "pasa" and options.recovery == "exact" and options.block_k == HOPPER_BLOCK
    plain = exact and call.mask is None and not call.features
    dim = call.q.shape[-1]
    fits = dim % HOPPER_STEP == 0 and hopper_pad(dim) in HOPPER_PADS
    return plain and fits and _is_hopper(call.q.device)


@cache
def _hopper() -> Family:
    from pasa.ops.attention.triton.hopper.launch import repeated  # Gluon, which other versions of Triton lack

    return with_own_plans(repeated)


def with_own_plans(repeated: Callable[[KernelCall], Callable[..., tuple[Tensor, Tensor]]]) -> Family:
    """Return the family of a launcher that keeps plans itself, so that a plan of the call calls it as a whole.

    `repeated` returns what attends to q, k and v of the call's geometry, and keeps no tensor of the call.
    """

    def family(call: KernelCall) -> tuple[Tensor, Tensor, None]:
        return *repeat_whole(repeated(call), call.q, call.k, call.v), None

    return family


@cache
def _is_hopper(device: torch.device) -> bool:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return DIRECT


def portable_attention(call: KernelCall) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attend to whole sequences on any device: exact recovery, published recovery, or plain flash attention.

    Returns output, log-sum-exp and the largest score of each row, which the published recovery lacks.
    """
    if call.dropped and call.q.device.type == "npu":
        return rounded_after(call)
    packing, options = None, call.options
    if call.cu_k is not None:
        packing = Packing(*tile_table(call.cu_k, options.block_k, call.k.shape[0]), call.cu_k)
    if options.precision == "pasa" and options.recovery == "paper":
        return (*paper_attention(call, packing), None)
    return prefill_attention(call, packing)


def rounded_after(call: KernelCall) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run `portable_attention` with FP32 output, and round the output in a separate launch."""
    wide, lse, top = portable_attention(replace(call, dropped=0, out_dtype=torch.float32))
    out = torch.empty_like(wide, dtype=call.out_dtype)
    dim, pad, rows = wide.shape[-1], pad_dim(wide.shape[-1]), lse.numel()
    block = min(16, ROUNDED // pad)
    launch(
        rounding_kernel, (min(-(-rows // block), 2 * processors(wide.device)), 1, 1), (wide, out), (rows,),
        {"D": dim, "D_PAD": pad, "BLOCK_M": block, "DROPPED": call.dropped},
    )  # fmt: skip
    return out, lse, top
