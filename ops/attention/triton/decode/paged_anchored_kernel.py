"""Triton kernel of decoding from a paged cache that keeps an anchor of every page (ops/attention/spec/pages.py).

Keys k enter as k - a, where a is the anchor of their page, and the difference loses no bit. So no anchor is searched
and nothing is checked. One pass of lanes, as in lanes_kernel.py, serves the heads whose scores are too large for the
pass without anchors. A page's scores then lack q a. Before the loop, q (a - f) is computed for many pages at once, with
one frame f for all scores of the sequence. f is near most anchors, so that FP32 adds small numbers. In each column, it
is the median of three pages. The anchor of a single page is no good choice if one of its keys is unlike all others, as
in the first page of a sequence (an attention sink).

A row may give all its weight to pages that are far from f. So maxima are FP64 numbers. A program that meets a page for
which q (a - f) may exceed FAR nats gives up, and is repeated with offsets in FP64 by a separate launch. Beside the fast
loop, code for FP64 offsets slows it down by half although it does not run (H200, Triton 3.6).
"""

import triton
import triton.language as tl

from pasa.ops.attention.triton.decode.kernel import load_queries
from pasa.ops.attention.triton.decode.lanes_kernel import locate_lanes, store_lanes
from pasa.ops.attention.triton.decode.tile_math import parts_of
from pasa.ops.attention.triton.tile_math import FP16_MAX, INF, LOG2_E

FAR = tl.constexpr(2.0**14)  # FP32 sums of 2^14 nats, and their two FP16 terms, err by 2^-8 at most
MARKS = tl.constexpr(128)  # marks of programs that are read at once
TURNS = tl.constexpr(64)  # blocks of a program for which offsets are found at once


@triton.jit
def is_marked(p_marked, o_pair, splits):
    """Test if the pass without anchors has failed in a program of the head."""
    marked = 0
    for start in range(0, splits, MARKS):
        o_mark = start + tl.arange(0, MARKS)
        b_mark = tl.load(p_marked + o_pair * splits + o_mark, mask=o_mark < splits, other=0)
        marked = tl.maximum(marked, tl.max(b_mark, 0))
    return marked


