"""Triton kernels that shift keys: anchors of the exact recovery, and K' of both recoveries (Eq. 10 to 12).

One source for NVIDIA GPUs, the interpreter and Ascend (through triton-ascend): pointers and masks, no inline
assembly, no target-specific call. A block of keys is `BLOCK` rows of one head; a head's last block may be shorter. On a
GPU the attention kernel subtracts anchors in its loop. An NPU's unified buffer has no room for that, so K' is written
to memory there, `WIDTH` columns of a block at a time.
"""

import triton
import triton.language as tl

from pasa.ops.attention.triton.tile_math import (
    ANCHOR_GAIN,
    FP16_MAX,
    INF,
    NORM_MARGIN,
    exact_anchor,
    in_steps,
    is_finite,
    load_keys,
)


@triton.jit
def locate_block(o_program, p_block, p_cu, heads, length, blocks, BLOCK: tl.constexpr, VARLEN: tl.constexpr):
    """Return the block of keys of a program: batch, head, block, its first key, and its number of keys.

    The first key counts from the start of the batch entry, or of the packed tokens.
    """
    o_row = o_program // blocks
    o_block = o_program - o_row * blocks
    o_batch = o_row // heads
    o_head = o_row - o_batch * heads
    if VARLEN:
        sequence = tl.load(p_block + 2 * o_block)
        used = sequence >= 0  # the table has room for more blocks than there are
        sequence = tl.maximum(sequence, 0)
        begin = tl.load(p_cu + sequence)
        start = tl.load(p_block + 2 * o_block + 1) * BLOCK
        n = tl.where(used, tl.load(p_cu + sequence + 1) - begin - start, 0)
        first = begin + start
    else:
        first = o_block * BLOCK
        n = length - first
    return o_batch, o_head, o_block, tl.cast(first, tl.int64), tl.minimum(n, BLOCK)


@triton.jit
def larger_of_each(a, b, other_a, other_b):
    """Return the larger of each pair, to reduce two arrays at once."""
    return tl.maximum(a, other_a), tl.maximum(b, other_b)


@triton.jit
def seen_keys(p_seen, o_n, groups, length, n):
    """Return which of the keys `o_n` some group of queries sees; `p_seen` has `length` bytes a group, `n` of them."""
    GROUPS: tl.constexpr = 16
    b_seen = tl.zeros_like(o_n)
    for start in range(0, groups, GROUPS):
        o_group = start + tl.arange(0, GROUPS)
        p_tile = p_seen + tl.cast(o_group, tl.int64)[:, None] * length + o_n[None, :]
        b_tile = tl.load(p_tile, mask=(o_group < groups)[:, None] & (o_n < n)[None, :], other=0)
        b_seen = tl.maximum(b_seen, tl.max(b_tile.to(tl.int32), 0))
    return b_seen > 0


