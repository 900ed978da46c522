"""Launches the kernels that shift keys."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pasa.ops.shift_keys.triton_kernel import SLICE, anchor_kernel, shift_kernel
from pasa.ops.triton_launch import launch

SLICE_ON_NPU = 32  # columns of a block of 128 keys that its unified buffer holds (ops/attention/README.md)


class Packing(NamedTuple):
    """Key blocks of packed sequences.

    Attributes
    ----------
    table, first : Tensor
        `pasa.ops.packed.tile_table` of the keys.
    cu_seqlens : Tensor (sequences + 1,), INT32
    """

    table: Tensor
    first: Tensor
    cu_seqlens: Tensor


class KeyBlocks(NamedTuple):
    """What is known of every block of keys.

    Attributes
    ----------
    norms : Tensor (B, Hkv, blocks), FP32
        The largest norm of a key, infinite where something is not finite (`anchor_kernel`).
    anchors : Tensor (B, Hkv, blocks, D), FP16
        Subtractable from the block's keys without rounding, or 0, by column.
    marked : Tensor (1,), INT32
        0; more after a pass of attention that left work for a second one.
    """

    norms: Tensor
    anchors: Tensor
    marked: Tensor


def pad_dim(dim: int) -> int:
    """Tiles have powers of two on every side, and at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def anchor_warps(block: int, pad: int) -> int:
    """Warps of `anchor_kernel`, so that several of its blocks are on their way in every multiprocessor."""
    return 4 if block * pad <= 8192 else 8


def find_anchors(
    k: Tensor,
    v: Tensor,
    block: int,
    *,
    visible: Tensor | None = None,
    packing: Packing | None = None,
    check_values: bool = False,
) -> KeyBlocks:
    """Norms and anchors of FP16 keys (B, Hkv, S, D) or packed (T, Hkv, D), one for every `block` keys.

    An anchor is kept only where FP32 accumulation gains from it.

    Parameters
    ----------
    k, v : Tensor
        Last stride 1.
    block : int
        A power of two.
    visible : Tensor (B, S), bool, optional
        Which keys some query sees; the others do not count.
    packing : Packing, optional
        For packed keys.
    check_values : bool
        Look for NaN and infinity in `v` as well.
    """
    heads, length, batch, blocks = _extent(k, block, packing)
    found = KeyBlocks(
        torch.empty((batch, heads, blocks), dtype=torch.float32, device=k.device),
        k.new_empty((batch, heads, blocks, k.shape[-1])),
        torch.empty(1, dtype=torch.int32, device=k.device),
    )
    seen, seen_stride = _bytes(visible, k)
    table, cu = (packing.table, packing.cu_seqlens) if packing else (found.marked, found.marked)
    pad = pad_dim(k.shape[-1])
    launch(
        anchor_kernel, (batch * blocks * heads, 1, 1),
        (k, v, seen, table, cu, found.anchors, found.norms, found.marked),
        (*_strides(k, packing), *_strides(v, packing), seen_stride, heads, length, blocks),
        {"D": k.shape[-1], "D_PAD": pad, "WIDTH": min(pad, SLICE), "BLOCK": block, "HAS_VISIBLE": visible is not None,
         "CHECK_VALUES": check_values, "VARLEN": packing is not None, "EARLY": False},
        num_warps=anchor_warps(block, pad),
    )  # fmt: skip
    _home(found.anchors, visible, block)
    return found


def shift_exact(
    k: Tensor, block: int, *, visible: Tensor | None = None, packing: Packing | None = None
) -> tuple[Tensor, Tensor]:
    """K' = K - anchor, exactly, and every anchor (B, Hkv, blocks, D): for a device that shifts before, not in the loop.

    Parameters
    ----------
    k, block, visible, packing
        As in `find_anchors`.
    """
    heads, _, batch, blocks = _extent(k, block, packing)
    anchor = k.new_empty((batch, heads, blocks, k.shape[-1]))
    shifted = _shift(k, anchor, (0.0, 0.0), block, visible, packing, gemm=False)
    _home(anchor, visible, block)
    return shifted, anchor


def shift_paper(
    k: Tensor,
    matrix: tuple[float, float],
    block: int,
    *,
    visible: Tensor | None = None,
    engine: Literal["gemm", "mean"] = "gemm",
) -> Tensor:
    """K' = M K of whole blocks of keys (B, Hkv, S, D).

    Parameters
    ----------
    k, block, visible
        As in `find_anchors`.
    matrix : (float, float)
        Diagonal and off-diagonal entry of M, the second without its sign.
    engine : "gemm" or "mean"
        The matrix engine, as the paper argues, or the mean; the same numbers up to FP32 rounding.
    """
    return _shift(k, None, matrix, block, visible, None, gemm=engine == "gemm")


def _shift(
    k: Tensor,
    anchor: Tensor | None,
    matrix: tuple[float, float],
    block: int,
    visible: Tensor | None,
    packing: Packing | None,
    gemm: bool,
) -> Tensor:
    heads, length, batch, blocks = _extent(k, block, packing)
    shifted = torch.empty_like(k, memory_format=torch.contiguous_format)
    seen, seen_stride = _bytes(visible, k)
    table, cu = (packing.table, packing.cu_seqlens) if packing else (shifted, shifted)
    pad = pad_dim(k.shape[-1])
    width = min(pad, SLICE_ON_NPU) if k.device.type == "npu" else pad
    launch(
        shift_kernel, (batch * blocks * heads, -(-k.shape[-1] // width), 1),
        (k, seen, table, cu, shifted, shifted if anchor is None else anchor),
        (*matrix, *_strides(k, packing), seen_stride, *_strides(shifted, packing), heads, length, blocks),
        {"D": k.shape[-1], "WIDTH": width, "BLOCK": block, "HAS_VISIBLE": visible is not None,
         "EXACT": anchor is not None, "GEMM": gemm, "VARLEN": packing is not None},
        num_warps=4 if block * width <= 8192 else 8,
    )  # fmt: skip
    return shifted


def _home(anchors: Tensor, visible: Tensor | None, block: int) -> None:
    """Give the first block, in whose frame scores are counted, the anchor of the first block with a key that is seen.

    Behind padding its own is 0, and every offset would be as large as the scores.
    """
    if visible is not None:
        first = visible.to(torch.uint8).argmax(1) // block  # of equal ones it is the first
        anchors[:, :, 0] = anchors[torch.arange(len(first), device=first.device), :, first]


def _extent(k: Tensor, block: int, packing: Packing | None) -> tuple[int, int, int, int]:
    """Heads, length, batch size and number of blocks."""
    if packing is not None:
        return k.shape[1], k.shape[0], 1, packing.table.shape[0]
    return k.shape[1], k.shape[2], k.shape[0], -(-k.shape[2] // block)


def _strides(x: Tensor, packing: Packing | None) -> tuple[int, int, int]:
    """Of batch, head and token."""
    if packing is not None:
        return 0, x.stride(1), x.stride(0)
    return x.stride(0), x.stride(1), x.stride(2)


def _bytes(visible: Tensor | None, k: Tensor) -> tuple[Tensor, int]:
    if visible is None:
        return k, 0
    seen = visible.contiguous().view(torch.uint8)
    return seen, seen.stride(0)
