"""Rounding of output rows without the one-sided error of repeated maxima, for Triton and Gluon kernels.

numerics/dither.py says why, and is the specification, bit for bit. Here a row is given the values that stochastic
rounding takes while they are still FP32, or stays as it is: the cast that follows rounds the others to nearest.
DROPPED, the bits of FP32 that the cast drops, is 13 for FP16 and 16 for BF16, and 0 where nothing but the cast rounds.
"""

import triton
import triton.language as tl

FIRST = tl.constexpr(64)  # columns that are looked at: dither.COLUMNS


@triton.jit
def leans(count, COLUMNS: tl.constexpr):
    """Whether so many of the columns lean: |2 count - COLUMNS| >= 17/4 sqrt(COLUMNS), in integers; dither.LEANING."""
    return 16 * (2 * count - COLUMNS) * (2 * count - COLUMNS) >= 289 * COLUMNS


@triton.jit
def leaning_rows(b_x, o_column, D: tl.constexpr, DROPPED: tl.constexpr):
    """Which rows (M,) of b_x (M, N), FP32, drop bits that are in order: `dither.is_structured`. o_column (N,): 0 to N.

    A row's five counters share a word: six bits each for three waves, seven for the fourth, and seven for the one that
    must not be low. A wave may count to 64 and carry: then it reads 0 and leans either way, and what it carries into
    the next ones changes nothing any more.
    """
    COLUMNS: tl.constexpr = D if D < FIRST else FIRST
    bits = b_x.to(tl.int32, bitcast=True)
    signs = bits >> (DROPPED - 4)  # bit 0 has the place 4, bit 1 the place 3
    edges = (bits >> (DROPPED - 6)) ^ (bits >> (DROPPED - 7))  # bits 2, 3 and 5 the places 4, 3 and 1
    spread = ((signs & 3) | (edges & 12)) * 0x8421  # bit i to 6 i, and elsewhere
    word = (spread & 0x41041) + ((edges & 32) << 20)
    word = tl.sum(tl.where((o_column < COLUMNS)[None, :], word, 0), 1)
    m_row = leans(word & 63, COLUMNS) | leans((word >> 6) & 63, COLUMNS)
    m_row = m_row | leans((word >> 12) & 63, COLUMNS) | leans((word >> 18) & 127, COLUMNS)
    last = (word >> 25) & 127
    return m_row & ((2 * last >= COLUMNS) | (leans(last, COLUMNS) == 0))


@triton.jit
def stir(v, factor):
    """A round of the hash: `dither._stir`."""
    return (v & 0x7FFF) * factor + (v >> 16) * (v >> 16)


@triton.jit
def drawn_rows(b_x, m_row, o_column, D: tl.constexpr, DROPPED: tl.constexpr):
    """b_x (M, N), where m_row (M,) as stochastic rounding leaves it: `dither.round_drawn` with `dither.lots`."""
    COLUMNS: tl.constexpr = D if D < FIRST else FIRST
    bits = b_x.to(tl.int32, bitcast=True)
    word = tl.where((o_column < COLUMNS)[None, :], (bits & 0xFFFF) + ((bits >> 16) & 0xFFFF), 0)
    word = tl.sum(word, 1)
    v = stir(stir((word & 0xFFFF) * 12285 + (word >> 16) * 14973, 26417), 31069)
    start = stir(v, 26417) & 0xFFFF00
    key = (o_column * 31865 & 0x7FFF) | 1
    lot = ((v >> 8) & 0x7FFF)[:, None] * key[None, :] + start[:, None]
    kept = (bits + ((lot >> 8) & ((1 << DROPPED) - 1))) & -(1 << DROPPED)
    MIN_NORMAL: tl.constexpr = 2.0**-14 if DROPPED == 13 else 2.0**-126
    LARGEST: tl.constexpr = 65504.0 if DROPPED == 13 else 3.3895313892515355e38
    m_drawn = m_row[:, None] & (tl.abs(b_x) >= MIN_NORMAL) & (tl.abs(b_x) <= LARGEST)
    return tl.where(m_drawn, kept.to(tl.float32, bitcast=True), b_x)


INTERPRETED = tl.constexpr(type(drawn_rows).__name__ != "JITFunction")


@triton.jit
def round_rows(b_x, o_column, D: tl.constexpr, DROPPED: tl.constexpr, LAZY: tl.constexpr):
    """Rows (M, N) of outputs, D columns of which count, ready for the cast; o_column (N,): 0 to N.

    LAZY draws only if a row of the tile asks for it; not in a loop: there such a branch led to illegal accesses
    (Triton 3.6, sm_90).
    """
    if DROPPED != 0:
        m_row = leaning_rows(b_x, o_column, D, DROPPED)
        if LAZY:
            if tl.max(tl.where(m_row, 1, 0), 0) > 0:
                b_x = drawn_rows(b_x, m_row, o_column, D, DROPPED)
        else:
            b_x = drawn_rows(b_x, m_row, o_column, D, DROPPED)
        if INTERPRETED and DROPPED == 16:  # the interpreter's cast (Triton 3.6) cuts off
            bits = b_x.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -(1 << DROPPED)
            b_x = tl.where(b_x == b_x, bits.to(tl.float32, bitcast=True), b_x)
    return b_x


@triton.jit
def rounding_kernel(
    p_x, p_out, rows, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, DROPPED: tl.constexpr
):  # fmt: skip
    """Rounds contiguous FP32 rows (rows, D): for an NPU, whose unified buffer has no room for it beside attention."""
    o_d = tl.arange(0, D_PAD)
    for start in range(tl.program_id(0) * BLOCK_M, rows, tl.num_programs(0) * BLOCK_M):
        o_m = tl.arange(0, BLOCK_M)
        o_x = tl.cast(start, tl.int64) * D + (o_m[:, None] * D + o_d[None, :])
        m_x = (start + o_m < rows)[:, None] & (o_d < D)[None, :]
        b_x = round_rows(tl.load(p_x + o_x, mask=m_x, other=0.0), o_d, D, DROPPED, False)
        tl.store(p_out + o_x, b_x.to(p_out.dtype.element_ty), mask=m_x)
