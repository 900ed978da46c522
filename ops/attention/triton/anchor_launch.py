"""Launch the kernels that read keys alone: norms and anchors of key blocks, and shifted keys K'."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pasa.ops.attention.triton.anchor_kernel import anchor_kernel, shift_kernel
from pasa.ops.attention.triton.centre_kernel import TILE, centre_kernel
from pasa.ops.attention.triton.kernel_call import Packing, step_of, strides_of
from pasa.ops.attention.triton.launcher import launch
from pasa.ops.attention.triton.tile_math import SLICE
from pasa.ops.attention.triton.tiles import pad_dim

PART_OF_WARP = 4096  # elements of `centre_kernel` for each warp
LEAST_PART = 64  # keys of a program, each of which reads the sample, too
SLICE_ON_NPU = 32  # most columns in a tile of 128 keys that fit an NPU's unified buffer (ops/attention/README.md)


class KeyBlocks(NamedTuple):
    """Hold the norms and anchors of all key blocks.

    Attributes
    ----------
    norms : Tensor (B, Hkv, blocks), FP32
        The largest norm of a key; infinite where an element is not finite (`anchor_kernel`).
    anchors : Tensor (B, Hkv, blocks, D), FP16
        What can be subtracted from the block's keys without rounding, column by column, or 0.
    marked : Tensor (1,), INT32
        0, or more after a pass of attention that left work for a second pass.
    """

    norms: Tensor
    anchors: Tensor
    marked: Tensor


class Centred(NamedTuple):
    """Hold the keys less what those of a head share, where that is exact, and the norms of keys.

    Attributes
    ----------
    shifted : Tensor, shape of the keys, FP16, contiguous
        K' of heads that share something; otherwise uninitialised.
    shared : Tensor (B, Hkv, D_PAD), FP16, or packed (Hkv, blocks, D_PAD)
        What K' lacks, at the first block of each sequence; uninitialised where there is no K'.
    norms : Tensor (B, Hkv, 2, parts), FP32
        The longest key of a part in K and in K'. Infinite in K where an element is not finite, and in K' where it is
        not exact, and in all parts of a head that shares nothing.
    marked : Tensor (1,), INT32
        0, or more after a pass of attention that left work for a second pass.
    part : int
        Keys of a part.
    """

    shifted: Tensor
    shared: Tensor
    norms: Tensor
    marked: Tensor
    part: int


def anchor_warps(block: int, pad: int) -> int:
    """Return the warps of `anchor_kernel`, few enough that each multiprocessor runs several of its blocks at a time."""
    return 4 if block * pad <= 8192 else 8


def find_anchors(
    k: Tensor,
    v: Tensor,
    block: int,
    *,
    visible: Tensor | None = None,
    packing: Packing | None = None,
    check_values: bool = False,
    marked: Tensor | None = None,
) -> KeyBlocks:
    """Compute norms and anchors of FP16 keys (B, Hkv, S, D) or packed (T, Hkv, D), one for every `block` keys.

    An anchor is kept only where FP32 accumulation gains from it.

    Parameters
    ----------
    k, v : Tensor
        The last stride is 1.
    block : int
        A power of two.
    visible : Tensor (B, Hkv, groups, S), UINT8, optional
        1 for keys that some query of a group sees; keys that nobody sees are ignored. The last two strides are those
        of a contiguous tensor. Where all heads see the same keys, that of the heads may be 0.
    packing : Packing, optional
        Required for packed keys.
    check_values : bool
        Also check `v` for NaN and infinity.
    marked : Tensor (1,), INT32, optional
        Compute nothing if it holds 0.
    """
    heads, length, batch, blocks = _extent(k, block, packing)
    key_blocks = KeyBlocks(
        torch.empty((batch, heads, blocks), dtype=torch.float32, device=k.device),
        k.new_empty((batch, heads, blocks, k.shape[-1])),
        torch.empty(1, dtype=torch.int32, device=k.device) if marked is None else marked,
    )
    seen, seen_strides, groups = _seen(k, visible)
    table, cu = (packing.table, packing.cu_seqlens) if packing else (key_blocks.marked, key_blocks.marked)
    pad = pad_dim(k.shape[-1])
    launch(
        anchor_kernel, (batch * blocks * heads, 1, 1),
        (k, v, seen, table, cu, key_blocks.anchors, key_blocks.norms, key_blocks.marked),
        (*strides_of(k), *strides_of(v), *seen_strides, groups, heads, length, blocks),
        {"D": k.shape[-1], "D_PAD": pad, "WIDTH": min(pad, SLICE), "BLOCK": block, "HAS_VISIBLE": visible is not None,
         "CHECK_VALUES": check_values, "VARLEN": packing is not None, "MARKED": marked is not None, "EARLY": False,
         "STEP": step_of(k, v)},
        num_warps=anchor_warps(block, pad),
    )  # fmt: skip
    return key_blocks


def centre_keys(k: Tensor, block: int, *, visible: Tensor | None = None, packing: Packing | None = None) -> Centred:
    """Subtract from FP16 keys (B, Hkv, S, D) or packed (T, Hkv, D) what those of a head share.

    Arguments as in `find_anchors`.
    """
    heads, length, batch, blocks = _extent(k, block, packing)
    dim, pad = k.shape[-1], pad_dim(k.shape[-1])
    part = min(max(TILE.value // pad, LEAST_PART), block)
    parts = blocks * (block // part) if packing else -(-length // part)
    centred = Centred(
        torch.empty_like(k, memory_format=torch.contiguous_format),
        k.new_empty((heads, blocks, pad) if packing else (batch, heads, pad)),
        torch.empty((batch, heads, 2, parts), dtype=torch.float32, device=k.device),
        torch.empty(1, dtype=torch.int32, device=k.device),
        part,
    )
    seen, seen_strides, groups = _seen(k, visible)
    table, cu = (packing.table, packing.cu_seqlens) if packing else (centred.marked, centred.marked)
    launch(
        centre_kernel, (batch * heads * parts, 1, 1),
        (k, seen, table, cu, *centred[:4]),
        (*strides_of(k), *seen_strides, groups, heads, length, parts),
        {"D": dim, "D_PAD": pad, "BLOCK": part, "PARTS": block // part, "HAS_VISIBLE": visible is not None,
         "VARLEN": packing is not None, "EARLY": False, "STEP": step_of(k)},
        num_warps=max(1, part * pad // PART_OF_WARP),
    )  # fmt: skip
    return centred


def shift_exact(
    k: Tensor, block: int, *, visible: Tensor | None = None, packing: Packing | None = None
) -> tuple[Tensor, Tensor]:
    """Return K' = K - anchor, exact, and the anchors (B, Hkv, blocks, D), for a device that shifts beforehand.

    Parameters
    ----------
    k, block, packing
        As in `find_anchors`.
    visible : Tensor (B, S), bool, optional
        Keys that some query sees; the others are ignored.
    """
    heads, _, batch, blocks = _extent(k, block, packing)
    anchor = k.new_empty((batch, heads, blocks, k.shape[-1]))
    shifted = _shift(k, anchor, (0.0, 0.0), block, visible, packing, gemm=False)
    if visible is not None:
        # The first block's frame counts for all scores. If that block is padding, its anchor is 0, and every offset
        # would be as large as the scores. So it gets the anchor of the first block with a visible key.
        first = visible.to(torch.uint8).argmax(1) // block  # of equal values, argmax returns the first
        anchor[:, :, 0] = anchor[torch.arange(len(first), device=first.device), :, first]
    return shifted, anchor


def shift_paper(
    k: Tensor,
    matrix: tuple[float, float],
    block: int,
    *,
    visible: Tensor | None = None,
    engine: Literal["gemm", "mean"] = "gemm",
) -> Tensor:
    """Multiply whole blocks of keys (B, Hkv, S, D) by the shifting matrix: K' = M K.

    Parameters
    ----------
    k, block, visible
        As in `shift_exact`.
    matrix : (float, float)
        Diagonal entry of M, and the off-diagonal entry without its sign.
    engine : "gemm" or "mean"
        Use the matrix engine, as in the paper, or subtract the mean; results are equal up to FP32
        rounding.
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
    seen = k if visible is None else visible.contiguous().view(torch.uint8)
    table, cu = (packing.table, packing.cu_seqlens) if packing else (shifted, shifted)
    pad = pad_dim(k.shape[-1])
    width = min(pad, SLICE_ON_NPU) if k.device.type == "npu" else pad
    launch(
        shift_kernel, (batch * blocks * heads, -(-k.shape[-1] // width), 1),
        (k, seen, table, cu, shifted, shifted if anchor is None else anchor),
        (*matrix, *strides_of(k), 0 if visible is None else length, *strides_of(shifted), heads, length, blocks),
        {"D": k.shape[-1], "WIDTH": width, "BLOCK": block, "HAS_VISIBLE": visible is not None,
         "EXACT": anchor is not None, "GEMM": gemm, "VARLEN": packing is not None},
        num_warps=4 if block * width <= 8192 else 8,
    )  # fmt: skip
    return shifted


def _seen(k: Tensor, visible: Tensor | None) -> tuple[Tensor, tuple[int, ...], int]:
    """Return the keys that are seen, or any tensor; strides of batch and head; and groups of queries of a head."""
    return (k, (0, 0), 1) if visible is None else (visible, visible.stride()[:2], visible.shape[2])


def _extent(k: Tensor, block: int, packing: Packing | None) -> tuple[int, int, int, int]:
    """Return heads, length, batch size and number of blocks."""
    if packing is not None:
        return k.shape[1], k.shape[0], 1, packing.table.shape[0]
    return k.shape[1], k.shape[2], k.shape[0], -(-k.shape[2] // block)
