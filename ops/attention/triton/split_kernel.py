"""Device functions that attend from all rows of a tile to a part of the keys, for calls with few rows or few keys."""

import triton
import triton.language as tl

from pasa.ops.attention.triton.tile_math import (
    ANCHOR_LIMIT,
    INF,
    LOG2_E,
    add_values,
    anchored_scores,
    capped_scores,
    next_frame,
    softmax_step,
    two_products,
)

FP32_MAX = tl.constexpr(3.4028234e38)
# In FP16, x * x is infinite from x = 256 on. A factor that should give 256.25 gives at least 256 after the factor and
# the product are rounded.
OVERFLOWS = tl.constexpr(256.25)
LEAST_ANCHOR = tl.constexpr(2.0**-6)  # |a| / 2 and 2 OVERFLOWS / |a| must be FP16 numbers (`column_units`)
FAR_ROWS = tl.constexpr(16)  # equal rows in which the matrix unit sums squares: no product of it has fewer


@triton.jit
def unit_of_squares(longest):
    """Return the unit, in FP16, in which the lengths of keys are squared. longest: largest norm of a query, in nats.

    A key at the bound has length 1 in this unit. FP16 squares overflow from 256 on, where a score may err by more than
    1 nat.
    """
    return tl.minimum(tl.maximum(longest / ANCHOR_LIMIT, 2.0**-8), 2.0**15).to(tl.float16)


@triton.jit
def column_units(b_anchor, unit):
    """Return the unit and the weight of each column in FP16, for anchors (D,) in FP16.

    In a column with an anchor, the unit is so short that squares overflow from |a| / 2 on. Below it k is between a / 2
    and 3 a / 2, so k - a is exact (Sterbenz's lemma) and no longer than k. Weights undo the shorter unit. A weight gets
    2^-24 more before it is rounded, so a subnormal one is never too small. This adds less than 2^-7 for each column.
    `highest_square` allows for the rounding of the others.
    """
    b_half = tl.abs(b_anchor.to(tl.float32)) * 0.5
    b_unit = tl.where(b_half == 0.0, unit, tl.maximum(unit.to(tl.float32), OVERFLOWS / b_half)).to(tl.float16)
    b_weight = unit.to(tl.float32) / b_unit.to(tl.float32)
    return b_unit, (b_weight * b_weight + 2.0**-24).to(tl.float16)


@triton.jit
def units_of_frame(b_anchor, framed, unit):
    """Return `column_units`; where no column has an anchor, so that `framed` is 0, in a few instructions."""
    b_unit = tl.zeros_like(b_anchor) + unit
    b_weight = tl.zeros_like(b_anchor) + 1.0
    if framed > 0:
        b_unit, b_weight = column_units(b_anchor, unit)
    return b_unit, b_weight


@triton.jit
def highest_square(longest, unit, D: tl.constexpr):
    """Return the largest sum of squares of a key within the bound; NaN is above it.

    FP16 rounds four times by 2^-11, and by 2^-25 near 0.
    """
    highest = ANCHOR_LIMIT / tl.maximum(longest, 1e-30) * unit.to(tl.float32)
    return tl.minimum(0.99 * highest * highest - D * 2.0**-25, FP32_MAX)


