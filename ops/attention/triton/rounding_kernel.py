"""Round output rows without the one-sided error of repeated maxima, for Triton and Gluon kernels.

numerics/dither.py explains why, and is the specification, bit for bit. A flagged row gets the values of stochastic
rounding while it is still FP32. All other rows stay unchanged, and the cast that follows rounds them to nearest.
DROPPED, the bits of FP32 that the cast drops, is 13 for FP16, 16 for BF16, and 0 if only the cast rounds.
"""

import triton
import triton.language as tl

TESTED = tl.constexpr(64)  # columns of a row that are tested: dither.COLUMNS


@triton.jit
def deviates(count, COLUMNS: tl.constexpr):
    """Test if `count` of COLUMNS signs deviate by 4.25 sigma (dither.FLAG_SIGMAS).

    In integers: |2 count - COLUMNS| >= 17/4 sqrt(COLUMNS).
    """
    return 16 * (2 * count - COLUMNS) * (2 * count - COLUMNS) >= 289 * COLUMNS


def _count_of_packed(places: int) -> tl.constexpr:
    """Return PTX that counts what `pack_signs` counts, for 8 registers of a wgmma accumulator at a time.

    These hold two pairs of columns of a row, alternating with the row 8 rows below. The dropped bits 1 to 5 lie in one
    byte, the last one at bit `places`. Four such bytes make a word, and a byte-wise sum takes one bit of each. A row's
    counters go to its first register.
    """
    shift = f"shr.b32 s, p, {places + 1}; shr.b32 x, p, {places};"
    parts = []
    for out, ins in ((0, (8, 9, 12, 13)), (2, (10, 11, 14, 15))):
        parts.append(
            "prmt.b32 p, ${}, ${}, 0x0051; prmt.b32 x, ${}, ${}, 0x0051; prmt.b32 p, p, x, 0x5410;".format(*ins)
            + f"{shift} xor.b32 x, x, s;"
            "and.b32 a, s, 0x01010101; dp4a.u32.u32 c, a, one, 0; and.b32 a, s, 0x02020202; dp4a.u32.u32 c, a, high, c;"
            "and.b32 a, x, 0x01010101; dp4a.u32.u32 d, a, one, 0; and.b32 a, x, 0x02020202; dp4a.u32.u32 d, a, high, d;"
            "and.b32 a, x, 0x08080808; dp4a.u32.u32 e, a, one, 0;"
            f"mad.lo.u32 c, d, 0x1000, c; mad.lo.u32 ${out}, e, 0x400000, c; mov.b32 ${out + 1}, 0;"
            f"mov.b32 ${out + 4}, 0; mov.b32 ${out + 5}, 0;"
        )
    return tl.constexpr(
        "{ .reg .b32 p, s, x, a, c, d, e, one, high; mov.b32 one, 0x01010101; mov.b32 high, 0x20202020;"
        + "".join(parts)
        + "}"
    )


COUNT_FP16 = _count_of_packed(0)
COUNT_BF16 = _count_of_packed(3)
COUNT_REGISTERS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 8))


@triton.jit
def pack_signs(bits, DROPPED: tl.constexpr):
    """Pack the sign of each of the five square waves into a counter of its own within one word, for every number.

    The counters' lowest bits in the word, from the highest: wave 5 at 25, wave 4 at 18, 3 at 12, 2 at 6, 1 at 0.
    """
    signs = bits >> (DROPPED - 4)  # bit 0 has the place 4, bit 1 the place 3
    edges = (bits >> (DROPPED - 6)) ^ (bits >> (DROPPED - 7))  # bits 2, 3 and 5 the places 4, 3 and 1
    spread = ((signs & 3) | (edges & 12)) * 0x8421  # bit i to 6 i, and elsewhere
    return (spread & 0x41041) + ((edges & 32) << 20)


@triton.jit
def flag_rows(b_x, o_column, D: tl.constexpr, DROPPED: tl.constexpr, WGMMA: tl.constexpr):
    """Flag the rows (M,) of b_x (M, N), FP32, whose dropped bits are not random: `dither.is_structured`.

    o_column (N,): 0 to N. A row's five counters share a word: six bits each for three waves, seven for the fourth, and
    seven for the one that must not be low. A counter of six bits that reaches 64 carries. It then reads 0, which flags
    the row as 64 would, so what it carries into the next counters no longer matters.
    """
    COLUMNS: tl.constexpr = D if D < TESTED else TESTED
    bits = b_x.to(tl.int32, bitcast=True)
    if WGMMA:
        COUNT: tl.constexpr = COUNT_FP16 if DROPPED == 13 else COUNT_BF16
        word = tl.inline_asm_elementwise(COUNT, COUNT_REGISTERS, [bits], tl.int32, is_pure=True, pack=8)
    else:
        word = pack_signs(bits, DROPPED)
    word = tl.sum(tl.where((o_column < COLUMNS)[None, :], word, 0), 1)
    m_flagged = deviates(word & 63, COLUMNS) | deviates((word >> 6) & 63, COLUMNS)
    m_flagged = m_flagged | deviates((word >> 12) & 63, COLUMNS) | deviates((word >> 18) & 127, COLUMNS)
    last = (word >> 25) & 127
    return m_flagged & ((2 * last >= COLUMNS) | (deviates(last, COLUMNS) == 0))


