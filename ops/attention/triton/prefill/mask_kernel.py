"""Triton kernels that sort the tiles of a masked call: seen whole, in part, or not at all."""

import triton
import triton.language as tl

from pasa.ops.attention.triton.tile_math import INF

HIDDEN: tl.constexpr = tl.constexpr(0)  # states of a key tile, as the rows of a row tile see it
TORN: tl.constexpr = tl.constexpr(1)
WHOLE: tl.constexpr = tl.constexpr(2)


@triton.jit(do_not_specialize=["heads", "row_tiles", "key_tiles", "chunks", "rows", "right", "span"])
def mask_tiles_kernel(
    p_mask,  # (B, H, Sq, Skv), bytes or floats
    p_states,  # (B, H, row tiles, key tiles) bytes: HIDDEN, TORN or WHOLE
    p_seen,  # (B, H, row tiles, Skv): 1 if some row of the tile sees the key
    p_copy,  # as p_mask, if COPY: all is copied to it
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    stride_copy_b,
    stride_copy_h,
    stride_copy_m,
    heads,
    row_tiles,
    key_tiles,
    chunks,  # of TILES key tiles each
    rows,
    keys,
    right,  # as `KernelCall.limits`, if WINDOW
    span,
    MASK: tl.constexpr,  # "bool" or "float"
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES: tl.constexpr,  # key tiles of a program
    LOADED: tl.constexpr,  # rows that are loaded together; a divisor of BLOCK_M
    COUNTED: tl.constexpr,  # rows that are counted together; a divisor of LOADED
    COPY: tl.constexpr,
):
    """Find the states of TILES key tiles for one tile of query rows of one mask."""
    o_work = tl.cast(tl.program_id(0) // chunks, tl.int64)
    o_chunk = tl.program_id(0) % chunks
    o_pair = o_work // row_tiles
    first_row = tl.cast(o_work % row_tiles * BLOCK_M, tl.int32)
    o_key = o_chunk * (TILES * BLOCK_N) + tl.arange(0, TILES * BLOCK_N)
    p_keys = p_mask + o_pair // heads * stride_mask_b + o_pair % heads * stride_mask_h
    p_keys += tl.cast(o_key, tl.int64) * stride_mask_n
    p_copies = p_copy + o_pair // heads * stride_copy_b + o_pair % heads * stride_copy_h + o_key
    # Two counts in one number: how many rows see a key, and for how many the mask changes nothing.
    BOTH: tl.constexpr = 1 + (1 << 16)
    MASKED: tl.constexpr = 0 if MASK == "bool" else -INF  # an element that masks out, as all outside of the tile do
    b_counts = tl.zeros((COUNTED, TILES * BLOCK_N), tl.int32)
    for first in range(0, tl.minimum(BLOCK_M, rows - first_row), LOADED):
        for start in tl.static_range(0, LOADED, COUNTED):  # unrolled, so that its loads come first
            o_row = first_row + first + start + tl.arange(0, COUNTED)
            m_tile = (o_row < rows)[:, None] & (o_key < keys)[None, :]
            p_tile = p_keys[None, :] + (tl.cast(o_row, tl.int64) * stride_mask_m)[:, None]
            b_mask = tl.load(p_tile, mask=m_tile, other=MASKED)
            if COPY:
                p_tile = p_copies[None, :] + (tl.cast(o_row, tl.int64) * stride_copy_m)[:, None]
                tl.store(p_tile, b_mask, mask=m_tile)
            m_seen = b_mask != MASKED
            if CAUSAL:
                if WINDOW:
                    m_band = o_key[None, :] <= o_row[:, None] + (keys - rows + right)
                    m_band = m_band & (o_key[None, :] >= o_row[:, None] + (keys - rows + right - span))
                else:
                    m_band = o_key[None, :] <= o_row[:, None] + (keys - rows)
                m_seen = m_seen & m_band
            if MASK == "bool":
                b_counts += tl.where(m_seen, BOTH, 0)
            else:
                m_plain = m_seen & (b_mask == 0.0)
                b_counts += tl.where(m_seen, 1, 0) + tl.where(m_plain, 1 << 16, 0)
    b_count = tl.sum(b_counts, 0)
    b_any = tl.where((b_count & 0xFFFF) > 0, 1, 0)
    b_all = tl.where(b_count >> 16 == tl.minimum(BLOCK_M, rows - first_row), 1, 0)
    tl.store(p_seen + o_work * keys + o_key, b_any.to(tl.uint8), mask=o_key < keys)
    o_tile = o_chunk * TILES + tl.arange(0, TILES)
    b_whole = tl.min(b_all.reshape(TILES, BLOCK_N), 1)
    b_torn = tl.max(b_any.reshape(TILES, BLOCK_N), 1)
    b_state = tl.where(b_whole == 1, WHOLE, tl.where(b_torn == 1, TORN, HIDDEN))
    tl.store(p_states + o_work * key_tiles + o_tile, b_state.to(tl.uint8), mask=o_tile < key_tiles)


@triton.jit(do_not_specialize=["key_tiles"])
def order_tiles_kernel(
    p_states,  # as in `mask_tiles_kernel`
    p_order,  # (B, H, row tiles, key tiles)
    p_counts,  # (B, H, row tiles, 2)
    key_tiles,
    BLOCK: tl.constexpr,  # key tiles that are read together
    PDL: tl.constexpr,  # launched while `mask_tiles_kernel` ends
):
    """List the key tiles of one tile of query rows: whole ones from the front, torn ones from the back."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    o_work = tl.cast(tl.program_id(0), tl.int64)
    p_row_order = p_order + o_work * key_tiles
    whole = 0
    torn = 0
    for first in range(0, key_tiles, BLOCK):
        o_tile = first + tl.arange(0, BLOCK)
        b_state = tl.load(p_states + o_work * key_tiles + o_tile, mask=o_tile < key_tiles, other=HIDDEN)
        b_whole = tl.where(b_state == WHOLE, 1, 0)
        b_torn = tl.where(b_state == TORN, 1, 0)
        tl.store(p_row_order + whole + tl.cumsum(b_whole, 0) - 1, o_tile, mask=b_whole == 1)
        tl.store(p_row_order + key_tiles - torn - tl.cumsum(b_torn, 0), o_tile, mask=b_torn == 1)
        whole += tl.sum(b_whole, 0)
        torn += tl.sum(b_torn, 0)
    tl.store(p_counts + 2 * o_work, whole)
    tl.store(p_counts + 2 * o_work + 1, torn)
