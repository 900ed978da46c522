"""Launches the kernel of half a step of power iteration."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from pasa.ops.spectral.half_step_kernel import half_step_kernel

PROGRAMS = 1024  # some 8 for each multiprocessor of a large GPU
LEAST_ROWS = 16  # of a product on tensor cores
TILE = 8192  # elements of a piece, of which three are on their way


def launch(weight: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """W t and |t|^2 of t = Wᵀ y / |y| for weight (H, D, d), contiguous, in 16 bits, and y (H, G, D) FP32.

    Sums of programs are added in any order: the last bits change from call to call.
    """
    heads, dim, columns = weight.shape
    group = y.shape[1]
    sums = torch.zeros(heads * group * (dim + 1), device=y.device)
    out, square = sums[: heads * group * dim].view(heads, group, dim), sums[heads * group * dim :].view(heads, group)
    width = TILE // dim
    count = triton.cdiv(columns, width)
    pieces = triton.cdiv(count, max(1, min(count, PROGRAMS // heads)))
    half_step_kernel[heads, triton.cdiv(count, pieces)](
        weight,
        y.contiguous(),
        out,
        square,
        columns,
        pieces,
        GROUP=group,
        BLOCK_G=max(LEAST_ROWS, triton.next_power_of_2(group)),
        DIM=dim,
        BLOCK_C=width,
        num_warps=4,
        num_stages=3,
    )
    return out, square
