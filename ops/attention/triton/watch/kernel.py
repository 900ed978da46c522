"""Triton kernels that count events in the scores of sampled query rows; spec/watch.py defines rows and counters.

Keys are split among programs. For each row, a program finds the two largest scores among its keys, and how many exceed
FP16's range. A second kernel joins these results. Inside its loop over tiles of keys, a program keeps the two largest
scores of every (row, column) of a tile, because a reduction in the loop would cost time. It reduces the columns once,
at the end.
"""

import triton
import triton.language as tl

from pasa.ops.attention.triton.tile_math import FP16_MAX, INF

FIRST_BLOCK = tl.constexpr(128)  # number of first keys whose largest score is the reference; as in spec/watch.py
# Per row and share of the keys: largest score, second, first block's largest, scores seen, scores beyond FP16.
FIELDS = tl.constexpr(5)


@triton.jit
def sampled_rows(base, first, tile, length, STRIDE: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the sampled query rows (M,) of a tile, and which of them exist; `length` query rows share a key head.

    base: index, within the call, of the first of these rows; first: index of the call's first sampled row.
    """
    skip = (first + STRIDE - base % STRIDE) % STRIDE
    o_row = skip + (tile * BLOCK_M + tl.arange(0, BLOCK_M)) * STRIDE
    return o_row, o_row < length


@triton.jit
def second_largest(b_top, b_next, top):
    """Return each row's second largest number (M,), from its largest, and the two largest of each column (M, N)."""
    m_top = b_top == top[:, None]
    below = tl.max(tl.where(m_top, b_next, b_top), 1)
    return tl.where(tl.sum(tl.where(m_top, 1, 0), 1) > 1, top, below)


@triton.jit(do_not_specialize=["kv_heads", "group", "tiles", "rows", "keys", "share", "first"])
def watch_kernel(
    p_q,  # (B, Hq, Sq, D)
    p_k,  # (B, Hkv, Skv, D)
    p_mask,  # bytes or floats, broadcast by strides of 0
    p_part,  # (shares of the keys, FIELDS, B Hkv tiles M)
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    kv_heads,
    group,
    tiles,
    rows,
    keys,
    share,  # keys of a program, a multiple of FIRST_BLOCK
    first,
    scale,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    STRIDE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # divides FIRST_BLOCK
):
    """Find the `FIELDS` of one tile of sampled rows that share a key head, over one share of the keys."""
    work = tl.program_id(0)
    kv_head = tl.cast(work // tiles % kv_heads, tl.int64)
    batch = tl.cast(work // tiles // kv_heads, tl.int64)
    base = (batch * kv_heads + kv_head) * group * rows
    o_flat, m_row = sampled_rows(base, first, work % tiles, group * rows, STRIDE, BLOCK_M)
    o_flat = tl.where(m_row, o_flat, 0)
    o_head = kv_head * group + o_flat // rows
    o_row = o_flat % rows
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, D_PAD)
    p_rows = p_q + batch * stride_qb + o_head * stride_qh + o_row * stride_qm
    b_q = tl.load(p_rows[:, None] + o_d[None, :], mask=m_row[:, None] & (o_d < D)[None, :], other=0.0).to(tl.float16)
    p_keys = p_k + batch * stride_kb + kv_head * stride_kh
    p_rows_mask = p_mask + batch * stride_mask_b + o_head * stride_mask_h + o_row * stride_mask_m
    # Keys begin to end: the program's share, up to the last key that some row of the tile may see.
    begin = tl.program_id(1) * share
    last = tl.where(m_row, keys, 0)
    if CAUSAL:
        last = tl.where(m_row, o_row + (keys - rows) + 1, 0)
    end = tl.minimum(tl.minimum(begin + share, keys), tl.max(last, 0).to(tl.int32))
    b_top = tl.full((BLOCK_M, BLOCK_N), -INF, tl.float32)
    b_next = tl.full((BLOCK_M, BLOCK_N), -INF, tl.float32)
    b_count = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)  # visible scores, plus 2^16 times those beyond FP16
    b_first = tl.full((BLOCK_M,), -INF, tl.float32)
    for start in range(begin, end, BLOCK_N):
        o_key = tl.cast(start + o_n, tl.int64)
        m_key = o_key < keys
        b_k = tl.load(p_keys + o_key[:, None] * stride_kn + o_d[None, :], mask=m_key[:, None] & (o_d < D)[None, :],
                      other=0.0).to(tl.float16)  # fmt: skip
        b_dot = tl.dot(b_q, tl.trans(b_k))
        b_s = b_dot * scale
        m_seen = m_row[:, None] & m_key[None, :]
        if CAUSAL:
            m_seen = m_seen & (o_key[None, :] < last[:, None])
        if MASK != "none":
            p_tile = p_rows_mask[:, None] + o_key[None, :] * stride_mask_n
            b_mask = tl.load(p_tile, mask=m_seen, other=0).to(tl.float32)
            if MASK == "bool":
                m_seen = m_seen & (b_mask != 0.0)
            else:
                b_s += b_mask
        m_seen = m_seen & (tl.abs(b_s) < INF)  # False for NaN and infinity, which count as masked out
        b_s = tl.where(m_seen, b_s, -INF)
        b_next = tl.maximum(b_next, tl.minimum(b_top, b_s))
        b_top = tl.maximum(b_top, b_s)
        b_count += tl.where(m_seen, tl.where(tl.abs(b_dot) > FP16_MAX, 65537, 1), 0)
        if start < FIRST_BLOCK:
            b_first = tl.max(b_top, 1)
    top = tl.max(b_top, 1)
    slots = tl.cast(tl.num_programs(0), tl.int64) * BLOCK_M
    p_slot = p_part + tl.program_id(1) * FIELDS * slots + work * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(p_slot, top)
    tl.store(p_slot + slots, second_largest(b_top, b_next, top))
    tl.store(p_slot + 2 * slots, b_first)
    tl.store(p_slot + 3 * slots, tl.sum(b_count & 0xFFFF, 1).to(tl.float32))
    tl.store(p_slot + 4 * slots, tl.sum(b_count >> 16, 1).to(tl.float32))


@triton.jit(do_not_specialize=["length", "tiles", "shares", "first"])
def watch_totals_kernel(
    p_totals,  # (5,) INT64: FIELDS of spec/watch.py
    p_part,  # (shares, FIELDS, B Hkv tiles M)
    length,  # query rows that share a key head
    tiles,
    shares,
    first,
    epsilon,
    reach,
    STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Join the shares of the keys of one tile of sampled rows, and add their counts to the totals."""
    work = tl.program_id(0)
    base = tl.cast(work // tiles, tl.int64) * length
    _, m_row = sampled_rows(base, first, work % tiles, length, STRIDE, BLOCK_M)
    slots = tl.cast(tl.num_programs(0), tl.int64) * BLOCK_M
    p_slot = p_part + work * BLOCK_M + tl.arange(0, BLOCK_M)
    top = tl.full((BLOCK_M,), -INF, tl.float32)
    below = tl.full((BLOCK_M,), -INF, tl.float32)
    seen = tl.zeros((BLOCK_M,), tl.int64)
    beyond = tl.zeros((BLOCK_M,), tl.int64)
    b_first = tl.load(p_slot + 2 * slots)
    for turn in range(shares):
        p_share = p_slot + turn * FIELDS * slots
        b_top = tl.load(p_share)
        below = tl.maximum(tl.maximum(below, tl.load(p_share + slots)), tl.minimum(top, b_top))
        top = tl.maximum(top, b_top)
        seen += tl.load(p_share + 3 * slots).to(tl.int64)
        beyond += tl.load(p_share + 4 * slots).to(tl.int64)
    m_row = m_row & (seen > 0)
    top = tl.where(m_row, top, 0.0)
    m_tied = (m_row & (below > -INF)) & (top - below <= epsilon)
    m_far = (m_row & (b_first > -INF)) & (top - b_first > reach)
    some = tl.max(tl.where(m_row, 1, 0), 0) > 0
    tl.atomic_add(p_totals, tl.sum(tl.where(m_row, 1, 0).to(tl.int64), 0), mask=some)
    tl.atomic_add(p_totals + 1, tl.sum(tl.where(m_tied, 1, 0).to(tl.int64), 0), mask=some)
    tl.atomic_add(p_totals + 2, tl.sum(tl.where(m_far, 1, 0).to(tl.int64), 0), mask=some)
    tl.atomic_add(p_totals + 3, tl.sum(tl.where(m_row, seen, 0), 0), mask=some)
    tl.atomic_add(p_totals + 4, tl.sum(tl.where(m_row, beyond, 0), 0), mask=some)