@triton.jit
def hash_round(v, factor):
    """Apply one round of the hash; no product or sum reaches 2^31."""
    return (v & 0x7FFF) * factor + (v >> 16) * (v >> 16)


@triton.jit
def round_flagged(b_x, m_flagged, o_column, D: tl.constexpr, DROPPED: tl.constexpr):
    """Round the flagged rows of b_x (M, N) stochastically, as `dither.round_stochastic` does; m_flagged (M,)."""
    COLUMNS: tl.constexpr = D if D < TESTED else TESTED
    bits = b_x.to(tl.int32, bitcast=True)
    word = tl.where((o_column < COLUMNS)[None, :], (bits & 0xFFFF) + ((bits >> 16) & 0xFFFF), 0)
    word = tl.sum(word, 1)
    v = hash_round(hash_round((word & 0xFFFF) * 12285 + (word >> 16) * 14973, 26417), 31069)
    start = hash_round(v, 26417) & 0xFFFF00
    key = (o_column * 31865 & 0x7FFF) | 1
    random = ((v >> 8) & 0x7FFF)[:, None] * key[None, :] + start[:, None]
    # rows that are not flagged add nothing and keep all bits
    dropped = tl.where(m_flagged, (1 << DROPPED) - 1, 0)[:, None]
    kept = (bits + ((random >> 8) & dropped)) & ~dropped
    MIN_NORMAL: tl.constexpr = 2.0**-14 if DROPPED == 13 else 2.0**-126
    LARGEST: tl.constexpr = 65504.0 if DROPPED == 13 else 3.3895313892515355e38
    m_normal = (tl.abs(b_x) >= MIN_NORMAL) & (tl.abs(b_x) <= LARGEST)
    return tl.where(m_normal, kept.to(tl.float32, bitcast=True), b_x)


INTERPRETED = tl.constexpr(type(round_flagged).__name__ != "JITFunction")


@triton.jit
def round_rows(
    b_x, o_column, D: tl.constexpr, DROPPED: tl.constexpr, LAZY: tl.constexpr, WGMMA: tl.constexpr = False
):  # fmt: skip
    """Prepare output rows (M, N), of which D columns count, for the cast; o_column (N,): 0 to N.

    LAZY forms random bits only if a row of the tile is flagged. It must not be used in a loop, because such a branch
    led to illegal accesses there (Triton 3.6, sm_90). WGMMA: registers hold b_x as a wgmma accumulator.
    """
    if DROPPED != 0:
        m_flagged = flag_rows(b_x, o_column, D, DROPPED, WGMMA)
        if LAZY:
            if tl.max(tl.where(m_flagged, 1, 0), 0) > 0:
                b_x = round_flagged(b_x, m_flagged, o_column, D, DROPPED)
        else:
            b_x = round_flagged(b_x, m_flagged, o_column, D, DROPPED)
        if INTERPRETED and DROPPED == 16:  # the interpreter's cast (Triton 3.6) truncates
            bits = b_x.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -(1 << DROPPED)
            b_x = tl.where(b_x == b_x, bits.to(tl.float32, bitcast=True), b_x)
    return b_x


@triton.jit
def rounding_kernel(
    p_x, p_out, rows, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, DROPPED: tl.constexpr
):  # fmt: skip
    """Round contiguous FP32 rows (rows, D): for an NPU, whose unified buffer has no room for this beside attention."""
    o_d = tl.arange(0, D_PAD)
    for start in range(tl.program_id(0) * BLOCK_M, rows, tl.num_programs(0) * BLOCK_M):
        o_m = tl.arange(0, BLOCK_M)
        o_x = tl.cast(start, tl.int64) * D + (o_m[:, None] * D + o_d[None, :])
        m_x = (start + o_m < rows)[:, None] & (o_d < D)[None, :]
        b_x = round_rows(tl.load(p_x + o_x, mask=m_x, other=0.0), o_d, D, DROPPED, False)
        tl.store(p_out + o_x, b_x.to(p_out.dtype.element_ty), mask=m_x)
