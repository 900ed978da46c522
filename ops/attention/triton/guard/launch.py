"""Launch the kernels that guard a device's own fused attention, without reading anything back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from pasa.ops.attention.call import Call
from pasa.ops.attention.triton.guard.kernel import bias_kernel, finish_kernel, scan_kernel, shift_columns_kernel
from pasa.ops.attention.triton.kernel_call import STEP, WIDEST, KernelCall, step_of, strides_of, visible_keys
from pasa.ops.attention.triton.launcher import Launch, at_most, early, launched_early, prepared
from pasa.ops.attention.triton.tiles import pad_dim
from pasa.ops.devices import on_device

TILE = 4096  # elements of K of a program, at least
SPLITS = 32  # programs that share the keys of a column; each reads what all of them found
WIDTH, NARROW = 64, 16  # columns: HBM delivers 64 bytes at a time; fewer if all keys fit then into one program
ONE_PASS = 2048  # keys of a program that needs no scan before it
ELEMENTS = 4096  # of a warp: reductions across its threads take as long for a quarter of them
LOOK = 8192  # elements of outputs, and as many of queries, that a program asks for before it waits for one
REPAIR = 2048  # elements of the rows that are repaired together
REGISTERS = 64  # of a thread: eight programs of a multiprocessor read at a time; without a limit, three
PROGRAMS = 256, 4096  # that look at log-sum-exps alone, or at outputs as well
ROWS_A_KEY = 2  # rows of a program for each key of its head, from which on it looks at values and not at outputs
LONGEST = 1024  # rows of a program
ONE_WARP = 512  # elements of all rows of a program that one warp looks at, and waits for no other
REDONE = 1024  # elements, for each warp, of a tile of keys, where a row is attended to again
BIAS_TILE, BIAS_KEYS = 4096, 1024  # the most elements and keys of a mask that a program writes as numbers at a time


Attended: TypeAlias = tuple[Tensor, Tensor]  # output and log-sum-exp


class Bias(NamedTuple):
    """Hold the launch of `bias_kernel` for masks of one geometry.

    Attributes
    ----------
    launch : Launch
    shape : tuple of int
        Of the mask: (1 or B, 1 or Hq, 1 or Sq, Skv).
    marks_keys : bool
        Whether the kernel finds the keys that some row sees.
    expanded : tuple of int
        (B, Hq, Sq, Skv).
    """

    launch: Launch
    shape: tuple[int, ...]
    marks_keys: bool
    expanded: tuple[int, ...]

    @classmethod
    def of(cls, mask: Tensor, expanded: tuple[int, ...], *, marks_keys: bool = False) -> Bias:
        """Prepare the launch for a mask, bool or FP16, of up to 4 dimensions, whose rows are all keys."""
        mask = _as_bytes(mask).expand((*(1,) * (4 - mask.dim()), *mask.shape[:-1], expanded[3]))
        for axis in range(3):  # a mask may come expanded
            mask = mask.narrow(axis, 0, 1) if mask.stride(axis) == 0 else mask
        shape = tuple(mask.shape)
        (batch, heads, rows, keys), kind = shape, "bool" if mask.dtype == torch.uint8 else "float"
        block_n = min(BIAS_KEYS, max(16, 1 << (keys - 1).bit_length()))
        block_m = min(BIAS_TILE // block_n, 1 << (rows - 1).bit_length())
        tiles, bias, empty = -(-rows // block_m), *_bias_buffers(mask, shape)
        with on_device(mask):
            step = prepared(
                bias_kernel, (batch * heads * tiles, 1, 1), (mask, bias, empty, empty),
                (*mask.stride(), bias.stride(2), heads, rows, keys, tiles),
                {"MASK": kind, "MARK_KEYS": marks_keys, "BLOCK_M": block_m, "BLOCK_N": block_n}, num_warps=4,
            )  # fmt: skip
        return cls(step, shape, marks_keys, expanded)

    def run(self, mask: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the bias (B, Hq, Sq, Skv), bytes (B, Hq, Sq), and None or bytes (B, Skv) with `marks_keys`.

        Bytes are 1 for rows without keys, and for keys that some row sees.
        """
        bias, empty = _bias_buffers(mask, self.shape)
        seen = None
        if self.marks_keys:
            seen = torch.zeros((self.shape[0], self.shape[3]), dtype=torch.uint8, device=mask.device)
        self.launch((_as_bytes(mask), bias, empty, empty if seen is None else seen))
        seen = None if seen is None else seen.expand(self.expanded[0], -1)
        return bias.expand(self.expanded), empty.expand(self.expanded[:3]), seen


