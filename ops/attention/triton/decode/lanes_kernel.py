"""Triton kernel of decoding with at most 16 query rows of a key head: every warp attends to separate keys.

Here a *lane* is a warp that has separate keys, not one thread of a warp as in CUDA. Warps that share a tile of so few
rows wait for each other's maxima and weights, so the tile is bound by latency. Lanes meet only in the merge, and the
time that remains is that of reading K and V once. Dots are three-dimensional, with the lane first.

FP32 sums are accurate only if scores are small, and scores are bounded by norms (the matrix unit computes |k|^2, too).
So all programs of a head subtract one anchor a, which they choose from the same sample of its keys. In each column a is
0, or k - a is tested to be exact and no longer than k. Keys that fail a bound mark their lane, unless their weight is
negligible. The exact pass attends to the keys of a marked lane again, with the exact anchor of every block. It leaves a
lane alone whose one key with weight is far from all other keys of the head, above or below, because such a weight is 1
or 0 whatever the error of its score.

Blocks are assigned to programs round-robin, so that all programs together read memory from one end to the other. This
is faster than one stream for each program.
"""

import triton
import triton.language as tl

from pasa.ops.attention.triton.decode.kernel import load_queries, store_split
from pasa.ops.attention.triton.decode.tile_math import SAMPLES, anchor_of_samples, are_long, load_sample, spread
from pasa.ops.attention.triton.split_kernel import (
    FAR_ROWS,
    FP32_MAX,
    attend_split,
    highest_square,
    unit_of_squares,
    units_of_frame,
)
from pasa.ops.attention.triton.tile_math import ANCHOR_LIMIT, FP16_MAX, INF, LOG2_E, in_steps

