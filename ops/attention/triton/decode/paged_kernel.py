"""Triton kernels of decoding from a paged cache: kernel.py and lanes_kernel.py with a page table for addresses.

Nothing is gathered, and lengths stay on the device. Each sequence is cut into the same number of splits, whose length
depends on the sequence. A mixed batch comes in tiles of a few queries, each with the keys that it sees.
"""

import triton
import triton.language as tl

from pasa.ops.attention.triton.decode.kernel import attend_split, load_queries, store_split
from pasa.ops.attention.triton.decode.lanes_kernel import attend_program, is_marked
from pasa.ops.attention.triton.tile_math import ANCHOR_LIMIT, INF


@triton.jit
def locate_split(p_tile, o_tile, o_split, splits, span, GRAIN: tl.constexpr, LANES: tl.constexpr, TILED: tl.constexpr,
                 WINDOW: tl.constexpr):  # fmt: skip
    """Return the sequence of a tile, the last key of its first row, and the keys `begin` to `end` of a split.

    Splits are equally long, LANES of them a multiple of GRAIN keys; the last ones may have fewer, or none. With WINDOW
    they start at the block of GRAIN keys that has the first key of the first row. p_tile: as in `decode_paged_kernel`.
    """
    if TILED:
        sequence = tl.load(p_tile + 3 * o_tile)
        keys = tl.load(p_tile + 3 * o_tile + 1)
        diagonal = tl.load(p_tile + 3 * o_tile + 2)
    else:
        sequence = o_tile
        keys = tl.load(p_tile + o_tile)
        diagonal = keys - 1
    if WINDOW:
        first = tl.minimum(tl.maximum(diagonal - span, 0), keys) // GRAIN * GRAIN
        keys_each = tl.cdiv(tl.cdiv(keys - first, GRAIN), splits // LANES) * (GRAIN // LANES)
        begin = tl.minimum(first + o_split * keys_each, keys)
    else:
        keys_each = tl.cdiv(tl.cdiv(keys, GRAIN), splits // LANES) * (GRAIN // LANES)
        begin = tl.minimum(o_split * keys_each, keys)
    return sequence, diagonal, begin, tl.minimum(begin + keys_each, keys)


@triton.jit(do_not_specialize=["kv_heads", "group", "rows", "splits", "span", "stride_table"])
def decode_paged_kernel(
    p_q,  # (tiles, Hq, rows, D)
    p_k,  # (pages, PAGE, Hkv, D)
    p_v,
    p_part,  # as in decode_kernel, with tiles for batch entries
    p_state,
    p_anchor,
    p_framed,
    p_table,  # (B, most pages of a sequence) INT32
    p_tile,  # (B,) INT32: keys of each sequence; TILED (tiles, 3): sequence, keys that some row sees, and the diagonal
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
    rows,
    splits,
    span,  # row i sees no key before i + diagonal - span, if WINDOW
    scale,  # nats in a unit of a score: of q.k, or of its tanh if CAP
    ratio,
    TILED: tl.constexpr,
    CAUSAL: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,  # slots of a page
    GRAIN: tl.constexpr,  # block of keys of the pass that chose the splits: LANES splits are a multiple of it
    LANES: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,  # as in `decode_kernel`
):
    """Attend within one split of one key head: all query rows of a tile against its keys."""
    ALIGNED: tl.constexpr = GRAIN // LANES % BLOCK_N == 0
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    o_split = tl.program_id(0) % splits
    o_pair = tl.program_id(0) // splits
    o_work = tl.program_id(0)
    if EXACT:
        if tl.load(p_framed + o_work) >= 0:
            return
    o_tile = o_pair // kv_heads
    kv_head = tl.cast(o_pair % kv_heads, tl.int64)
    sequence, diagonal, begin, end = locate_split(p_tile, o_tile, o_split, splits, span, GRAIN, LANES, TILED, WINDOW)
    p_pages = p_table + tl.cast(sequence, tl.int64) * stride_table
    m_row = tl.arange(0, BLOCK_M) < group * rows
    b_q, _, o_query, longest = load_queries(
        p_q, tl.cast(o_tile, tl.int64), kv_head, group, rows, stride_qb, stride_qh, stride_qm, scale, D, D_PAD, BLOCK_M
    )
    p_keys = p_k + kv_head * stride_kh
    p_values = p_v + kv_head * stride_vh
    # keys that all rows see in whole blocks, then the others
    seen_by_all = diagonal + 1 if CAUSAL else end
    whole = tl.maximum(tl.minimum(end, seen_by_all) // BLOCK_N * BLOCK_N, begin)
    if WINDOW:  # keys in this split are before the window of the last row
        whole = tl.where(begin < rows - 1 + diagonal - span, begin, whole)
    b_max = tl.full((BLOCK_M,), -INF, tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    b_acc = tl.zeros((BLOCK_M, D_PAD), tl.float32)
    b_first = tl.zeros((D_PAD,), tl.float32)
    b_square = tl.zeros((BLOCK_N,), tl.float32)
    if EXACT:
        b_max, b_sum, b_acc, b_first, b_square = attend_split(
            b_q, b_max, b_sum, b_acc, b_first, b_square, p_keys, p_values, p_q, o_query, m_row, begin, end,
            diagonal, span, scale, ratio, longest, stride_kn, stride_vn, 0, p_pages, stride_kp, stride_vp,
            True, True, "none", CAUSAL, D, D_PAD, BLOCK_N, PAGE, ALIGNED, WINDOW, CAP,
        )  # fmt: skip
        good = True
    else:
        b_max, b_sum, b_acc, b_first, b_square = attend_split(
            b_q, b_max, b_sum, b_acc, b_first, b_square, p_keys, p_values, p_q, o_query, m_row, begin, whole,
            diagonal, span, scale, ratio, longest, stride_kn, stride_vn, 0, p_pages, stride_kp, stride_vp,
            False, False, "none", False, D, D_PAD, BLOCK_N, PAGE, ALIGNED, False, CAP,
        )  # fmt: skip
        b_max, b_sum, b_acc, b_first, b_square = attend_split(
            b_q, b_max, b_sum, b_acc, b_first, b_square, p_keys, p_values, p_q, o_query, m_row, whole, end,
            diagonal, span, scale, ratio, longest, stride_kn, stride_vn, 0, p_pages, stride_kp, stride_vp,
            False, True, "none", CAUSAL, D, D_PAD, BLOCK_N, PAGE, ALIGNED, WINDOW, CAP,
        )  # fmt: skip
        # a sum, unlike a maximum, does not lose a NaN
        good = (tl.sqrt(tl.max(b_square, 0)) * longest <= ANCHOR_LIMIT) & (tl.sum(b_square, 0) < INF)
        if CAP != "none":
            good = True
    store_split(b_max, b_sum, b_acc, b_first, p_part, p_state, p_anchor + o_work * D, p_framed + o_work, o_work, m_row,
                good, D, D_PAD, BLOCK_M)  # fmt: skip


@triton.jit(do_not_specialize=["kv_heads", "group", "splits", "stride_table"])
def decode_lanes_paged_kernel(
    p_q,  # (B, Hq, 1, D)
    p_k,  # (pages, PAGE, Hkv, D)
    p_v,
    p_part,  # as in decode_lanes_kernel
    p_state,
    p_anchor,
    p_framed,
    p_marked,
    p_table,  # (B, most pages of a sequence) INT32
    p_tile,  # (B,) INT32: keys of each sequence
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
    ANCHORED: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend as one of `splits` programs of one key head, for sequences with one query each."""
    BLOCK: tl.constexpr = LANES * BLOCK_N
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    o_split = tl.program_id(0) % splits
    o_pair = tl.program_id(0) // splits
    if ANCHORED:
        if is_marked(p_marked, o_pair, splits) == 0:
            return
    sequence = o_pair // kv_heads
    batch = tl.cast(sequence, tl.int64)
    kv_head = tl.cast(o_pair % kv_heads, tl.int64)
    keys = tl.load(p_tile + sequence)
    # whole blocks, then the others
    if ANCHORED:
        _, _, begin, end = locate_split(p_tile, sequence, o_split, splits, 0, BLOCK, 1, False, False)
        whole = tl.maximum(tl.minimum(end, keys // BLOCK * BLOCK), begin)
        rest = whole
        step = BLOCK
    else:
        begin = o_split * BLOCK
        end = keys
        whole = keys // BLOCK * BLOCK
        step = splits * BLOCK
        rest = whole + (o_split + splits - whole // BLOCK % splits) % splits * BLOCK
    attend_program(
        p_q, p_k + kv_head * stride_kh, p_v + kv_head * stride_vh, p_part, p_state, p_anchor, p_framed, p_marked,
        batch, kv_head, begin, whole, rest, end, step, tl.program_id(0) * LANES, keys, stride_qb, stride_qh, stride_qm,
        stride_kn, stride_vn, p_table + batch * stride_table, stride_kp, stride_vp, group, 1, scale,
        ANCHORED, False, D, D_PAD, LANES, BLOCK_M, BLOCK_N, PAGE,
    )  # fmt: skip
