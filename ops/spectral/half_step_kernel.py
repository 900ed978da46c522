"""Triton kernel of half a step of power iteration: W Wᵀ y of every head, with one read of the weights.

A program processes pieces of the columns of one head. Its t = Wᵀy of a piece is complete, and its W t is a part of the
sum over all columns. Two separate products would read the weights twice.
"""

import triton
import triton.language as tl


@triton.jit
def half_step_kernel(
    p_weight,  # (H, D, d), BF16 or FP16
    p_y,  # (H, G, D), FP32
    p_out,  # (H, G, D), FP32, zeros: W t
    p_square,  # (H, G), FP32, zeros: |t|^2
    columns,  # d
    pieces,  # pieces of BLOCK_C columns that a program processes
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute t = Wᵀ y / |y| of some pieces of the columns, and add their parts to W t and |t|^2."""
    head, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_g, o_d = tl.arange(0, BLOCK_G), tl.arange(0, DIM)
    m_g = o_g < GROUP
    o_row = head * GROUP + o_g
    o_out = o_row[:, None] * DIM + o_d[None, :]
    b_y = tl.load(p_y + o_out, mask=m_g[:, None], other=0.0)  # (G, D)
    length = tl.sqrt(tl.sum(b_y * b_y, 1))
    b_y = (b_y / tl.where(length > 0, length, 1.0)[:, None]).to(p_weight.dtype.element_ty)
    b_out = tl.zeros((BLOCK_G, DIM), tl.float32)
    b_square = tl.zeros((BLOCK_G,), tl.float32)
    for piece in range(pieces):
        o_c = (part * pieces + piece) * BLOCK_C + tl.arange(0, BLOCK_C)
        p_tile = p_weight + (head * DIM + o_d[:, None]) * columns + o_c[None, :]
        b_weight = tl.load(p_tile, mask=o_c[None, :] < columns, other=0.0)  # (D, C)
        b_t = tl.dot(b_y, b_weight)  # (G, C)
        b_square += tl.sum(b_t * b_t, 1)
        b_out += tl.dot(b_t.to(b_weight.dtype), tl.trans(b_weight))
    tl.atomic_add(p_out + o_out, b_out, mask=m_g[:, None] & (o_d >= 0)[None, :])
    tl.atomic_add(p_square + o_row, b_square, mask=m_g)
