"""Device functions of the backward kernels: units of gradients, scores, weights, and gradients of scores."""

import triton
import triton.language as tl

from pasa.ops.attention.triton.backward.centre_kernel import BITS_LIMIT, WIDTH
from pasa.ops.attention.triton.tile_math import INF, LOG2_E, load_mask

LIFT_BITS = tl.constexpr(15.0)
UNLIFT = tl.constexpr(2.0**-15)
LARGEST_BITS = tl.constexpr(15)  # operands stay at or below 2^15: FP16 ends at 65504


@triton.jit
def power_of_two(bits):
    """Return 2^bits, exactly, for integers from -126 to 127."""
    return ((bits.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def unit_bits(b_grad, b_slope, p_largest, D: tl.constexpr, SLICES: tl.constexpr):
    """Return log2 of the units (M,) of rows with gradients G_O (M, D) and G_L (M,).

    |dS| <= P (2 D max|G_O| max|v| + |G_L|), and P <= 1. In units, this bound and |G_O| are at most 2^15. Elements that
    are not finite are left out of the unit, and make dS NaN wherever they reach. Maxima are used instead of Euclidean
    norms, because the square of 1e-30 is 0. p_largest: of the key head.
    """
    o_slice = tl.arange(0, SLICES)
    b_values = tl.load(p_largest + o_slice, mask=o_slice < (D + WIDTH - 1) // WIDTH, other=0.0)
    b_size = tl.abs(b_grad)
    b_largest = tl.max(tl.where(b_size < INF, b_size, 0.0), 1)
    b_slope = tl.abs(b_slope)
    b_bound = 2.0 * D * b_largest * tl.max(b_values, 0) + tl.where(b_slope < INF, b_slope, 0.0)
    exponent = (
        tl.maximum(b_bound, b_largest).to(tl.int32, bitcast=True) >> 23
    )  # biased; the bound is below its successor
    return tl.minimum(tl.maximum(exponent - 126 - LARGEST_BITS, -BITS_LIMIT), BITS_LIMIT)


@triton.jit
def scores_of(b_s, p_mask, m_tile, m_seen, stride_0, stride_1, scale, HIDES: tl.constexpr, MASK: tl.constexpr):
    """Return scores of a tile of products, either way round; -inf where masked out. `bits_in_score` is their unit."""
    b_bias = 0.0
    if MASK != "none":
        m_seen, b_bias = load_mask(p_mask, m_tile, m_seen, stride_0, stride_1, MASK)
    b_x = b_s
    if MASK == "float":
        b_x = b_s * scale + b_bias
    if HIDES:
        b_x = tl.where(m_seen, b_x, -INF)
    return b_x


@triton.jit
def bits_in_score(scale, MASK: tl.constexpr):
    """Return log2(e) times the nats in a unit of `scores_of`: products are not scaled, unless a float mask is added."""
    return LOG2_E if MASK == "float" else scale * LOG2_E


@triton.jit
def lifted_weights(b_x, b_top, b_log, scale, MASK: tl.constexpr):
    """Return 2^15 P. No P exceeds 1, whatever the order of sums: 2 would be infinite in FP16 when it is lifted."""
    return tl.exp2(tl.minimum(b_x - b_top, 0.0) * bits_in_score(scale, MASK) - b_log)


@triton.jit
def gradient_of_scores(b_p, b_dp, b_shift, b_x, HIDES: tl.constexpr):
    """Return dS in FP16, from weights lifted by 2^15; 0 where masked out, even if the value is not finite."""
    b_ds = b_p * (b_dp * UNLIFT - b_shift)
    if HIDES:
        b_ds = tl.where(b_x > -INF, b_ds, 0.0)
    return b_ds.to(tl.float16)
