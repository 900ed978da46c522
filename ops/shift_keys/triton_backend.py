"""Launches the kernels that shift keys."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pasa.ops.shift_keys.triton_kernel import anchor_kernel, shift_paper_kernel


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


class Anchors(NamedTuple):
    """What `shift_exact` finds out about every block of keys; see `anchor_kernel`.

    Attributes
    ----------
    anchor : Tensor (B, Hkv, blocks, D), FP16
    stats : Tensor (B, Hkv, blocks, 4), FP32
        Largest norm of a shifted key, of a key; 1 where keys must be changed; 1 where a value is not finite.
    shifted : Tensor, shape and dtype of the keys, optional
        K', when asked for.
    """

    anchor: Tensor
    stats: Tensor
    shifted: Tensor | None


def pad_dim(dim: int) -> int:
    """Tiles have powers of two on every side, and at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def shift_exact(
    k: Tensor,
    v: Tensor,
    block: int,
    *,
    visible: Tensor | None = None,
    packing: Packing | None = None,
    check_values: bool = False,
    write_keys: bool = False,
) -> Anchors:
    """Anchors of FP16 keys (B, Hkv, S, D) or packed (T, Hkv, D), one for every `block` keys.

    Parameters
    ----------
    k, v : Tensor
        Last stride 1.
    block : int
        A power of two.
    visible : Tensor (B, S), bool, optional
        Which keys some query sees; the others enter no mean.
    packing : Packing, optional
        For packed keys.
    check_values : bool
        Look for NaN and infinity in `v` as well.
    write_keys : bool
        Keep every anchor and write K'; without it an anchor is kept only where FP32 accumulation gains from it.
    """
    heads, length, batch, blocks = _extent(k, block, packing)
    anchor = k.new_empty((batch, heads, blocks, k.shape[-1]))
    stats = torch.empty((batch, heads, blocks, 4), dtype=torch.float32, device=k.device)
    shifted = torch.empty_like(k, memory_format=torch.contiguous_format) if write_keys else None
    seen, seen_stride = _bytes(visible, k)
    table, cu = (packing.table, packing.cu_seqlens) if packing else (anchor, anchor)
    pad = pad_dim(k.shape[-1])
    anchor_kernel[(batch * blocks * heads,)](
        k, v, seen, table, cu, anchor, stats, k if shifted is None else shifted,
        *_strides(k, packing), *_strides(v, packing), seen_stride, *_strides(k if shifted is None else shifted, packing),
        heads, length, blocks,
        D=k.shape[-1], D_PAD=pad, BLOCK=block, HAS_VISIBLE=visible is not None, CHECK_VALUES=check_values,
        WRITE_KEYS=write_keys, VARLEN=packing is not None, num_warps=4 if block * pad <= 8192 else 8,
    )  # fmt: skip
    return Anchors(anchor, stats, shifted)


def shift_paper(
    k: Tensor,
    matrix: Tensor,
    block: int,
    *,
    visible: Tensor | None = None,
    packing: Packing | None = None,
    engine: Literal["gemm", "mean"] = "gemm",
) -> Tensor:
    """K' = M K for FP16 keys (B, Hkv, S, D) or packed (T, Hkv, D), block by block.

    Parameters
    ----------
    k, block, visible, packing
        As in `shift_exact`.
    matrix : Tensor (block + 1, 2), FP32
        Diagonal and off-diagonal entry of M for blocks of 0 to `block` keys.
    engine : "gemm" or "mean"
        The matrix engine, as the paper argues, or the mean; the same numbers up to FP32 rounding.
    """
    heads, length, batch, blocks = _extent(k, block, packing)
    shifted = torch.empty_like(k, memory_format=torch.contiguous_format)
    seen, seen_stride = _bytes(visible, k)
    table, cu = (packing.table, packing.cu_seqlens) if packing else (shifted, shifted)
    pad = pad_dim(k.shape[-1])
    shift_paper_kernel[(batch * blocks * heads,)](
        k, seen, table, cu, shifted, *_strides(k, packing), seen_stride, *_strides(shifted, packing),
        heads, length, blocks, matrix,
        D=k.shape[-1], D_PAD=pad, BLOCK=block, HAS_VISIBLE=visible is not None, GEMM=engine == "gemm",
        VARLEN=packing is not None, num_warps=4 if block * pad <= 8192 else 8,
    )  # fmt: skip
    return shifted


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
