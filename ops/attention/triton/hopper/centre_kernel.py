"""The pass over the keys before plain_kernel.py: what all keys of a head share is subtracted, where that is exact.

A bias that all keys share shifts all scores of a row alike, so softmax does not change, but FP32 sums of shorter
products are more accurate. The anchor of a column is the middle of the smallest and the largest of a few keys, spread
over the head, if these differ little. Each program tests its own keys: K - a is exact (Sterbenz) and no longer than K
where every key is half to twice the anchor. A head's K' counts if it is so in all blocks.
"""

import triton
import triton.language as tl

from pasa.ops.attention.triton.tile_math import INF, NORM_MARGIN

TILE: tl.constexpr = tl.constexpr(8192)  # elements of the keys of a program, padding included
SAMPLE: tl.constexpr = tl.constexpr(32)  # keys from which the anchors are chosen
SPREAD: tl.constexpr = tl.constexpr(1.5)  # of the sample; other keys may lie three times as far apart


@triton.jit(do_not_specialize=["heads", "keys", "blocks"])
def centre_kernel(
    p_k,  # (B, Hkv, S, D)
    p_shifted,  # (B, Hkv, S, D) FP16, contiguous: K' of heads that share something
    p_anchors,  # (B Hkv, D_PAD) FP16
    p_norms,  # (B Hkv, 2, blocks) FP32: the longest key of K and of K'; infinite if one is not finite or K' not exact
    p_marked,  # (1,) INT32: set to 0
    stride_kb,  # of the keys: multiples of 8
    stride_kh,
    stride_kn,
    heads,
    keys,
    blocks,
    D: tl.constexpr,
    D_PAD: tl.constexpr,  # columns of a tile
    BLOCK: tl.constexpr,  # keys of a program: TILE / D_PAD
):
    """Compute K' of a block of keys, and the longest key of it."""
    tl.extra.cuda.gdc_launch_dependents()
    o_pair = tl.cast(tl.program_id(0) // blocks, tl.int64)
    o_block = tl.program_id(0) % blocks
    o_d = tl.arange(0, D_PAD)
    m_d = (o_d < D)[None, :]
    stride_kn = tl.multiple_of(stride_kn, 8)  # or loads of heads like D = 72 would be of 2 bytes each
    p_head = p_k + o_pair // heads * tl.multiple_of(stride_kb, 8) + o_pair % heads * tl.multiple_of(stride_kh, 8)
    o_n = o_block * BLOCK + tl.arange(0, BLOCK)
    o_sample = tl.arange(0, SAMPLE) * (keys // SAMPLE) + tl.minimum(tl.arange(0, SAMPLE), keys % SAMPLE)
    p_tile = p_head + tl.cast(tl.minimum(o_n, keys - 1), tl.int64)[:, None] * stride_kn + o_d[None, :]
    p_sample = p_head + tl.cast(tl.minimum(o_sample, keys - 1), tl.int64)[:, None] * stride_kn + o_d[None, :]
    b_k = tl.load(p_tile) if D == D_PAD else tl.load(p_tile, mask=m_d, other=0.0)
    b_sample = tl.load(p_sample) if D == D_PAD else tl.load(p_sample, mask=m_d, other=0.0)
    tl.debug_barrier()  # both are on their way before one is waited for
    low = tl.min(b_sample, 0).to(tl.float32)
    high = tl.max(b_sample, 0).to(tl.float32)
    near = tl.minimum(tl.abs(low), tl.abs(high))
    far = tl.maximum(tl.abs(low), tl.abs(high))
    shared = (low * high > 0.0) & (far <= SPREAD * near) & (far < INF)
    anchor = tl.where(shared, (low + high) * 0.5, 0.0).to(tl.float16)
    b_wide = b_k.to(tl.float32)
    square = tl.sum(b_wide * b_wide, 1)  # FP32 holds any sum of FP16 squares
    norm = tl.sqrt(tl.max(tl.where(square < INF, square, INF), 0)) * NORM_MARGIN
    p_norm = p_norms + o_pair * 2 * blocks + o_block
    tl.store(p_norm, norm)
    if tl.max(shared.to(tl.int32), 0) > 0:
        b_a = anchor.to(tl.float32)[None, :]
        m_exact = (b_a == 0.0) | ((2.0 * b_wide * b_a >= b_a * b_a) & (tl.abs(b_wide) <= 2.0 * tl.abs(b_a)))
        b_new = b_wide - b_a
        longest = tl.sqrt(tl.max(tl.sum(b_new * b_new, 1), 0)) * NORM_MARGIN
        exact = tl.min(tl.min(m_exact.to(tl.int32), 1), 0) > 0
        tl.store(p_norm + blocks, tl.where(exact & (norm < INF), longest, INF))
        p_new = p_shifted + (o_pair * keys + o_n[:, None]) * D + o_d[None, :]
        tl.store(p_new, b_new.to(tl.float16), mask=(o_n < keys)[:, None] & m_d)
        if o_block == 0:
            tl.store(p_anchors + o_pair * D_PAD + o_d, anchor)  # 0 in padding
    else:
        tl.store(p_norm + blocks, INF)
    if tl.program_id(0) == 0:
        tl.store(p_marked, 0)
