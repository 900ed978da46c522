"""Triton kernel for short sequences of keys: one launch, in which each program goes through all keys of its rows.

Where keys are few, a second launch costs more than splitting them would save. The rows of a tile are those of all query
heads that share a key head, one head after another. The last keys that its last row sees show whether scores may be too
large for FP32 sums. If so, their middle is subtracted from all keys. If that does not help or rounds a key, if other
keys are longer, or if a number is not finite, the program starts again, and each block gets an anchor.
"""

import triton
import triton.language as tl

from pasa.ops.attention.triton.split_kernel import FAR_ROWS, LEAST_ANCHOR, attend_split, is_near
from pasa.ops.attention.triton.tile_math import (
    ANCHOR_LIMIT,
    FP16_MAX,
    INF,
    LOG2_E,
    add_values,
    capped_scores,
    in_steps,
    largest_score,
    mean_of_values,
    middle_anchor,
)

REACH = tl.constexpr(512)  # how many keys `end_of_seen` looks at: no call that this kernel serves has as many


@triton.jit
def end_of_seen(p_mask, end, stride_mask_n, MASK: tl.constexpr):
    """Return one more than the last key before `end` that a row of a mask shows; `end` if it shows none of the last."""
    o_n = tl.maximum(end - REACH, 0) + tl.arange(0, REACH)
    b_mask = tl.load(p_mask + tl.cast(o_n, tl.int64) * stride_mask_n, mask=o_n < end, other=0).to(tl.float32)
    m_seen = (o_n < end) & ((b_mask != 0.0) if MASK == "bool" else (b_mask != -INF))
    found = tl.max(tl.where(m_seen, o_n + 1, 0), 0)
    return tl.where(found > 0, found, end)


@triton.jit
def load_block(p_x, o_n, end, stride_n, D: tl.constexpr, D_PAD: tl.constexpr):
    """Load keys or values (N, D_PAD) with the indices o_n; from `end` on, the last one before it again and again.

    Where `end` is 0, no row of the tile sees a key, and the first one is loaded.
    """
    o_d = tl.arange(0, D_PAD)
    o_n = tl.minimum(o_n, tl.maximum(end - 1, 0))
    p_x += (tl.cast(o_n, tl.int64) * stride_n)[:, None] + o_d[None, :]
    if D < D_PAD:
        b_x = tl.load(p_x, mask=(o_d < D)[None, :], other=0.0)
    else:
        b_x = tl.load(p_x)
    return b_x


@triton.jit
def load_mask(p_masks, o_n, m_row, end, stride_mask_n, MASK: tl.constexpr):
    """Load what a mask says of the keys o_n (N,) for each row (M, N); 0 without a mask."""
    b_mask = 0.0
    if MASK != "none":
        p_tile = p_masks[:, None] + (tl.cast(o_n, tl.int64) * stride_mask_n)[None, :]
        b_mask = tl.load(p_tile, mask=(o_n < end)[None, :] & m_row[:, None], other=0)
    return b_mask