@triton.jit(do_not_specialize=["stride_visible_h", "groups", "heads", "length", "blocks"])
def anchor_kernel(
    p_k,  # (B, Hkv, S, D), or packed (T, Hkv, D)
    p_v,
    p_visible,  # (B, Hkv, groups, S) bytes: 1 for keys that some query of a group sees
    p_block,  # (blocks, 2): sequence and block within it, when VARLEN
    p_cu,  # (sequences + 1,) when VARLEN
    p_anchor,  # (B, Hkv, blocks, D) FP16
    p_norm,  # (B, Hkv, blocks) FP32
    p_marked,  # (1,) INT32: set to 0, unless MARKED
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_visible_b,
    stride_visible_h,
    groups,
    heads,
    length,
    blocks,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    WIDTH: tl.constexpr,  # columns of a block whose anchor is computed at a time
    BLOCK: tl.constexpr,
    HAS_VISIBLE: tl.constexpr,
    CHECK_VALUES: tl.constexpr,
    VARLEN: tl.constexpr,
    MARKED: tl.constexpr,  # return at once if `p_marked` holds 0
    EARLY: tl.constexpr,  # if MARKED: the next kernel is launched early, and so is this one
    STEP: tl.constexpr,  # of the strides of k and v: `in_steps`
):
    """Compute the anchor of every block, and the largest norm of its keys.

    The norm is infinite if a key, or with CHECK_VALUES a value, is not finite. An anchor is kept only if it is
    `ANCHOR_GAIN` = 4 times longer than every key less the anchor, because an FP32 accumulator gains little from a
    shorter one. Then no key is further from another key than 2/3 of its length. So for most blocks, comparing all keys
    with the first one already shows that there is no anchor.
    """
    if MARKED:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        if tl.load(p_marked) == 0:
            return
    o_batch, o_head, o_block, first, n = locate_block(
        tl.program_id(0), p_block, p_cu, heads, length, blocks, BLOCK, VARLEN
    )
    stride_kb, stride_kh, stride_kn = in_steps(stride_kb, stride_kh, stride_kn, STEP)
    stride_vb, stride_vh, stride_vn = in_steps(stride_vb, stride_vh, stride_vn, STEP)
    batch = tl.cast(o_batch, tl.int64)
    p_k += batch * stride_kb
    m_key = tl.arange(0, BLOCK) < n
    o_d = tl.arange(0, D_PAD)
    p_first = p_k + tl.cast(o_head, tl.int64) * stride_kh + first * stride_kn
    b_k = load_keys(p_k, o_head, first, n, stride_kh, stride_kn, 0, D, D_PAD, BLOCK)
    b_first = tl.load(p_first + o_d, mask=(o_d < D) & (n > 0), other=0.0)
    if CHECK_VALUES:
        b_v = load_keys(p_v + batch * stride_vb, o_head, first, n, stride_vh, stride_vn, 0, D, D_PAD, BLOCK)
    tl.debug_barrier()  # all loads are on their way before one is waited for
    b_k = b_k.to(tl.float32)
    b_first = b_first.to(tl.float32)
    # FP32 holds any sum of FP16 squares, so an infinite or NaN sum comes from an element that is not finite.
    square = tl.sum(b_k * b_k, 1)
    m_finite = square < INF
    bad = m_key & (m_finite == 0)
    first_square = tl.sum(b_first * b_first, 0)
    hidden = (n < 1) | ((first_square < INF) == 0)  # the first key, with which all are compared, enters no mean
    if CHECK_VALUES:
        b_v = b_v.to(tl.float32)
        bad = bad | (m_key & ((tl.sum(b_v * b_v, 1) < INF) == 0))
    # Keys that no query sees, and keys that are not finite, enter no mean.
    if HAS_VISIBLE:
        p_visible += batch * stride_visible_b + tl.cast(o_head, tl.int64) * stride_visible_h
        seen = seen_keys(p_visible + first, tl.arange(0, BLOCK), groups, length, n)
        hidden = hidden | (tl.max(tl.where(tl.arange(0, BLOCK) == 0, seen, False).to(tl.int32), 0) == 0)
        bad = bad & seen
        m_key = m_key & seen
    m_key = m_key & m_finite
    b_away = b_k - b_first[None, :]
    away = tl.where(m_key, tl.sum(b_away * b_away, 1), 0.0)
    longest, away = tl.reduce((tl.where(bad, INF, tl.where(m_key, square, 0.0)), away), 0, larger_of_each)
    o_out = (batch * heads + o_head) * blocks + o_block
    tl.store(p_norm + o_out, tl.sqrt(longest) * NORM_MARGIN)
    p_out = p_anchor + o_out * D
    if hidden | (away < 0.5 * first_square):
        count = tl.sum(tl.where(m_key, 1.0, 0.0), 0)
        kept = 0.0
        b_left = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, D_PAD, WIDTH):
            b_part = load_keys(p_k, o_head, first, n, stride_kh, stride_kn, start, D, WIDTH, BLOCK).to(tl.float32)
            b_part = tl.where(m_key[:, None], b_part, 0.0)
            anchor = exact_anchor(b_part, m_key[:, None], count)
            b_rest = tl.where(m_key[:, None], b_part - anchor[None, :], 0.0)
            b_left += tl.sum(b_rest * b_rest, 1)
            kept += tl.sum(anchor * anchor, 0)
            o_part = start + tl.arange(0, WIDTH)
            tl.store(p_out + o_part, anchor.to(tl.float16), mask=o_part < D)
        tl.debug_barrier()  # other threads may have stored what the next lines take back
        if kept <= ANCHOR_GAIN * ANCHOR_GAIN * tl.max(b_left, 0):
            tl.store(p_out + o_d, tl.zeros((D_PAD,), tl.float16), mask=o_d < D)
    else:
        tl.store(p_out + o_d, tl.zeros((D_PAD,), tl.float16), mask=o_d < D)
    if not MARKED:
        if tl.program_id(0) == 0:
            tl.store(p_marked, 0)