OTHERS = tl.constexpr(64)  # lanes whose bounds are read at once
# Nats below the maximum: 2^17 keys there have weights of 2^-17 together, 2^-6 of the rounding of one weight to FP16.
NEGLIGIBLE = tl.constexpr(24.0)
SUM_ERROR = tl.constexpr(2.0**-19)  # of |q| |k|: of an FP32 sum of up to 128 products (README.md, "Decoding")


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
    b_q, b_max, b_sum, b_acc, b_worst, p_keys, p_values, p_frame, framed, o_query, begin, end, step, keys, diagonal,
    scale, longest, stride_kn, stride_vn, p_table, stride_kp, stride_vp,
    ANCHORED: tl.constexpr, HIDES: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    LANES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Attend to one block of LANES * BLOCK_N keys every `step`, and return the state of every lane.

    This is b_max, b_sum (L, M) and b_acc (L, M, D). b_worst (L, M, N) is the largest score of keys that fail a bound.
    It is infinite if the score may err by more than 1 nat, for a key or value that is not finite, and for a difference
    k - a that may be rounded. b_q (M, D); longest: largest norm of a query, in nats. p_frame: a, in memory so that the
    loop can load it in the layout of the dot; 0, and not loaded, unless `framed`.
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
    b_queries = tl.broadcast_to(b_q[None, :, :], (LANES, BLOCK_M, D_PAD))
    factor = scale * LOG2_E
    unit = unit_of_squares(longest)
    if ANCHORED:
        b_anchor = tl.load(p_frame + o_d, mask=m_d & (framed > 0), other=0.0)
        b_unit, b_weight = units_of_frame(b_anchor, framed, unit)
        b_weights = tl.broadcast_to(b_weight[None, None, :], (LANES, BLOCK_M, D_PAD))
        b_anchor = b_anchor[None, :, None]
        b_unit = b_unit[None, :, None]
    else:
        b_unit = unit
        b_weights = tl.full((LANES, BLOCK_M, D_PAD), 1.0, tl.float16)
    highest = highest_square(longest, unit, D)  # every comparison with NaN is false
    extreme = unit.to(tl.float32) / (SUM_ERROR * tl.maximum(longest, 1e-30))
    extreme = tl.minimum(extreme * extreme, FP32_MAX)
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
                b_k = tl.where(m_n[:, None, :], b_k, 0.0).to(tl.float16)  # padding fails no bound
        b_square = b_k * b_unit
        b_far = tl.dot(b_weights, b_square * b_square)
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
        b_bad = tl.where(b_far <= extreme, b_s, INF)
        b_worst = tl.maximum(b_worst, tl.where(b_far <= highest, -INF, b_bad))
        b_acc = tl.dot(b_p, b_v, b_acc * alpha[:, :, None])
    return b_max, b_sum, b_acc, b_worst


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
    p_q, p_keys, p_values, p_part, p_state, p_anchor, p_framed, p_marked, p_bound, batch, kv_head, o_split, splits,
    seen_by_all, keys, stride_qb, stride_qh, stride_qm, stride_kn, stride_vn, p_table, stride_kp, stride_vp,
    group, rows, scale, ANCHORED: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    LANES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Do the work of one of `splits` programs of a head; all rows see the first `seen_by_all` keys.

    A program whose o_split is `splits` or more has no keys. ANCHORED: an anchor is chosen; otherwise keys are used
    unchanged.
    """
    BLOCK: tl.constexpr = LANES * BLOCK_N
    slot = tl.program_id(0) * LANES
    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, D_PAD)
    step = splits * BLOCK
    begin = tl.where(o_split < splits, o_split * BLOCK, keys)
    o_sample = spread(0, keys)
    b_sample = load_sample(p_keys, o_sample, keys, stride_kn, p_table, stride_kp, D, D_PAD, PAGE)
    b_q, _, o_query, longest = load_queries(
        p_q, batch, kv_head, 0, group, rows, stride_qb, stride_qh, stride_qm, scale, D, D_PAD, BLOCK_M
    )
    m_row = o_m < group * rows
    p_frame = p_anchor + slot * D
    # the anchor
    o_lane = tl.arange(0, LANES)
    framed = 0
    fails = 0
    if are_long(b_sample, longest):
        b_left = b_sample.to(tl.float32)
        if ANCHORED:
            anchor = anchor_of_samples(b_left, o_sample < keys)
            framed = tl.max(tl.where(anchor != 0.0, 1, 0), 0)
            o_frame = o_lane[:, None] * D + o_d[None, :]
            b_frame = tl.broadcast_to(anchor[None, :], (LANES, D_PAD)).to(tl.float16)
            tl.store(p_frame + o_frame, b_frame, mask=(o_frame >= 0) & (o_d < D)[None, :])
            b_left -= anchor[None, :]
            tl.debug_barrier()  # other threads of the program read it
        # Nothing is gained by a pass in which most keys fail; NaN fails nothing here, and the loop finds it.
        b_norms = tl.sqrt(tl.sum(b_left * b_left, 1)) * longest
        fails = tl.sum(tl.where(b_norms > ANCHOR_LIMIT, 1, 0), 0)
    good = fails <= SAMPLES // 2
    # blocks in turn, first those that all rows see
    whole = seen_by_all // BLOCK * BLOCK
    rest = whole + (o_split + splits - whole // BLOCK % splits) % splits * BLOCK
    rest = tl.where(o_split < splits, rest, keys)
    diagonal = keys - rows
    b_max = tl.full((LANES, BLOCK_M), -INF, tl.float32)
    b_sum = tl.zeros((LANES, BLOCK_M), tl.float32)
    b_acc = tl.zeros((LANES, BLOCK_M, D_PAD), tl.float32)
    b_worst = tl.full((LANES, BLOCK_M, BLOCK_N), -INF, tl.float32)
    b_max, b_sum, b_acc, b_worst = attend_lanes(
        b_q, b_max, b_sum, b_acc, b_worst, p_keys, p_values, p_frame, framed, o_query, begin,
        tl.where(good, whole, begin), step, keys, diagonal, scale, longest, stride_kn, stride_vn, p_table, stride_kp,
        stride_vp, ANCHORED, False, CAUSAL, D, D_PAD, LANES, BLOCK_M, BLOCK_N, PAGE,
    )  # fmt: skip
    if good & (rest < keys):
        b_max, b_sum, b_acc, b_worst = attend_lanes(
            b_q, b_max, b_sum, b_acc, b_worst, p_keys, p_values, p_frame, framed, o_query, rest, keys,
            step, keys, diagonal, scale, longest, stride_kn, stride_vn, p_table, stride_kp, stride_vp,
            ANCHORED, True, CAUSAL, D, D_PAD, LANES, BLOCK_M, BLOCK_N, PAGE,
        )  # fmt: skip
    # A row may need the exact pass if a key that failed a bound may have weight. If FP16 rounds all other weights to 0,
    # they are 16 nats below, and the row's maximum is known up to an error.
    b_worst = tl.max(b_worst, 2) + 1.0 / scale
    m_bad = b_worst > b_max - NEGLIGIBLE / scale
    m_alone = (b_sum == 1.0) & (b_worst < INF)
    error = tl.where(m_bad, tl.where(m_alone, tl.maximum(b_worst - b_max, 0.0), INF), 0.0)
    error = tl.where(good, error, INF)
    b_marked = tl.max(tl.where(m_row[None, :] & (m_bad | (error == INF)), 1, 0), 1)
    tl.store(p_framed + slot + o_lane, tl.where(b_marked > 0, -1 - framed, framed))
    if PAGE > 0:  # read where pages have anchors
        tl.store(p_marked + tl.program_id(0), tl.max(b_marked, 0))
    o_part = (slot + o_lane[:, None]) * BLOCK_M + o_m[None, :]
    tl.store(p_bound + 2 * o_part, tl.where(error == INF, -INF, b_max - error))
    tl.store(p_bound + 2 * o_part + 1, tl.where(error == INF, INF, b_max + error))
    store_lanes(b_max, b_sum, b_acc, p_part, p_state, slot, m_row, D, D_PAD, LANES, BLOCK_M)


@triton.jit
def is_settled(p_bound, slot, first, lanes, m_row, scale, BLOCK_M: tl.constexpr):
    """Test if every row's maximum in a lane is far above those in all other lanes of the head, or far below one.

    `first`: the first of all `lanes` lanes of the head.
    """
    o_m = tl.arange(0, BLOCK_M)
    least = tl.load(p_bound + 2 * (slot * BLOCK_M + o_m))
    most = tl.load(p_bound + 2 * (slot * BLOCK_M + o_m) + 1)
    others_least = tl.full((BLOCK_M,), -INF, tl.float32)
    others_most = tl.full((BLOCK_M,), -INF, tl.float32)
    for start in range(0, lanes, OTHERS):
        o_lane = start + tl.arange(0, OTHERS)
        m_lane = ((o_lane < lanes) & (first + o_lane != slot))[:, None]
        p_other = p_bound + 2 * ((first + o_lane)[:, None] * BLOCK_M + o_m[None, :])
        others_least = tl.maximum(others_least, tl.max(tl.load(p_other, mask=m_lane, other=-INF), 0))
        others_most = tl.maximum(others_most, tl.max(tl.load(p_other + 1, mask=m_lane, other=-INF), 0))
    far = NEGLIGIBLE / scale
    m_settled = (least == most) | (least - far > others_most) | (most + far < others_least)
    return tl.min(tl.where(m_row & (m_settled == 0), 0, 1), 0)


@triton.jit
def attend_lane_exactly(
    p_q, p_keys, p_values, p_part, p_state, p_anchor, p_framed, p_bound, batch, kv_head, o_split, o_lane, splits, parts,
    keys, stride_qb, stride_qh, stride_qm, stride_kn, stride_vn, p_table, stride_kp, stride_vp,
    group, rows, scale, CAUSAL: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    LANES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Attend to the blocks of a marked lane again, with an anchor for each, unless the lane is settled.

    The first `parts` of the `splits` programs of a head have keys.
    """
    slot = tl.program_id(0)
    m_row = tl.arange(0, BLOCK_M) < group * rows
    lanes = splits * LANES
    if is_settled(p_bound, slot, slot // lanes * lanes, lanes, m_row, scale, BLOCK_M) > 0:
        tl.store(p_framed + slot, -1 - tl.load(p_framed + slot))
        return
    b_q, _, o_query, longest = load_queries(
        p_q, batch, kv_head, 0, group, rows, stride_qb, stride_qh, stride_qm, scale, D, D_PAD, BLOCK_M
    )
    b_max = tl.full((BLOCK_M,), -INF, tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    b_acc = tl.zeros((BLOCK_M, D_PAD), tl.float32)
    b_first = tl.zeros((D_PAD,), tl.float32)
    b_far = tl.zeros((FAR_ROWS, BLOCK_N), tl.float32)
    first = tl.where(o_split < parts, (o_split * LANES + o_lane) * BLOCK_N, keys)
    for start in range(first, keys, parts * LANES * BLOCK_N):
        b_max, b_sum, b_acc, b_first, b_far = attend_split(
            b_q, b_max, b_sum, b_acc, b_first, b_far, p_keys, p_values, p_q, o_query, m_row,
            start, tl.minimum(start + BLOCK_N, keys), keys - rows, 0, scale, scale, longest, stride_kn, stride_vn, 0,
            p_table, stride_kp, stride_vp,
            "block", True, "none", CAUSAL, D, D_PAD, BLOCK_N, PAGE, False, "none",
        )  # fmt: skip
    store_split(b_max, b_sum, b_acc, b_first, p_part, p_state, p_anchor + slot * D, p_framed + slot, slot, m_row, 2,
                D, D_PAD, BLOCK_M)  # fmt: skip


@triton.jit(do_not_specialize=["kv_heads", "group", "rows", "keys", "splits"])
def decode_lanes_kernel(
    p_q,  # as in decode_kernel
    p_k,
    p_v,
    p_part,  # with LANES times as many splits
    p_state,
    p_anchor,
    p_framed,
    p_marked,  # (B, Hkv, programs of a head) INT32: 1 if a lane of the program is marked
    p_bound,  # (B, Hkv, splits, BLOCK_M, 2) FP32: the least and the most that the maximum of a row in a lane may be
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
    scale,
    EXACT: tl.constexpr,  # the exact pass: a program for each lane, which returns if its lane is not marked
    CAUSAL: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # keys of a lane
    PDL: tl.constexpr,
    STEP: tl.constexpr,  # of the strides of q, k and v: `in_steps`
):
    """Attend as one of `splits` programs of one key head, or as one lane of a program if EXACT."""
    stride_qb, stride_qh, stride_qm = in_steps(stride_qb, stride_qh, stride_qm, STEP)
    stride_kb, stride_kh, stride_kn = in_steps(stride_kb, stride_kh, stride_kn, STEP)
    stride_vb, stride_vh, stride_vn = in_steps(stride_vb, stride_vh, stride_vn, STEP)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    o_program = tl.program_id(0)
    if EXACT:
        if tl.load(p_framed + o_program) >= 0:
            return
        o_program = o_program // LANES
    o_split = o_program % splits
    o_pair = o_program // splits
    batch = tl.cast(o_pair // kv_heads, tl.int64)
    kv_head = tl.cast(o_pair % kv_heads, tl.int64)
    p_keys = p_k + batch * stride_kb + kv_head * stride_kh
    p_values = p_v + batch * stride_vb + kv_head * stride_vh
    if EXACT:
        attend_lane_exactly(
            p_q, p_keys, p_values, p_part, p_state, p_anchor, p_framed, p_bound, batch, kv_head, o_split,
            tl.program_id(0) % LANES, splits, splits, keys, stride_qb, stride_qh, stride_qm, stride_kn, stride_vn,
            p_k, 0, 0, group, rows, scale, CAUSAL, D, D_PAD, LANES, BLOCK_M, BLOCK_N, 0,
        )  # fmt: skip
    else:
        attend_program(
            p_q, p_keys, p_values, p_part, p_state, p_anchor, p_framed, p_marked, p_bound, batch, kv_head, o_split,
            splits, tl.maximum(keys - rows + 1 if CAUSAL else keys, 0), keys, stride_qb, stride_qh, stride_qm,
            stride_kn, stride_vn, p_k, 0, 0, group, rows, scale, True, CAUSAL, D, D_PAD, LANES, BLOCK_M, BLOCK_N, 0,
        )  # fmt: skip
