"""Launch the kernels of the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pasa.ops.attention.triton.backward.centre_kernel import centre_kernel
from pasa.ops.attention.triton.backward.kernel import keys_kernel, queries_kernel, rows_kernel
from pasa.ops.attention.triton.backward.tiles import BACKWARD
from pasa.ops.attention.triton.kernel_call import KernelCall, strides_of, visible_keys
from pasa.ops.attention.triton.launcher import launch, workspace
from pasa.ops.attention.triton.tile_math import SLICE
from pasa.ops.attention.triton.tiles import Tile, device_architecture, pad_dim


def attention_gradients(
    call: KernelCall,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    dtype: torch.dtype,
    grad_sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dQ, dK and dV of a dense call, in `dtype`, from gradients of any float type.

    The gradient of the sinks is added to `grad_sinks` (Hq,), FP32.
    """
    q, k, v = call.q, call.k, call.v
    grad_out = torch.zeros_like(q) if grad_out is None else grad_out
    grad_out = grad_out if grad_out.stride(-1) == 1 else grad_out.contiguous()
    grad_lse = None if grad_lse is None else grad_lse.float().contiguous()
    batch, heads, rows, dim = q.shape
    keys, device = call.keys, q.device
    of_rows, of_keys, of_queries = backward_tiles(device, pad_dim(dim))
    tiles = -(-rows // of_rows.block_m)
    centred, centre, largest, top_bits = prepare_keys(k, v, visible_keys(call), tiles)
    numbers = batch * heads * rows
    floats = (numbers, torch.float32)
    scaled, top, log, shift, unit = workspace(device, (numbers * dim, torch.float16), *(floats,) * 4)
    dq, dk, dv = (torch.empty(x.shape, dtype=dtype, device=device) for x in (q, k, v))
    mask, lse = top if call.mask is None else call.mask, top if grad_lse is None else grad_lse
    has_lse = {"HAS_LSE": grad_lse is not None}
    shared = {"MASK": call.mask_kind, "CAUSAL": call.banded, "WINDOW": call.has_window, "D": dim, "D_PAD": pad_dim(dim)}
    strides = (*strides_of(q), *strides_of(v))
    sizes = (rows, keys, *call.limits, call.scale)
    sinks = None if call.sinks is None else (call.sinks, torch.empty(q.shape[:3], dtype=torch.float32, device=device))
    launch(
        rows_kernel, (tiles * batch * heads, 1, 1),
        (q, centred, v, grad_out, lse, largest, mask, scaled, top, log, shift, unit, top_bits,
         top if sinks is None else sinks[0], centre, top if sinks is None else sinks[1]),
        (*strides, *strides_of(grad_out), *call.mask_strides, heads, call.group, tiles, *sizes),
        shared | has_lse | {"SINKS": sinks is not None, "BLOCK_M": of_rows.block_m, "BLOCK_N": of_rows.block_n},
        num_warps=of_rows.warps, num_stages=of_rows.stages,
    )  # fmt: skip
    if sinks is not None:  # the scores of keys get what the sink does not: dS K = dS (K - c) + (G_L - dS_s) c
        lse = -sinks[1] if grad_lse is None else grad_lse - sinks[1]
        has_lse = {"HAS_LSE": True}
        if grad_sinks is not None:
            grad_sinks += sinks[1].sum((0, 2))
    saved = (q, centred, v, scaled, top, log, shift)
    tiles = -(-keys // of_keys.block_n)
    launch(
        keys_kernel, (tiles * batch * k.shape[1], 1, 1),
        (*saved, top_bits, mask, dk, dv),
        (*strides, *call.mask_strides, heads, call.group, tiles, *sizes),
        shared | {"BLOCK_M": of_keys.block_m, "BLOCK_N": of_keys.block_n, "SPAN": of_rows.block_m},
        num_warps=of_keys.warps, num_stages=of_keys.stages,
    )  # fmt: skip
    tiles = -(-rows // of_queries.block_m)
    launch(
        queries_kernel, (tiles * batch * heads, 1, 1),
        (*saved, unit, mask, lse, centre, dq),
        (*strides, *call.mask_strides, heads, call.group, tiles, *sizes),
        shared | has_lse | {"BLOCK_M": of_queries.block_m, "BLOCK_N": of_queries.block_n},
        num_warps=of_queries.warps, num_stages=of_queries.stages,
    )  # fmt: skip
    return dq, dk, dv


def prepare_keys(k: Tensor, v: Tensor, visible: Tensor | None, tiles: int) -> tuple[Any, Any, Any, Any]:
    """Run `centre_kernel` on FP16 keys and values (B, Hkv, S, D); returns memory for kernels, not tensors.

    Returns
    -------
    centred : (B, Hkv, S, D), FP16
        K - c, exact.
    centre : (B, Hkv, D), FP32
        c: the mean of each column on a grid, or 0.
    largest : (B, Hkv, slices), FP32
        Largest |v| of every SLICE columns.
    most : (B, Hkv, tiles), INT32
        Filled by `rows_kernel`.
    """
    batch, heads, length, dim = k.shape
    slices = -(-dim // SLICE)
    parts = (k.numel(), torch.float16), *((batch * heads * n, torch.float32) for n in (dim, slices))
    centred, centre, largest, top_bits = workspace(k.device, *parts, (batch * heads * tiles, torch.int32))
    seen = k if visible is None else visible.contiguous().view(torch.uint8)
    launch(
        centre_kernel, (batch * heads, slices, 1),
        (k, v, seen, centred, centre, largest, top_bits),
        (*strides_of(k), *strides_of(v), 0 if visible is None else seen.stride(0), heads, length, tiles),
        {"D": dim, "BLOCK": 256, "HAS_VISIBLE": visible is not None},
        num_warps=4,
    )  # fmt: skip
    return centred, centre, largest, top_bits


def backward_tiles(device: torch.device, pad: int) -> tuple[Tile, Tile, Tile]:
    """Return the tiles of the three backward passes over score tiles, for a padded head dimension."""
    by_dim = BACKWARD[device_architecture(device)]
    rows, keys, queries = by_dim[min(d for d in by_dim if d >= pad)]
    return Tile(*rows), Tile(*keys), Tile(*queries)
