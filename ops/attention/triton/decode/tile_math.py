"""Device functions that choose one anchor for all keys of a head, from a sample of them.

Each program of the head chooses, so no launch comes before. All choose the same anchor, because their sample is the
same. README.md, "Decoding", says what it must fulfil.
"""

import triton
import triton.language as tl

from pasa.ops.attention.triton.split_kernel import LEAST_ANCHOR
from pasa.ops.attention.triton.tile_math import ANCHOR_LIMIT, INF

SAMPLES = tl.constexpr(16)  # keys from which the anchor of a head is chosen
UNLIKE = tl.constexpr(3)  # of them may be unlike the others
FEWEST = tl.constexpr(8)  # of them must be alike, or there is no anchor
LOOKS = tl.constexpr(512)  # places of a mask at which `shown_range` looks
# The largest distance of a sampled key from its anchor, relative to the anchor; other keys may lie 2.5 times as far
# away. The largest of 16 normal numbers lies 1.8 sigma from their mean, so others may lie 4.4 sigma away or more.
NEAR = tl.constexpr(0.2)
LONG = tl.constexpr(16)  # splits of a sequence that suffice to occupy a GPU together with its other heads


@triton.jit
def parts_of(keys, splits, LEAST: tl.constexpr):
    """Return how many of `splits` splits share `keys` keys; the others have none.

    LEAST 0: all. Otherwise as many as have LEAST keys each, or twice as many keys where that makes fewer than LONG
    splits. This does not depend on the other sequences of a batch.
    """
    parts = splits
    if LEAST > 0:
        each = tl.where(keys < LONG * LEAST, 2 * LEAST, LEAST)
        parts = tl.minimum(splits, tl.maximum(tl.cdiv(keys, each), 1))
    return parts


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
def spread(begin, end):
    """Return the numbers (SAMPLES,) of keys that are spread from `begin` to `end`; equal ones where keys are few."""
    keys = end - begin
    o_sample = tl.arange(0, SAMPLES)
    # (o_sample * keys + keys // 2) // SAMPLES, without a product of all keys, which may pass 2^31
    return begin + o_sample * (keys // SAMPLES) + (o_sample * (keys % SAMPLES) + keys // 2) // SAMPLES


@triton.jit
def shown_keys(p_mask, o_n, keys, stride_mask_n, MASK: tl.constexpr):
    """Return which of the keys o_n (N,) a row of a mask shows."""
    m_seen = o_n < keys
    if MASK != "none":
        b_mask = tl.load(p_mask + tl.cast(o_n, tl.int64) * stride_mask_n, mask=m_seen, other=0).to(tl.float32)
        m_seen = m_seen & ((b_mask != 0.0) if MASK == "bool" else (b_mask != -INF))
    return m_seen


@triton.jit
def shown_range(p_mask, keys, stride_mask_n, MASK: tl.constexpr):
    """Return begin and end of the keys that a row of a mask shows, of `LOOKS` that are spread over all; 0, 0 if none.

    They are right to a `LOOKS`th of the keys.
    """
    o_n = tl.arange(0, LOOKS) * tl.cdiv(keys, LOOKS)
    m_seen = shown_keys(p_mask, o_n, keys, stride_mask_n, MASK)
    end = tl.max(tl.where(m_seen, o_n + 1, 0), 0)
    return tl.minimum(tl.min(tl.where(m_seen, o_n, keys), 0), end), end


@triton.jit
def load_sample(
    p_keys, o_n, keys, stride_kn, p_table, stride_kp, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr
):  # fmt: skip
    """Load the sampled keys o_n (SAMPLES,) of a head, as (SAMPLES, D)."""
    o_d = tl.arange(0, D_PAD)
    # Transposed and without vectors, so that a thread holds all samples of a column, which are reduced again and again.
    p_tile = p_keys + offsets_of(o_n, o_n < keys, stride_kn, p_table, stride_kp, PAGE)[None, :] + o_d[:, None]
    p_tile = tl.max_contiguous(p_tile, [1, 1])
    b_k = tl.load(p_tile, mask=(o_n < keys)[None, :] & (o_d < D)[:, None], other=0.0)
    return tl.trans(b_k.to(tl.float16))


@triton.jit
def masked_mean(b_k, m_k):
    """Return the mean (D,) of the elements of b_k (N, D) where m_k (N, D or 1) is true."""
    return tl.sum(tl.where(m_k, b_k, 0.0), 0) / tl.maximum(tl.sum(tl.where(m_k, 1.0, 0.0), 0), 1.0)


@triton.jit
def mean_of_third(b_k, m_seen, third):
    """Return the mean (D,) of every third of the samples (SAMPLES, D), from sample `third` on."""
    return masked_mean(b_k, (m_seen & (tl.arange(0, SAMPLES) % 3 == third))[:, None])


@triton.jit
def are_long(b_k, longest):
    """Return whether keys like the samples b_k (SAMPLES, D) may need an anchor; if not, half the bound holds for each.

    longest: largest norm of a query, in nats. The largest square of each column counts, which takes one sum over all
    columns where norms would take SAMPLES. NaN counts only in a column that has nothing else; then there is no anchor.
    """
    b_top = tl.max(tl.abs(b_k), 0).to(tl.float32) * longest
    return tl.sum(b_top * b_top, 0) > (0.5 * ANCHOR_LIMIT) * (0.5 * ANCHOR_LIMIT)


@triton.jit
def choose_anchor(b_k, m_seen, longest):
    """Return an anchor (D,) of FP16 numbers for keys like most of the samples b_k (SAMPLES, D), in FP32.

    It is 0 everywhere if scores are small anyway. m_seen (SAMPLES,); longest: largest norm of a query, in nats. Keys
    must be tested against the anchor.
    """
    anchor = tl.zeros_like(tl.max(b_k, 0))
    if are_long(tl.where(m_seen[:, None], b_k, 0.0), longest):
        anchor = anchor_of_samples(b_k, m_seen)
    return anchor


@triton.jit
def anchor_of_samples(b_k, m_seen):
    """Return an anchor (D,) of FP16 numbers for keys like most of the samples b_k (SAMPLES, D), in FP32.

    In each column it is the mean of the samples near the median of the means of three thirds, so that some unlike keys,
    such as attention sinks, do not move it. It is 0 where samples differ, and everywhere if few samples are seen.
    """
    b_low = mean_of_third(b_k, m_seen, 0)
    b_high = mean_of_third(b_k, m_seen, 1)
    b_third = mean_of_third(b_k, m_seen, 2)
    b_middle = tl.maximum(tl.minimum(b_low, b_high), tl.minimum(tl.maximum(b_low, b_high), b_third))
    m_near = m_seen[:, None] & (tl.abs(b_k - b_middle[None, :]) <= 0.5 * tl.abs(b_middle)[None, :])
    anchor = masked_mean(b_k, m_near).to(tl.float16).to(tl.float32)
    m_near = m_seen[:, None] & (tl.abs(b_k - anchor[None, :]) <= NEAR * tl.abs(anchor)[None, :])
    seen = tl.sum(tl.where(m_seen, 1, 0), 0)
    steady = tl.sum(tl.where(m_near, 1, 0), 0) >= tl.maximum(seen - UNLIKE, FEWEST)
    return tl.where(steady & (tl.abs(anchor) >= LEAST_ANCHOR), anchor, 0.0)
