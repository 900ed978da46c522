"""Triton kernel for short sequences of keys: all keys of a head are in one tile, so that one launch is enough.

A video model attends over 25 frames at every pixel, and over one token: tens of thousands of heads with a few rows and
keys each. One block of keys needs one anchor, and nothing is rescaled or merged.
"""

import triton
import triton.language as tl

from pasa.ops.attention.triton.tile_math import (
    FP16_MAX,
    INF,
    LOG2_E,
    add_values,
    anchored_scores,
    capped_scores,
    largest_score,
    load_mask,
    mean_of_values,
    softmax_step,
)


@triton.jit(do_not_specialize=["heads", "group", "tiles", "rows", "keys", "right", "span"])
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
    heads,
    group,
    tiles,
    rows,
    keys,
    right,  # as `KernelCall.limits`, if WINDOW
    span,
    scale,  # nats in a unit of a score: of q.k, or of its tanh if CAP
    ratio,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # at least `keys`
    DROPPED: tl.constexpr,  # how outputs are rounded: rounding_kernel.py
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,  # "none", or how a soft cap is computed: `capped_scores`
    SINKS: tl.constexpr,
    MAXIMA: tl.constexpr,
):
    """Compute softmax(scale q k^T + mask) v and its log-sum-exp for one tile of BLOCK_M query rows of one head."""
    o_tile = tl.program_id(0) % tiles
    head = tl.cast((tl.program_id(0) // tiles) % heads, tl.int64)
    batch = tl.cast(tl.program_id(0) // tiles // heads, tl.int64)
    o_m = tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, D_PAD)
    o_row = o_tile * BLOCK_M + o_m
    at = tl.cast(o_tile * BLOCK_M, tl.int64)
    m_q = (o_row < rows)[:, None] & (o_d < D)[None, :]
    m_kv = (o_n < keys)[:, None] & (o_d < D)[None, :]
    # queries (M, D), keys and values (N, D)
    p_rows = p_q + batch * stride_qb + head * stride_qh + at * stride_qm
    p_keys = p_k + batch * stride_kb + (head // group) * stride_kh
    p_values = p_v + batch * stride_vb + (head // group) * stride_vh
    b_q = tl.load(p_rows + o_m[:, None] * stride_qm + o_d[None, :], mask=m_q, other=0.0)
    b_k = tl.load(p_keys + o_n[:, None] * stride_kn + o_d[None, :], mask=m_kv, other=0.0)
    b_v = tl.load(p_values + o_n[:, None] * stride_vn + o_d[None, :], mask=m_kv, other=0.0)
    b_q = tl.where(tl.abs(b_q.to(tl.float32)) <= FP16_MAX, b_q, float("nan")).to(tl.float16)
    # what each row sees (M, N)
    m_tile = (o_n < keys)[None, :] & (o_row < rows)[:, None]
    m_seen = m_tile
    if WINDOW:
        last = o_row + keys - rows + right
        m_seen = m_seen & (o_n[None, :] <= last[:, None]) & (o_n[None, :] >= last[:, None] - span)
    elif CAUSAL:
        m_seen = m_seen & (o_n[None, :] <= o_row[:, None] + keys - rows)
    if MASK != "none":
        p_tile = p_mask + batch * stride_mask_b + head * stride_mask_h + at * stride_mask_m
        m_seen, b_bias = load_mask(p_tile, m_tile, m_seen, stride_mask_m, stride_mask_n, MASK)
    m_key = tl.max(tl.where(m_seen, 1, 0), 0) > 0
    if CAP != "none":
        b_s = capped_scores(tl.dot(b_q, tl.trans(b_k)), ratio, CAP)
        frame = tl.zeros((BLOCK_M,), tl.float32)
    else:  # scores (M, N), less those of the anchor
        b_wide = b_q.to(tl.float32)
        b_s, b_anchor = anchored_scores(b_q, b_k, m_key, tl.sqrt(tl.max(tl.sum(b_wide * b_wide, 1), 0)) * scale, True)
        frame = tl.sum(b_wide * b_anchor[None, :], 1) * scale
    factor = scale * LOG2_E
    if MASK == "float":
        b_s = b_s * scale + b_bias
        factor = LOG2_E
    b_s = tl.where(m_seen, b_s, -INF)
    # softmax and values
    b_zero = tl.zeros((BLOCK_M,), tl.float32)
    b_p, _, b_max, b_sum = softmax_step(b_s, b_zero, factor, b_zero - INF, b_zero, True, False)
    b_acc = add_values(tl.zeros((BLOCK_M, D_PAD), tl.float32), b_p, b_v, m_seen)
    nats = b_max if MASK == "float" else b_max * scale
    nats += frame
    b_out, b_lse = mean_of_values(b_acc, b_max, b_sum, nats, p_sink + head, D, DROPPED, True, SINKS)
    p_rows = p_out + batch * stride_ob + head * stride_oh + at * stride_om
    tl.store(p_rows + o_m[:, None] * stride_om + o_d[None, :], b_out.to(p_out.dtype.element_ty), mask=m_q)
    p_rows_lse = p_lse + batch * stride_lb + head * stride_lh + at * stride_lm
    tl.store(p_rows_lse + o_m * stride_lm, b_lse, mask=o_row < rows)
    if MAXIMA:
        p_rows_largest = p_largest + batch * stride_lb + head * stride_lh + at * stride_lm
        tl.store(p_rows_largest + o_m * stride_lm, largest_score(b_max, b_sum, nats), mask=o_row < rows)