@triton.jit(do_not_specialize=["heads", "length", "blocks"])
def shift_kernel(
    p_k,  # as in `anchor_kernel`, like every argument without a comment
    p_visible,
    p_block,
    p_cu,
    p_shifted,  # shape of the keys, FP16: K'
    p_anchor,  # when EXACT
    diagonal,  # entries of M, the second without its sign, unless EXACT
    off_diagonal,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_visible,
    stride_sb,
    stride_sh,
    stride_sn,
    heads,
    length,
    blocks,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_VISIBLE: tl.constexpr,
    EXACT: tl.constexpr,
    GEMM: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """Compute K' of WIDTH columns of a block: K less its anchor (EXACT, also stored), or the published K' = M K.

    M K is a batched GEMM on the matrix engine, or is computed from the mean, with equal results. A key that no query
    sees is replaced by the mean of the others, which does not change the mean. A key that is not finite is replaced in
    the same way, and its K' is NaN.
    """
    o_batch, o_head, o_block, first, n = locate_block(
        tl.program_id(0), p_block, p_cu, heads, length, blocks, BLOCK, VARLEN
    )
    batch = tl.cast(o_batch, tl.int64)
    o_n = tl.arange(0, BLOCK)
    o_d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    m_n = o_n < n
    m_tile = m_n[:, None] & (o_d < D)[None, :]
    # keys (BLOCK, WIDTH), cleaned
    p_tile = p_k + batch * stride_kb + tl.cast(o_head, tl.int64) * stride_kh + first * stride_kn
    b_k = tl.load(p_tile + o_n[:, None] * stride_kn + o_d[None, :], mask=m_tile, other=0.0).to(tl.float32)
    m_finite = (tl.min(tl.where(is_finite(b_k), 1, 0), 1) > 0)[:, None]  # in the columns of this program
    m_key = m_finite & m_tile
    if HAS_VISIBLE:
        seen = tl.load(p_visible + batch * stride_visible + first + o_n, mask=m_n, other=0)
        m_key = m_key & (seen != 0)[:, None]
    b_clean = tl.where(m_key, b_k, 0.0)
    count = tl.sum(tl.where(m_key, 1.0, 0.0), 0)
    if EXACT:
        anchor = exact_anchor(b_clean, m_key, count)
        o_out = (batch * heads + o_head) * blocks + o_block
        tl.store(p_anchor + o_out * D + o_d, anchor.to(tl.float16), mask=o_d < D)
        # A masked key need not stay exact, only finite, because its scores are masked out.
        b_new = tl.minimum(tl.maximum(b_k - anchor[None, :], -FP16_MAX), FP16_MAX)
    else:
        mean = (tl.sum(b_clean, 0) / tl.maximum(count, 1.0)).to(tl.float16).to(tl.float32)
        b_clean = tl.where(m_key, b_clean, tl.where(m_tile, mean[None, :], 0.0))
        if GEMM:
            b_m = tl.where(o_n[:, None] == o_n[None, :], diagonal, -off_diagonal).to(tl.float16)
            b_new = tl.dot(b_m, b_clean.to(tl.float16))
        else:
            b_new = (diagonal + off_diagonal) * b_clean - off_diagonal * tl.sum(b_clean, 0)[None, :]
    b_new = tl.where(m_finite, b_new, float("nan")).to(tl.float16)
    p_tile = p_shifted + batch * stride_sb + tl.cast(o_head, tl.int64) * stride_sh + first * stride_sn
    tl.store(p_tile + o_n[:, None] * stride_sn + o_d[None, :], b_new, mask=m_tile)
