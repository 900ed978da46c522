"""Triton kernel of the attention forward pass: the exact recovery, and plain flash attention to compare.

One source for NVIDIA GPUs, the interpreter and Ascend (through triton-ascend): pointers and masks, no inline assembly.
Score tiles stay in FP32, in which every target of Triton accumulates them. So no row reference and no rescue is needed,
and a head whose keys have no anchor runs FP32-softmax flash attention. It cannot overflow, because weights are
exponentials of differences that are taken before scores are scaled. A fast pass takes more risk, and the exact pass
repeats the tiles that it marks. FP16 tiles with a row reference pay off where tiles leave the matrix unit through
memory, as in the Ascend C kernel.

The fast pass reads K' of heads for which centre_kernel.py found it to be exact, and K of the others.
"""

import triton
import triton.language as tl

from pasa.ops.attention.triton.tile_math import (
    FP16_MAX,
    INF,
    LOG2_E,
    add_values,
    capped_scores,
    in_steps,
    is_bounded,
    largest_norm,
    largest_score,
    load_mask,
    load_rows,
    locate,
    mean_of_values,
    next_frame,
    softmax_step,
    tile_keys,
    two_products,
)


@triton.jit
def all_finite(b_x):
    """Test if all elements (M, N) are finite."""
    return tl.min(tl.min(tl.where(tl.abs(b_x) < INF, 1, 0), 1), 0) == 1


