"""Triton kernels of decoding: few query rows against a long cache, split over the keys, merged by log-sum-exp.

The time is that of reading K and V once, so no pass over the keys comes before. All splits of a head subtract one
anchor from their keys, which each chooses from the same sample of the head's keys. If norms show that scores may still
be too large for FP32 sums, or if a difference is not exact, the split is repeated with an anchor for each block. It
then counts scores in the frame of its first block's anchor, and the merge corrects for the difference of two frames.
The query heads that share a key head are rows of one tile.
"""

import triton
import triton.language as tl

from pasa.ops.attention.triton.decode.tile_math import (
    FEWEST,
    choose_anchor,
    load_sample,
    shown_keys,
    shown_range,
    spread,
)
from pasa.ops.attention.triton.rounding_kernel import round_rows
from pasa.ops.attention.triton.split_kernel import FAR_ROWS, attend_split, is_near
from pasa.ops.attention.triton.tile_math import (
    FP16_MAX,
    INF,
    LOG2_E,
    beside_sink,
    in_steps,
    largest_score,
    wait_for_others,
)


@triton.jit
def load_queries(
    p_q, batch, kv_head, tile, group, rows, stride_qb, stride_qh, stride_qm, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Load a tile (M, D) of the query rows of all heads of the group, one head after another.

    Also returns the head and the query of each row, and the largest norm, in nats. An infinity in a query becomes NaN,
    and a NaN makes its whole row NaN.
    """
    o_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, D_PAD)
    o_head = kv_head * group + o_m // rows
    o_query = o_m % rows
    p_rows = p_q + batch * stride_qb + o_head * stride_qh + tl.cast(o_query, tl.int64) * stride_qm
    b_q = tl.load(p_rows[:, None] + o_d[None, :], mask=(o_m < group * rows)[:, None] & (o_d < D)[None, :], other=0.0)
    tl.debug_barrier()  # the loads of the caller are waited for from here on, together
    b_q = tl.where(tl.abs(b_q.to(tl.float32)) <= FP16_MAX, b_q, float("nan")).to(tl.float16)
    b_wide = b_q.to(tl.float32)
    return b_q, o_head, o_query, tl.sqrt(tl.max(tl.sum(b_wide * b_wide, 1), 0)) * scale


@triton.jit
def store_split(
    b_max, b_sum, b_acc, b_first, p_part, p_state, p_frame, p_framed, o_work, m_row, mark,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Store the state of one split and its frame, and `mark`, or 0 if the mark is positive and the frame is 0."""
    o_d = tl.arange(0, D_PAD)
    o_part = tl.cast(o_work, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(p_part + o_part[:, None] * D + o_d[None, :], b_acc, mask=m_row[:, None] & (o_d < D)[None, :])
    tl.store(p_state + 2 * o_part, b_max, mask=m_row)
    tl.store(p_state + 2 * o_part + 1, b_sum, mask=m_row)
    tl.store(p_frame + o_d, b_first.to(tl.float16), mask=o_d < D)
    tl.store(p_framed, tl.where((mark > 0) & (tl.max(tl.where(b_first != 0.0, 1, 0), 0) == 0), 0, mark))


@triton.jit(do_not_specialize=["kv_heads", "group", "rows", "keys", "splits", "keys_each", "right", "span"])
def decode_kernel(
    p_q,  # (B, Hq, Sq, D)
    p_k,  # (B, Hkv, Skv, D)
    p_v,
    p_part,  # (B, Hkv, tiles, splits, BLOCK_M, D) FP32: O of each split, not divided
    p_state,  # (B, Hkv, tiles, splits, BLOCK_M, 2) FP32: maximum and sum
    p_anchor,  # (B, Hkv, tiles, splits, D) FP16: the frame of each split
    p_framed,  # (B, Hkv, tiles, splits) INT32: 0: frame 0, 1: the head's anchor, 2: another frame; -1: exact pass
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
    keys_each,
    right,  # as `KernelCall.limits`, if WINDOW
    span,
    scale,  # nats in a unit of a score: of q.k, or of its tanh if CAP
    ratio,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EXACT: tl.constexpr,  # the exact pass: only the splits that the fast pass has marked
    PDL: tl.constexpr,  # launched before the previous kernel ends
    WINDOW: tl.constexpr,  # with CAUSAL: rows see no key before their window either
    CAP: tl.constexpr,  # "none", or how a soft cap is computed: `capped_scores`; other than "none" never EXACT
    STEP: tl.constexpr,  # of the strides of q, k and v: `in_steps`
):
    """Attend within one split of one key head: a tile of its query rows against `keys_each` keys."""
    stride_qb, stride_qh, stride_qm = in_steps(stride_qb, stride_qh, stride_qm, STEP)
    stride_kb, stride_kh, stride_kn = in_steps(stride_kb, stride_kh, stride_kn, STEP)
    stride_vb, stride_vh, stride_vn = in_steps(stride_vb, stride_vh, stride_vn, STEP)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tiles = (group * rows + BLOCK_M - 1) // BLOCK_M
    o_split = tl.program_id(0) % splits
    tile = tl.program_id(0) // splits % tiles
    o_pair = tl.program_id(0) // (splits * tiles)
    o_work = tl.program_id(0)
    if EXACT:
        if tl.load(p_framed + o_work) >= 0:
            return
    batch = tl.cast(o_pair // kv_heads, tl.int64)
    kv_head = tl.cast(o_pair % kv_heads, tl.int64)
    m_row = tile * BLOCK_M + tl.arange(0, BLOCK_M) < group * rows
    SHIFT: tl.constexpr = "block" if EXACT else "head" if CAP == "none" else "none"
    p_keys = p_k + batch * stride_kb + kv_head * stride_kh
    if SHIFT == "head":  # these are waited for together with the queries
        p_last = p_mask + batch * stride_mask_b + kv_head * group * stride_mask_h
        p_last += tl.cast(rows - 1, tl.int64) * stride_mask_m
        o_sample = spread(0, keys)
        b_sample = load_sample(p_keys, o_sample, keys, stride_kn, p_k, 0, D, D_PAD, 0)
        m_sample = shown_keys(p_last, o_sample, keys, stride_mask_n, MASK)
        if MASK != "none":
            if tl.sum(tl.where(m_sample, 1, 0), 0) < FEWEST:  # a static cache that is less than half full
                first, last = shown_range(p_last, keys, stride_mask_n, MASK)
                o_sample = spread(first, last)
                b_sample = load_sample(p_keys, o_sample, keys, stride_kn, p_k, 0, D, D_PAD, 0)
                m_sample = shown_keys(p_last, o_sample, keys, stride_mask_n, MASK)
    b_q, o_head, o_query, longest = load_queries(
        p_q, batch, kv_head, tile, group, rows, stride_qb, stride_qh, stride_qm, scale, D, D_PAD, BLOCK_M
    )
    p_values = p_v + batch * stride_vb + kv_head * stride_vh
    p_masks = p_mask + batch * stride_mask_b + o_head * stride_mask_h
    p_masks += tl.cast(o_query, tl.int64) * stride_mask_m
    # keys that all rows see in whole blocks, then the others
    diagonal = keys - rows
    if WINDOW:
        diagonal += right
    begin = o_split * keys_each
    end = tl.minimum(begin + keys_each, keys)
    seen_by_all = keys
    if CAUSAL:
        seen_by_all = diagonal + 1 + tl.min(tl.where(m_row, o_query, rows), 0)
        end = tl.minimum(end, diagonal + 1 + tl.max(tl.where(m_row, o_query, 0), 0))
    whole = tl.maximum(tl.minimum(end, seen_by_all) // BLOCK_N * BLOCK_N, begin)
    if WINDOW:  # keys in this split are before the window of the last row
        whole = tl.where(begin < rows - 1 + diagonal - span, begin, whole)
    if MASK != "none":
        whole = begin
    b_max = tl.full((BLOCK_M,), -INF, tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    b_acc = tl.zeros((BLOCK_M, D_PAD), tl.float32)
    b_first = tl.zeros((D_PAD,), tl.float32)
    b_far = tl.zeros((FAR_ROWS, BLOCK_N), tl.float32)
    if EXACT:
        b_max, b_sum, b_acc, b_first, b_far = attend_split(
            b_q, b_max, b_sum, b_acc, b_first, b_far, p_keys, p_values, p_masks, o_query, m_row, begin, end,
            diagonal, span, scale, ratio, longest, stride_kn, stride_vn, stride_mask_n, p_k, 0, 0,
            SHIFT, True, MASK, CAUSAL, D, D_PAD, BLOCK_N, 0, WINDOW, CAP,
        )  # fmt: skip
        mark = 2
    else:
        if SHIFT == "head":
            b_first = choose_anchor(b_sample.to(tl.float32), m_sample, longest)
        if MASK == "none":
            b_max, b_sum, b_acc, b_first, b_far = attend_split(
                b_q, b_max, b_sum, b_acc, b_first, b_far, p_keys, p_values, p_masks, o_query, m_row, begin, whole,
                diagonal, span, scale, ratio, longest, stride_kn, stride_vn, stride_mask_n, p_k, 0, 0,
                SHIFT, False, MASK, False, D, D_PAD, BLOCK_N, 0, False, CAP,
            )  # fmt: skip
        if whole < end:
            b_max, b_sum, b_acc, b_first, b_far = attend_split(
                b_q, b_max, b_sum, b_acc, b_first, b_far, p_keys, p_values, p_masks, o_query, m_row, whole, end,
                diagonal, span, scale, ratio, longest, stride_kn, stride_vn, stride_mask_n, p_k, 0, 0,
                SHIFT, True, MASK, CAUSAL, D, D_PAD, BLOCK_N, 0, WINDOW, CAP,
            )  # fmt: skip
        mark = 1
        if CAP == "none":
            mark = tl.where(is_near(b_far, b_acc, longest, D), 1, -1)
    store_split(b_max, b_sum, b_acc, b_first, p_part, p_state, p_anchor + o_work * D, p_framed + o_work, o_work, m_row,
                mark, D, D_PAD, BLOCK_M)  # fmt: skip


@triton.jit
def frame_offsets(
    p_row, p_anchor, o_split, b_framed, home, D: tl.constexpr, D_PAD: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return q (f - h) (SPLITS,) for a query and the frames f of all splits, and q h.

    h is the frame of split `home`, or 0 if `home` is negative.
    """
    b_offset = tl.zeros_like(b_framed).to(tl.float32)
    frame = tl.sum(b_offset, 0)
    PART: tl.constexpr = COLUMNS // 4 if COLUMNS >= 64 else COLUMNS  # O is in registers already
    for start in range(0, D_PAD, PART):
        o_d = start + tl.arange(0, PART)
        m_d = o_d < D
        b_q = tl.load(p_row + o_d, mask=m_d, other=0.0)
        b_q = tl.where(tl.abs(b_q.to(tl.float32)) <= FP16_MAX, b_q.to(tl.float32), float("nan"))
        b_home = tl.load(p_anchor + home * D + o_d, mask=m_d & (home >= 0), other=0.0).to(tl.float32)
        p_frames = p_anchor + o_split[:, None] * D + o_d[None, :]
        b_frame = tl.load(p_frames, mask=(b_framed > 0)[:, None] & m_d[None, :], other=0.0).to(tl.float32)
        b_offset += tl.sum(b_q[None, :] * (b_frame - b_home[None, :]), 1)
        frame += tl.sum(b_q * b_home, 0)
    return b_offset, frame


@triton.jit
def frame_of_head(p_row, p_frame, D: tl.constexpr, D_PAD: tl.constexpr):
    """Return q f for a query and a frame."""
    o_d = tl.arange(0, D_PAD)
    b_q = tl.load(p_row + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    b_frame = tl.load(p_frame + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    return tl.sum(b_q * b_frame, 0)


@triton.jit
def shared_frame_nats(p_row, p_frame, b_framed, top, low, scale, D: tl.constexpr, D_PAD: tl.constexpr):
    """Return a row's largest score, whose two parts are counted in the frame that all splits share."""
    o_d = tl.arange(0, D_PAD)
    m_d = (o_d < D) & (tl.max(b_framed, 0) > 0)
    b_q = tl.load(p_row + o_d, mask=m_d, other=0.0).to(tl.float64)
    b_frame = tl.load(p_frame + o_d, mask=m_d, other=0.0).to(tl.float64)
    return ((tl.sum(b_q * b_frame, 0) + top + low) * scale).to(tl.float32)


@triton.jit(do_not_specialize=["heads", "group", "rows", "splits"])
def merge_kernel(
    p_q,
    p_part,  # as in decode_kernel
    p_state,
    p_anchor,
    p_framed,
    p_low,  # as in decode_anchored_paged_kernel
    p_out,  # (B, Hq, Sq, D), contiguous
    p_lse,  # (B, Hq, Sq) FP32, contiguous
    p_sink,  # (Hq,) FP32, if SINKS
    p_largest,  # as p_lse: the largest score of each row, if MAXIMA
    stride_qb,
    stride_qh,
    stride_qm,
    heads,
    group,
    rows,
    splits,
    scale,
    NATS: tl.constexpr,  # maxima are in nats (float mask), not in units of q.k
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLITS: tl.constexpr,  # a power of two, at least `splits`
    COLUMNS: tl.constexpr,  # of O, for each program: all of them if unbiased rounding must see whole rows
    DROPPED: tl.constexpr,  # how outputs are rounded: rounding_kernel.py
    SHARED_FRAME: tl.constexpr,  # the splits of a head share a frame, and maxima have a low part
    PDL: tl.constexpr,
    SINKS: tl.constexpr,
    MAXIMA: tl.constexpr,
):
    """Merge the splits of some columns of one query row."""
    o_out = tl.program_id(0)
    o_row = o_out % (group * rows)
    tiles = (group * rows + BLOCK_M - 1) // BLOCK_M
    o_pair = o_out // (group * rows) * tiles + o_row // BLOCK_M  # of a key head and a tile
    o_row %= BLOCK_M
    batch = tl.cast(o_out // (heads * rows), tl.int64)
    head = tl.cast((o_out // rows) % heads, tl.int64)
    o_split = tl.arange(0, SPLITS)
    o_column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m_split = o_split < splits
    o_split = o_pair * splits + o_split
    o_part = tl.cast(o_split, tl.int64) * BLOCK_M + o_row
    if PDL:
        wait_for_others(splits)
        tl.extra.cuda.gdc_launch_dependents()
    # O last, because it is waited for at once
    b_state = tl.load(p_state + 2 * o_part[:, None] + tl.arange(0, 2)[None, :], mask=m_split[:, None], other=0.0)
    b_framed = tl.load(p_framed + o_split, mask=m_split, other=0)
    p_tile = p_part + o_part[:, None] * D + o_column[None, :]
    b_part = tl.load(p_tile, mask=m_split[:, None] & (o_column < D)[None, :], other=0.0)
    b_max, b_sum = tl.split(b_state)
    b_max = tl.where(m_split, b_max, -INF)
    # every split's maximum in one frame; where all frames are 0, a NaN in q is in b_sum
    if NATS:
        scale_left = 1.0
    else:
        scale_left = scale
    frame = scale * 0.0
    p_row = p_q + batch * stride_qb + head * stride_qh + (o_out % rows) * stride_qm
    most = tl.max(b_framed, 0)
    least = tl.min(tl.where(m_split, b_framed, most), 0)
    if SHARED_FRAME:
        b_low = tl.load(p_low + o_part, mask=m_split & (b_framed > 0), other=0.0)
    elif most > tl.where(least > 0, 1, 0):  # not all splits are in one frame
        o_slot = tl.arange(0, SPLITS)
        # Use the frame of the split with the largest score. The frame of a split without weight may be so far away that
        # all other scores would lose their digits. Counted from 0, a score is as accurate as an FP32 sum of its
        # products.
        home = tl.min(b_framed, 0) * 0 - 1
        offset = tl.zeros((SPLITS,), tl.float32)
        for turn in range(2):
            if turn > 0:
                b_true = tl.where(b_max == -INF, -INF, b_max + offset * (scale if NATS else 1.0))
                o_home = tl.min(tl.where(b_true == tl.max(b_true, 0), o_slot, SPLITS), 0)
                framed = tl.max(tl.where(o_slot == o_home, b_framed, -1), 0) > 0
                home = tl.where(framed, o_pair * splits + o_home, -1)
            offset, frame = frame_offsets(p_row, p_anchor, o_split, b_framed, home, D, D_PAD, COLUMNS)
        frame *= scale
        b_max = tl.where(b_max == -INF, -INF, b_max + offset * (scale if NATS else 1.0))
    elif most > 0:  # all splits are in the frame of the head
        frame = frame_of_head(p_row, p_anchor + o_pair * splits * D, D, D_PAD) * scale
    top = tl.max(b_max, 0)
    behind = b_max - tl.where(top == -INF, 0.0, top)
    if SHARED_FRAME:
        low = tl.max(tl.where(b_max == top, b_low, -INF), 0)
        behind += b_low - low
    weight = tl.exp2(behind * (scale_left * LOG2_E))
    total = tl.sum(b_sum * weight, 0)
    # A mean of values lies in FP16's range up to the last bit. Infinity in the sum comes from a value.
    fully_masked = (total == 0.0) & (top == -INF)
    divisor = tl.where(fully_masked, 1.0, total)
    b_out = tl.sum(b_part * weight[:, None], 0) / divisor
    p_frame = p_anchor + o_pair * splits * D
    nats = top * scale_left + frame
    if SINKS:
        if SHARED_FRAME:
            nats = shared_frame_nats(p_row, p_frame, b_framed, top, low, scale, D, D_PAD)
        b_lse = tl.where(fully_masked, -INF, nats + tl.log(divisor))
        share, b_lse = beside_sink(b_lse, tl.load(p_sink + head))
        b_out = b_out * share
    b_out = tl.where(tl.abs(b_out) < INF, tl.minimum(tl.maximum(b_out, -FP16_MAX), FP16_MAX), float("nan"))
    if DROPPED != 0:
        b_out = tl.reshape(round_rows(b_out[None, :], o_column, D, DROPPED, False), (COLUMNS,))
    tl.store(p_out + tl.cast(o_out, tl.int64) * D + o_column, b_out.to(p_out.dtype.element_ty), mask=o_column < D)
    if tl.program_id(1) == 0:
        if not SINKS:
            if SHARED_FRAME:
                nats = shared_frame_nats(p_row, p_frame, b_framed, top, low, scale, D, D_PAD)
            b_lse = tl.where(fully_masked, -INF, nats + tl.log(divisor))
        tl.store(p_lse + o_out, b_lse)
        if MAXIMA:
            tl.store(p_largest + o_out, largest_score(top, total, nats))
