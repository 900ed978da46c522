"""Triton kernel for the pass over the keys before whole sequences are attended to: norms, and K' where it is exact.

A bias that all keys of a head share shifts all scores of a row alike, so softmax does not change, but FP32 sums of
shorter products are more accurate. The anchor of a column is the middle of the smallest and the largest of a few keys,
spread over the head, if these differ little. Each program tests its own keys: K - a is exact (Sterbenz) and no longer
than K where every key is half to twice the anchor. A head's K' counts if it is so in all parts. Keys that no row sees
do not count.
"""

import triton
import triton.language as tl

from pasa.ops.attention.triton.anchor_kernel import seen_keys
from pasa.ops.attention.triton.tile_math import INF, NORM_MARGIN, in_steps

TILE: tl.constexpr = tl.constexpr(8192)  # elements of the keys of a program, padding included
SAMPLE: tl.constexpr = tl.constexpr(32)  # keys from which the anchors are chosen
SPREAD: tl.constexpr = tl.constexpr(1.5)  # of the sample; other keys may lie three times as far apart


@triton.jit(do_not_specialize=["stride_visible_h", "groups", "heads", "length", "parts"])
def centre_kernel(
    p_k,  # (B, Hkv, S, D), or packed (T, Hkv, D)
    p_visible,  # (B, Hkv, groups, S) bytes, if HAS_VISIBLE: 1 for keys that some query of a group sees
    p_block,  # (blocks, 2): sequence and block within it, if VARLEN
    p_cu,  # (sequences + 1,), if VARLEN
    p_shifted,  # shape of the keys, FP16, contiguous: K' of heads that share something
    p_anchors,  # (B Hkv, D_PAD) FP16; packed: (Hkv, blocks, D_PAD), at the first block of each sequence
    p_norms,  # (B Hkv, 2, parts) FP32: the longest key of K and of K'; infinite if one is not finite or K' not exact
    p_marked,  # (1,) INT32: set to 0
    stride_kb,
    stride_kh,
    stride_kn,
    stride_visible_b,
    stride_visible_h,
    groups,
    heads,
    length,  # keys of a head, or packed tokens
    parts,  # of BLOCK keys; if VARLEN, each block has the same number of them
    D: tl.constexpr,
    D_PAD: tl.constexpr,  # columns of a tile
    BLOCK: tl.constexpr,  # keys of a program: TILE / D_PAD, and not more than a block has
    PARTS: tl.constexpr,  # of a block, if VARLEN
    HAS_VISIBLE: tl.constexpr,
    VARLEN: tl.constexpr,
    EARLY: tl.constexpr,  # the next kernel is launched early
    STEP: tl.constexpr,  # of the strides of k: `in_steps`
):
    """Compute K' of a part of the keys, and the longest key of it."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    o_pair = tl.cast(tl.program_id(0) // parts, tl.int64)
    o_part = tl.program_id(0) % parts
    o_d = tl.arange(0, D_PAD)
    m_d = (o_d < D)[None, :]
    stride_kb, stride_kh, stride_kn = in_steps(stride_kb, stride_kh, stride_kn, STEP)
    p_head = p_k + o_pair // heads * stride_kb + o_pair % heads * stride_kh
    first = o_part * BLOCK  # key of the head
    begin = 0
    keys = length
    if VARLEN:
        sequence = tl.load(p_block + 2 * (o_part // PARTS))
        used = sequence >= 0  # the table has room for more blocks than there are
        sequence = tl.maximum(sequence, 0)
        begin = tl.load(p_cu + sequence)
        keys = tl.where(used, tl.load(p_cu + sequence + 1) - begin, 0)
        first = (tl.load(p_block + 2 * (o_part // PARTS) + 1) * PARTS + o_part % PARTS) * BLOCK
        p_head += tl.cast(begin, tl.int64) * stride_kn
    o_n = first + tl.arange(0, BLOCK)
    o_sample = tl.arange(0, SAMPLE) * (keys // SAMPLE) + tl.minimum(tl.arange(0, SAMPLE), keys % SAMPLE)
    o_sample = tl.minimum(o_sample, keys - 1)
    p_tile = p_head + tl.cast(tl.minimum(o_n, keys - 1), tl.int64)[:, None] * stride_kn + o_d[None, :]
    p_sample = p_head + tl.cast(o_sample, tl.int64)[:, None] * stride_kn + o_d[None, :]
    if VARLEN:
        b_k = tl.load(p_tile, mask=m_d & (o_n < keys)[:, None], other=0.0)
        b_sample = tl.load(p_sample, mask=m_d & (o_sample >= 0)[:, None], other=0.0)
    else:
        b_k = tl.load(p_tile) if D == D_PAD else tl.load(p_tile, mask=m_d, other=0.0)
        b_sample = tl.load(p_sample) if D == D_PAD else tl.load(p_sample, mask=m_d, other=0.0)
    if HAS_VISIBLE:
        p_visible += o_pair // heads * stride_visible_b + o_pair % heads * stride_visible_h
        m_key = seen_keys(p_visible, o_n, groups, length, keys)
        m_sample = seen_keys(p_visible, o_sample, groups, length, keys)[:, None]
    tl.debug_barrier()  # all are on their way before one is waited for
    if HAS_VISIBLE:
        low = tl.min(tl.where(m_sample, b_sample.to(tl.float32), INF), 0)
        high = tl.max(tl.where(m_sample, b_sample.to(tl.float32), -INF), 0)
    else:
        low = tl.min(b_sample, 0).to(tl.float32)
        high = tl.max(b_sample, 0).to(tl.float32)
    near = tl.minimum(tl.abs(low), tl.abs(high))
    far = tl.maximum(tl.abs(low), tl.abs(high))
    shared = (low * high > 0.0) & (far <= SPREAD * near) & (far < INF)
    anchor = tl.where(shared, (low + high) * 0.5, 0.0).to(tl.float16)
    b_wide = b_k.to(tl.float32)
    if HAS_VISIBLE:
        b_wide = tl.where(m_key[:, None], b_wide, anchor.to(tl.float32)[None, :])  # K' = 0, and finite
        square = tl.where(m_key, tl.sum(b_wide * b_wide, 1), 0.0)
    else:
        square = tl.sum(b_wide * b_wide, 1)  # FP32 holds any sum of FP16 squares
    norm = tl.sqrt(tl.max(tl.where(square < INF, square, INF), 0)) * NORM_MARGIN
    p_norm = p_norms + o_pair * 2 * parts + o_part
    tl.store(p_norm, norm)
    if tl.max(shared.to(tl.int32), 0) > 0:
        b_a = anchor.to(tl.float32)[None, :]
        m_exact = (b_a == 0.0) | ((2.0 * b_wide * b_a >= b_a * b_a) & (tl.abs(b_wide) <= 2.0 * tl.abs(b_a)))
        b_new = b_wide - b_a
        if VARLEN:
            m_exact = m_exact | (o_n >= keys)[:, None]
            b_new = tl.where((o_n < keys)[:, None], b_new, 0.0)
        longest = tl.sqrt(tl.max(tl.sum(b_new * b_new, 1), 0)) * NORM_MARGIN
        exact = tl.min(tl.min(m_exact.to(tl.int32), 1), 0) > 0
        tl.store(p_norm + parts, tl.where(exact & (norm < INF), longest, INF))
        if VARLEN:
            p_new = p_shifted + ((begin + o_n).to(tl.int64)[:, None] * heads + o_pair) * D + o_d[None, :]
            if first == 0:
                p_anchor = p_anchors + (o_pair * (parts // PARTS) + o_part // PARTS) * D_PAD
                tl.store(p_anchor + o_d, anchor)
        else:
            p_new = p_shifted + (o_pair * keys + o_n[:, None]) * D + o_d[None, :]
            if o_part == 0:
                tl.store(p_anchors + o_pair * D_PAD + o_d, anchor)  # 0 in padding
        tl.store(p_new, b_new.to(tl.float16), mask=(o_n < keys)[:, None] & m_d)
    else:
        tl.store(p_norm + parts, INF)
    if tl.program_id(0) == 0:
        tl.store(p_marked, 0)
