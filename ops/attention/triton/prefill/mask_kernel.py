"""Triton kernel that sorts the tiles of a masked call: seen whole, in part, or not at all."""

import triton
import triton.language as tl

from pasa.ops.attention.triton.tile_math import INF


@triton.jit(do_not_specialize=["heads", "row_tiles", "key_tiles", "rows", "right", "span"])
def mask_tiles_kernel(
    p_mask,  # (B, H, Sq, Skv), bytes or floats
    p_order,  # (B, H, row tiles, key tiles)
    p_counts,  # (B, H, row tiles, 2)
    p_seen,  # (B, H, row tiles, Skv): 1 if some row of the tile sees the key
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    heads,
    row_tiles,
    key_tiles,
    rows,
    keys,
    right,  # as `KernelCall.limits`, if WINDOW
    span,
    MASK: tl.constexpr,  # "bool" or "float"
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES: tl.constexpr,  # key tiles at once
):
    """Sort all key tiles for one tile of query rows of one mask."""
    o_work = tl.cast(tl.program_id(0), tl.int64)
    o_row = o_work % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    p_rows = p_mask + (o_work // row_tiles // heads) * stride_mask_b + (o_work // row_tiles % heads) * stride_mask_h
    p_rows += o_row[:, None] * stride_mask_m
    p_row_order = p_order + o_work * key_tiles
    whole = 0
    torn = 0
    for first in range(0, key_tiles, TILES):
        o_key = first * BLOCK_N + tl.arange(0, TILES * BLOCK_N)
        m_tile = (o_row < rows)[:, None] & (o_key < keys)[None, :]
        b_mask = tl.load(p_rows + tl.cast(o_key, tl.int64)[None, :] * stride_mask_n, mask=m_tile, other=0)
        if MASK == "bool":
            m_seen = m_tile & (b_mask != 0)
            m_plain = m_seen
        else:
            b_mask = b_mask.to(tl.float32)
            m_seen = m_tile & (b_mask != -INF)
            m_plain = m_tile & (b_mask == 0.0)
        if CAUSAL:
            if WINDOW:
                m_band = o_key[None, :] <= o_row[:, None] + (keys - rows + right)
                m_band = m_band & (o_key[None, :] >= o_row[:, None] + (keys - rows + right - span))
            else:
                m_band = o_key[None, :] <= o_row[:, None] + (keys - rows)
            m_seen = m_seen & m_band
            m_plain = m_plain & m_band
        # how many rows see a key, and for how many the mask changes nothing: two counts in one sum
        b_count = tl.sum(tl.where(m_seen, 1, 0) + tl.where(m_plain, 1 << 16, 0), 0)
        b_any = tl.where((b_count & 0xFFFF) > 0, 1, 0)
        b_all = tl.where(b_count >> 16 == tl.minimum(BLOCK_M, rows - o_work % row_tiles * BLOCK_M), 1, 0)
        tl.store(p_seen + o_work * keys + o_key, b_any.to(tl.uint8), mask=o_key < keys)
        o_tile = first + tl.arange(0, TILES)
        b_whole = tl.min(b_all.reshape(TILES, BLOCK_N), 1)
        b_torn = tl.max(b_any.reshape(TILES, BLOCK_N), 1) - b_whole
        tl.store(p_row_order + whole + tl.cumsum(b_whole, 0) - 1, o_tile, mask=b_whole == 1)
        tl.store(p_row_order + key_tiles - torn - tl.cumsum(b_torn, 0), o_tile, mask=b_torn == 1)
        whole += tl.sum(b_whole, 0)
        torn += tl.sum(b_torn, 0)
    tl.store(p_counts + 2 * o_work, whole)
    tl.store(p_counts + 2 * o_work + 1, torn)
