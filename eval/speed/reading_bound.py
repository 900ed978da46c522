# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""A kernel that only reads K and V. Its time is a lower bound for decoding, launch and ramp-up included."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pasa.eval.kit.timing import Call

BLOCK, BLOCKS_EACH, WARPS = 4096, 2, 4  # the fastest of a few settings; many programs balance the load


@triton.jit
def reading_bound(p_k, p_v, p_sum, count, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Add up BLOCKS * BLOCK elements of K and of V; the sum is stored so that the compiler keeps the loads."""
    o_first = tl.program_id(0) * (BLOCK * BLOCKS)
    b_sum = tl.zeros((BLOCK,), tl.float32)
    for start in range(o_first, o_first + BLOCK * BLOCKS, BLOCK):
        o_x = start + tl.arange(0, BLOCK)
        b_sum += tl.load(p_k + o_x, mask=o_x < count, other=0.0).to(tl.float32)
        b_sum += tl.load(p_v + o_x, mask=o_x < count, other=0.0).to(tl.float32)
    tl.store(p_sum + tl.program_id(0), tl.sum(b_sum, 0))


def prepare_read(k: Tensor, v: Tensor) -> Call:
    """Return a call that reads k and v once; both are contiguous and of one size. Its output is the partial sums."""
    programs = -(-k.numel() // (BLOCK * BLOCKS_EACH))
    sums = torch.empty(programs, dtype=torch.float32, device=k.device)

    def run() -> Tensor:
        reading_bound[(programs,)](k, v, sums, k.numel(), BLOCK, BLOCKS_EACH, num_warps=WARPS)
        return sums

    return Call(run)