def _as_bytes(mask: Tensor) -> Tensor:
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def _bias_buffers(mask: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Allocate a bias with aligned rows, and a byte for each row."""
    padded = (*shape[:3], shape[3] + -shape[3] % STEP)
    bias = torch.empty(padded, dtype=torch.float16, device=mask.device)[..., : shape[3]]
    return bias, torch.empty(shape[:3], dtype=torch.uint8, device=mask.device)


class Shift(NamedTuple):
    """Hold the launches that subtract anchors from keys of one geometry.

    Attributes
    ----------
    launches : tuple of Launch
        That of `scan_kernel`, if one program does not hold all keys, and that of `shift_columns_kernel`.
    parts : tuple of int
        The shape of what the first leaves for the second.
    """

    launches: tuple[Launch, ...]
    parts: tuple[int, ...]

    @classmethod
    def of(cls, k: Tensor, v: Tensor, seen: Tensor | None) -> Shift:
        """Prepare the launches for keys and values (B, Hkv, Skv, D) and `seen`, as in `run`; last strides are 1."""
        (batch, heads, keys, dim), padded = k.shape, 1 << (k.shape[2] - 1).bit_length()
        width = min(pad_dim(dim), NARROW if padded <= ONE_PASS else WIDTH)
        block = padded if padded <= ONE_PASS else max(TILE // width, padded // SPLITS)
        splits = -(-keys // block)
        made = k.new_empty(1)  # as those that `run` allocates
        tensors = k, v, k if seen is None else _as_bytes(seen), made, made, made
        slices = batch * heads * -(-dim // width)
        stride_seen = 0 if seen is None else seen.stride(0)
        numbers = *strides_of(k), *strides_of(v), stride_seen, heads, keys, splits
        sizes = {"HAS_SEEN": seen is not None, "D": dim, "WIDTH": width, "BLOCK": block}
        warps = max(1, min(16, block * width // ELEMENTS))
        grid = slices * splits, 1, 1
        whole = sizes | {"WHOLE": splits == 1, "PARTS": SPLITS}
        shift = prepared(shift_columns_kernel, grid, tensors, numbers, whole, num_warps=warps)
        scan = splits > 1 and prepared(scan_kernel, grid, tensors[:4], numbers, sizes, num_warps=warps)
        return cls((scan, shift) if scan else (shift,), (batch, heads, splits, 3, dim))

    def run(self, k: Tensor, v: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return K' (as k, contiguous), and anchors beside the largest |v| of each column (B, Hkv, 2, D).

        Anchors are those of `head_anchors`, and NaN in columns with a key that is not finite. `seen`, (B, Skv) bool or
        UINT8 with contiguous rows, marks the keys that some row sees; the others are ignored. None marks all.
        """
        shifted = torch.empty_like(k, memory_format=torch.contiguous_format)
        anchors = k.new_empty((*k.shape[:2], 2, k.shape[3]))
        tensors = k, v, k if seen is None else _as_bytes(seen), k.new_empty(self.parts), shifted, anchors
        *scan, shift = self.launches
        for each in scan:
            each(tensors[:4])
        shift(tensors)
        return shifted, anchors


class Finish(NamedTuple):
    """Hold the launches around the fused attention for calls of one geometry.

    To prepare a launch takes the host ten times as long as the launch.

    Attributes
    ----------
    launch : Launch
        Of `finish_kernel`.
    strides : (tuple of int, tuple of int)
        Of the results that it was prepared for.
    bias : Bias, optional
    shift : Shift, optional
    """

    launch: Launch
    strides: tuple[tuple[int, ...], tuple[int, ...]]
    bias: Bias | None
    shift: Shift | None

    def attend(
        self, fused: Callable[..., Attended], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool,
        scale: float,
    ) -> Attended | None:  # fmt: skip
        """Attend by `fused`; return None if the results lie otherwise than in the first call."""
        added = empty = seen = anchors = None
        if mask is not None and self.bias is not None:
            added, empty, seen = self.bias.run(mask)
        shifted = k
        if self.shift is not None:
            shifted, anchors = self.shift.run(k, v, seen)
        out, lse = fused(q, shifted, v, added, causal, scale)
        if (out.stride(), lse.stride()) != self.strides:
            return None
        mask, anchors, empty = (
            out if mask is None else _as_bytes(mask), out if anchors is None else anchors,
            out if empty is None else empty,
        )  # fmt: skip
        self.launch((out, lse, q, k, v, mask, anchors, empty))
        return out, lse


def attend_guarded(
    call: Call, attend: Callable[[Call], Attended], fused: Callable[..., Attended], kept: list[Finish] | None = None,
    *, anchored: bool, queries: bool = True,
) -> Attended:  # fmt: skip
    """Return output and log-sum-exp of a dense FP16 call, whose fused attention is `attend`.

    Parameters
    ----------
    call, attend
        `attend` is called once, with the keys that it is to use.
    fused
        Called instead below a mask, bool or FP16, with q, k, v, the mask as numbers to add, False and the scale. It may
        return anything for rows without keys.
    kept : list of Finish, optional
        Empty at the first call of a geometry, which leaves its launch there.
    anchored : bool
        Subtract anchors from the keys, and look for keys that are not finite. Otherwise a NaN is found in the results,
        and an infinite key whose score is -inf has the weight 0.
    queries : bool
        Look for queries that are not finite, because the fused attention may hide one.
    """
    kernel_call = KernelCall.of(call)  # whose rows are contiguous, as the kernels assume
    with on_device(call.q):
        if call.mask is None or call.mask.dtype not in (torch.bool, torch.float16):
            shift, k, anchors = _shifted(kernel_call, visible_keys(kernel_call), anchored)
            attended = attend(replace(call, k=k) if anchored else call)
            return finish(kernel_call, anchors, *attended, kept, shift=shift, queries=queries)
        bias = Bias.of(call.mask, (*call.q.shape[:3], call.k.shape[2]), marks_keys=anchored)
        added, empty, seen = bias.run(call.mask)
        shift, k, anchors = _shifted(kernel_call, seen, anchored)
        out, lse = fused(call.q, k if anchored else call.k, call.v, added, False, call.scale)
        return finish(kernel_call, anchors, out, lse, kept, bias, empty, shift=shift, queries=queries)


def _shifted(call: KernelCall, seen: Tensor | None, anchored: bool) -> tuple[Shift | None, Tensor, Tensor | None]:
    """Return what `Shift.run` returns, and the launches; or the keys themselves if not `anchored`."""
    if not anchored:
        return None, call.k, None
    if seen is not None and seen.stride(1) != 1:
        seen = seen.contiguous()
    shift = Shift.of(call.k, call.v, seen)
    return shift, *shift.run(call.k, call.v, seen)


def finish(
    call: KernelCall, anchors: Tensor | None, out: Tensor, lse: Tensor, kept: list[Finish] | None = None,
    bias: Bias | None = None, empty: Tensor | None = None, *, shift: Shift | None = None, queries: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return output and log-sum-exp of the call itself, from those of the kernel, which may be written into.

    Parameters
    ----------
    call : KernelCall
        With the keys as they were before `Shift.run`.
    anchors : Tensor, optional
        The second result of `Shift.run`; None for keys without anchors.
    kept : list of Finish, optional
        As in `attend_guarded`.
    bias : Bias, optional
        What made a bias of the mask, to be kept.
    empty : Tensor, optional
        The second result of `Bias.run`: rows that get 0 and -inf, whatever the kernel made of them.
    shift : Shift, optional
        What made the anchors, to be kept.
    queries : bool
        As in `attend_guarded`.
    """
    out = out if out.stride(-1) == 1 else out.contiguous()
    (batch, heads, rows, dim), keys, pad = call.q.shape, call.keys, pad_dim(call.q.shape[3])
    padded = 1 << (rows - 1).bit_length()
    block_m = min(REPAIR // pad, padded)
    busy = [batch * heads * padded // each for each in PROGRAMS]  # rows of each of so many programs
    longest = max(LONGEST, padded >> 15)  # there are at most 65,535 tiles, as there are heads
    few, many = (max(block_m, min(longest, padded, 1 << each.bit_length())) for each in busy)
    by_values = anchors is None and call.mask is None and not queries and ROWS_A_KEY * keys <= few
    block_l = many if anchors is None and not by_values else few
    tiles, warps = -(-rows // block_l), 1 if block_l * pad <= ONE_WARP else 4
    block_r = min(LOOK // (2 if queries else 1) // pad, block_l)
    left, right = (WIDEST if side < 0 else min(side, WIDEST) for side in call.window)
    right = 0 if call.is_causal else right
    tensors = (
        out, lse, call.q, call.k, call.v, out if call.mask is None else call.mask, out if anchors is None else anchors,
        out if empty is None else empty,
    )  # fmt: skip
    with on_device(out):
        step = prepared(
            finish_kernel, (batch, heads, tiles), tensors,
            (*strides_of(out), *lse.stride(), *strides_of(call.q), *strides_of(call.k), *strides_of(call.v),
             *call.mask_strides, *((0, 0, 0) if empty is None else empty.stride()),
             heads, call.group, rows, keys, left, right, call.scale),
            {"MASK": call.mask_kind, "SCANNED": anchors is not None, "EMPTY": empty is not None, "QUERIES": queries,
             "VALUES": by_values, "D": dim, "D_PAD": pad, "BLOCK_L": block_l, "BLOCK_R": block_r, "BLOCK_M": block_m,
             "BLOCK_N": REDONE * warps // pad, "PDL": early(out.device), "STEP": step_of(out, call.q, call.k, call.v)},
            num_warps=warps, **launched_early(out.device), **at_most(REGISTERS, out.device),
        )  # fmt: skip
        step(tensors)
    if kept == [] and (call.mask is None or bias is not None):
        kept.append(Finish(step, (out.stride(), lse.stride()), bias, shift))
    return out, lse
