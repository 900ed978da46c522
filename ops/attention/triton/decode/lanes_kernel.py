"""Triton kernel of decoding with at most 16 query rows of a key head: every warp attends to separate keys.

Here a *lane* is a warp that has separate keys, not one thread of a warp as in CUDA. Warps that share a tile of so few
rows wait for each other's maxima and weights, so the tile is bound by latency. Lanes meet only in the merge, and the
time that remains is that of reading K and V once. Dots are three-dimensional, with the lane first.

FP32 sums are accurate only if scores are small. Scores are bounded by norms, and the matrix unit computes |k|^2 too. If
a bound in some program is too large, all keys of the head are attended to again, as k - a. Each program guesses one
anchor a from a sample of its keys, and checks it on all of them. If a check fails too, decode_kernel treats lanes as
splits and finds the exact anchor of every block.

The first pass assigns blocks to programs round-robin, so that all programs together read memory from one end to the
other. This is faster than one stream for each program. In the pass with anchors a program has adjacent keys, because
adjacent keys differ less.
"""

import triton
import triton.language as tl

from pasa.ops.attention.triton.decode.kernel import load_queries
from pasa.ops.attention.triton.tile_math import ANCHOR_LIMIT, FP16_MAX, INF, LOG2_E

SAMPLES = tl.constexpr(16)  # keys from which a program guesses an anchor
TESTED_KEYS = tl.constexpr(4)  # keys whose norms are tested before the pass without anchors
MARKS = tl.constexpr(128)  # marks of programs that are read at once
FP32_MAX = tl.constexpr(3.4028234e38)


