"""Triton kernels of the backward pass, for GPUs and the interpreter.

spec/gradients.py has the formulas and the frame, and serves NPUs.

Three passes follow centre_kernel.py: maximum, sum and delta of every row; dK and dV by key tiles; dQ by row tiles.
Products take FP16 operands and accumulate in FP32. Powers of two keep operands away from both ends of FP16's range:
- The gradient of each row is divided by its unit u (`unit_bits`), so that no |dS| of the row exceeds 2^15. So loss
  scaling cannot overflow, dS of a weight of 2^-20 is still a normal number, and dQ does not depend on other rows.
- Weights are multiplied by 2^15.
dK and dV sum over rows. Let U be the largest unit of the rows of a key tile. Weights then carry u / U as well. So an
addend keeps its digits down to P u = 2^-29 U, and below that errs by at most 2^-40 of the largest row's bound. A sum of
FP16 operands in one unit cannot be more accurate.
A weight is exp of the difference between a score and its row's maximum. The difference is taken before scores are
scaled, where it is exact between neighbours. So a row's largest weight is right even where scores of 1e8 nats lie 8
nats apart in FP32. Another pass may sum a score in another order, and get it above the maximum by FP32's error of a
score. Differences are therefore clamped at 0, so that P <= 1, which the units rely on. Below 0 such an error e turns a
weight P into P exp(+-e), as it does in every FP32 attention.
"""

import triton
import triton.language as tl

from pasa.ops.attention.triton.backward.centre_kernel import BITS_LIMIT, WIDTH
from pasa.ops.attention.triton.backward.tile_math import (
    LIFT_BITS,
    UNLIFT,
    bits_in_score,
    gradient_of_scores,
    lifted_weights,
    power_of_two,
    scores_of,
    unit_bits,
)
from pasa.ops.attention.triton.tile_math import INF, load_rows, tile_keys