@triton.jit
def is_near(b_far, b_acc, longest, D: tl.constexpr):
    """Return whether the fast pass is exact: all scores are within the bound, and all sums of values are finite."""
    highest = highest_square(longest, unit_of_squares(longest), D)
    far = tl.max(tl.max(tl.where(b_far <= highest, 0, 1), 1), 0)
    infinite = tl.max(tl.max(tl.where(tl.abs(b_acc) < INF, 0, 1), 1), 0)
    return (far == 0) & (infinite == 0)


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
    b_q, b_max, b_sum, b_acc, b_first, b_far, p_keys, p_values, p_mask, o_query, m_row, begin, end,
    diagonal, span, scale, ratio, longest, stride_kn, stride_vn, stride_mask_n, p_table, stride_kp, stride_vp,
    SHIFT: tl.constexpr, HIDES: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Attend to the keys from `begin`, a multiple of BLOCK_N, to `end`, a part of a split.

    SHIFT "block": block anchors are subtracted, and scores are in the frame b_first. This starts as the anchor of the
    first block with a key that some row sees, because blocks of padding have none. SHIFT "head": b_first (D,), made of
    FP16 numbers, is subtracted; "none": keys are used unchanged. In both, b_far (FAR_ROWS, BLOCK_N) collects the
    largest squares of keys that a row sees, for `is_near`; a difference that may be rounded makes them infinite. A
    value that is not finite leaves no finite sum, because 0 times it is NaN, and such a split goes to the exact pass.
    Elements of b_far stay apart until then: a norm that threads had to bring together took most of a block's time.
    PAGE: slots of a page, or 0 without pages, when p_table and the strides of pages are unused. WINDOW: row i sees no
    key before i + diagonal - span. CAP: scores are those of `capped_scores`, which are small, so nothing is anchored or
    collected.
    """
    o_d = tl.arange(0, D_PAD)
    factor = LOG2_E if MASK == "float" else scale * LOG2_E
    BOUND: tl.constexpr = SHIFT != "block" and CAP == "none"
    # Unchanged keys have small scores, or their split is repeated. A float mask may add large numbers to the scores.
    FAST: tl.constexpr = BOUND and MASK != "float"
    offset = tl.zeros_like(b_max)
    if BOUND:
        unit = unit_of_squares(longest)
        b_weights = tl.full((FAR_ROWS, D_PAD), 1.0, tl.float16)
        if SHIFT == "head":
            b_anchor16 = b_first.to(tl.float16)
            b_unit, b_weight = units_of_frame(b_anchor16, tl.max(tl.where(b_first != 0.0, 1, 0), 0), unit)
            b_weights = tl.broadcast_to(b_weight[None, :], (FAR_ROWS, D_PAD))
    if MASK != "none":  # loaded a block ahead
        p_masks = p_mask[:, None] + (tl.arange(0, BLOCK_N).to(tl.int64) * stride_mask_n)[None, :]
        m_ahead = m_row[:, None] & (begin + tl.arange(0, BLOCK_N) < end)[None, :]
        b_ahead = tl.load(p_masks + tl.cast(begin, tl.int64) * stride_mask_n, mask=m_ahead, other=0)
    for start in range(begin, end, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        at = tl.cast(start, tl.int64)
        # what each row sees, and keys that no row sees: those enter no mean and no bound
        m_seen = (o_n < end)[None, :] & m_row[:, None]
        m_key = o_n < end
        if CAUSAL:
            m_seen = m_seen & (o_n[None, :] <= o_query[:, None] + diagonal)
            m_key = m_key & (o_n <= tl.max(tl.where(m_row, o_query, 0), 0) + diagonal)
        if WINDOW:
            m_seen = m_seen & (o_n[None, :] >= o_query[:, None] + diagonal - span)
            m_key = m_key & (o_n >= tl.min(tl.where(m_row, o_query, 2147483647), 0) + diagonal - span)
        if MASK != "none":
            b_bias = b_ahead.to(tl.float32)
            m_ahead = m_row[:, None] & (o_n + BLOCK_N < end)[None, :]
            b_ahead = tl.load(p_masks + (at + BLOCK_N) * stride_mask_n, mask=m_ahead, other=0)
            m_seen = m_seen & ((b_bias != 0.0) if MASK == "bool" else (b_bias != -INF))
        if PAGE > 0:
            b_page, b_slot = locate_keys(p_table, start, end, BLOCK_N, PAGE)
            b_key = b_page * stride_kp + b_slot * stride_kn
            b_value = b_page * stride_vp + b_slot * stride_vn
        else:
            b_key = at * stride_kn + tl.arange(0, BLOCK_N) * stride_kn
            b_value = at * stride_vn + tl.arange(0, BLOCK_N) * stride_vn
        # scores
        if BOUND:
            p_key = p_keys + b_key[None, :] + o_d[:, None]  # transposed, as the matrix unit reads it
            if HIDES or D < D_PAD:
                b_k = tl.load(p_key, mask=m_key[None, :] & (o_d < D)[:, None], other=0.0)
            else:
                b_k = tl.load(p_key)
            b_k = b_k.to(tl.float16)  # a cache may be BF16
            if SHIFT == "head":
                b_k = b_k - b_anchor16[:, None]
                b_square = b_k * b_unit[:, None]
            else:
                b_square = b_k * unit
            b_new = tl.dot(b_weights, b_square * b_square)
            b_s = tl.dot(b_q, b_k)
            if MASK != "none":
                m_key = tl.max(tl.where(m_seen, 1, 0), 0) > 0
            if HIDES:
                b_new = tl.where(m_key[None, :], b_new, 0.0)
            b_far = tl.maximum(b_far, b_new, propagate_nan=tl.PropagateNan.ALL)
        else:
            p_key = p_keys + b_key[:, None] + o_d[None, :]
            if HIDES or D < D_PAD:
                b_k = tl.load(p_key, mask=m_key[:, None] & (o_d < D)[None, :], other=0.0)
            else:
                b_k = tl.load(p_key)
            b_k = b_k.to(tl.float16)
            if MASK != "none":
                m_key = tl.max(tl.where(m_seen, 1, 0), 0) > 0
            if CAP != "none":
                b_s = capped_scores(tl.dot(b_q, tl.trans(b_k)), ratio, CAP)
            else:
                b_s, b_anchor = anchored_scores(b_q, b_k, m_key, longest, False)
                b_before = tl.where(tl.max(b_max, 0) == -INF, b_anchor, b_first)
                b_first = next_frame(b_before, b_anchor)
                offset, carry = two_products(b_q, b_anchor - b_first, b_before - b_first)
                carry *= scale if MASK == "float" else 1.0
                b_max = tl.where(b_max == -INF, -INF, b_max + carry)  # a NaN in q stays out of a row without keys
        if MASK == "float":
            b_s = b_s * scale + b_bias
            offset = offset * scale
        if HIDES:
            b_s = tl.where(m_seen, b_s, -INF)
        # softmax and values
        b_p, alpha, b_max, b_sum = softmax_step(b_s, offset, factor, b_max, b_sum, HIDES, FAST, True)
        b_acc = b_acc * alpha[:, None]
        p_value = p_values + b_value[:, None] + o_d[None, :]
        if HIDES or D < D_PAD:
            b_v = tl.load(p_value, mask=(o_n < end)[:, None] & (o_d < D)[None, :], other=0.0)
        else:
            b_v = tl.load(p_value)
        b_v = b_v.to(tl.float16)
        if HIDES and not BOUND:
            b_acc = add_values(b_acc, b_p, b_v, m_seen)
        else:
            if HIDES:
                b_v = tl.where(m_key[:, None], b_v, 0.0).to(tl.float16)
            b_acc = tl.dot(b_p, b_v, b_acc)
    return b_max, b_sum, b_acc, b_first, b_far