@triton.jit
def offsets_of(o_n, m_n, stride_n, p_table, stride_page, PAGE: tl.constexpr):
    """Return the memory offsets of keys o_n.

    PAGE: slots of a page, or 0 without pages, when p_table and stride_page are unused.
    """
    if PAGE > 0:
        page = tl.load(p_table + o_n // PAGE, mask=m_n, other=0)
        offset = tl.cast(page, tl.int64) * stride_page + (o_n % PAGE) * stride_n
    else:
        offset = tl.cast(o_n, tl.int64) * stride_n
    return offset


@triton.jit
def sampled_anchor(p_keys, begin, end, longest, stride_kn, p_table, stride_kp, D: tl.constexpr, D_PAD: tl.constexpr,
                   PAGE: tl.constexpr):  # fmt: skip
    """Return an anchor a (D,) of keys `begin` to `end`, the limit of |k - a|, and if sampled keys are well below it.

    If |k - a| is at most half of the smallest nonzero |a| of a column, k is between a / 2 and 3 a / 2 in every column
    with an anchor. There FP16 subtracts exactly (Sterbenz's lemma). So a column gets an anchor only if its mean is at
    least 2.5 times the largest norm that the shift leaves of a sampled key. No column gets one if scores are small
    anyway. longest: largest norm of a query, in nats.
    """
    o_n = begin + tl.arange(0, SAMPLES) * ((end - begin) // SAMPLES)
    o_d = tl.arange(0, D_PAD)
    p_tile = p_keys + offsets_of(o_n, o_n < end, stride_kn, p_table, stride_kp, PAGE)[:, None] + o_d[None, :]
    b_k = tl.load(p_tile, mask=(o_n < end)[:, None] & (o_d < D)[None, :], other=0.0).to(tl.float16).to(tl.float32)
    mean = tl.sum(b_k, 0) / SAMPLES
    steady = tl.max(tl.abs(b_k - mean[None, :]), 0) <= tl.abs(mean) * 0.125
    b_left = tl.where(steady[None, :], b_k - mean[None, :], b_k)
    limit = ANCHOR_LIMIT / tl.maximum(longest, 1e-30)
    needed = tl.max(tl.sum(b_k * b_k, 1), 0) > 0.25 * limit * limit
    least = tl.where(needed, 6.25 * tl.max(tl.sum(b_left * b_left, 1), 0), INF)
    keep = steady & (mean * mean > least)
    anchor = tl.where(keep, mean, 0.0).to(tl.float16).to(tl.float32)
    limit = tl.minimum(limit, tl.min(tl.where(keep, tl.abs(anchor), INF), 0) * 0.5)
    b_left = b_k - anchor[None, :]
    b_square = tl.sum(b_left * b_left, 1)
    # every comparison with NaN is false, so a key with a NaN fails
    return anchor, limit, tl.min(tl.where(b_square <= 0.8 * limit * limit, 1, 0), 0) > 0


@triton.jit
def load_tested_keys(
    p_keys, keys, stride_kn, p_table, stride_kp, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr
):
    """Load a few keys (TESTED_KEYS, D), far from each other."""
    o_n = tl.arange(0, TESTED_KEYS) * (keys // TESTED_KEYS)
    o_d = tl.arange(0, D_PAD)
    p_tile = p_keys + offsets_of(o_n, o_n < keys, stride_kn, p_table, stride_kp, PAGE)[:, None] + o_d[None, :]
    return tl.load(p_tile, mask=(o_n < keys)[:, None] & (o_d < D)[None, :], other=0.0).to(tl.float16)


@triton.jit
def locate_lanes(p_table, start, keys, HIDES: tl.constexpr, LANES: tl.constexpr, BLOCK_N: tl.constexpr,
                 PAGE: tl.constexpr):  # fmt: skip
    """Return page and slot of each lane's first key (L, 1), or of every key (L, N) if a lane may have several pages.

    `start` is a multiple of LANES * BLOCK_N.
    """
    o_n = start + tl.arange(0, LANES)[:, None] * BLOCK_N
    if PAGE % BLOCK_N != 0:
        o_n += tl.arange(0, BLOCK_N)[None, :]
    if HIDES:
        page = tl.load(p_table + o_n // PAGE, mask=o_n < keys, other=0)
    else:
        page = tl.load(p_table + o_n // PAGE)
    return tl.cast(page, tl.int64), o_n % PAGE


@triton.jit
def attend_lanes(
    b_q, b_max, b_sum, b_acc, b_far, p_keys, p_values, p_frame, o_query, begin, end, step, keys, diagonal, scale,
    stride_kn, stride_vn, p_table, stride_kp, stride_vp,
    ANCHORED: tl.constexpr, HIDES: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    LANES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Attend to one block of LANES * BLOCK_N keys every `step`, and return the state of every lane.

    This is b_max, b_sum (L, M) and b_acc (L, M, D). b_far (L, M, N), a tile of equal rows, is the largest |k - a|^2;
    infinity or NaN there fails the bound. b_q (M, D). p_frame: a, in memory so that the loop can load it in the layout
    of the dot.
    """
    o_d = tl.arange(0, D_PAD)
    m_d = o_d < D
    o_n = tl.arange(0, LANES)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    if PAGE == 0:
        o_row = o_n
    elif PAGE % BLOCK_N == 0:
        o_row = tl.arange(0, BLOCK_N)[None, :]  # from the lane's first key on
    else:
        o_row = tl.zeros((1, 1), tl.int32)
    o_k = o_row[:, None, :] * stride_kn + o_d[None, :, None]  # (L, D, N): transposed as it is read
    o_v = o_row[:, :, None] * stride_vn + o_d[None, None, :]
    if ANCHORED:
        b_anchor = tl.load(p_frame + o_d, mask=m_d, other=0.0)[None, :, None]
    b_queries = tl.broadcast_to(b_q[None, :, :], (LANES, BLOCK_M, D_PAD))
    b_ones = tl.full((LANES, BLOCK_M, D_PAD), 1.0, tl.float16)
    factor = scale * LOG2_E
    for start in range(begin, end, step):
        at = tl.cast(start, tl.int64)
        m_n = start + o_n < keys
        if PAGE > 0:
            b_page, b_slot = locate_lanes(p_table, start, keys, HIDES, LANES, BLOCK_N, PAGE)
            p_key = p_keys + (b_page * stride_kp + b_slot * stride_kn)[:, None, :] + o_k
        else:
            p_key = p_keys + at * stride_kn + o_k
        # scores (L, M, N)
        if HIDES or D < D_PAD:
            b_k = tl.load(p_key, mask=m_n[:, None, :] & m_d[None, :, None], other=0.0)
        else:
            b_k = tl.load(p_key)
        b_k = b_k.to(tl.float16)  # a cache may be BF16
        if ANCHORED:
            b_k = b_k - b_anchor
            if HIDES:
                b_k = tl.where(m_n[:, None, :], b_k, 0.0).to(tl.float16)  # padding has no norm
        b_far = tl.maximum(b_far, tl.dot(b_ones, b_k * b_k), propagate_nan=tl.PropagateNan.ALL)
        b_s = tl.dot(b_queries, b_k)
        if HIDES:
            m_seen = m_n[:, None, :] & (o_query >= 0)[None, :, None]
            if CAUSAL:
                m_seen = m_seen & ((start + o_n)[:, None, :] <= (o_query + diagonal)[None, :, None])
            b_s = tl.where(m_seen, b_s, -INF)
        # weights; no exponent exceeds 0
        new_max = tl.maximum(b_max, tl.max(b_s, 2))
        base = tl.where(new_max == -INF, 0.0, new_max) if HIDES else new_max
        alpha = tl.exp2((b_max - base) * factor)
        b_p = tl.exp2((b_s - base[:, :, None]) * factor).to(tl.float16)
        b_sum = b_sum * alpha + tl.sum(b_p.to(tl.float32), 2)
        b_max = new_max
        # values
        if PAGE > 0:
            p_value = p_values + (b_page * stride_vp + b_slot * stride_vn)[:, :, None] + o_v
        else:
            p_value = p_values + at * stride_vn + o_v
        if HIDES or D < D_PAD:
            b_v = tl.load(p_value, mask=m_n[:, :, None] & m_d[None, None, :], other=0.0)
        else:
            b_v = tl.load(p_value)
        b_v = b_v.to(tl.float16)
        if HIDES:  # rows see different keys, and 0 * NaN is NaN
            finite = tl.min(tl.where(tl.abs(b_v.to(tl.float32)) <= FP16_MAX, 1, 0), 2) > 0
            b_far = tl.where(finite[:, None, :], b_far, INF)
        b_acc = tl.dot(b_p, b_v, b_acc * alpha[:, :, None])
    return b_max, b_sum, b_acc, b_far


@triton.jit
def store_lanes(
    b_max, b_sum, b_acc, p_part, p_state, slot, m_row,
    D: tl.constexpr, D_PAD: tl.constexpr, LANES: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Store the states of all lanes, from split `slot` on."""
    o_d = tl.arange(0, D_PAD)
    o_part = (slot + tl.arange(0, LANES)[:, None]) * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    m_part = (o_part >= 0) & m_row[None, :]
    m_out = m_part[:, :, None] & (o_d < D)[None, None, :]
    tl.store(p_part + o_part[:, :, None] * D + o_d[None, None, :], b_acc, mask=m_out)
    tl.store(p_state + 2 * o_part, b_max, mask=m_part)
    tl.store(p_state + 2 * o_part + 1, b_sum, mask=m_part)


@triton.jit
def attend_program(
    p_q, p_keys, p_values, p_part, p_state, p_anchor, p_framed, p_marked, batch, kv_head, begin, whole, rest, end, step,
    slot, keys, stride_qb, stride_qh, stride_qm, stride_kn, stride_vn, p_table, stride_kp, stride_vp,
    group, rows, scale, ANCHORED: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    LANES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Do the work of one program: blocks from `begin` to `whole`, which all rows see, and those from `rest` to `end`.

    slot: number of its first lane among all lanes of the launch.
    """
    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, D_PAD)
    b_tested = load_tested_keys(p_keys, keys, stride_kn, p_table, stride_kp, D, D_PAD, PAGE)
    b_q, _, o_query, longest = load_queries(
        p_q, batch, kv_head, group, rows, stride_qb, stride_qh, stride_qm, scale, D, D_PAD, BLOCK_M
    )
    m_row = o_m < group * rows
    p_frame = p_anchor + slot * D
    diagonal = keys - rows
    # the anchor, the largest norm that k - a may have, and a test of some keys
    o_lane = tl.arange(0, LANES)
    framed = 0
    if ANCHORED:
        anchor, limit, good = sampled_anchor(
            p_keys, begin, whole, longest, stride_kn, p_table, stride_kp, D, D_PAD, PAGE
        )
        framed = tl.max(tl.where(anchor != 0.0, 1, 0), 0)
        o_frame = o_lane[:, None] * D + o_d[None, :]
        b_frame = tl.broadcast_to(anchor[None, :], (LANES, D_PAD)).to(tl.float16)
        tl.store(p_frame + o_frame, b_frame, mask=(o_frame >= 0) & (o_d < D)[None, :])
        tl.debug_barrier()  # other threads of the program read it
    else:
        limit = ANCHOR_LIMIT / tl.maximum(longest, 1e-30)
        b_tested = b_tested.to(tl.float32)
        # a cheap test before the loop; a maximum ignores NaN, which the loop finds
        good = tl.max(tl.sum(b_tested * b_tested, 1), 0) <= limit * limit
    # the lanes
    b_max = tl.full((LANES, BLOCK_M), -INF, tl.float32)
    b_sum = tl.zeros((LANES, BLOCK_M), tl.float32)
    b_acc = tl.zeros((LANES, BLOCK_M, D_PAD), tl.float32)
    b_far = tl.zeros((LANES, BLOCK_M, BLOCK_N), tl.float32)
    b_max, b_sum, b_acc, b_far = attend_lanes(
        b_q, b_max, b_sum, b_acc, b_far, p_keys, p_values, p_frame, o_query, begin, tl.where(good, whole, begin), step,
        keys, diagonal, scale, stride_kn, stride_vn, p_table, stride_kp, stride_vp,
        ANCHORED, False, CAUSAL, D, D_PAD, LANES, BLOCK_M, BLOCK_N, PAGE,
    )  # fmt: skip
    if good & (rest < end):
        b_max, b_sum, b_acc, b_far = attend_lanes(
            b_q, b_max, b_sum, b_acc, b_far, p_keys, p_values, p_frame, o_query, rest, end, step,
            keys, diagonal, scale, stride_kn, stride_vn, p_table, stride_kp, stride_vp,
            ANCHORED, True, CAUSAL, D, D_PAD, LANES, BLOCK_M, BLOCK_N, PAGE,
        )  # fmt: skip
    # FP16 rounds squares and their differences by 2^-11, and by 2^-25 near 0; every comparison with NaN is false
    highest = tl.minimum(0.99 * limit * limit - D * 2.0**-25, FP32_MAX)
    far = tl.max(tl.max(tl.max(tl.where(b_far <= highest, 0, 1), 2), 1), 0)
    good = good & (far == 0)
    if ANCHORED:
        tl.store(p_framed + slot + o_lane, tl.full((LANES,), 0, tl.int32) + tl.where(good, framed, -1))
    else:
        tl.store(p_framed + slot + o_lane, tl.zeros((LANES,), tl.int32))
        tl.store(p_marked + tl.program_id(0), tl.where(good, 0, 1))
    store_lanes(b_max, b_sum, b_acc, p_part, p_state, slot, m_row, D, D_PAD, LANES, BLOCK_M)


@triton.jit
def is_marked(p_marked, o_pair, splits):
    """Test if the pass without anchors has failed in a program of the head."""
    marked = 0
    for start in range(0, splits, MARKS):
        o_mark = start + tl.arange(0, MARKS)
        b_mark = tl.load(p_marked + o_pair * splits + o_mark, mask=o_mark < splits, other=0)
        marked = tl.maximum(marked, tl.max(b_mark, 0))
    return marked


@triton.jit(do_not_specialize=["kv_heads", "group", "rows", "keys", "splits", "keys_each"])
def decode_lanes_kernel(
    p_q,  # as in decode_kernel
    p_k,
    p_v,
    p_part,  # with LANES times as many splits
    p_state,
    p_anchor,
    p_framed,
    p_marked,  # (B, Hkv, programs of a head) INT32: 1 if the pass without anchors has failed
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    kv_heads,
    group,
    rows,
    keys,
    splits,
    keys_each,
    scale,
    ANCHORED: tl.constexpr,  # only heads that the pass without anchors has marked
    CAUSAL: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # keys of a lane
    PDL: tl.constexpr,
):
    """Attend as one of `splits` programs of one key head; if ANCHORED, to `keys_each` adjacent keys, whole blocks."""
    BLOCK: tl.constexpr = LANES * BLOCK_N
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    o_split = tl.program_id(0) % splits
    o_pair = tl.program_id(0) // splits
    slot = tl.program_id(0) * LANES
    if ANCHORED:
        if is_marked(p_marked, o_pair, splits) == 0:
            return
    batch = tl.cast(o_pair // kv_heads, tl.int64)
    kv_head = tl.cast(o_pair % kv_heads, tl.int64)
    p_keys = p_k + batch * stride_kb + kv_head * stride_kh
    p_values = p_v + batch * stride_vb + kv_head * stride_vh
    # keys that all rows see in whole blocks, then the others
    seen_by_all = tl.maximum(keys - rows + 1 if CAUSAL else keys, 0) // BLOCK * BLOCK
    if ANCHORED:
        begin = o_split * keys_each
        end = tl.minimum(begin + keys_each, keys)
        whole = tl.maximum(tl.minimum(end, seen_by_all), begin)
        rest = whole
        step = BLOCK
    else:
        begin = o_split * BLOCK
        end = keys
        whole = seen_by_all
        step = splits * BLOCK
        rest = whole + (o_split + splits - whole // BLOCK % splits) % splits * BLOCK
    attend_program(
        p_q, p_keys, p_values, p_part, p_state, p_anchor, p_framed, p_marked, batch, kv_head, begin, whole, rest, end,
        step, slot, keys, stride_qb, stride_qh, stride_qm, stride_kn, stride_vn, p_k, 0, 0, group, rows, scale,
        ANCHORED, CAUSAL, D, D_PAD, LANES, BLOCK_M, BLOCK_N, 0,
    )  # fmt: skip
