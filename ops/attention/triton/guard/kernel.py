"""Triton kernels around a device's own fused attention; `sdpa/backend.py` is their specification.

They need no tensor cores, so they run on every GPU for which Triton compiles. Nothing is read back by the host: each
program decides from its own numbers whether it has something to repair.
"""

import triton
import triton.language as tl

from pasa.ops.attention.triton.tile_math import FP16_MAX, INF, in_steps, is_finite, middle_anchor, wait_for_others

LARGE: tl.constexpr = tl.constexpr(2.0**15)  # convex combinations of values up to here cannot be rounded to infinity


@triton.jit
def any_of(m_x):
    """Return 1 if one of the flags (M, D) is set, else 0."""
    flags: tl.constexpr = m_x.shape[0] * m_x.shape[1]
    return tl.max(tl.reshape(tl.where(m_x, 1, 0), (flags,), can_reorder=True), 0)


@triton.jit
def merge(low, high, top, other_low, other_high, other_top):
    """Return the extremes of two sets: NaN if one of them holds a NaN."""
    low = tl.minimum(low, other_low, propagate_nan=tl.PropagateNan.ALL)
    high = tl.maximum(high, other_high, propagate_nan=tl.PropagateNan.ALL)
    return low, high, tl.maximum(top, other_top, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def load_tile(p_x, first, n, stride_n, o_d, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load the columns `o_d` of BLOCK keys or values (BLOCK, WIDTH), the last of `n` for those beyond it."""
    p_tile = p_x + first * stride_n + tl.minimum(tl.arange(0, BLOCK), n - 1)[:, None] * stride_n + o_d[None, :]
    if D % WIDTH == 0:
        return tl.load(p_tile)
    return tl.load(p_tile, mask=(o_d < D)[None, :], other=0.0)


@triton.jit
def extremes(
    b_k, p_v, p_seen, first, n, stride_vn, o_d,
    HAS_SEEN: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the smallest and the largest key of each column (WIDTH,) that a row sees, and the largest |v| of all.

    NaN propagates. Where no row sees a key, they are inf and -inf. A value that no row sees counts: its weight is 0,
    but 0 times NaN is NaN.
    """
    b_top = tl.abs(load_tile(p_v, first, n, stride_vn, o_d, D, WIDTH, BLOCK))
    b_low = b_k
    b_high = b_k
    if HAS_SEEN:
        m_key = (tl.load(p_seen + first + tl.minimum(tl.arange(0, BLOCK), n - 1)) != 0)[:, None]
        b_low = tl.where(m_key, b_low, INF)
        b_high = tl.where(m_key, b_high, -INF)
    return tl.reduce((b_low, b_high, b_top), 0, merge)


@triton.jit(do_not_specialize=["stride_seen", "keys", "splits"])
def scan_kernel(
    p_k,  # (B, Hkv, S, D)
    p_v,  # (B, Hkv, S, D)
    p_seen,  # (B, S) bytes: 1 for keys that some row sees, with HAS_SEEN
    p_extremes,  # (B, Hkv, splits, 3, D): extremes
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_seen,
    heads,
    keys,
    splits,
    HAS_SEEN: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the extremes of BLOCK keys and values in WIDTH columns."""
    SLICES: tl.constexpr = (D + WIDTH - 1) // WIDTH
    o_split = tl.program_id(0) % splits
    o_pair = tl.cast(tl.program_id(0) // splits // SLICES, tl.int64)
    o_d = tl.program_id(0) // splits % SLICES * WIDTH + tl.arange(0, WIDTH)
    batch, head = o_pair // heads, o_pair % heads
    first = tl.cast(o_split, tl.int64) * BLOCK
    n = keys - o_split * BLOCK
    b_k = load_tile(p_k + batch * stride_kb + head * stride_kh, first, n, stride_kn, o_d, D, WIDTH, BLOCK)
    low, high, top = extremes(
        b_k, p_v + batch * stride_vb + head * stride_vh, p_seen + batch * stride_seen, first, n, stride_vn, o_d,
        HAS_SEEN, D, WIDTH, BLOCK,
    )  # fmt: skip
    p_out = p_extremes + (o_pair * splits + o_split) * (3 * D) + o_d
    tl.store(p_out, low, mask=o_d < D)
    tl.store(p_out + D, high, mask=o_d < D)
    tl.store(p_out + 2 * D, top, mask=o_d < D)


@triton.jit(do_not_specialize=["stride_seen", "keys", "splits"])
def shift_columns_kernel(
    p_k,  # as in `scan_kernel`, like every argument without a comment
    p_v,
    p_seen,
    p_extremes,  # unless WHOLE
    p_shifted,  # (B, Hkv, S, D) FP16, contiguous: K'
    p_column,  # (B, Hkv, 2, D) FP16: anchors, NaN where a key that a row sees is not finite; the largest |v|
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_seen,
    heads,
    keys,
    splits,
    HAS_SEEN: tl.constexpr,
    WHOLE: tl.constexpr,  # BLOCK holds all keys, so no scan came before
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,  # extremes that are loaded at a time
):
    """Compute the anchors of WIDTH columns as `head_anchors` does, and K' of BLOCK keys, with 0 for what is not finite.

    The difference from an anchor is exact in FP16. Only keys that no row sees can leave its
    range, and are clamped.
    """
    SLICES: tl.constexpr = (D + WIDTH - 1) // WIDTH
    o_block = tl.program_id(0) % splits
    o_pair = tl.cast(tl.program_id(0) // splits // SLICES, tl.int64)
    o_d = tl.program_id(0) // splits % SLICES * WIDTH + tl.arange(0, WIDTH)
    batch, head = o_pair // heads, o_pair % heads
    first = tl.cast(o_block, tl.int64) * BLOCK
    n = keys - o_block * BLOCK
    b_k = load_tile(p_k + batch * stride_kb + head * stride_kh, first, n, stride_kn, o_d, D, WIDTH, BLOCK)
    if WHOLE:
        low, high, top = extremes(
            b_k, p_v + batch * stride_vb + head * stride_vh, p_seen + batch * stride_seen, first, n, stride_vn, o_d,
            HAS_SEEN, D, WIDTH, BLOCK,
        )  # fmt: skip
    else:
        low = tl.full((WIDTH,), INF, tl.float16)
        high = tl.full((WIDTH,), -INF, tl.float16)
        top = tl.zeros((WIDTH,), tl.float16)
        for start in range(0, splits, PARTS):
            o_part = tl.minimum(start + tl.arange(0, PARTS), splits - 1)
            p_tile = p_extremes + ((o_pair * splits + o_part) * (3 * D))[:, None] + o_d[None, :]
            m_tile = (o_d < D)[None, :]
            b_low = tl.load(p_tile, mask=m_tile, other=0.0)
            b_high = tl.load(p_tile + D, mask=m_tile, other=0.0)
            b_top = tl.load(p_tile + 2 * D, mask=m_tile, other=0.0)
            new_low, new_high, new_top = tl.reduce((b_low, b_high, b_top), 0, merge)
            low, high, top = merge(low, high, top, new_low, new_high, new_top)
    b_low = low.to(tl.float32)
    b_high = high.to(tl.float32)
    b_anchor = middle_anchor(b_low, b_high)
    if HAS_SEEN:
        b_new = tl.where(is_finite(b_k), b_k, 0.0).to(tl.float32) - b_anchor.to(tl.float32)[None, :]
        b_new = tl.minimum(tl.maximum(b_new, -FP16_MAX), FP16_MAX).to(tl.float16)
    else:
        b_new = tl.where(is_finite(b_k), b_k - b_anchor[None, :], 0.0).to(tl.float16)
    o_n = tl.arange(0, BLOCK)
    p_tile = p_shifted + (o_pair * keys + first) * D + o_n[:, None] * D + o_d[None, :]
    tl.store(p_tile, b_new, mask=(o_n < n)[:, None] & (o_d < D)[None, :])
    if o_block == 0:
        bad = (b_low != b_low) | (b_low == -INF) | (b_high == INF)
        p_out = p_column + o_pair * (2 * D) + o_d
        tl.store(p_out, tl.where(bad, float("nan"), b_anchor).to(tl.float16), mask=o_d < D)
        tl.store(p_out + D, top, mask=o_d < D)


# Keys and the stride of the bias are specialised, because only multiples of 16 let a thread load and store 16 bytes.
@triton.jit(do_not_specialize=["heads", "rows", "tiles"])
def bias_kernel(
    p_mask,  # (B, H, S, Skv) bytes or FP16
    p_bias,  # (B, H, S, Skv) FP16, rows `stride_bias` apart
    p_empty,  # (B, H, S) bytes: 1 for rows without keys
    p_seen,  # (B, Skv) bytes, with MARK_KEYS: 0, which become 1 for keys that some row of some head sees
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    stride_bias,
    heads,
    rows,
    keys,
    tiles,
    MASK: tl.constexpr,
    MARK_KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write BLOCK_M rows of a mask as numbers to add, mark rows without keys, and mark keys that some row sees."""
    o_pair = tl.cast(tl.program_id(0) // tiles, tl.int64)
    o_m = tl.cast(tl.program_id(0) % tiles * BLOCK_M, tl.int64) + tl.arange(0, BLOCK_M)
    p_row = p_mask + o_pair // heads * stride_mask_b + o_pair % heads * stride_mask_h + o_m * stride_mask_m
    b_any = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for start in range(0, keys, BLOCK_N):
        o_n = tl.cast(start, tl.int64) + tl.arange(0, BLOCK_N)
        m_tile = (o_m < rows)[:, None] & (o_n < keys)[None, :]
        b_mask = tl.load(p_row[:, None] + (o_n * stride_mask_n)[None, :], mask=m_tile, other=0)
        if MASK == "bool":
            m_seen = b_mask != 0
            b_bias = tl.where(m_seen, 0.0, -INF).to(tl.float16)
        else:
            m_seen = b_mask != -INF
            b_bias = b_mask
        tl.store(p_bias + ((o_pair * rows + o_m) * stride_bias)[:, None] + o_n[None, :], b_bias, mask=m_tile)
        m_seen = m_seen & m_tile
        b_any = tl.where(m_seen, 1, b_any)
        if MARK_KEYS:
            # Thousands of programs would store the same bytes, in a few cache lines. So a byte that is 1 already is
            # left alone. The load goes past the L1 cache, which may still hold a 0. Each row stores its own
            # bytes: a maximum over rows would make threads wait for each other.
            p_bytes = p_seen + o_pair // heads * keys + tl.broadcast_to(o_n[None, :], (BLOCK_M, BLOCK_N))
            b_byte = tl.load(p_bytes, mask=m_seen, other=1, cache_modifier=".cg")
            tl.store(p_bytes, tl.full((BLOCK_M, BLOCK_N), 1, tl.uint8), mask=m_seen & (b_byte == 0))
    b_any = tl.max(b_any, 1)
    tl.store(p_empty + o_pair * rows + o_m, tl.where(b_any > 0, 0, 1).to(tl.int8), mask=o_m < rows)


@triton.jit
def attend_row(
    p_query, p_keys, p_values, p_masks, diagonal, keys, left, right, scale, stride_kn, stride_vn, stride_mask_n,
    MASK: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attend from one row in FP32 to keys `diagonal - left` to `diagonal + right`, with 0 for all that is not finite.

    Returns the output (D_PAD,), which is NaN in the columns of values that are not finite, the log-sum-exp, and
    whether the row sees a NaN or an infinity elsewhere. Then it is NaN.
    """
    o_d = tl.arange(0, D_PAD)
    m_d = (o_d < D)[None, :]
    b_q = tl.load(p_query + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    bad_query = tl.max(tl.where(is_finite(b_q), 0, 1), 0)
    b_q = tl.where(is_finite(b_q), b_q, 0.0)
    top = tl.full((), -INF, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    bad = tl.full((), 0, tl.int32)
    b_acc = tl.zeros((D_PAD,), tl.float32)
    begin = tl.maximum(diagonal - left, 0) // BLOCK_N * BLOCK_N
    end = tl.minimum(diagonal + right + 1, keys)
    for start in range(begin, end, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        o_wide = tl.cast(start, tl.int64) + tl.arange(0, BLOCK_N)
        m_seen = (o_n < end) & (o_n >= diagonal - left)
        b_bias = tl.zeros((BLOCK_N,), tl.float32)
        if MASK != "none":
            b_bias = tl.load(p_masks + o_wide * stride_mask_n, mask=m_seen, other=0).to(tl.float32)
            m_seen = m_seen & ((b_bias != 0.0) if MASK == "bool" else (b_bias != -INF))
        m_tile = m_seen[:, None] & m_d
        b_k = tl.load(p_keys + (o_wide * stride_kn)[:, None] + o_d[None, :], mask=m_tile, other=0.0).to(tl.float32)
        b_v = tl.load(p_values + (o_wide * stride_vn)[:, None] + o_d[None, :], mask=m_tile, other=0.0).to(tl.float32)
        m_clean = is_finite(b_k)
        bad = tl.maximum(bad, tl.max(tl.max(tl.where(m_clean, 0, 1), 1), 0))
        b_s = tl.sum(b_q[None, :] * tl.where(m_clean, b_k, 0.0), 1) * scale
        if MASK == "float":
            m_finite = tl.abs(b_bias) < INF
            bad = tl.maximum(bad, tl.max(tl.where(m_seen & (m_finite == 0), 1, 0), 0))
            b_s += tl.where(m_finite, b_bias, 0.0)
        b_s = tl.where(m_seen, b_s, -INF)
        before = top
        top = tl.maximum(top, tl.max(b_s, 0))
        frame = tl.where(top == -INF, 0.0, top)
        b_p = tl.exp(b_s - frame)
        share = tl.exp(before - frame)
        total = total * share + tl.sum(b_p, 0)
        # The products are of finite values; NaN - 0 marks the columns of the others.
        b_v = tl.where(is_finite(b_v), b_v, float("nan"))
        b_acc = b_acc * share + tl.sum(tl.where(m_tile, b_p[:, None] * b_v, 0.0), 0)
    bad = tl.where(top > -INF, tl.maximum(bad, bad_query), bad)
    b_out = tl.where(top > -INF, b_acc / tl.where(total > 0.0, total, 1.0), 0.0)
    b_new = tl.minimum(tl.maximum(b_out, -FP16_MAX), FP16_MAX)
    b_new = tl.where((b_out == b_out) & (bad == 0), b_new, float("nan"))
    return b_new, tl.where(bad > 0, float("nan"), top + tl.log(total)), bad


@triton.jit(
    do_not_specialize=[
        *("stride_lb", "stride_lh", "stride_mask_b", "stride_mask_h", "stride_mask_m"),
        *("stride_eb", "stride_eh", "stride_em", "rows", "keys", "left", "right"),
    ]
)
def finish_kernel(
    p_out,  # (B, Hq, Sq, D) FP16: read, and repaired
    p_lse,  # (B, Hq, Sq) FP32: of K' until here
    p_q,
    p_k,  # (B, Hkv, Skv, D): the keys themselves
    p_v,
    p_mask,
    p_column,  # as in `shift_columns_kernel`, with SCANNED
    p_empty,  # bytes, broadcast by strides of 0: 1 for rows without keys, with EMPTY
    stride_ob,
    stride_oh,
    stride_om,
    stride_lb,
    stride_lh,
    stride_lm,
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
    stride_eb,
    stride_eh,
    stride_em,
    heads,
    group,
    rows,
    keys,
    left,  # row i sees keys i + Skv - Sq - left to i + Skv - Sq + right
    right,
    scale,
    MASK: tl.constexpr,
    SCANNED: tl.constexpr,
    EMPTY: tl.constexpr,  # rows of which a mask hides all keys are given, whatever the kernel made of them
    QUERIES: tl.constexpr,  # the kernel may hide an infinite query
    VALUES: tl.constexpr,  # keys are few, so every program looks at all values of its head
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_L: tl.constexpr,  # rows of a program
    BLOCK_R: tl.constexpr,  # of them looked at together
    BLOCK_M: tl.constexpr,  # and repaired together
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,  # launched while the fused kernel ends
    STEP: tl.constexpr,  # of the strides of q, k, v and the output: `in_steps`
):
    """Add to the log-sum-exp what anchors took from the scores, and attend again from rows that may be wrong.

    These are the rows whose output or log-sum-exp, or with QUERIES query, is not finite, and all rows of a head with a
    key that is not finite, because a kernel may hide such numbers. Of the latter, rows that see no such key stay as
    they are. With SCANNED or VALUES, outputs are not even read where they are finite in any case: no value of the head
    is beyond LARGE, and every log-sum-exp is finite. Memory-efficient attention hides an infinite query whose scores
    are all -inf: output and log-sum-exp are 0. cuDNN hides none.
    """
    stride_ob, stride_oh, stride_om = in_steps(stride_ob, stride_oh, stride_om, STEP)
    batch = tl.cast(tl.program_id(0), tl.int64)
    head = tl.cast(tl.program_id(1), tl.int64)
    first = tl.program_id(2) * BLOCK_L
    o_d = tl.arange(0, D_PAD)
    p_out += batch * stride_ob + head * stride_oh
    p_lse += batch * stride_lb + head * stride_lh
    if QUERIES or SCANNED:
        p_rows = p_q + batch * stride_qb + head * stride_qh
    if EMPTY:
        p_empty += batch * stride_eb + head * stride_eh
    large = tl.full((), 0, tl.int32)
    o_l = tl.cast(first, tl.int64) + tl.arange(0, BLOCK_L)
    p_lses = p_lse + o_l * stride_lm
    if PDL:  # before V as well: the fused kernel may have started early, too
        wait_for_others(rows)
    if VALUES:
        p_values = p_v + batch * stride_vb + head // group * stride_vh
        for start in range(0, keys, BLOCK_N):
            o_n = tl.cast(start, tl.int64) + tl.arange(0, BLOCK_N)
            p_tile = p_values + (o_n * stride_vn)[:, None] + o_d[None, :]
            b_v = tl.load(p_tile, mask=(o_n < keys)[:, None] & (o_d < D)[None, :], other=0.0)
            large = tl.maximum(large, tl.max(tl.where(tl.abs(b_v) <= LARGE, 0, 1)))  # NaN is large
    last = tl.minimum(first + BLOCK_L, rows)
    suspect = tl.full((), 0, tl.int32)
    b_anchor = tl.zeros((D_PAD,), tl.float32)
    b_lses = tl.load(p_lses, mask=o_l < rows, other=0.0)
    if EMPTY:
        b_empty = tl.load(p_empty + o_l * stride_em, mask=o_l < rows, other=0)
    wanted = large
    if SCANNED:
        p_head = p_column + (batch * (heads // group) + head // group) * (2 * D) + o_d
        b_anchor = tl.load(p_head, mask=o_d < D, other=0.0).to(tl.float32)
        b_top = tl.load(p_head + D, mask=o_d < D, other=0.0).to(tl.float32)
        suspect = tl.max(tl.where(b_anchor == b_anchor, 0, 1))
        wanted = tl.maximum(wanted, tl.max(tl.where((b_anchor == 0.0) & (b_top <= LARGE), 0, 1)))
        b_anchor = tl.where(b_anchor == b_anchor, b_anchor, 0.0)
    elif not VALUES:  # many numbers at a time, and no code between them that would repair one
        for begin in range(first, last, BLOCK_R):
            o_r = tl.cast(begin, tl.int64) + tl.arange(0, BLOCK_R)
            m_tile = (o_r < rows)[:, None] & (o_d < D)[None, :]
            p_tile = p_out + (o_r * stride_om)[:, None] + o_d[None, :]  # read once, so these may leave the cache first
            m_clean = is_finite(tl.load(p_tile, mask=m_tile, other=0.0, eviction_policy="evict_first"))
            if QUERIES:
                b_query = tl.load(p_rows + (o_r * stride_qm)[:, None] + o_d[None, :], mask=m_tile, other=0.0)
                m_clean = m_clean & is_finite(b_query)
            wanted = tl.maximum(wanted, any_of(m_clean == 0))
    # The log-sum-exps have arrived meanwhile.
    m_lses = b_lses < INF  # NaN is not below
    if SCANNED or VALUES or EMPTY:  # an infinite query may have -inf
        m_lses = m_lses & (b_lses > -INF)
    elif MASK == "none":  # then only rows before the first key have none, and -inf
        m_lses = m_lses & ((b_lses > -INF) | (o_l + (keys - rows) + right < 0))
    if EMPTY:
        m_lses = m_lses & (b_empty == 0)
    wanted = tl.maximum(wanted, tl.max(tl.where(m_lses, 0, 1)))
    last = tl.where(wanted > 0, last, first)
    for begin in range(first, last, BLOCK_M):
        o_m = tl.cast(begin, tl.int64) + tl.arange(0, BLOCK_M)
        m_tile = (o_m < rows)[:, None] & (o_d < D)[None, :]
        b_out = tl.load(p_out + (o_m * stride_om)[:, None] + o_d[None, :], mask=m_tile, other=0.0)
        b_lse = tl.load(p_lse + o_m * stride_lm, mask=o_m < rows, other=0.0)
        m_clean = is_finite(b_out)
        if QUERIES or SCANNED:
            b_q = tl.load(p_rows + (o_m * stride_qm)[:, None] + o_d[None, :], mask=m_tile, other=0.0).to(tl.float32)
            m_clean = m_clean & is_finite(b_q)
        m_lse = b_lse < INF  # a mask may leave a row without keys, which has -inf; NaN is not below
        if MASK == "none":
            m_lse = m_lse & ((b_lse > -INF) | (o_m + (keys - rows) + right < 0))
        broken = tl.where(m_clean & m_lse[:, None], 0, 1)
        if EMPTY:
            m_empty = tl.load(p_empty + o_m * stride_em, mask=o_m < rows, other=0) != 0
            broken = tl.where(m_empty[:, None], 0, tl.where((b_lse > -INF)[:, None], broken, 1))
            p_tile = p_out + (o_m * stride_om)[:, None] + o_d[None, :]
            tl.store(p_tile, tl.zeros((BLOCK_M, D_PAD), tl.float16), mask=m_tile & m_empty[:, None])
        if SCANNED:
            b_lse += tl.sum(b_q * b_anchor[None, :], 1) * scale
        if EMPTY:  # after the anchors, because the query may be NaN
            b_lse = tl.where(m_empty, -INF, b_lse)
        if SCANNED or EMPTY:
            tl.store(p_lse + o_m * stride_lm, b_lse, mask=o_m < rows)
        if tl.maximum(suspect, tl.max(broken)) > 0:  # little code comes before, because a short call waits to load it
            tl.debug_barrier()  # other threads may have stored what the next lines replace
            stride_qb, stride_qh, stride_qm = in_steps(stride_qb, stride_qh, stride_qm, STEP)
            stride_kb, stride_kh, stride_kn = in_steps(stride_kb, stride_kh, stride_kn, STEP)
            stride_vb, stride_vh, stride_vn = in_steps(stride_vb, stride_vh, stride_vn, STEP)
            kv_head = head // group
            broken_rows = tl.max(broken, 1)
            for row in range(begin, tl.minimum(begin + BLOCK_M, rows)):
                wrong = tl.max(tl.where(o_m == row, broken_rows, 0))
                if tl.maximum(suspect, wrong) > 0:
                    at = tl.cast(row, tl.int64)
                    b_new, lse, bad = attend_row(
                        p_q + batch * stride_qb + head * stride_qh + at * stride_qm,
                        p_k + batch * stride_kb + kv_head * stride_kh, p_v + batch * stride_vb + kv_head * stride_vh,
                        p_mask + batch * stride_mask_b + head * stride_mask_h + at * stride_mask_m,
                        row + keys - rows, keys, left, right, scale, stride_kn, stride_vn, stride_mask_n,
                        MASK, D, D_PAD, BLOCK_N,
                    )  # fmt: skip
                    if tl.maximum(wrong, bad) > 0:
                        tl.store(p_out + at * stride_om + o_d, b_new.to(tl.float16), mask=o_d < D)
                        tl.store(p_lse + at * stride_lm, lse)
