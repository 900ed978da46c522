"""Triton kernel that centres the keys for the backward pass; spec/gradients.py describes the frame.

K - c is computed once and is exact, and no key is less than a third of c. Otherwise the column keeps c = 0. So one key
far from all others, such as an attention sink, leaves the bias of its columns in the scores. Gradients are then as
accurate as those of a plain backward pass.
"""

import triton
import triton.language as tl

from pasa.ops.attention.triton.tile_math import SLICE, is_finite, load_keys, on_grid, rounds

BITS_LIMIT = tl.constexpr(100)  # largest |log2| of a unit, so that products with it or its inverse stay in FP32's range
WIDTH = tl.constexpr(SLICE)  # columns of an entry of `p_largest`


@triton.jit(do_not_specialize=["heads", "length", "tiles"])
def centre_kernel(
    p_k,  # (B, Hkv, S, D)
    p_v,
    p_visible,  # (B, S) bytes: 1 for keys that some query sees
    p_centred,  # (B, Hkv, S, D) FP16, contiguous
    p_centre,  # (B, Hkv, D) FP32
    p_largest,  # (B, Hkv, slices) FP32: largest |v| of a slice's columns
    p_top_bits,  # (B, Hkv, tiles) INT32: set to the minimum, which `rows_kernel` raises
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_visible,
    heads,
    length,
    tiles,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_VISIBLE: tl.constexpr,
):
    """Subtract from WIDTH columns of a head's keys the part of their mean that all keys can lose without rounding.

    A key that no query sees becomes 0, and a key that is not finite becomes NaN. The kernel also stores the largest
    finite |v| of these columns.
    """
    o_row = tl.program_id(0)
    batch = tl.cast(o_row // heads, tl.int64)
    column = tl.program_id(1) * WIDTH
    o_n = tl.arange(0, BLOCK)
    o_d = column + tl.arange(0, WIDTH)
    p_k += batch * stride_kb
    p_v += batch * stride_vb
    p_visible += batch * stride_visible
    total = tl.zeros((WIDTH,), tl.float32)
    count = tl.zeros((WIDTH,), tl.float32)
    largest = tl.zeros((WIDTH,), tl.float32)
    lossy = tl.zeros((WIDTH,), tl.int32)
    largest_v = tl.zeros((WIDTH,), tl.float32)
    anchor = total
    for turn in tl.static_range(3):  # compute the mean, test that subtracting it is exact, subtract it
        if turn == 1:
            anchor = on_grid(total / tl.maximum(count, 1.0), largest)
        if turn == 2:
            anchor = tl.where(lossy > 0, 0.0, anchor)
        for start in range(0, length, BLOCK):
            n = length - start
            at = tl.cast(start, tl.int64)
            b_k = load_keys(p_k, o_row % heads, at, n, stride_kh, stride_kn, column, D, WIDTH, BLOCK).to(tl.float32)
            m_seen = o_n < n
            if HAS_VISIBLE:
                m_seen = m_seen & (tl.load(p_visible + start + o_n, mask=m_seen, other=0) != 0)
            m_key = m_seen[:, None] & is_finite(b_k)
            if turn == 0:
                b_clean = tl.where(m_key, b_k, 0.0)
                total += tl.sum(b_clean, 0)
                count += tl.sum(tl.where(m_key, 1.0, 0.0), 0)
                largest = tl.maximum(largest, tl.max(tl.abs(b_clean), 0))
                b_v = load_keys(p_v, o_row % heads, at, n, stride_vh, stride_vn, column, D, WIDTH, BLOCK).to(tl.float32)
                b_v = tl.where(m_seen[:, None] & is_finite(b_v), tl.abs(b_v), 0.0)
                largest_v = tl.maximum(largest_v, tl.max(b_v, 0))
            elif turn == 1:
                lossy = tl.maximum(lossy, rounds(b_k, m_key, anchor))
            else:
                b_new = tl.where(m_key, b_k - anchor[None, :], tl.where(m_seen[:, None], float("nan"), 0.0))
                p_tile = p_centred + (tl.cast(o_row, tl.int64) * length + at + o_n)[:, None] * D + o_d[None, :]
                tl.store(p_tile, b_new.to(tl.float16), mask=(o_n < n)[:, None] & (o_d < D)[None, :])
    tl.store(p_centre + o_row * D + o_d, anchor, mask=o_d < D)
    for start in range(0, tiles, BLOCK):
        tl.store(p_top_bits + o_row * tiles + start + o_n, -BITS_LIMIT, mask=start + o_n < tiles)
    tl.store(p_largest + o_row * tl.num_programs(1) + tl.program_id(1), tl.max(largest_v, 0))
