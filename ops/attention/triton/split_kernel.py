"""Device functions that attend from all rows of a tile to a part of the keys, for calls with few rows or few keys."""

import triton
import triton.language as tl

from pasa.ops.attention.triton.tile_math import (
    FP16_MAX,
    INF,
    LOG2_E,
    add_values,
    anchored_scores,
    capped_scores,
    next_frame,
    softmax_step,
    two_products,
)


@triton.jit
def locate_keys(p_table, start, end, BLOCK_N: tl.constexpr, PAGE: tl.constexpr):
    """Return pages and slots of BLOCK_N keys from `start` on, a multiple of BLOCK_N; a scalar page if all are in one.

    p_table: row of the sequence.
    """
    o_n = start + tl.arange(0, BLOCK_N)
    if PAGE % BLOCK_N == 0:
        page = tl.load(p_table + start // PAGE)
    else:
        page = tl.load(p_table + o_n // PAGE, mask=o_n < end, other=0)
    return tl.cast(page, tl.int64), o_n % PAGE


@triton.jit
def attend_split(
    b_q, b_max, b_sum, b_acc, b_first, b_square, p_keys, p_values, p_mask, o_query, m_row, begin, end,
    diagonal, span, scale, ratio, longest, stride_kn, stride_vn, stride_mask_n, p_table, stride_kp, stride_vp,
    SHIFT: tl.constexpr, HIDES: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Attend to the keys from `begin`, a multiple of BLOCK_N, to `end`, a part of a split.

    SHIFT "block": block anchors are subtracted, and scores are in the frame b_first. This starts as the anchor of the
    first block with a key that some row sees, because blocks of padding have none. SHIFT "head": b_first (D,) is
    subtracted; "none": keys are used unchanged. In both, b_square (BLOCK_N,) collects the largest squared norms;
    infinity or NaN there fails the bound, and stands for a difference that may be rounded, too.
    PAGE: slots of a page, or 0 without pages, when p_table and the strides of pages are unused. WINDOW: row i sees no
    key before i + diagonal - span. CAP: scores are those of `capped_scores`, which are small, so nothing is anchored or
    collected.
    """
    o_d = tl.arange(0, D_PAD)
    factor = LOG2_E if MASK == "float" else scale * LOG2_E
    # Unchanged keys have small scores, or their split is repeated. A float mask may add large numbers to the scores.
    FAST: tl.constexpr = (SHIFT != "block" and MASK != "float") and CAP == "none"
    offset = tl.zeros_like(b_max)
    if SHIFT == "head":  # |k - a| < |a| / 2 is exact (Sterbenz's lemma), and no longer than k
        b_reach = tl.where(b_first == 0.0, FP16_MAX, tl.abs(b_first) * 0.5)
    for start in range(begin, end, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        at = tl.cast(start, tl.int64)
        m_tile = (o_n < end)[:, None] & (o_d < D)[None, :]
        if PAGE > 0:
            b_page, b_slot = locate_keys(p_table, start, end, BLOCK_N, PAGE)
            p_key = p_keys + (b_page * stride_kp + b_slot * stride_kn)[:, None] + o_d[None, :]
            p_value = p_values + (b_page * stride_vp + b_slot * stride_vn)[:, None] + o_d[None, :]
        else:
            p_key = p_keys + at * stride_kn + tl.arange(0, BLOCK_N)[:, None] * stride_kn + o_d[None, :]
            p_value = p_values + at * stride_vn + tl.arange(0, BLOCK_N)[:, None] * stride_vn + o_d[None, :]
        if HIDES or D < D_PAD:
            b_k = tl.load(p_key, mask=m_tile, other=0.0)
        else:
            b_k = tl.load(p_key)
        b_k = b_k.to(tl.float16)  # a cache may be BF16
        # what each row sees
        m_seen = (o_n < end)[None, :] & m_row[:, None]
        if CAUSAL:
            m_seen = m_seen & (o_n[None, :] <= o_query[:, None] + diagonal)
        if WINDOW:
            m_seen = m_seen & (o_n[None, :] >= o_query[:, None] + diagonal - span)
        if MASK != "none":
            p_tile = p_mask[:, None] + (at + tl.arange(0, BLOCK_N))[None, :] * stride_mask_n
            b_bias = tl.load(p_tile, mask=m_seen, other=0).to(tl.float32)
            m_seen = m_seen & ((b_bias != 0.0) if MASK == "bool" else (b_bias != -INF))
        if HIDES:
            m_key = tl.max(tl.where(m_seen, 1, 0), 0) > 0  # a key that no row sees enters no mean and no bound
        else:
            m_key = o_n >= 0
        # scores
        if SHIFT == "block":
            b_s, b_anchor = anchored_scores(b_q, b_k, m_key, longest, False)
            b_before = tl.where(tl.max(b_max, 0) == -INF, b_anchor, b_first)
            b_first = next_frame(b_before, b_anchor)
            offset, carry = two_products(b_q, b_anchor - b_first, b_before - b_first)
            carry *= scale if MASK == "float" else 1.0
            b_max = tl.where(b_max == -INF, -INF, b_max + carry)  # a NaN in q stays out of a row without keys
        elif CAP != "none":
            b_s = capped_scores(tl.dot(b_q, tl.trans(b_k)), ratio, CAP)
        else:
            b_wide = b_k.to(tl.float32)
            if SHIFT == "head":
                b_wide -= b_first[None, :]
                b_k = b_wide.to(tl.float16)
                b_wide = tl.where(tl.abs(b_wide) <= b_reach[None, :], b_wide, INF)
            square = tl.sum(b_wide * b_wide, 1)
            if HIDES:
                square = tl.where(m_key, square, 0.0)
            b_square = tl.maximum(b_square, square, propagate_nan=tl.PropagateNan.ALL)
            b_s = tl.dot(b_q, tl.trans(b_k))
        if MASK == "float":
            b_s = b_s * scale + b_bias
            offset = offset * scale
        if HIDES:
            b_s = tl.where(m_seen, b_s, -INF)
        # softmax and values
        b_p, alpha, b_max, b_sum = softmax_step(b_s, offset, factor, b_max, b_sum, HIDES, FAST)
        b_acc = b_acc * alpha[:, None]
        if HIDES or D < D_PAD:
            b_v = tl.load(p_value, mask=m_tile, other=0.0)
        else:
            b_v = tl.load(p_value)
        b_v = b_v.to(tl.float16)
        if HIDES and (SHIFT == "block" or CAP != "none"):
            b_acc = add_values(b_acc, b_p, b_v, m_seen)
        else:
            if HIDES:  # rows see different keys, and 0 * NaN is NaN, so such a split goes to the exact pass
                b_v = tl.where(m_key[:, None], b_v, 0.0).to(tl.float16)
                finite = tl.min(tl.where(tl.abs(b_v.to(tl.float32)) <= FP16_MAX, 1, 0), 1) > 0
                b_square = tl.where(finite, b_square, INF)
            b_acc = tl.dot(b_p, b_v, b_acc)
    return b_max, b_sum, b_acc, b_first, b_square
