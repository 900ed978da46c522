"""Launch the kernels that guard a device's own fused attention, without reading anything back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from pasa.ops.attention.call import Call
from pasa.ops.attention.triton.guard.kernel import finish_kernel, scan_kernel, shift_columns_kernel
from pasa.ops.attention.triton.kernel_call import WIDEST, KernelCall, step_of, strides_of, visible_keys
from pasa.ops.attention.triton.launcher import Launch, early, launch, launched_early, prepared
from pasa.ops.attention.triton.tiles import pad_dim
from pasa.ops.devices import on_device

TILE = 4096  # elements of K of a program, at least
SPLITS = 32  # programs that share the keys of a column; each reads what all of them found
WIDTH, NARROW = 64, 16  # columns: HBM delivers 64 bytes at a time; fewer if all keys fit then into one program
ONE_PASS = 2048  # keys of a program that needs no scan before it
ELEMENTS = 4096  # of a warp: reductions across its threads take as long for a quarter of them
BLOCK_M = 32  # query rows that are looked at together
PROGRAMS = 256, 2048  # that look at log-sum-exps alone, or at outputs as well
LONGEST = 1024  # rows of a program
REDONE = 4096  # elements of a tile of keys, where a row is attended to again


class Finish(NamedTuple):
    """Hold the launch of `finish_kernel` for calls of one geometry without mask and anchors.

    To prepare a launch takes the host ten times as long as the launch.
    """

    launch: Launch
    strides: tuple[tuple[int, ...], tuple[int, ...]]

    def run(self, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Launch the kernel; return False, and do nothing, if the results lie otherwise than in the first call."""
        if (out.stride(), lse.stride()) != self.strides:
            return False
        self.launch((out, lse, q, k, v, out, out))
        return True


def attend_guarded(
    call: Call, attend: Callable[[Call], tuple[Tensor, Tensor]], kept: list[Finish] | None = None, *, anchored: bool
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of a dense FP16 call, whose fused attention is `attend`.

    Parameters
    ----------
    call, attend
        `attend` is called once, with the keys that it is to use.
    kept : list of Finish, optional
        Empty at the first call of a geometry, which leaves its launch there.
    anchored : bool
        Subtract anchors from the keys, and look for keys that are not finite. Otherwise a NaN is found in the results,
        and an infinite key whose score is -inf has the weight 0.
    """
    kernel_call = KernelCall.of(call)
    if not anchored:
        return finish(kernel_call, None, *attend(call), kept)
    k, anchors = shift_columns(kernel_call)
    return finish(kernel_call, anchors, *attend(replace(call, k=k)))


def shift_columns(call: KernelCall) -> tuple[Tensor, Tensor]:
    """Return K' (as k), and anchors beside the largest |v| of each column (B, Hkv, 2, D).

    Anchors are those of `head_anchors`, and NaN in columns with a key that is not finite.
    """
    k, dim, (batch, heads, keys) = call.k, call.k.shape[3], call.k.shape[:3]
    seen = visible_keys(call)
    seen_bytes = k if seen is None else seen.contiguous().view(torch.uint8)
    shifted = torch.empty_like(k, memory_format=torch.contiguous_format)
    anchors = k.new_empty((batch, heads, 2, dim))
    padded = 1 << (keys - 1).bit_length()
    width = min(pad_dim(dim), NARROW if padded <= ONE_PASS else WIDTH)
    block = padded if padded <= ONE_PASS else max(TILE // width, padded // SPLITS)
    splits = -(-keys // block)
    part = torch.empty((batch, heads, splits, 3, dim), dtype=k.dtype, device=k.device)
    slices = batch * heads * -(-dim // width)
    numbers = *strides_of(k), *strides_of(call.v), 0 if seen is None else keys, heads, keys, splits
    sizes = {"HAS_SEEN": seen is not None, "D": dim, "WIDTH": width, "BLOCK": block}
    warps = max(1, min(16, block * width // ELEMENTS))
    with on_device(k):
        if splits > 1:
            launch(scan_kernel, (slices * splits, 1, 1), (k, call.v, seen_bytes, part), numbers, sizes, num_warps=warps)
        launch(
            shift_columns_kernel, (slices * splits, 1, 1), (k, call.v, seen_bytes, part, shifted, anchors),
            numbers, sizes | {"WHOLE": splits == 1, "PARTS": SPLITS}, num_warps=warps,
        )  # fmt: skip
    return shifted, anchors


def finish(
    call: KernelCall, anchors: Tensor | None, out: Tensor, lse: Tensor, kept: list[Finish] | None = None
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of the call itself, from those of the kernel, which may be written into.

    Parameters
    ----------
    call : KernelCall
        With the keys as they were before `shift_columns`.
    anchors : Tensor, optional
        The second result of `shift_columns`; None for keys without anchors.
    kept : list of Finish, optional
        As in `attend_guarded`.
    """
    out = out if out.stride(-1) == 1 else out.contiguous()
    (batch, heads, rows, dim), keys, pad = call.q.shape, call.keys, pad_dim(call.q.shape[3])
    padded = 1 << (rows - 1).bit_length()
    block_m = min(BLOCK_M, padded)
    busy = batch * heads * padded // PROGRAMS[anchors is None]  # rows of each of so many programs
    block_l = max(block_m, min(LONGEST, padded, 1 << busy.bit_length()))
    tiles = -(-rows // block_l)
    left, right = (WIDEST if side < 0 else min(side, WIDEST) for side in call.window)
    right = 0 if call.is_causal else right
    tensors = (
        out, lse, call.q, call.k, call.v, out if call.mask is None else call.mask, out if anchors is None else anchors
    )  # fmt: skip
    with on_device(out):
        step = prepared(
            finish_kernel, (batch * heads * tiles, 1, 1), tensors,
            (*strides_of(out), *lse.stride(), *strides_of(call.q), *strides_of(call.k), *strides_of(call.v),
             *call.mask_strides, heads, call.group, rows, keys, tiles, left, right, call.scale),
            {"MASK": call.mask_kind, "SCANNED": anchors is not None, "D": dim, "D_PAD": pad, "BLOCK_L": block_l,
             "BLOCK_M": block_m, "BLOCK_N": REDONE // pad, "PDL": early(out.device),
             "STEP": step_of(out, call.q, call.k, call.v)},
            **launched_early(out.device),
        )  # fmt: skip
        step(tensors)
    if kept == [] and call.mask is None and anchors is None:
        kept.append(Finish(step, (out.stride(), lse.stride())))
    return out, lse
