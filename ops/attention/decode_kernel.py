"""Triton kernels of decoding: few query rows against a long cache, split over the keys, merged by log-sum-exp.

Time is that of reading K and V once, so there is no pass before: each program finds the anchors of its own blocks.
All splits count scores in the frame of block 0's anchor, which each of them finds again from the same keys. The query
heads that share a key head are rows of one tile.
"""

import triton
import triton.language as tl

from pasa.ops.attention.triton_kernel import FP16_MAX, INF, LOG2_E, add_values, softmax_step
from pasa.ops.shift_keys.triton_kernel import exact_anchor


@triton.jit
def key_block(p_k, p_mask, start, o_d, o_query, m_row, keys, diagonal, stride_kn, stride_mask_n,
              MASK: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Keys (N, D) less their anchor, the anchor (D,), what each row sees (M, N), and what the mask adds.

    p_mask (M,): pointers to the mask's row of each query row; o_query (M,): its position among the queries.
    """
    o_n = start + tl.arange(0, BLOCK_N)
    at = tl.cast(start, tl.int64)
    p_tile = p_k + at * stride_kn + tl.arange(0, BLOCK_N)[:, None] * stride_kn + o_d[None, :]
    b_k = tl.load(p_tile, mask=(o_n < keys)[:, None] & (o_d < D)[None, :], other=0.0)
    m_seen = (o_n < keys)[None, :] & m_row[:, None]
    if CAUSAL:
        m_seen = m_seen & (o_n[None, :] <= o_query[:, None] + diagonal)
    b_bias = 0.0
    if MASK != "none":
        p_tile = p_mask[:, None] + (at + tl.arange(0, BLOCK_N))[None, :] * stride_mask_n
        b_bias = tl.load(p_tile, mask=m_seen, other=0).to(tl.float32)
        m_seen = m_seen & ((b_bias != 0.0) if MASK == "bool" else (b_bias != -INF))
    b_wide = b_k.to(tl.float32)
    m_finite = tl.min(tl.where(tl.abs(b_wide) <= FP16_MAX, 1, 0), 1) > 0
    m_key = (tl.max(tl.where(m_seen, 1, 0), 0) > 0) & m_finite  # a key that no row sees enters no mean
    b_clean = tl.where(m_key[:, None], b_wide, 0.0)
    anchor, _ = exact_anchor(b_clean, m_key[:, None], tl.sum(tl.where(m_key, 1.0, 0.0), 0))
    b_k = tl.where(m_finite[:, None], b_wide - anchor[None, :], float("nan")).to(tl.float16)
    return b_k, anchor, m_seen, b_bias


@triton.jit
def decode_kernel(
    p_q,  # (B, Hq, Sq, D)
    p_k,  # (B, Hkv, Skv, D)
    p_v,
    p_part,  # (B, Hkv, splits, BLOCK_M, D) FP32: O of each split, not divided
    p_state,  # (B, Hkv, splits, BLOCK_M, 2) FP32: maximum and sum
    p_frame,  # (B, Hkv, BLOCK_M) FP32: q . a_1
    p_mask,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    kv_heads,
    group,
    rows,
    keys,
    splits,
    blocks_each,
    scale,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One split of one key head: all its query rows against `blocks_each` blocks of BLOCK_N keys."""
    o_split = tl.program_id(0) % splits
    o_pair = tl.program_id(0) // splits
    batch = tl.cast(o_pair // kv_heads, tl.int64)
    kv_head = tl.cast(o_pair % kv_heads, tl.int64)
    # query rows (M, D): all heads of the group, one after another
    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, D_PAD)
    m_row = o_m < group * rows
    o_head = kv_head * group + o_m // rows
    o_query = o_m % rows
    p_tile = p_q + batch * stride_qb + (o_head * stride_qh + o_query * stride_qm)[:, None] + o_d[None, :]
    b_q = tl.load(p_tile, mask=m_row[:, None] & (o_d < D)[None, :], other=0.0)
    b_q = tl.where(tl.abs(b_q.to(tl.float32)) <= FP16_MAX, b_q, float("nan")).to(tl.float16)
    p_keys = p_k + batch * stride_kb + kv_head * stride_kh
    p_values = p_v + batch * stride_vb + kv_head * stride_vh
    p_masks = p_mask + batch * stride_mask_b + o_head * stride_mask_h + o_query * stride_mask_m
    diagonal = keys - rows
    factor = LOG2_E if MASK == "float" else scale * LOG2_E

    _, b_first, _, _ = key_block(
        p_keys, p_masks, 0, o_d, o_query, m_row, keys, diagonal, stride_kn, stride_mask_n, MASK, CAUSAL, D, BLOCK_N
    )
    b_max = tl.full((BLOCK_M,), -INF, tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    b_acc = tl.zeros((BLOCK_M, D_PAD), tl.float32)
    begin = o_split * blocks_each * BLOCK_N
    end = tl.minimum(begin + blocks_each * BLOCK_N, keys)
    for start in range(begin, end, BLOCK_N):
        b_k, b_anchor, m_seen, b_bias = key_block(
            p_keys, p_masks, start, o_d, o_query, m_row, keys, diagonal, stride_kn, stride_mask_n, MASK, CAUSAL, D, BLOCK_N
        )
        offset = tl.sum(b_q.to(tl.float32) * (b_anchor - b_first)[None, :], 1)
        b_s = tl.dot(b_q, tl.trans(b_k))
        if MASK == "float":
            b_s = b_s * scale + b_bias
            offset = offset * scale
        b_s = tl.where(m_seen, b_s, -INF)
        b_p, alpha, b_max, b_sum = softmax_step(b_s, offset, factor, b_max, b_sum)
        o_n = start + tl.arange(0, BLOCK_N)
        p_value = p_values + tl.cast(start, tl.int64) * stride_vn + tl.arange(0, BLOCK_N)[:, None] * stride_vn
        b_v = tl.load(p_value + o_d[None, :], mask=(o_n < keys)[:, None] & (o_d < D)[None, :], other=0.0)
        b_acc = add_values(b_acc * alpha[:, None], b_p, b_v, m_seen)
    o_part = ((o_pair * splits + o_split) * BLOCK_M + o_m)
    tl.store(p_part + o_part[:, None] * D + o_d[None, :], b_acc, mask=m_row[:, None] & (o_d < D)[None, :])
    tl.store(p_state + 2 * o_part, b_max, mask=m_row)
    tl.store(p_state + 2 * o_part + 1, b_sum, mask=m_row)
    if o_split == 0:
        frame = tl.sum(b_q.to(tl.float32) * b_first[None, :], 1)
        tl.store(p_frame + o_pair * BLOCK_M + o_m, frame * scale, mask=m_row)


@triton.jit
def merge_kernel(
    p_part,  # as in decode_kernel
    p_state,
    p_frame,
    p_out,  # (B, Hq, Sq, D) FP16, contiguous
    p_lse,  # (B, Hq, Sq) FP32
    group_rows,  # query rows of a key head
    splits,
    scale,  # of the maxima: 1 when they are in nats
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLITS: tl.constexpr,  # a power of two, at least `splits`
):
    """Joins the splits of one query row."""
    o_pair = tl.program_id(0) // group_rows
    o_row = tl.program_id(0) % group_rows
    o_split = tl.arange(0, SPLITS)
    o_d = tl.arange(0, D_PAD)
    m_split = o_split < splits
    o_part = (o_pair * splits + o_split) * BLOCK_M + o_row
    b_max = tl.load(p_state + 2 * o_part, mask=m_split, other=-INF)
    b_sum = tl.load(p_state + 2 * o_part + 1, mask=m_split, other=0.0)
    top = tl.max(b_max, 0)
    weight = tl.exp2((b_max - tl.where(top == -INF, 0.0, top)) * (scale * LOG2_E))
    total = tl.sum(b_sum * weight, 0)
    m_part = m_split[:, None] & (o_d < D)[None, :]
    b_part = tl.load(p_part + o_part[:, None] * D + o_d[None, :], mask=m_part, other=0.0)
    blind = (total == 0.0) & (top == -INF)
    divisor = tl.where(blind, 1.0, total)
    b_out = tl.sum(b_part * weight[:, None], 0) / divisor
    b_out = tl.where(tl.abs(b_out) < INF, tl.minimum(tl.maximum(b_out, -FP16_MAX), FP16_MAX), float("nan"))
    frame = tl.load(p_frame + o_pair * BLOCK_M + o_row)
    tl.store(p_out + tl.program_id(0) * D + o_d, b_out.to(tl.float16), mask=o_d < D)
    tl.store(p_lse + tl.program_id(0), tl.where(blind, -INF, top * scale + frame + tl.log(divisor)))