@triton.jit
def load_anchor(p_anchors, p_table, key, keys, stride_page, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr):
    """Load the anchor (D,) of the page of a key, or 0 if there is no key."""
    o_d = tl.arange(0, D_PAD)
    page = tl.cast(tl.load(p_table + key // PAGE, mask=keys > 0, other=0), tl.int64)
    return tl.load(p_anchors + page * stride_page + o_d, mask=(o_d < D) & (keys > 0), other=0.0)


@triton.jit
def load_anchors(p_anchors, p_table, o_lane, begin, end, step, stride_page, D: tl.constexpr, D_PAD: tl.constexpr,
                 LANES: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr):  # fmt: skip
    """Load the anchors (N, D) of the pages in which lanes o_lane (N,) start, counted from key `begin` on.

    The second result (N,) is false, and the anchor 0, where there is no key.
    """
    o_d = tl.arange(0, D_PAD)
    o_n = begin + o_lane // LANES * step + o_lane % LANES * BLOCK_N
    page = tl.cast(tl.load(p_table + o_n // PAGE, mask=o_n < end, other=0), tl.int64)
    p_tile = p_anchors + page[:, None] * stride_page + o_d[None, :]
    return tl.load(p_tile, mask=(o_n < end)[:, None] & (o_d < D)[None, :], other=0.0), o_n < end


@triton.jit
def page_offsets(
    b_q, b_frame, longest, group, p_offset, p_anchors, p_table, begin, end, step, stride_page,
    EXACT: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, LANES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Store q (a - f) (TURNS, LANES, M) for the pages of at most TURNS blocks; return if one may exceed FAR.

    b_q (M, D); b_frame (D,); longest: largest norm of a query, in nats.
    """
    CHUNK: tl.constexpr = 16 * LANES
    o_m = tl.arange(0, BLOCK_M)
    b_transposed = tl.trans(b_q)
    lanes = tl.cdiv(end - begin, step) * LANES
    far = begin < 0
    if not EXACT:
        b_far = tl.zeros((CHUNK,), tl.float32)
        for first in range(0, lanes, CHUNK):
            b_anchor, m_key = load_anchors(p_anchors, p_table, first + tl.arange(0, CHUNK), begin, end, step,
                                           stride_page, D, D_PAD, LANES, BLOCK_N, PAGE)  # fmt: skip
            b_delta = b_anchor.to(tl.float32) - b_frame[None, :]
            b_far = tl.maximum(b_far, tl.where(m_key, tl.sum(b_delta * b_delta, 1), 0.0))
        far = tl.sqrt(tl.max(b_far, 0)) * longest > FAR
    for first in range(0, lanes, CHUNK):
        o_lane = first + tl.arange(0, CHUNK)
        b_anchor, _ = load_anchors(p_anchors, p_table, o_lane, begin, end, step, stride_page, D, D_PAD, LANES, BLOCK_N,
                                   PAGE)  # fmt: skip
        if EXACT:
            b_apart = b_anchor.to(tl.float64) - b_frame.to(tl.float64)[None, :]
            for m in range(group):
                b_row = tl.sum(tl.where(o_m[:, None] == m, b_q, 0.0).to(tl.float32), 0)
                tl.store(p_offset + o_lane * BLOCK_M + m, tl.sum(b_apart * b_row.to(tl.float64)[None, :], 1))
        else:
            # a difference of two FP16 numbers is a sum of two
            b_delta = b_anchor.to(tl.float32) - b_frame[None, :]
            b_high = tl.minimum(tl.maximum(b_delta, -FP16_MAX), FP16_MAX).to(tl.float16)
            b_low = (b_delta - b_high.to(tl.float32)).to(tl.float16)
            b_offset = tl.dot(b_high, b_transposed) + tl.dot(b_low, b_transposed)
            tl.store(p_offset + o_lane[:, None] * BLOCK_M + o_m[None, :], b_offset.to(tl.float64))
    return far


@triton.jit
def attend_pages(
    b_q, b_max, b_sum, b_acc, far, b_frame, longest, group, p_keys, p_values, p_anchors, p_offset, p_table, begin, end,
    step, keys, scale, stride_kn, stride_vn, stride_kp, stride_vp, stride_page,
    EXACT: tl.constexpr, HIDES: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, LANES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Attend to at most TURNS blocks of LANES * BLOCK_N keys, one every `step`.

    Returns b_max (FP64), b_sum (L, M), b_acc (L, M, D) and `far`, which is true once a page is too far from the frame.
    From then on no block is read.
    """
    o_d = tl.arange(0, D_PAD)
    m_d = o_d < D
    o_row = tl.arange(0, BLOCK_N)[None, :]
    o_n = tl.arange(0, LANES)[:, None] * BLOCK_N + o_row
    o_k = o_row[:, None, :] * stride_kn + o_d[None, :, None]  # (1, D, N): transposed as it is read
    o_v = o_row[:, :, None] * stride_vn + o_d[None, None, :]
    o_state = tl.arange(0, LANES)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    b_queries = tl.broadcast_to(b_q[None, :, :], (LANES, BLOCK_M, D_PAD))
    factor = scale * LOG2_E
    tl.debug_barrier()  # other threads have read the offsets before, and read these
    far |= page_offsets(b_q, b_frame, longest, group, p_offset, p_anchors, p_table, begin, end, step, stride_page,
                        EXACT, D, D_PAD, LANES, BLOCK_M, BLOCK_N, PAGE)  # fmt: skip
    tl.debug_barrier()
    for start in range(begin, tl.where(far, begin, end), step):
        m_n = start + o_n < keys
        b_page, b_slot = locate_lanes(p_table, start, keys, HIDES, LANES, BLOCK_N, PAGE)
        p_key = p_keys + (b_page * stride_kp + b_slot * stride_kn)[:, None, :] + o_k
        p_value = p_values + (b_page * stride_vp + b_slot * stride_vn)[:, :, None] + o_v
        p_anchor = p_anchors + b_page * stride_page + o_d[None, :]
        # scores (L, M, N)
        if HIDES or D < D_PAD:
            b_k = tl.load(p_key, mask=m_n[:, None, :] & m_d[None, :, None], other=0.0)
            b_anchor = tl.load(p_anchor, mask=m_d[None, :], other=0.0)
        else:
            b_k = tl.load(p_key)
            b_anchor = tl.load(p_anchor)
        b_s = tl.dot(b_queries, b_k.to(tl.float16) - b_anchor[:, :, None])
        if HIDES:
            b_s = tl.where(m_n[:, None, :], b_s, -INF)
        # weights; no exponent exceeds 0
        top = tl.max(b_s, 2)
        reached = top.to(tl.float64) + tl.load(p_offset + (start - begin) // step * (LANES * BLOCK_M) + o_state)
        if HIDES:
            empty = top == -INF
            top = tl.where(empty, 0.0, top)
            reached = tl.where(empty, -INF, reached)
        new_max = tl.maximum(b_max, reached)
        base = tl.where(new_max == -INF, 0.0, new_max) if HIDES else new_max
        alpha = tl.exp2((b_max - base).to(tl.float32) * factor)
        behind = (reached - base).to(tl.float32) * factor
        if HIDES:
            behind = tl.where(empty, 0.0, behind)
        b_p = tl.exp2((b_s - top[:, :, None]) * factor + behind[:, :, None]).to(tl.float16)
        b_sum = b_sum * alpha + tl.sum(b_p.to(tl.float32), 2)
        b_max = new_max
        # values
        if HIDES or D < D_PAD:
            b_v = tl.load(p_value, mask=m_n[:, :, None] & m_d[None, None, :], other=0.0)
        else:
            b_v = tl.load(p_value)
        b_acc = tl.dot(b_p, b_v.to(tl.float16), b_acc * alpha[:, :, None])
    return b_max, b_sum, b_acc, far


@triton.jit(do_not_specialize=["kv_heads", "group", "splits", "stride_table"])
def decode_anchored_paged_kernel(
    p_q,  # as in decode_lanes_paged_kernel
    p_k,
    p_v,
    p_anchors,  # (pages, Hkv, D) FP16, contiguous: of each page; NaN where a key is not finite
    p_part,
    p_state,
    p_frame,  # its p_anchor: the frame of each split
    p_framed,
    p_marked,
    p_low,  # (B, Hkv, splits, BLOCK_M) FP32: FP64 maximum minus its FP32 value
    p_offset,  # (programs, TURNS, LANES, BLOCK_M) FP64
    p_table,
    p_tile,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kp,
    stride_kh,
    stride_kn,
    stride_vp,
    stride_vh,
    stride_vn,
    stride_table,
    kv_heads,
    group,
    splits,
    scale,
    EXACT: tl.constexpr,  # the exact pass: only programs that the previous pass gave up
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # keys of a lane: a page has a multiple of them
    PAGE: tl.constexpr,
    PDL: tl.constexpr,
    LEAST: tl.constexpr = 0,  # as in `decode_paged_kernel`
):
    """Attend as one of `splits` programs of a key head that the pass without anchors has marked."""
    BLOCK: tl.constexpr = LANES * BLOCK_N
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    o_split = tl.program_id(0) % splits
    o_pair = tl.program_id(0) // splits
    if EXACT:
        if tl.load(p_framed + tl.program_id(0) * LANES) >= 0:
            return
    elif is_marked(p_marked, o_pair, splits) == 0:
        return
    batch = tl.cast(o_pair // kv_heads, tl.int64)
    kv_head = tl.cast(o_pair % kv_heads, tl.int64)
    o_d = tl.arange(0, D_PAD)
    keys = tl.load(p_tile + batch)
    b_q, _, _, longest = load_queries(
        p_q, batch, kv_head, 0, group, 1, stride_qb, stride_qh, stride_qm, scale, D, D_PAD, BLOCK_M
    )
    p_k += kv_head * stride_kh
    p_v += kv_head * stride_vh
    p_anchors += kv_head * D
    stride_page = kv_heads * D
    p_pages = p_table + batch * stride_table
    p_offsets = p_offset + tl.cast(tl.program_id(0), tl.int64) * (TURNS * LANES * BLOCK_M)
    # the frame
    b_low = load_anchor(p_anchors, p_pages, keys // 4, keys, stride_page, D, D_PAD, PAGE)
    b_high = load_anchor(p_anchors, p_pages, keys // 2, keys, stride_page, D, D_PAD, PAGE)
    b_third = load_anchor(p_anchors, p_pages, keys // 4 * 3, keys, stride_page, D, D_PAD, PAGE)
    b_frame = tl.maximum(tl.minimum(b_low, b_high), tl.minimum(tl.maximum(b_low, b_high), b_third))
    slot = tl.program_id(0) * LANES + tl.arange(0, LANES)
    o_frame = slot[:, None] * D + o_d[None, :]
    b_frames = tl.broadcast_to(b_frame[None, :], (LANES, D_PAD))
    tl.store(p_frame + o_frame, b_frames, mask=(o_frame >= 0) & (o_d < D)[None, :])
    b_frame = b_frame.to(tl.float32)
    # whole blocks, dealt out in turn, then the last one, which belongs to one of the programs
    parts = parts_of(keys, splits, LEAST)
    whole = keys // BLOCK * BLOCK
    rest = whole + (o_split + parts - whole // BLOCK % parts) % parts * BLOCK
    rest = tl.where(o_split < parts, rest, keys)
    first = tl.where(o_split < parts, o_split * BLOCK, keys)
    step = parts * BLOCK
    far = keys < 0
    b_max = tl.full((LANES, BLOCK_M), -INF, tl.float64)
    b_sum = tl.zeros((LANES, BLOCK_M), tl.float32)
    b_acc = tl.zeros((LANES, BLOCK_M, D_PAD), tl.float32)
    for begin in range(first, whole, step * TURNS):
        b_max, b_sum, b_acc, far = attend_pages(
            b_q, b_max, b_sum, b_acc, far, b_frame, longest, group, p_k, p_v, p_anchors, p_offsets, p_pages, begin,
            tl.minimum(whole, begin + step * TURNS), step, keys, scale, stride_kn, stride_vn, stride_kp, stride_vp,
            stride_page, EXACT, False, D, D_PAD, LANES, BLOCK_M, BLOCK_N, PAGE,
        )  # fmt: skip
    if rest < keys:
        b_max, b_sum, b_acc, far = attend_pages(
            b_q, b_max, b_sum, b_acc, far, b_frame, longest, group, p_k, p_v, p_anchors, p_offsets, p_pages, rest,
            keys, step, keys, scale, stride_kn, stride_vn, stride_kp, stride_vp,
            stride_page, EXACT, True, D, D_PAD, LANES, BLOCK_M, BLOCK_N, PAGE,
        )  # fmt: skip
    m_row = tl.arange(0, BLOCK_M) < group
    tl.store(p_framed + slot, tl.full((LANES,), 1, tl.int32) - 2 * far.to(tl.int32))
    b_high = b_max.to(tl.float32)
    b_low = tl.where(b_max == -INF, 0.0, (b_max - b_high.to(tl.float64)).to(tl.float32))
    o_part = slot[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    tl.store(p_low + o_part, b_low, mask=(o_part >= 0) & m_row[None, :])
    store_lanes(b_high, b_sum, b_acc, p_part, p_state, tl.program_id(0) * LANES, m_row, D, D_PAD, LANES, BLOCK_M)
