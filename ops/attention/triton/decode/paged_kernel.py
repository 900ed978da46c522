"""Triton kernels of decoding from a paged cache: kernel.py and lanes_kernel.py with a page table for addresses.

Nothing is gathered, and lengths stay on the device. Each sequence is cut into the same number of splits, whose length
depends on the sequence. A mixed batch comes in tiles of a few queries, each with the keys that it sees.
"""

import triton
import triton.language as tl

from pasa.ops.attention.triton.decode.kernel import load_queries, store_split
from pasa.ops.attention.triton.decode.lanes_kernel import attend_lane_exactly, attend_program
from pasa.ops.attention.triton.decode.tile_math import choose_anchor, load_sample, parts_of, spread
from pasa.ops.attention.triton.split_kernel import FAR_ROWS, attend_split, is_near
from pasa.ops.attention.triton.tile_math import INF


@triton.jit
def locate_split(p_tile, o_tile, o_split, splits, span, GRAIN: tl.constexpr, TILED: tl.constexpr,
                 WINDOW: tl.constexpr, LEAST: tl.constexpr):  # fmt: skip
    """Return the sequence of a tile, the last key of its first row, and the keys `begin` to `end` of a split.

    Splits are equally long, a multiple of GRAIN keys; the last ones may have fewer, or none, also because of LEAST
    (`parts_of`). With WINDOW they start at the block of GRAIN keys that has the first key of the first row. p_tile: as
    in `decode_paged_kernel`.
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
        keys_each = tl.cdiv(tl.cdiv(keys - first, GRAIN), parts_of(keys - first, splits, LEAST)) * GRAIN
        begin = tl.minimum(first + o_split * keys_each, keys)
    else:
        keys_each = tl.cdiv(tl.cdiv(keys, GRAIN), parts_of(keys, splits, LEAST)) * GRAIN
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
    GRAIN: tl.constexpr,  # block of keys of the fast pass: splits are a multiple of it
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,  # as in `decode_kernel`
    LEAST: tl.constexpr = 0,  # keys of a split, at least, so that a tile's splits do not depend on others: `parts_of`
):
    """Attend within one split of one key head: all query rows of a tile against its keys."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    o_split = tl.program_id(0) % splits
    o_pair = tl.program_id(0) // splits
    o_work = tl.program_id(0)
    if EXACT:
        if tl.load(p_framed + o_work) >= 0:
            return
    o_tile = o_pair // kv_heads
    kv_head = tl.cast(o_pair % kv_heads, tl.int64)
    sequence, diagonal, begin, end = locate_split(p_tile, o_tile, o_split, splits, span, GRAIN, TILED, WINDOW, LEAST)
    p_pages = p_table + tl.cast(sequence, tl.int64) * stride_table
    m_row = tl.arange(0, BLOCK_M) < group * rows
    b_q, _, o_query, longest = load_queries(
        p_q, tl.cast(o_tile, tl.int64), kv_head, 0, group, rows, stride_qb, stride_qh, stride_qm, scale,
        D, D_PAD, BLOCK_M,
    )  # fmt: skip
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
    b_far = tl.zeros((FAR_ROWS, BLOCK_N), tl.float32)
    if EXACT:
        b_max, b_sum, b_acc, b_first, b_far = attend_split(
            b_q, b_max, b_sum, b_acc, b_first, b_far, p_keys, p_values, p_q, o_query, m_row, begin, end,
            diagonal, span, scale, ratio, longest, stride_kn, stride_vn, 0, p_pages, stride_kp, stride_vp,
            "block", True, "none", CAUSAL, D, D_PAD, BLOCK_N, PAGE, WINDOW, CAP,
        )  # fmt: skip
        mark = 2
    else:
        # With 64 rows of 256, an anchor spills registers (1.3 KiB for each thread on sm_89). Keys before a window, that
        # no row sees, must not choose an anchor.
        ANCHORS: tl.constexpr = CAP == "none" and not WINDOW
        SHIFT: tl.constexpr = "head" if ANCHORS and (D_PAD <= 128 or BLOCK_M <= 32) else "none"
        if SHIFT == "head":
            keys = tl.load(p_tile + (3 * o_tile + 1 if TILED else o_tile))
            o_sample = spread(0, keys)
            b_sample = load_sample(p_keys, o_sample, keys, stride_kn, p_pages, stride_kp, D, D_PAD, PAGE)
            b_first = choose_anchor(b_sample.to(tl.float32), o_sample < keys, longest)
        b_max, b_sum, b_acc, b_first, b_far = attend_split(
            b_q, b_max, b_sum, b_acc, b_first, b_far, p_keys, p_values, p_q, o_query, m_row, begin, whole,
            diagonal, span, scale, ratio, longest, stride_kn, stride_vn, 0, p_pages, stride_kp, stride_vp,
            SHIFT, False, "none", False, D, D_PAD, BLOCK_N, PAGE, False, CAP,
        )  # fmt: skip
        b_max, b_sum, b_acc, b_first, b_far = attend_split(
            b_q, b_max, b_sum, b_acc, b_first, b_far, p_keys, p_values, p_q, o_query, m_row, whole, end,
            diagonal, span, scale, ratio, longest, stride_kn, stride_vn, 0, p_pages, stride_kp, stride_vp,
            SHIFT, True, "none", CAUSAL, D, D_PAD, BLOCK_N, PAGE, WINDOW, CAP,
        )  # fmt: skip
        mark = 1
        if CAP == "none":
            mark = tl.where(is_near(b_far, b_acc, longest, D), 1, -1)
    store_split(b_max, b_sum, b_acc, b_first, p_part, p_state, p_anchor + o_work * D, p_framed + o_work, o_work, m_row,
                mark, D, D_PAD, BLOCK_M)  # fmt: skip


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
    p_bound,
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
    ANCHORED: tl.constexpr,  # programs choose an anchor for each head: no pages keep anchors
    EXACT: tl.constexpr,  # as in decode_lanes_kernel
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    PDL: tl.constexpr,
    LEAST: tl.constexpr = 0,  # as in `decode_paged_kernel`
):
    """Attend as one of `splits` programs of one key head, for sequences with one query each."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    o_program = tl.program_id(0)
    if EXACT:
        if tl.load(p_framed + o_program) >= 0:
            return
        o_program = o_program // LANES
    o_split = o_program % splits
    sequence = o_program // splits // kv_heads
    batch = tl.cast(sequence, tl.int64)
    kv_head = tl.cast(o_program // splits % kv_heads, tl.int64)
    keys = tl.load(p_tile + sequence)
    parts = parts_of(keys, splits, LEAST)
    p_keys = p_k + kv_head * stride_kh
    p_values = p_v + kv_head * stride_vh
    p_pages = p_table + batch * stride_table
    if EXACT:
        attend_lane_exactly(
            p_q, p_keys, p_values, p_part, p_state, p_anchor, p_framed, p_bound, batch, kv_head, o_split,
            tl.program_id(0) % LANES, splits, parts, keys, stride_qb, stride_qh, stride_qm, stride_kn, stride_vn,
            p_pages, stride_kp, stride_vp, group, 1, scale, False, D, D_PAD, LANES, BLOCK_M, BLOCK_N, PAGE,
        )  # fmt: skip
    else:
        attend_program(
            p_q, p_keys, p_values, p_part, p_state, p_anchor, p_framed, p_marked, p_bound, batch, kv_head, o_split,
            parts, keys, keys, stride_qb, stride_qh, stride_qm, stride_kn, stride_vn, p_pages, stride_kp, stride_vp,
            group, 1, scale, ANCHORED, False, D, D_PAD, LANES, BLOCK_M, BLOCK_N, PAGE,
        )  # fmt: skip