@triton.jit
def seen_keys(
    b_mask, o_n, o_query, m_row, end, diagonal, span, MASK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Return which of the keys o_n (N,) each row sees (M, N), which some row sees (N,), and what a mask adds (M, N)."""
    m_key = o_n < end  # a row sees all of them, unless there is a mask or a window
    m_seen = m_key[None, :] & m_row[:, None]
    b_bias = 0.0
    if CAUSAL:
        m_seen = m_seen & (o_n[None, :] <= o_query[:, None] + diagonal)
    if WINDOW:
        m_seen = m_seen & (o_n[None, :] >= o_query[:, None] + diagonal - span)
    if MASK != "none":
        b_bias = b_mask.to(tl.float32)
        m_seen = m_seen & ((b_bias != 0.0) if MASK == "bool" else (b_bias != -INF))
    if MASK != "none" or WINDOW:
        m_key = tl.max(tl.where(m_seen, 1, 0), 0) > 0
    return m_seen, m_key, b_bias


@triton.jit
def attend_block(
    b_q, b_k, b_v, m_seen, m_key, b_bias, scale, ratio, MASK: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Return maxima (M,), sums of weights (M,), and products with values (M, D), of a block that holds all keys.

    No exponent exceeds 0. Keys that no row sees do not count.
    """
    factor = LOG2_E if MASK == "float" else scale * LOG2_E
    b_s = tl.dot(b_q, tl.trans(b_k))
    if CAP != "none":
        b_s = capped_scores(b_s, ratio, CAP)
    if MASK == "float":
        b_s = b_s * scale + b_bias
    b_s = tl.where(m_seen, b_s, -INF)
    b_max = tl.max(b_s, 1)
    base = tl.where(b_max == -INF, 0.0, b_max)
    b_p = tl.exp2((b_s - base[:, None]) * factor).to(tl.float16)
    b_sum = tl.sum(b_p.to(tl.float32), 1)
    if CAP != "none":
        b_acc = add_values(tl.zeros((b_q.shape[0], b_v.shape[1]), tl.float32), b_p, b_v, m_seen)
    else:
        if MASK != "none" or WINDOW:
            b_v = tl.where(m_key[:, None], b_v, 0.0).to(tl.float16)
        b_acc = tl.dot(b_p, b_v)
    return b_max, b_sum, b_acc


@triton.jit
def squared_norms(b_k, m_key, HIDES: tl.constexpr):
    """Return |k|^2 (N,): with HIDES, 0 for keys that no row sees; NaN or infinite if a number of the key is."""
    b_wide = b_k.to(tl.float32)
    b_squares = tl.sum(b_wide * b_wide, 1)
    if HIDES:
        b_squares = tl.where(m_key, b_squares, 0.0)
    return b_squares


@triton.jit
def larger(one, other):
    """Return the larger of two numbers: NaN if one of them is."""
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def are_bounded(b_squares, longest):
    """Return whether scores stay within `ANCHOR_LIMIT`, by |k|^2 (N,) and the largest norm of a query, in nats."""
    return tl.sqrt(tl.reduce(b_squares, 0, larger)) * longest <= ANCHOR_LIMIT  # not so if one is NaN


@triton.jit
def outermost(low, high, other_low, other_high):
    """Return the extremes of two sets: NaN if one of them holds a NaN."""
    low = tl.minimum(low, other_low, propagate_nan=tl.PropagateNan.ALL)
    return low, tl.maximum(high, other_high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def middle_of(b_k, m_key, WHOLE: tl.constexpr, HIDES: tl.constexpr):
    """Return the anchor (D,) FP16 of the keys (N, D) that a row sees; 0 in columns where it may round a key.

    Without HIDES, some row sees each of the keys, or no row of the tile sees any.

    Unless WHOLE, there are others: they may lie beyond these by a quarter of what these span. `column_units` then needs
    anchors that are not too small.
    """
    b_low = b_k
    b_high = b_k
    if HIDES:
        b_low = tl.where(m_key[:, None], b_k, INF).to(tl.float16)
        b_high = tl.where(m_key[:, None], b_k, -INF).to(tl.float16)
    low, high = tl.reduce((b_low, b_high), 0, outermost)
    low = low.to(tl.float32)
    high = high.to(tl.float32)
    beyond = 0.0 if WHOLE else (high - low) * 0.25
    b_anchor = middle_anchor(low - beyond, high + beyond)
    return b_anchor if WHOLE else tl.where(tl.abs(b_anchor) >= LEAST_ANCHOR, b_anchor, 0.0).to(tl.float16)


@triton.jit
def without_infinities(b_q):
    """Return queries (M, D) with NaN for each infinity."""
    return tl.where(tl.abs(b_q.to(tl.float32)) <= FP16_MAX, b_q, float("nan")).to(tl.float16)


@triton.jit
def shift_of(b_q, b_anchor):
    """Return what an anchor (D,) takes from the products with the keys (M,)."""
    return tl.sum(b_q.to(tl.float32) * b_anchor.to(tl.float32)[None, :], 1)


@triton.jit(do_not_specialize=["stride_lb", "stride_lh", "kv_heads", "group", "rows", "keys", "right", "span"])
def short_kernel(
    p_q,  # (B, Hq, Sq, D)
    p_k,  # (B, Hkv, Skv, D)
    p_v,
    p_out,  # (B, Hq, Sq, D)
    p_lse,  # (B, Hq, Sq) FP32
    p_mask,  # bytes or floats, broadcast by strides of 0
    p_sink,  # (Hq,) FP32, if SINKS
    p_largest,  # (B, Hq, Sq) FP32: the largest score of each row, if MAXIMA
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_ob,
    stride_oh,
    stride_om,
    stride_lb,
    stride_lh,
    stride_lm,
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    kv_heads,
    group,
    rows,
    keys,
    right,  # as `KernelCall.limits`, if WINDOW
    span,
    scale,  # nats in a unit of a score: of q.k, or of its tanh if CAP
    ratio,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,  # also if WINDOW: the keys of a row end at a diagonal
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DROPPED: tl.constexpr,  # how outputs are rounded: rounding_kernel.py
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,  # "none", or how a soft cap is computed: `capped_scores`
    SINKS: tl.constexpr,
    MAXIMA: tl.constexpr,
    STEP: tl.constexpr,  # of the strides of q, k, v and the output: `in_steps`
    WHOLE: tl.constexpr,  # all keys are in one block
):
    """Compute softmax(scale q k^T + mask) v and its log-sum-exp for BLOCK_M rows of the heads of one key head."""
    stride_qb, stride_qh, stride_qm = in_steps(stride_qb, stride_qh, stride_qm, STEP)
    stride_kb, stride_kh, stride_kn = in_steps(stride_kb, stride_kh, stride_kn, STEP)
    stride_vb, stride_vh, stride_vn = in_steps(stride_vb, stride_vh, stride_vn, STEP)
    stride_ob, stride_oh, stride_om = in_steps(stride_ob, stride_oh, stride_om, STEP)
    HIDES: tl.constexpr = MASK != "none" or WINDOW  # from all rows, some of the keys that are loaded
    first = tl.program_id(1) * BLOCK_M
    o_pair = tl.program_id(0)
    batch = tl.cast(o_pair // kv_heads, tl.int64)
    kv_head = tl.cast(o_pair % kv_heads, tl.int64)
    o_m = first + tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, D_PAD)
    m_row = o_m < group * rows
    m_q = m_row[:, None] & (o_d < D)[None, :]
    o_head = kv_head * group + o_m // rows
    o_query = o_m % rows
    p_rows = p_q + batch * stride_qb + o_head * stride_qh + tl.cast(o_query, tl.int64) * stride_qm
    p_keys = p_k + batch * stride_kb + kv_head * stride_kh
    p_values = p_v + batch * stride_vb + kv_head * stride_vh
    p_masks = (
        p_mask + batch * stride_mask_b + o_head * stride_mask_h + tl.cast(o_query, tl.int64) * stride_mask_m
    )  # fmt: skip
    # Some row of the tile sees the last key before `end`. Keys before all windows are cut off (`Call.narrowed`).
    last = tl.minimum(first + BLOCK_M, group * rows) - 1
    one_head = first // rows == last // rows
    diagonal = keys - rows
    end = keys
    if WINDOW:
        diagonal += right
    if CAUSAL:
        end = tl.maximum(tl.minimum(keys, tl.where(one_head, last % rows, rows - 1) + diagonal + 1), 0)
    sampled = end
    if MASK != "none" and not WHOLE:  # a mask may hide what its rows may not see yet, and slots that are not filled
        p_last = p_mask + batch * stride_mask_b + (kv_head * group + last // rows) * stride_mask_h
        sampled = end_of_seen(p_last + tl.cast(last % rows, tl.int64) * stride_mask_m, end, stride_mask_n, MASK)
    # All loads are on their way before one is waited for. Queries, which every warp gets from the others, are last.
    o_last = tl.maximum(sampled - BLOCK_N, 0) + tl.arange(0, BLOCK_N)
    b_k = load_block(p_keys, o_last, end, stride_kn, D, D_PAD)
    if WHOLE:
        b_v = load_block(p_values, o_last, end, stride_vn, D, D_PAD)
    b_mask = load_mask(p_masks, o_last, m_row, end, stride_mask_n, MASK)
    b_q = tl.load(p_rows[:, None] + o_d[None, :], mask=m_q, other=0.0)
    if CAP != "none":  # otherwise the restart does so: an infinite query exceeds the bound
        b_q = without_infinities(b_q)
    m_seen, m_key, b_bias = seen_keys(b_mask, o_last, o_query, m_row, end, diagonal, span, MASK, CAUSAL, WINDOW)
    b_max = tl.full((BLOCK_M,), -INF, tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    b_acc = tl.zeros((BLOCK_M, D_PAD), tl.float32)
    b_far = tl.zeros((FAR_ROWS, BLOCK_N), tl.float32)
    b_anchor = tl.zeros((D_PAD,), tl.float16)
    b_shift = tl.zeros((BLOCK_M,), tl.float32)
    longest = scale
    is_small = scale > 0.0
    if CAP == "none":
        b_wide = b_q.to(tl.float32)
        longest = tl.sqrt(tl.max(tl.sum(b_wide * b_wide, 1), 0)) * scale
        is_small = are_bounded(squared_norms(b_k, m_key, HIDES), longest)
        if is_small == 0:
            b_anchor = middle_of(b_k, m_key, WHOLE, HIDES)
            b_shift = shift_of(b_q, b_anchor)
            if WHOLE:
                b_k = b_k - b_anchor[None, :]
                is_small = are_bounded(squared_norms(b_k, m_key, HIDES), longest)
    if WHOLE:
        b_max, b_sum, b_acc = attend_block(b_q, b_k, b_v, m_seen, m_key, b_bias, scale, ratio, MASK, WINDOW, CAP)
        infinite = tl.max(tl.reshape(tl.where(tl.abs(b_acc) < INF, 0, 1), (BLOCK_M * D_PAD,), can_reorder=True), 0)
        is_exact = (is_small != 0) & (infinite == 0)
    else:
        b_max, b_sum, b_acc, b_frame, b_far = attend_split(
            b_q, b_max, b_sum, b_acc, b_anchor.to(tl.float32), b_far, p_keys, p_values, p_masks, o_query, m_row, 0, end,
            diagonal, span, scale, ratio, longest, stride_kn, stride_vn, stride_mask_n, p_k, 0, 0,
            "head" if CAP == "none" else "none", True, MASK, CAUSAL, D, D_PAD, BLOCK_N, 0, WINDOW, CAP,
        )  # fmt: skip
        if CAP == "none":
            is_exact = is_near(b_far, b_acc, longest, D)
    if CAP == "none":
        if is_exact == 0:
            EACH: tl.constexpr = BLOCK_N if BLOCK_N <= 64 else 32  # keys of an anchor: fewer differ less
            b_q = without_infinities(b_q)
            b_max, b_sum, b_acc, b_frame, _ = attend_split(
                b_q, tl.full((BLOCK_M,), -INF, tl.float32), tl.zeros_like(b_sum), tl.zeros_like(b_acc),
                tl.zeros((D_PAD,), tl.float32), tl.zeros((FAR_ROWS, EACH), tl.float32), p_keys, p_values, p_masks,
                o_query, m_row, 0, end, diagonal, span, scale, ratio, longest, stride_kn, stride_vn, stride_mask_n,
                p_k, 0, 0, "block", True, MASK, CAUSAL, D, D_PAD, EACH, 0, WINDOW, CAP,
            )  # fmt: skip
            b_shift = shift_of(b_q, b_frame)
    nats = b_max if MASK == "float" else b_max * scale
    nats += b_shift * scale
    p_sinks = p_sink + tl.where(m_row, o_head, 0)  # rows of padding lie behind the last head
    b_out, b_lse = mean_of_values(b_acc, b_max, b_sum, nats, p_sinks, D, DROPPED, True, SINKS)
    p_rows = p_out + batch * stride_ob + o_head * stride_oh + tl.cast(o_query, tl.int64) * stride_om
    tl.store(p_rows[:, None] + o_d[None, :], b_out.to(p_out.dtype.element_ty), mask=m_q)
    o_lse = batch * stride_lb + o_head * stride_lh + tl.cast(o_query, tl.int64) * stride_lm
    tl.store(p_lse + o_lse, b_lse, mask=m_row)
    if MAXIMA:
        tl.store(p_largest + o_lse, largest_score(b_max, b_sum, nats), mask=m_row)
