"""Sorts the score tiles of a masked call: those that every row sees whole need no mask, hidden ones are left out."""

import triton
import triton.language as tl

INF = tl.constexpr(float("inf"))


@triton.jit
def mask_tiles_kernel(
    p_mask,  # (B, H, Sq, Skv), bytes or floats
    p_order,  # (B, H, row tiles, key tiles)
    p_counts,  # (B, H, row tiles, 2)
    p_seen,  # (B, H, row tiles, Skv): whether some row of the tile sees the key
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    heads,
    row_tiles,
    key_tiles,
    rows,
    keys,
    MASK: tl.constexpr,  # "bool" or "float"
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One tile of query rows of one mask, over all key tiles."""
    o_work = tl.cast(tl.program_id(0), tl.int64)
    o_tile = o_work % row_tiles
    o_row = o_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    p_rows = p_mask + (o_work // row_tiles // heads) * stride_mask_b + (o_work // row_tiles % heads) * stride_mask_h
    p_rows += o_row[:, None] * stride_mask_m
    p_own = p_order + o_work * key_tiles
    whole = 0
    partial = 0
    for tile in range(key_tiles):
        o_key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
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
            m_band = o_key[None, :] <= o_row[:, None] + (keys - rows)
            m_seen = m_seen & m_band
            m_plain = m_plain & m_band
        b_any = tl.max(tl.where(m_seen, 1, 0), 0)
        tl.store(p_seen + o_work * keys + o_key, b_any.to(tl.uint8), mask=o_key < keys)
        # a ragged tile is loaded under the mask's bounds; rows beyond the last one are not stored by anyone
        m_open = m_plain | (o_row >= rows)[:, None]
        is_whole = tl.min(tl.min(tl.where(m_open, 1, 0), 1), 0) == 1
        is_partial = (tl.max(b_any, 0) == 1) & (is_whole == 0)
        tl.store(p_own + whole, tile, mask=is_whole)
        tl.store(p_own + key_tiles - 1 - partial, tile, mask=is_partial)
        whole += tl.where(is_whole, 1, 0)
        partial += tl.where(is_partial, 1, 0)
    tl.store(p_counts + 2 * o_work, whole)
    tl.store(p_counts + 2 * o_work + 1, partial)
