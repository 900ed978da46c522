"""Launches the kernels of the backward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from pasa.ops.attention.backward_kernel import centre_kernel, keys_kernel, queries_kernel, rows_kernel
from pasa.ops.attention.tiles import backward_tiles
from pasa.ops.attention.triton_call import Call, strides_of
from pasa.ops.shift_keys.triton_backend import pad_dim
from pasa.ops.shift_keys.triton_kernel import SLICE
from pasa.ops.triton_launch import launch

LARGEST_BITS = 15  # operands stay at or below 2^15: FP16 ends at 65504


def gradients(
    call: Call, grad_out: Tensor, grad_lse: Tensor | None, visible: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV of a call that is not packed, in `dtype`.

    Parameters
    ----------
    grad_out : Tensor (B, Hq, Sq, D)
        Any float type, last stride 1.
    grad_lse : Tensor (B, Hq, Sq), FP32, contiguous; optional
    visible : Tensor (B, Skv), bool, optional
        Which keys some query sees.
    """
    q, v = call.q, call.v
    batch, heads, rows, dim = q.shape
    keys = call.keys
    centred, centre = centre_keys(call.k, visible)
    unit = units(call, grad_out, grad_lse, visible)
    scaled = torch.empty(q.shape, dtype=torch.float16, device=q.device)
    top, log, shift = (torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) for _ in range(3))
    dq, dk, dv = (torch.empty(x.shape, dtype=dtype, device=q.device) for x in (q, call.k, v))
    mask, lse = top if call.mask is None else call.mask, top if grad_lse is None else grad_lse
    has_lse = {"HAS_LSE": grad_lse is not None}
    shared = {"MASK": call.mask_kind, "CAUSAL": call.is_causal, "D": dim, "D_PAD": pad_dim(dim)}
    of_rows, of_keys, of_queries = backward_tiles(q.device, pad_dim(dim))
    strides = (*strides_of(q), *strides_of(v))
    tiles = -(-rows // of_rows.block_m)
    launch(
        rows_kernel, (tiles * batch * heads, 1, 1),
        (q, centred, v, grad_out, lse, unit, mask, scaled, top, log, shift),
        (*strides, *strides_of(grad_out), *call.mask_strides, heads, call.group, tiles, rows, keys, call.scale),
        shared | has_lse | {"BLOCK_M": of_rows.block_m, "BLOCK_N": of_rows.block_n},
        num_warps=of_rows.warps, num_stages=of_rows.stages,
    )  # fmt: skip
    saved = (q, centred, v, scaled, top, log, shift, unit, mask)
    tiles = -(-keys // of_keys.block_n)
    launch(
        keys_kernel, (tiles * batch * call.k.shape[1], 1, 1),
        (*saved, dk, dv),
        (*strides, *call.mask_strides, heads, call.group, tiles, rows, keys, call.scale),
        shared | {"BLOCK_M": of_keys.block_m, "BLOCK_N": of_keys.block_n},
        num_warps=of_keys.warps, num_stages=of_keys.stages,
    )  # fmt: skip
    tiles = -(-rows // of_queries.block_m)
    launch(
        queries_kernel, (tiles * batch * heads, 1, 1),
        (*saved, lse, centre, dq),
        (*strides, *call.mask_strides, heads, call.group, tiles, rows, keys, call.scale),
        shared | has_lse | {"BLOCK_M": of_queries.block_m, "BLOCK_N": of_queries.block_n},
        num_warps=of_queries.warps, num_stages=of_queries.stages,
    )  # fmt: skip
    return dq, dk, dv


def centre_keys(k: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """K - c for FP16 keys (B, Hkv, S, D), exactly, and c (B, Hkv, D) in FP32: by column the mean on a grid, or 0."""
    batch, heads, length, dim = k.shape
    centred = torch.empty(k.shape, dtype=torch.float16, device=k.device)
    centre = torch.empty((batch, heads, dim), dtype=torch.float32, device=k.device)
    seen = k if visible is None else visible.contiguous().view(torch.uint8)
    launch(
        centre_kernel, (batch * heads, -(-dim // SLICE), 1),
        (k, seen, centred, centre),
        (*strides_of(k), 0 if visible is None else seen.stride(0), heads, length),
        {"D": dim, "WIDTH": SLICE, "BLOCK": 256, "HAS_VISIBLE": visible is not None},
        num_warps=4,
    )  # fmt: skip
    return centred, centre


def units(call: Call, grad_out: Tensor, grad_lse: Tensor | None, visible: Tensor | None) -> Tensor:
    """Powers of two (B, Hkv) by which the gradients of the heads that share keys are divided.

    |dS| <= P (2 D max|G_O| max|v| + |G_L|), which with P <= 1 becomes at most 2^15; so does |G_O|. Not by Euclidean
    norms: the square of 1e-30 is 0.
    """
    values = torch.linalg.vector_norm(call.v, torch.inf, dim=-1, dtype=torch.float32)
    if visible is not None:
        values = values.masked_fill(~visible[:, None], 0.0)
    outs = torch.linalg.vector_norm(grad_out, torch.inf, dim=(2, 3), dtype=torch.float32)
    outs = outs.unflatten(1, (-1, call.group)).amax(-1)
    largest = 2.0 * call.q.shape[-1] * outs * values.amax(-1)
    if grad_lse is not None:
        slopes = grad_lse.abs().where(grad_lse.isfinite(), 0.0)  # of rows that see no key, or NaN all the same
        largest += slopes.amax(-1).unflatten(1, (-1, call.group)).amax(-1)
    exponent = torch.frexp(torch.maximum(largest, outs)).exponent - LARGEST_BITS
    return torch.exp2(exponent.clamp(-100, 100).float())
