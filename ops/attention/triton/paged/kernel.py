"""Triton kernels that write keys and values into the pages of a cache, and compute the anchors of pages."""

import triton
import triton.language as tl

from pasa.ops.attention.triton.tile_math import exact_anchor, is_finite


@triton.jit
def write_pages_kernel(
    p_k,  # (T, Hkv, D)
    p_v,
    p_k_cache,  # (pages, PAGE, Hkv, D)
    p_v_cache,
    p_slot,  # (T,) whole numbers
    p_last,  # (pages,) INT32, with ANCHORED: -1, and then the last slot that is written in each page
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_kp,
    stride_kn,
    stride_kch,
    stride_vp,
    stride_vn,
    stride_vch,
    heads,
    pages,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    ANCHORED: tl.constexpr,
):
    """Write one token; a token without a slot in the cache is not written."""
    token = tl.cast(tl.program_id(0), tl.int64)
    slot = tl.cast(tl.load(p_slot + token), tl.int64)
    if (slot < 0) | (slot >= pages * PAGE):
        return
    page = slot // PAGE
    row = slot % PAGE
    o_h = tl.cast(tl.arange(0, HEADS_PAD), tl.int64)[:, None]
    o_d = tl.arange(0, D_PAD)[None, :]
    m_tile = (o_h < heads) & (o_d < D)
    b_k = tl.load(p_k + token * stride_kt + o_h * stride_kh + o_d, mask=m_tile)
    b_v = tl.load(p_v + token * stride_vt + o_h * stride_vh + o_d, mask=m_tile)
    tl.store(p_k_cache + page * stride_kp + row * stride_kn + o_h * stride_kch + o_d, b_k, mask=m_tile)
    tl.store(p_v_cache + page * stride_vp + row * stride_vn + o_h * stride_vch + o_d, b_v, mask=m_tile)
    if ANCHORED:
        tl.atomic_max(p_last + page, row.to(tl.int32))


@triton.jit
def page_anchors_kernel(
    p_k_cache,  # as in `write_pages_kernel`
    p_slot,
    p_last,
    p_anchor,  # (pages, Hkv, D) FP16, contiguous
    stride_kp,
    stride_kn,
    stride_kch,
    heads,
    pages,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    WIDTH: tl.constexpr,  # columns that are processed together
    PAGE: tl.constexpr,
    PAGE_PAD: tl.constexpr,
):
    """Compute one head's anchor of a token's page, from the slots up to the token, if no later slot is written.

    The anchor is NaN if a key is not finite.
    """
    token = tl.program_id(0) // heads
    head = tl.cast(tl.program_id(0) % heads, tl.int64)
    slot = tl.cast(tl.load(p_slot + token), tl.int64)
    if (slot < 0) | (slot >= pages * PAGE):
        return
    page = slot // PAGE
    last = tl.load(p_last + page)
    if slot % PAGE != last:
        return
    o_n = tl.arange(0, PAGE_PAD)
    m_key = (o_n <= last)[:, None]
    p_keys = p_k_cache + page * stride_kp + head * stride_kch
    p_out = p_anchor + (page * heads + head) * D
    good = 1
    for start in range(0, D_PAD, WIDTH):
        o_d = start + tl.arange(0, WIDTH)
        m_tile = m_key & (o_d < D)[None, :]
        b_k = tl.load(p_keys + o_n[:, None] * stride_kn + o_d[None, :], mask=m_tile, other=0.0)
        b_k = b_k.to(tl.float16).to(tl.float32)
        good = tl.minimum(good, tl.min(tl.min(tl.where(is_finite(b_k), 1, 0), 1), 0))
        anchor = exact_anchor(b_k, m_key, last + 1.0)
        tl.store(p_out + o_d, anchor.to(tl.float16), mask=o_d < D)
    tl.debug_barrier()  # other threads may have stored what the next lines replace
    if good == 0:
        o_all = tl.arange(0, D_PAD)
        tl.store(p_out + o_all, tl.full((D_PAD,), float("nan"), tl.float16), mask=o_all < D)