@triton.jit
def attend(
    b_q,  # (M, D)
    b_nan,  # (M,) NaN for rows whose query is not finite, otherwise 0
    b_max,
    b_sum,
    b_acc,
    b_frame,  # (D,) frame of the scores: `next_frame`
    b_framed,  # (M,) q.frame of the last block with a key that a row has seen
    p_k,  # first key of the sequence, of this head
    p_v,
    p_anchor,
    p_mask,  # first row of the tile
    p_order,  # the key tiles to visit, if LISTED
    o_row,  # (M,) rows within the sequence
    rows,
    begin,
    end,
    keys,
    diagonal,  # row i sees keys up to i + diagonal
    span,  # and none before i + diagonal - span, if WINDOW
    gap_at,  # not LISTED and WINDOW: from here on, `gap` is added to a key, as other blocks have been attended to
    gap,
    scale,
    ratio,  # as in `capped_scores`
    stride_kn,
    stride_vn,
    stride_mask_m,
    stride_mask_n,
    o_batch,
    o_kv_head,
    begin_k,
    WHOLE: tl.constexpr,  # every row sees every key of these blocks, and a mask adds 0
    SHIFT: tl.constexpr,  # "none", "here" (k - a in the loop) or "before" (p_k holds K')
    MASK: tl.constexpr,  # "none", "bool" or "float"
    CAUSAL: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ANCHOR_BLOCK: tl.constexpr,
    FAST: tl.constexpr,
    GUARDED: tl.constexpr,
    CLEAN: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    LISTED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,  # "none", or how a soft cap is computed: `capped_scores`
):
    """Attend to the key blocks from key `begin` to `end`, or to entries `begin` to `end` of the list `p_order`."""
    o_d = tl.arange(0, D_PAD)
    m_d = o_d < D
    factor = scale * LOG2_E
    offset = tl.zeros_like(b_max)
    STEP: tl.constexpr = 1 if LISTED else BLOCK_N
    for turn in range(begin, end, STEP):
        start = turn
        if LISTED:
            start = tl.load(p_order + turn) * BLOCK_N
        elif WINDOW and not WHOLE:
            start = tl.where(turn < gap_at, turn, turn + gap)
        o_n = start + tl.arange(0, BLOCK_N)
        at = tl.cast(start, tl.int64)
        # scores (M, N), in FP32
        b_k = load_rows(p_k, at, stride_kn, o_batch, o_kv_head, begin_k, keys, WHOLE, DESCRIPTORS, D, D_PAD, BLOCK_N)
        if SHIFT != "none":
            b_anchor = tl.load(p_anchor + (start // ANCHOR_BLOCK) * D + o_d, mask=m_d, other=0.0)
            b_frame = next_frame(b_frame, b_anchor.to(tl.float32))
            b_apart = b_anchor.to(tl.float32) - b_frame
            if SHIFT == "here":
                offset, framed = two_products(b_q, b_apart, b_frame)
            else:
                offset = tl.sum(b_q.to(tl.float32) * b_apart[None, :], 1)
                framed = tl.sum(b_q.to(tl.float32) * b_frame[None, :], 1)
        if SHIFT == "here":
            m_finite = tl.abs(b_k.to(tl.float32)) <= FP16_MAX
            b_k = tl.where(m_finite, b_k - b_anchor[None, :], float("nan")).to(tl.float16)
        b_s = tl.dot(b_q, tl.trans(b_k))
        if CAP != "none":
            b_s = capped_scores(b_s, ratio, CAP)
        if FAST and not GUARDED:
            b_s += b_nan[:, None]
        # what each row sees of it
        m_tile = (o_n < keys)[None, :] & (o_row < rows)[:, None]
        m_seen = m_tile
        if CAUSAL:
            m_seen = m_seen & (o_n[None, :] <= o_row[:, None] + diagonal)
        if WINDOW and not WHOLE:
            m_seen = m_seen & (o_n[None, :] >= o_row[:, None] + diagonal - span)
        b_bias = 0.0
        if MASK != "none" and not WHOLE:
            p_tile = p_mask + at * stride_mask_n
            m_seen, b_bias = load_mask(p_tile, m_tile, m_seen, stride_mask_m, stride_mask_n, MASK)
        if MASK == "float":  # nats: it is added to scaled scores
            b_s = b_s * scale + b_bias
            offset = offset * scale
            factor = LOG2_E
        if not WHOLE:
            b_s = tl.where(m_seen, b_s, -INF)
        if SHIFT != "none":  # the maxima of rows that see a key go into its frame
            if not WHOLE:
                framed = tl.where(tl.max(b_s, 1) == -INF, b_framed, framed)
            b_max += (b_framed - framed) * (scale if MASK == "float" else 1.0)
            b_framed = framed
        # softmax and values
        # A mask may add -3.4e38, whose product with log2(e) is -inf, so a float mask excludes the fast exponent.
        # A cap may be so high that the fast exponent exceeds 0 by much.
        b_p, alpha, b_max, b_sum = softmax_step(
            b_s, offset, factor, b_max, b_sum, not WHOLE, (FAST and MASK != "float") and CAP == "none"
        )
        b_acc = b_acc * alpha[:, None]
        b_v = load_rows(p_v, at, stride_vn, o_batch, o_kv_head, begin_k, keys, WHOLE, DESCRIPTORS, D, D_PAD, BLOCK_N)
        if (WHOLE or CLEAN) or (FAST and GUARDED):  # a value that is not finite marks its tile
            b_acc = tl.dot(b_p, b_v, b_acc)
        else:
            b_acc = add_values(b_acc, b_p, b_v, m_seen)
    return b_max, b_sum, b_acc, b_frame, b_framed


@triton.jit
def attend_whole(
    b_q,  # as in `attend`, like every argument without a comment
    b_nan,
    p_k,
    p_v,
    begin,
    end,
    scale,
    ratio,
    stride_kn,
    stride_vn,
    o_batch,
    o_kv_head,
    begin_k,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    OVERLAP: tl.constexpr,  # P V of a block runs on the matrix unit under the softmax of the next
    CAP: tl.constexpr,
):
    """Attend to the key blocks from key `begin` to key `end`, which every row sees; FAST, no shift, no mask."""
    b_max = tl.full((b_q.shape[0],), -INF, tl.float32)
    b_sum = tl.zeros((b_q.shape[0],), tl.float32)
    b_acc = tl.zeros((b_q.shape[0], D_PAD), tl.float32)
    alpha = tl.full((b_q.shape[0],), 1.0, tl.float32)
    # Weights of the previous block, as integers. Triton would keep an FP16 operand of the loop's product in shared
    # memory, but keeps integers in registers.
    b_bits = tl.zeros((b_q.shape[0], BLOCK_N), tl.int16)
    factor = scale * LOG2_E
    for start in range(begin, end, BLOCK_N):
        at = tl.cast(start, tl.int64)
        b_k = load_rows(p_k, at, stride_kn, o_batch, o_kv_head, begin_k, end, True, DESCRIPTORS, D, D_PAD, BLOCK_N)
        b_s = tl.dot(b_q, tl.trans(b_k))
        if CAP != "none":
            b_s = capped_scores(b_s, ratio, CAP)
        if OVERLAP:  # the first block's product adds 0
            at = tl.maximum(at - BLOCK_N, begin)
            b_v = load_rows(p_v, at, stride_vn, o_batch, o_kv_head, begin_k, end, True, DESCRIPTORS, D, D_PAD, BLOCK_N)
            b_acc = tl.dot(b_bits.to(tl.float16, bitcast=True), b_v, b_acc * alpha[:, None])
        b_p, alpha, b_max, b_sum = softmax_step(b_s, b_nan, factor, b_max, b_sum, False, CAP == "none")
        if OVERLAP:
            b_bits = b_p.to(tl.int16, bitcast=True)
        else:
            b_v = load_rows(p_v, at, stride_vn, o_batch, o_kv_head, begin_k, end, True, DESCRIPTORS, D, D_PAD, BLOCK_N)
            b_acc = tl.dot(b_p, b_v, b_acc * alpha[:, None])
    if OVERLAP:
        if end > begin:
            at = tl.cast(end - BLOCK_N, tl.int64)
            b_v = load_rows(p_v, at, stride_vn, o_batch, o_kv_head, begin_k, end, True, DESCRIPTORS, D, D_PAD, BLOCK_N)
            b_acc = tl.dot(b_bits.to(tl.float16, bitcast=True), b_v, b_acc * alpha[:, None])
    return b_max, b_sum, b_acc


@triton.jit
def attend_tile(
    b_q, b_nan, b_frame, p_k, p_v, p_anchor, p_mask, p_order, whole_tiles, torn_tiles, o_row, rows, begin, whole_from,
    whole, end, keys, diagonal, span, scale, ratio, stride_kn, stride_vn, stride_mask_m, stride_mask_n, o_batch,
    o_kv_head, begin_k, p_longest, its_parts, SHIFT: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_N: tl.constexpr, ANCHOR_BLOCK: tl.constexpr, FAST: tl.constexpr,
    GUARDED: tl.constexpr, CLEAN: tl.constexpr, DESCRIPTORS: tl.constexpr, OVERLAP: tl.constexpr, LISTED: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Attend to key blocks that every row sees whole, then to those on the diagonal and the partial last one.

    Arguments as in `attend`, but: begin, end: the keys that some row sees; whole_from, whole: those within them that
    every row sees; whole_tiles, torn_tiles, if LISTED: how many tiles at either end of the list every row sees, or not;
    p_longest: norms of `its_parts` parts of the keys, the largest of which is returned.
    """
    b_max = tl.full((b_q.shape[0],), -INF, tl.float32)
    b_sum = tl.zeros((b_q.shape[0],), tl.float32)
    b_acc = tl.zeros((b_q.shape[0], D_PAD), tl.float32)
    b_framed = tl.zeros((b_q.shape[0],), tl.float32)
    gap = tl.maximum(whole - whole_from, 0)
    if LISTED:
        b_max, b_sum, b_acc, b_frame, b_framed = attend(
            b_q, b_nan, b_max, b_sum, b_acc, b_frame, b_framed, p_k, p_v, p_anchor, p_mask, p_order, o_row, rows, 0,
            whole_tiles, keys, diagonal, span, 0, 0, scale, ratio, stride_kn, stride_vn, stride_mask_m, stride_mask_n,
            o_batch, o_kv_head, begin_k, True, SHIFT, MASK, False, D, D_PAD, BLOCK_N, ANCHOR_BLOCK, FAST, GUARDED,
            CLEAN, DESCRIPTORS, True, WINDOW, CAP,
        )  # fmt: skip
        end = tl.cdiv(keys, BLOCK_N)
        whole = end - torn_tiles
    elif FAST and MASK == "none":
        b_max, b_sum, b_acc = attend_whole(
            b_q, b_nan, p_k, p_v, whole_from, whole, scale, ratio, stride_kn, stride_vn, o_batch, o_kv_head, begin_k,
            D, D_PAD, BLOCK_N, DESCRIPTORS, OVERLAP, CAP,
        )  # fmt: skip
    elif MASK == "none":
        b_max, b_sum, b_acc, b_frame, b_framed = attend(
            b_q, b_nan, b_max, b_sum, b_acc, b_frame, b_framed, p_k, p_v, p_anchor, p_mask, p_order, o_row, rows,
            whole_from, whole, keys, diagonal, span, 0, 0, scale, ratio, stride_kn, stride_vn, stride_mask_m,
            stride_mask_n, o_batch, o_kv_head, begin_k, True, SHIFT, MASK, False, D, D_PAD, BLOCK_N, ANCHOR_BLOCK,
            FAST, GUARDED, CLEAN, DESCRIPTORS, False, WINDOW, CAP,
        )  # fmt: skip
    longest = 0.0
    if (GUARDED and FAST) and not LISTED:
        # After a loop, which would otherwise wait for the norms. Between two, or else ptxas lets products of D = 256
        # wait for one another (C7515).
        longest = largest_norm(p_longest, its_parts, 128)
    rest = whole
    if WINDOW and not LISTED:  # blocks at both edges, without those that every row sees
        rest = begin
        end -= gap
    b_max, b_sum, b_acc, b_frame, b_framed = attend(
        b_q, b_nan, b_max, b_sum, b_acc, b_frame, b_framed, p_k, p_v, p_anchor, p_mask, p_order, o_row, rows, rest, end,
        keys, diagonal, span, whole_from, gap, scale, ratio, stride_kn, stride_vn, stride_mask_m, stride_mask_n,
        o_batch, o_kv_head, begin_k, False, SHIFT, MASK, CAUSAL, D, D_PAD, BLOCK_N, ANCHOR_BLOCK, FAST, GUARDED,
        CLEAN, DESCRIPTORS, LISTED, WINDOW, CAP,
    )  # fmt: skip
    return b_max, b_sum, b_acc, b_framed, longest


@triton.jit
def store_rows(
    b_max, b_sum, b_acc, b_framed, marked, p_out, p_lse, p_largest, p_sink, m_out, m_row, stride_om, stride_lm, scale,
    MASK: tl.constexpr, D: tl.constexpr, DROPPED: tl.constexpr, LAZY: tl.constexpr, SINKS: tl.constexpr,
    MAXIMA: tl.constexpr,
):  # fmt: skip
    """Store outputs, log-sum-exps and largest scores of a tile; pointers are those of its first row and its head.

    marked: the exact pass repeats the tile.
    """
    o_m = tl.arange(0, b_acc.shape[0])
    o_d = tl.arange(0, b_acc.shape[1])
    nats = b_max if MASK == "float" else b_max * scale
    nats += b_framed * scale
    b_out, b_lse = mean_of_values(b_acc, b_max, b_sum, nats, p_sink, D, DROPPED, LAZY, SINKS)
    b_lse = tl.where(marked, INF, b_lse)
    tl.store(p_out + o_m[:, None] * stride_om + o_d[None, :], b_out.to(p_out.dtype.element_ty), mask=m_out)
    tl.store(p_lse + o_m * stride_lm, b_lse, mask=m_row)
    if MAXIMA:
        tl.store(p_largest + o_m * stride_lm, largest_score(b_max, b_sum, nats), mask=m_row)


@triton.jit(
    do_not_specialize=[
        *("stride_lb", "stride_lh", "stride_order_b", "stride_order_h"),
        *("heads", "group", "tiles", "work", "all_rows", "blocks", "parts", "right", "span"),
    ]
)
def attention_kernel(
    p_q,  # (B, Hq, Sq, D), or packed (T, Hq, D): strides say
    p_k,  # (B, Hkv, Skv, D), or packed; K' when SHIFT is "before"
    p_v,
    p_out,
    p_lse,  # (B, Hq, Sq) FP32, or packed (T, Hq)
    p_anchor,  # (B, Hkv, blocks, D) FP16; packed: (1, Hkv, blocks, D)
    p_shifted,  # if FAST and GUARDED, from `centre_kernel`: K'
    p_shared,  # (B Hkv, D_PAD) FP16, packed: (Hkv, blocks, D_PAD): what K' lacks
    p_norms,  # (B Hkv, 2, parts) FP32: the longest key of K and of K'; infinite where that does not count
    p_marked,  # (1,) INT32: 1 if any tile needs the exact pass
    p_mask,  # bytes or floats, broadcast by strides of 0
    p_sink,  # (Hq,) FP32, if SINKS
    p_largest,  # FP32, strides of p_lse: the largest score of each row, if MAXIMA
    p_order,  # order and counts of prefill/mask_kernel.py, if LISTED
    p_counts,
    p_tile,  # (tiles, 2) sequence and tile within it, packed sequences only; so are the next three
    p_cu_q,
    p_cu_k,
    p_first_block,
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
    stride_order_b,
    stride_order_h,
    heads,
    group,
    tiles,
    work,
    all_rows,
    all_keys,
    blocks,  # of keys, for their anchors
    parts,  # for their norms
    right,  # as `KernelCall.limits`, if WINDOW
    span,
    scale,  # nats in a unit of a score: of q.k, or of its tanh if CAP
    ratio,
    SHIFT: tl.constexpr,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    VARLEN: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ANCHOR_BLOCK: tl.constexpr,
    PART: tl.constexpr,  # keys of a part
    FAST: tl.constexpr,  # one instruction for an exponent; only with SHIFT "none"
    GUARDED: tl.constexpr,  # with FAST, mark the tiles that need the exact pass; without, compute only these
    CLEAN: tl.constexpr,  # skip the test of values: an NPU cannot branch around a product (see README.md)
    DESCRIPTORS: tl.constexpr,  # p_k and p_v are tensor descriptors
    OVERLAP: tl.constexpr,  # as in `attend_whole`; only with FAST
    LISTED: tl.constexpr,  # a masked call: the tiles to visit are listed, and an unbounded tile is given up at once
    LOOP: tl.constexpr,  # few programs share the tiles; a program for each tile has more registers
    DROPPED: tl.constexpr,  # how outputs are rounded: rounding_kernel.py
    WINDOW: tl.constexpr,  # with CAUSAL: rows see no key before their window either
    CAP: tl.constexpr,  # as in `attend`; other than "none" only with SHIFT "none", and not GUARDED
    SINKS: tl.constexpr,
    MAXIMA: tl.constexpr,
    STEP: tl.constexpr,  # of the strides of q, k, v and the output: `in_steps`
):
    """Compute softmax(scale q k^T + mask) v and its log-sum-exp, one tile of BLOCK_M query rows at a time."""
    stride_qb, stride_qh, stride_qm = in_steps(stride_qb, stride_qh, stride_qm, STEP)
    stride_kb, stride_kh, stride_kn = in_steps(stride_kb, stride_kh, stride_kn, STEP)
    stride_vb, stride_vh, stride_vn = in_steps(stride_vb, stride_vh, stride_vn, STEP)
    stride_ob, stride_oh, stride_om = in_steps(stride_ob, stride_oh, stride_om, STEP)
    if GUARDED and not FAST:
        work = tl.where(tl.load(p_marked) > 0, work, 0)
    turns = tl.cdiv(work - tl.program_id(0), tl.num_programs(0)) if LOOP else 1
    for turn in range(turns):
        o_work = tl.program_id(0) + turn * tl.num_programs(0)
        o_batch, o_head, o_tile, begin_q, begin_k, first_block, rows, keys = locate(
            o_work, work, p_tile, p_cu_q, p_cu_k, p_first_block, heads, tiles, all_rows, all_keys, VARLEN, CAUSAL
        )
        batch = tl.cast(o_batch, tl.int64)
        head = tl.cast(o_head, tl.int64)
        kv_head = head // group
        # queries (M, D). An element that is not finite makes its row NaN. FAST does not change the tile, because a
        # changed tile would be an operand of products in registers.
        o_m = tl.arange(0, BLOCK_M)
        o_row = o_tile * BLOCK_M + o_m
        o_d = tl.arange(0, D_PAD)
        m_out = (o_row < rows)[:, None] & (o_d < D)[None, :]
        at = tl.cast(begin_q + o_tile * BLOCK_M, tl.int64)
        p_rows = p_q + batch * stride_qb + head * stride_qh + at * stride_qm
        b_q = tl.load(p_rows + o_m[:, None] * stride_qm + o_d[None, :], mask=m_out, other=0.0)
        b_square = tl.zeros((BLOCK_M,), tl.float32)
        if FAST:
            b_square = tl.sum(b_q.to(tl.float32) * b_q.to(tl.float32), 1)
        else:
            b_q = tl.where(tl.abs(b_q.to(tl.float32)) <= FP16_MAX, b_q, float("nan")).to(tl.float16)
        b_nan = b_square * 0.0
        # first keys, values, anchors and mask elements of this tile
        if DESCRIPTORS:
            p_keys = p_k
            p_values = p_v
        else:
            p_keys = p_k + batch * stride_kb + kv_head * stride_kh + tl.cast(begin_k, tl.int64) * stride_kn
            p_values = p_v + batch * stride_vb + kv_head * stride_vh + tl.cast(begin_k, tl.int64) * stride_vn
        head_block = (batch * (heads // group) + kv_head) * blocks + first_block
        p_anchors = p_anchor + head_block * D
        p_rows_mask = p_mask + batch * stride_mask_b + head * stride_mask_h + at * stride_mask_m
        diagonal, begin, whole_from, whole, end = tile_keys(
            o_tile, rows, keys, right, span, CAUSAL, WINDOW, MASK != "none", BLOCK_M, BLOCK_N
        )
        # active: this pass computes the tile. The fast pass marks a tile for the exact pass by an infinite log-sum-exp.
        active = o_tile * BLOCK_M < rows
        if GUARDED and not FAST:
            p_mark = p_lse + batch * stride_lb + head * stride_lh + at * stride_lm
            active = tl.load(p_mark, mask=active, other=0.0) == INF
            rows = tl.where(active, rows, 0)
            m_out = m_out & (rows > 0)
        b_frame = tl.zeros((D_PAD,), tl.float32)
        p_listed = p_order
        whole_tiles = 0
        torn_tiles = 0
        if LISTED:
            o_order = batch * stride_order_b + head * stride_order_h + o_tile
            listed = tl.cdiv(keys, BLOCK_N)
            p_listed = p_order + o_order * listed
            whole_tiles = tl.load(p_counts + 2 * o_order)
            torn_tiles = tl.load(p_counts + 2 * o_order + 1)
        if SHIFT != "none":  # the anchor of the first block that is visited is its frame
            first = tl.where(whole_from < whole, whole_from, begin) // ANCHOR_BLOCK
            if LISTED:  # a list may be empty
                p_entry = p_listed + tl.where(whole_tiles > 0, 0, listed - torn_tiles)
                first = tl.load(p_entry, mask=whole_tiles + torn_tiles > 0, other=0) * BLOCK_N // ANCHOR_BLOCK
            m_first = (o_d < D) & (first * ANCHOR_BLOCK < keys)
            b_frame = tl.load(p_anchors + first * D + o_d, mask=m_first, other=0.0).to(tl.float32)
        p_longest = p_norms
        its_parts = 0  # whose norms are still to be read
        stride_key = stride_kn
        if GUARDED and FAST:
            # A head's first part tells if there may be a K'. Mostly there is none, and no other norm is waited for.
            pair = batch * (heads // group) + kv_head
            PARTS: tl.constexpr = ANCHOR_BLOCK // PART  # of a block
            p_longest = p_norms + pair * 2 * parts + first_block * PARTS
            first = tl.load(p_longest + parts, mask=keys > 0, other=INF)
            its_parts = tl.cdiv(keys, PART)
            longest = tl.maximum(first, largest_norm(p_longest + parts, tl.where(first < INF, its_parts, 0), 128))
            shared = longest < INF
            its_parts = tl.where(shared, 0, its_parts)
            if LISTED:
                longest = tl.where(shared, longest, largest_norm(p_longest, its_parts, 128))
                active = active & is_bounded(b_square, longest, scale)
            b_shared = tl.zeros((BLOCK_M,), tl.float32)  # q.a
            if shared:
                o_anchor = pair * (parts // PARTS) + first_block if VARLEN else pair
                b_anchor = tl.load(p_shared + o_anchor * D_PAD + o_d).to(tl.float32)
                b_shared = tl.sum(b_q.to(tl.float32) * b_anchor[None, :], 1)
            if DESCRIPTORS:
                if shared:
                    p_keys = p_shifted
            else:  # K' is contiguous
                o_shifted = tl.cast(begin_k, tl.int64) * (heads // group) + kv_head
                o_shifted = o_shifted if VARLEN else pair * keys
                p_keys = tl.where(shared, p_shifted + o_shifted * D, p_keys)
                stride_key = tl.where(shared, heads // group * D if VARLEN else D, stride_kn)
        whole, end = tl.where(active, whole, 0), tl.where(active, end, 0)
        whole_tiles, torn_tiles = tl.where(active, whole_tiles, 0), tl.where(active, torn_tiles, 0)
        b_max, b_sum, b_acc, b_framed, other = attend_tile(
            b_q, b_nan, b_frame, p_keys, p_values, p_anchors, p_rows_mask, p_listed, whole_tiles, torn_tiles, o_row,
            rows, begin, whole_from, whole, end, keys, diagonal, span, scale, ratio, stride_key, stride_vn,
            stride_mask_m, stride_mask_n, o_batch, o_head // group, begin_k, p_longest, its_parts, SHIFT, MASK, CAUSAL,
            D, D_PAD, BLOCK_N, ANCHOR_BLOCK, FAST, GUARDED, CLEAN, DESCRIPTORS, OVERLAP, LISTED, WINDOW, CAP,
        )  # fmt: skip
        marked = False
        if GUARDED and FAST:  # a value that is not finite shows in the result
            if not LISTED:
                longest = tl.where(shared, longest, other)
            marked = (is_bounded(b_square, longest, scale) & all_finite(b_acc)) == 0
            tl.store(p_marked, 1, mask=marked)
            b_framed = b_shared
        o_lse = batch * stride_lb + head * stride_lh + at * stride_lm
        store_rows(
            b_max, b_sum, b_acc, b_framed, marked, p_out + batch * stride_ob + head * stride_oh + at * stride_om,
            p_lse + o_lse, p_largest + o_lse, p_sink + head, m_out, o_row < rows, stride_om, stride_lm, scale, MASK, D,
            DROPPED, not LOOP, SINKS, MAXIMA,
        )  # fmt: skip