@triton.jit
def row_statistics(b_q, b_g, b_top, b_sum, b_delta, p_k, p_v, p_mask, o_row, rows, begin, end, keys, diagonal, span,
                   gap_at, gap, scale, stride_vn, stride_mask_m, stride_mask_n, HIDES: tl.constexpr,
                   MASK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, D: tl.constexpr,
                   D_PAD: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Update maximum, sum and delta of rows with the keys from `begin` to `end`: the loop of `rows_kernel`.

    WINDOW: `gap` is added to keys from `gap_at` on, and row i sees none before i + diagonal - span.
    """
    for turn in range(begin, end, BLOCK_N):
        start = turn
        if WINDOW:
            start = tl.where(turn < gap_at, turn, turn + gap)
        o_n = start + tl.arange(0, BLOCK_N)
        at = tl.cast(start, tl.int64)
        b_k = load_rows(p_k, at, D, 0, 0, 0, keys, not HIDES, False, D, D_PAD, BLOCK_N)
        b_v = load_rows(p_v, at, stride_vn, 0, 0, 0, keys, not HIDES, False, D, D_PAD, BLOCK_N)
        b_s = tl.dot(b_q, tl.trans(b_k))
        b_dp = tl.dot(b_g, tl.trans(b_v))
        m_tile = (o_n < keys)[None, :] & (o_row < rows)[:, None]
        m_seen = m_tile
        if CAUSAL:
            m_seen = m_seen & (o_n[None, :] <= o_row[:, None] + diagonal)
        if WINDOW:
            m_seen = m_seen & (o_n[None, :] >= o_row[:, None] + diagonal - span)
        p_tile = p_mask + at * stride_mask_n
        b_x = scores_of(b_s, p_tile, m_tile, m_seen, stride_mask_m, stride_mask_n, scale, HIDES, MASK)
        top = tl.maximum(b_top, tl.max(b_x, 1))
        base = tl.where(top == -INF, 0.0, top) if HIDES else top
        b_p = tl.exp2((b_x - base[:, None]) * bits_in_score(scale, MASK))
        alpha = tl.exp2((b_top - base) * bits_in_score(scale, MASK))
        if HIDES:
            b_dp = tl.where(b_x > -INF, b_dp, 0.0)
        b_sum = b_sum * alpha + tl.sum(b_p, 1)
        b_delta = b_delta * alpha + tl.sum(b_p * b_dp, 1)
        b_top = top
    return b_top, b_sum, b_delta


@triton.jit
def add_sink(b_q, b_top, b_sum, b_delta, sink, p_centre, scale, MASK: tl.constexpr, D: tl.constexpr):
    """Return maximum, sum and delta of rows (M,) with a sink, whose value is 0, and the sink's share of the weights.

    p_centre: of the key head; scores lack q.c, so the sink does, too.
    """
    o_d = tl.arange(0, b_q.shape[1])
    b_centre = tl.load(p_centre + o_d, mask=o_d < D, other=0.0)
    b_sink = sink / scale - tl.sum(b_q.to(tl.float32) * b_centre[None, :], 1)
    if MASK == "float":
        b_sink = b_sink * scale
    top = tl.maximum(b_top, b_sink)
    base = tl.where(top == -INF, 0.0, top)
    keep = tl.exp2((b_top - base) * bits_in_score(scale, MASK))
    power = tl.exp2((b_sink - base) * bits_in_score(scale, MASK))
    b_sum = b_sum * keep + power
    return top, b_sum, b_delta * keep, tl.where(b_sum == 0.0, 0.0, power / b_sum)


@triton.jit(do_not_specialize=["heads", "group", "tiles", "rows", "right", "span"])
def rows_kernel(
    p_q,  # (B, Hq, Sq, D)
    p_k,  # (B, Hkv, Skv, D) centred, contiguous
    p_v,
    p_grad,  # (B, Hq, Sq, D), any float type: gradient of the output
    p_grad_lse,  # (B, Hq, Sq) FP32, contiguous
    p_largest,  # (B, Hkv, slices) FP32: largest |v| of some columns
    p_mask,
    p_scaled,  # (B, Hq, Sq, D) FP16, contiguous: gradient in units of the row
    p_top,  # (B, Hq, Sq) FP32, as the next three: maximum of `scores_of`, infinite for a fully masked row
    p_log,  # log2 of the sum, less 15 and less log2 of the unit: of weights that carry 2^15 u
    p_shift,  # 2^-15 (delta - G_L), in units
    p_unit,  # log2 of the unit
    p_top_bits,  # (B, Hkv, tiles) INT32: largest `p_unit` of the rows from a tile on that see a key
    p_sink,  # (Hq,) FP32, if SINKS
    p_centre,  # (B, Hkv, D) FP32: subtracted from the keys by `centre_kernel`
    p_of_sink,  # (B, Hq, Sq) FP32: gradient of the sink's score in each row, if SINKS
    stride_qb,
    stride_qh,
    stride_qm,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_gb,
    stride_gh,
    stride_gm,
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
    scale,
    MASK: tl.constexpr,  # "none", "bool" or "float"
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,  # with CAUSAL: rows see no key before their window either
    SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute scaled gradient, maximum, sum and delta of BLOCK_M rows of a head."""
    o_work = tl.program_id(0)
    o_tile = tiles - 1 - o_work % tiles  # the last sees most keys
    o_head = o_work // tiles
    batch = tl.cast(o_head // heads, tl.int64)
    head = tl.cast(o_head % heads, tl.int64)
    kv = batch * (heads // group) + head // group
    o_m = tl.arange(0, BLOCK_M)
    o_row = o_tile * BLOCK_M + o_m
    o_d = tl.arange(0, D_PAD)
    m_row = o_row < rows
    m_out = m_row[:, None] & (o_d < D)[None, :]
    at = tl.cast(o_tile * BLOCK_M, tl.int64)
    o_flat = (batch * heads + head) * rows + o_row
    p_tile = p_grad + batch * stride_gb + head * stride_gh + at * stride_gm
    b_g = tl.load(p_tile + o_m[:, None] * stride_gm + o_d[None, :], mask=m_out, other=0.0).to(tl.float32)
    b_slope = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_LSE:
        b_slope = tl.load(p_grad_lse + o_flat, mask=m_row, other=0.0)
    b_bits = unit_bits(b_g, b_slope, p_largest + kv * ((D + WIDTH - 1) // WIDTH), D, D_PAD // WIDTH)
    tl.store(p_unit + o_flat, b_bits.to(tl.float32), mask=m_row)
    b_g = (b_g * power_of_two(-b_bits)[:, None]).to(tl.float16)
    tl.store(p_scaled + o_flat[:, None] * D + o_d[None, :], b_g, mask=m_out)
    b_q = load_rows(p_q + batch * stride_qb + head * stride_qh, at, stride_qm, 0, 0, 0, rows, False, False, D, D_PAD,
                    BLOCK_M)  # fmt: skip
    p_keys = p_k + kv * keys * D
    p_values = p_v + batch * stride_vb + (head // group) * stride_vh
    p_rows_mask = p_mask + batch * stride_mask_b + head * stride_mask_h + at * stride_mask_m
    diagonal, begin, whole_from, whole, end = tile_keys(
        o_tile, rows, keys, right, span, CAUSAL, WINDOW, MASK != "none", BLOCK_M, BLOCK_N
    )
    b_top = tl.full((BLOCK_M,), -INF, tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    b_delta = tl.zeros((BLOCK_M,), tl.float32)
    if MASK == "none":
        b_top, b_sum, b_delta = row_statistics(
            b_q, b_g, b_top, b_sum, b_delta, p_keys, p_values, p_rows_mask, o_row, rows, whole_from, whole, keys,
            diagonal, span, 0, 0, scale, stride_vn, stride_mask_m, stride_mask_n, False, MASK, False, False, D, D_PAD,
            BLOCK_N,
        )  # fmt: skip
    gap = tl.maximum(whole - whole_from, 0) if WINDOW else 0
    b_top, b_sum, b_delta = row_statistics(
        b_q, b_g, b_top, b_sum, b_delta, p_keys, p_values, p_rows_mask, o_row, rows, begin if WINDOW else whole,
        end - gap, keys, diagonal, span, whole_from, gap, scale, stride_vn, stride_mask_m, stride_mask_n, True, MASK,
        CAUSAL, WINDOW, D, D_PAD, BLOCK_N,
    )  # fmt: skip
    fully_masked = b_top == -INF
    share = tl.zeros((BLOCK_M,), tl.float32)
    if SINKS:
        b_top, b_sum, b_delta, share = add_sink(b_q, b_top, b_sum, b_delta, tl.load(p_sink + head), p_centre + kv * D,
                                                scale, MASK, D)  # fmt: skip
    b_sum = tl.where(fully_masked, 1.0, b_sum)
    b_shift = b_delta / b_sum
    tl.debug_barrier()
    b_unit = tl.load(p_unit + o_flat, mask=m_row, other=-BITS_LIMIT)  # from memory: registers are short in the loops
    if HAS_LSE:
        b_slope = tl.load(p_grad_lse + o_flat, mask=m_row, other=0.0)
        b_shift -= tl.where(fully_masked, 0.0, b_slope * power_of_two(-b_unit))
    if SINKS:  # of a row without keys, the log-sum-exp is the sink
        b_slope = tl.where(fully_masked, b_slope, -b_shift * power_of_two(b_unit))
        tl.store(p_of_sink + o_flat, tl.where(share > 0.0, share * b_slope, 0.0), mask=m_row)
    tl.store(p_top + o_flat, tl.where(fully_masked, INF, b_top), mask=m_row)
    tl.store(p_log + o_flat, tl.log2(b_sum) - (LIFT_BITS + b_unit), mask=m_row)
    tl.store(p_shift + o_flat, b_shift * UNLIFT, mask=m_row)
    top_bits = tl.max(tl.where(fully_masked, -BITS_LIMIT, b_unit).to(tl.int32), 0)
    for start in range(0, o_tile + 1, 32):
        o_span = start + tl.arange(0, 32)
        tl.atomic_max(p_top_bits + kv * tiles + o_span, tl.full((32,), top_bits, tl.int32), mask=o_span <= o_tile)


@triton.jit
def add_rows(b_k, b_v, b_dk, b_dv, p_q, p_g, p_top, p_log, p_shift, p_mask, o_n, keys, begin, end, rows, diagonal,
             span, gap_at, gap, scale, top_bits, stride_qm, stride_mask_m, stride_mask_n, HIDES: tl.constexpr,
             MASK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
             BLOCK_M: tl.constexpr):  # fmt: skip
    """Add the rows of one head from `begin` to `end` to dK and dV: the loop of `keys_kernel`.

    Tiles are (N, M), because the weights then are the operand that tensor cores take from registers. WINDOW: `gap` is
    added to rows from `gap_at` on, and row i sees no key before i + diagonal - span.
    """
    for turn in range(begin, end, BLOCK_M):
        start = turn
        if WINDOW:
            start = tl.where(turn < gap_at, turn, turn + gap)
        o_m = start + tl.arange(0, BLOCK_M)
        m_m = o_m < rows
        at = tl.cast(start, tl.int64)
        b_q = load_rows(p_q, at, stride_qm, 0, 0, 0, rows, False, False, D, D_PAD, BLOCK_M)
        b_g = load_rows(p_g, at, D, 0, 0, 0, rows, False, False, D, D_PAD, BLOCK_M)
        b_top = tl.load(p_top + o_m, mask=m_m, other=INF)  # rows beyond the last get weight 0
        b_log = tl.load(p_log + o_m, mask=m_m, other=0.0) + top_bits
        b_shift = tl.load(p_shift + o_m, mask=m_m, other=0.0)
        b_s = tl.dot(b_k, tl.trans(b_q))
        m_tile = (o_n < keys)[:, None] & m_m[None, :]
        m_seen = m_tile
        if CAUSAL:
            m_seen = m_seen & (o_n[:, None] <= o_m[None, :] + diagonal)
        if WINDOW:
            m_seen = m_seen & (o_n[:, None] >= o_m[None, :] + diagonal - span)
        p_tile = p_mask + at * stride_mask_m
        b_x = scores_of(b_s, p_tile, m_tile, m_seen, stride_mask_n, stride_mask_m, scale, HIDES, MASK)
        b_p = lifted_weights(b_x, b_top[None, :], b_log[None, :], scale, MASK)
        b_dv = tl.dot(b_p.to(tl.float16), b_g, b_dv)
        b_dp = tl.dot(b_v, tl.trans(b_g))
        b_dk = tl.dot(gradient_of_scores(b_p, b_dp, b_shift[None, :], b_x, HIDES), b_q, b_dk)
    return b_dk, b_dv


@triton.jit(do_not_specialize=["heads", "group", "tiles", "rows", "right", "span"])
def keys_kernel(
    p_q,  # as in `rows_kernel`, like every argument without a comment
    p_k,
    p_v,
    p_g,  # the scaled gradient
    p_top,
    p_log,
    p_shift,
    p_top_bits,
    p_mask,
    p_dk,  # (B, Hkv, Skv, D), contiguous
    p_dv,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    heads,
    group,
    tiles,
    rows,
    keys,
    right,
    span,
    scale,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPAN: tl.constexpr,  # rows of a tile of `p_top_bits`
):
    """Compute dK and dV of BLOCK_N keys, over the rows of all heads that share them.

    The first keys come first, because with a causal mask most rows see them.
    """
    kv_heads = heads // group
    o_tile = tl.program_id(0) // (tl.num_programs(0) // tiles)
    o_kv = tl.program_id(0) % (tl.num_programs(0) // tiles)
    batch = tl.cast(o_kv // kv_heads, tl.int64)
    kv_head = tl.cast(o_kv % kv_heads, tl.int64)
    kv = batch * kv_heads + kv_head
    first = o_tile * BLOCK_N
    at = tl.cast(first, tl.int64)
    o_n = first + tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, D_PAD)
    diagonal = keys - rows
    # rows before `begin` and from `end` on see none of these keys, rows from `whole` to `whole_end` see all of them
    begin = 0
    whole = 0
    end = rows
    whole_end = rows
    if WINDOW:
        diagonal += right
        end = tl.maximum(tl.minimum(first + BLOCK_N - diagonal + span, rows), 0)
        whole_end = tl.maximum(tl.minimum(first + 1 - diagonal + span, rows), 0)
    if CAUSAL:
        begin = tl.maximum(first - diagonal, 0) // BLOCK_M * BLOCK_M
        whole = tl.cdiv(tl.maximum(first + BLOCK_N - 1 - diagonal, 0), BLOCK_M) * BLOCK_M
    if MASK != "none":
        whole = rows
    if WINDOW:  # `whole_end` is the first row of a tile, or there is no row behind
        whole_end = tl.where(whole_end < rows, whole_end // BLOCK_M * BLOCK_M, tl.cdiv(rows, BLOCK_M) * BLOCK_M)
        whole_end = tl.maximum(whole_end, whole)
        end = tl.minimum(whole, end) + tl.maximum(end - whole_end, 0)
    top_bits = tl.load(p_top_bits + kv * tl.cdiv(rows, SPAN) + begin // SPAN).to(tl.float32)
    p_values = p_v + batch * stride_vb + kv_head * stride_vh
    b_k = load_rows(p_k + kv * keys * D, at, D, 0, 0, 0, keys, False, False, D, D_PAD, BLOCK_N)
    b_v = load_rows(p_values, at, stride_vn, 0, 0, 0, keys, False, False, D, D_PAD, BLOCK_N)
    b_dk = tl.zeros((BLOCK_N, D_PAD), tl.float32)
    b_dv = tl.zeros((BLOCK_N, D_PAD), tl.float32)
    for turn in range(group):
        head = kv_head * group + turn
        first_row = (batch * heads + head) * rows
        p_rows = p_q + batch * stride_qb + head * stride_qh
        p_rows_mask = p_mask + batch * stride_mask_b + head * stride_mask_h + at * stride_mask_n
        if CAUSAL or MASK != "none":
            b_dk, b_dv = add_rows(
                b_k, b_v, b_dk, b_dv, p_rows, p_g + first_row * D, p_top + first_row, p_log + first_row,
                p_shift + first_row, p_rows_mask, o_n, keys, begin, end if WINDOW else tl.minimum(whole, rows), rows,
                diagonal, span, whole, whole_end - whole, scale, top_bits, stride_qm, stride_mask_m, stride_mask_n,
                True, MASK, CAUSAL, WINDOW, D, D_PAD, BLOCK_M,
            )  # fmt: skip
        if MASK == "none":
            b_dk, b_dv = add_rows(
                b_k, b_v, b_dk, b_dv, p_rows, p_g + first_row * D, p_top + first_row, p_log + first_row,
                p_shift + first_row, p_rows_mask, o_n, keys, whole, whole_end if WINDOW else rows, rows, diagonal,
                span, 0, 0, scale, top_bits, stride_qm, stride_mask_m, stride_mask_n, False, MASK, False, False, D,
                D_PAD, BLOCK_M,
            )  # fmt: skip
    unit = power_of_two(top_bits)
    o_out = (kv * keys + o_n)[:, None] * D + o_d[None, :]
    m_out = (o_n < keys)[:, None] & (o_d < D)[None, :]
    tl.store(p_dk + o_out, (b_dk * (scale * unit)).to(p_dk.dtype.element_ty), mask=m_out)
    tl.store(p_dv + o_out, (b_dv * (UNLIFT * unit)).to(p_dv.dtype.element_ty), mask=m_out)


@triton.jit
def add_keys(b_q, b_g, b_top, b_log, b_shift, b_dq, p_k, p_v, p_mask, o_row, rows, begin, end, keys, diagonal, span,
             gap_at, gap, scale, stride_vn, stride_mask_m, stride_mask_n, HIDES: tl.constexpr, MASK: tl.constexpr,
             CAUSAL: tl.constexpr, WINDOW: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
             BLOCK_N: tl.constexpr):  # fmt: skip
    """Add the keys from `begin` to `end` to dQ: the loop of `queries_kernel`; WINDOW as in `row_statistics`."""
    for turn in range(begin, end, BLOCK_N):
        start = turn
        if WINDOW:
            start = tl.where(turn < gap_at, turn, turn + gap)
        o_n = start + tl.arange(0, BLOCK_N)
        at = tl.cast(start, tl.int64)
        b_k = load_rows(p_k, at, D, 0, 0, 0, keys, not HIDES, False, D, D_PAD, BLOCK_N)
        b_v = load_rows(p_v, at, stride_vn, 0, 0, 0, keys, not HIDES, False, D, D_PAD, BLOCK_N)
        b_s = tl.dot(b_q, tl.trans(b_k))
        m_tile = (o_n < keys)[None, :] & (o_row < rows)[:, None]
        m_seen = m_tile
        if CAUSAL:
            m_seen = m_seen & (o_n[None, :] <= o_row[:, None] + diagonal)
        if WINDOW:
            m_seen = m_seen & (o_n[None, :] >= o_row[:, None] + diagonal - span)
        p_tile = p_mask + at * stride_mask_n
        b_x = scores_of(b_s, p_tile, m_tile, m_seen, stride_mask_m, stride_mask_n, scale, HIDES, MASK)
        b_p = lifted_weights(b_x, b_top[:, None], b_log[:, None], scale, MASK)
        b_dp = tl.dot(b_g, tl.trans(b_v))
        b_dq = tl.dot(gradient_of_scores(b_p, b_dp, b_shift[:, None], b_x, HIDES), b_k, b_dq)
    return b_dq


@triton.jit(do_not_specialize=["heads", "group", "tiles", "rows", "right", "span"])
def queries_kernel(
    p_q,  # as in `keys_kernel`, like every argument without a comment
    p_k,
    p_v,
    p_g,
    p_top,
    p_log,
    p_shift,
    p_unit,
    p_mask,
    p_grad_lse,
    p_centre,  # (B, Hkv, D) FP32: subtracted from the keys by `centre_kernel`
    p_dq,  # (B, Hq, Sq, D), contiguous
    stride_qb,
    stride_qh,
    stride_qm,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    heads,
    group,
    tiles,
    rows,
    keys,
    right,
    span,
    scale,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_LSE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute dQ of BLOCK_M rows of a head: dS (K - c) + G_L c."""
    o_work = tl.program_id(0)
    o_tile = tiles - 1 - o_work // (tl.num_programs(0) // tiles)
    o_head = o_work % (tl.num_programs(0) // tiles)
    batch = tl.cast(o_head // heads, tl.int64)
    head = tl.cast(o_head % heads, tl.int64)
    kv = batch * (heads // group) + head // group
    o_row = o_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, D_PAD)
    m_row = o_row < rows
    at = tl.cast(o_tile * BLOCK_M, tl.int64)
    b_q = load_rows(p_q + batch * stride_qb + head * stride_qh, at, stride_qm, 0, 0, 0, rows, False, False, D, D_PAD,
                    BLOCK_M)  # fmt: skip
    first_row = (batch * heads + head) * rows
    b_g = load_rows(p_g + first_row * D, at, D, 0, 0, 0, rows, False, False, D, D_PAD, BLOCK_M)
    b_top = tl.load(p_top + first_row + o_row, mask=m_row, other=INF)
    b_log = tl.load(p_log + first_row + o_row, mask=m_row, other=0.0)
    b_log += tl.load(p_unit + first_row + o_row, mask=m_row, other=0.0)
    b_shift = tl.load(p_shift + first_row + o_row, mask=m_row, other=0.0)
    p_keys = p_k + kv * keys * D
    p_values = p_v + batch * stride_vb + (head // group) * stride_vh
    p_rows_mask = p_mask + batch * stride_mask_b + head * stride_mask_h + at * stride_mask_m
    diagonal, begin, whole_from, whole, end = tile_keys(
        o_tile, rows, keys, right, span, CAUSAL, WINDOW, MASK != "none", BLOCK_M, BLOCK_N
    )
    b_dq = tl.zeros((BLOCK_M, D_PAD), tl.float32)
    if MASK == "none":
        b_dq = add_keys(
            b_q, b_g, b_top, b_log, b_shift, b_dq, p_keys, p_values, p_rows_mask, o_row, rows, whole_from, whole, keys,
            diagonal, span, 0, 0, scale, stride_vn, stride_mask_m, stride_mask_n, False, MASK, False, False, D, D_PAD,
            BLOCK_N,
        )  # fmt: skip
    gap = tl.maximum(whole - whole_from, 0) if WINDOW else 0
    b_dq = add_keys(
        b_q, b_g, b_top, b_log, b_shift, b_dq, p_keys, p_values, p_rows_mask, o_row, rows, begin if WINDOW else whole,
        end - gap, keys, diagonal, span, whole_from, gap, scale, stride_vn, stride_mask_m, stride_mask_n, True, MASK,
        CAUSAL, WINDOW, D, D_PAD, BLOCK_N,
    )  # fmt: skip
    tl.debug_barrier()
    b_unit = tl.load(p_unit + first_row + o_row, mask=m_row, other=0.0)
    b_dq *= power_of_two(b_unit)[:, None]
    if HAS_LSE:
        b_lse = tl.load(p_grad_lse + first_row + o_row, mask=m_row & (b_top < INF), other=0.0)
        b_centre = tl.load(p_centre + kv * D + o_d, mask=o_d < D, other=0.0)
        b_dq += b_lse[:, None] * b_centre[None, :]
    o_out = (first_row + o_row)[:, None] * D + o_d[None, :]
    tl.store(p_dq + o_out, (b_dq * scale).to(p_dq.dtype.element_ty), mask=m_row[:, None] & (o_d < D)[None, :])
