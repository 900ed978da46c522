"""Launch the kernel of half a step of power iteration."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from pasa.ops.spectral.half_step_kernel import half_step_kernel

PROGRAMS = 1024  # programs of a launch: about 8 for each multiprocessor of a large GPU
LEAST_ROWS = 16  # the fewest rows of a product on tensor cores
TILE = 8192  # elements of a tile of weights; three tiles are in flight at a time


def launch(weight: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return W t and |t|^2, where t = Wᵀ y / |y|, for weights (H, D, d) and y (H, G, D) in FP32.

    The weights have 16 bits and are contiguous. Programs add their sums in any order, so the last
    bits change from call to call.
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
