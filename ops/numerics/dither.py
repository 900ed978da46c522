"""Round attention outputs to 16 bits without the bias that repeated maxima cause.

If two equal maxima share a row's weight, its outputs are (v_1 + v_2) / 2 plus a tiny remainder.
Such halves of 16-bit values have dropped bits that are not random: a tie, or a quarter or an eighth
of a spacing where the values lie some binades apart. The remainder then decides all ties of the row
the same way ("Why Low-Precision Transformer Training Fails", arXiv:2510.04212; section 3.2). The
published cure multiplies the row by a factor, but a factor cancels when O is divided by l before it
is rounded. So such rows are flagged by their dropped bits and rounded stochastically, which has no
such bias. The random bits come from a hash of the row's own bits. There is no state and no
generator, and the same input gives the same output.

Outputs of three, five, six and seven equal maxima drop thirds, fifths, sixths and sevenths. The
square waves that detect halves, quarters and eighths do not detect those: up to 17 % of such rows
are flagged, and the others keep their bias. It is up to 0.06 spacings for six maxima, 0.05 for
three, 0.03 for five, 0.02 for seven, where values lie in one binade, and less than 0.01 where they
are N(0, 1) (eval/accuracy/rounding_bias). Waves for thirds would double the counters of every kernel.

All arithmetic here is that of 32-bit integers without overflow, so that every kernel can reproduce
it bit for bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pasa.ops.numerics.formats import FP32, Format, Overflow, get_format, round_to

# Columns of a row that are tested. All columns share the row's weights, so more columns would add
# little.
COLUMNS = 64
# Deviation of a wave's signs, in sigmas, that flags a row: 49 of 64 columns. One of a row's four
# waves reaches it in one of 10,000 random rows.
FLAG_SIGMAS = 4.25
# Step between the keys of two columns, the best of 56 that were tried. Keys of 64 columns are at
# least 260 apart. Of 256 columns, two pairs have keys 14 apart and random bits that correlate by
# 0.45. The signs of 1,024 rows then have a spectral norm of up to 1.33 times that of fair coins.
KEY_STEP = 31865


def round_unbiased(x: Tensor, fmt: str | Format | torch.dtype, overflow: Overflow = "inf") -> Tensor:
    """Round each row to nearest, or stochastically if its dropped bits are not random.

    Parameters
    ----------
    x : Tensor (..., D), FP32
        Rows of outputs.
    fmt : str, Format or torch.dtype
        FP16 or BF16.
    overflow : {"inf", "saturate"}
        As in `round_to`.

    Returns
    -------
    Tensor (..., D), FP32
        Values of the format, less than one spacing from `x`. Values that the format holds do not change. The result is
        finite wherever rounding to nearest is.

    Raises
    ------
    TypeError
        If `x` is not FP32, whose bits this function reads.
    """
    if x.dtype != torch.float32:
        raise TypeError(f"round_unbiased reads the bits of FP32, not of {x.dtype}")
    target = get_format(fmt)
    stochastic = round_stochastic(x, target, overflow)
    return torch.where(is_structured(x, target), stochastic, round_to(x, target, overflow=overflow))


def is_structured(x: Tensor, fmt: str | Format | torch.dtype, columns: int = COLUMNS) -> Tensor:
    """Return which rows (..., 1) of `x` (..., D) have dropped bits that follow the pattern of repeated maxima.

    Let f be the dropped fraction of a spacing. The signs of square waves sin and cos of f with
    periods 1/4 and 1/8 are random for a random row. If the signs of one wave deviate by more than
    4.25 sigma, the fractions f of the row lie close together modulo its period. Rows whose f are
    all near 0 are not flagged. In such a row one key has all the weight. Rounding to nearest then
    errs only by the weight of the other keys, and any other rounding errs by more.
    """
    dropped = FP32.mantissa_bits - get_format(fmt).mantissa_bits
    bits = _bits(x[..., :columns])
    columns = bits.shape[-1]
    limit = flag_limit(columns)

    def wave(word: Tensor, place: int) -> Tensor:
        """Sum, over the columns, the signs of bit `place` below the last kept bit."""
        return 2 * ((word >> (dropped - place)) & 1).sum(-1, keepdim=True) - columns

    edges = bits ^ (bits << 1)  # set where a bit and the next one differ: the cosine of the same period
    flagged = torch.zeros_like(bits[..., :1], dtype=torch.bool)
    for word in (bits, edges):
        for place in (3, 4):
            flagged |= wave(word, place).abs() >= limit
    return flagged & (wave(edges, 1) > -limit)


def flag_limit(columns: int) -> int:
    """Return the least sum of that many signs (1 or -1) that flags a row."""
    return math.ceil(FLAG_SIGMAS * math.sqrt(columns))


def _bits(x: Tensor) -> Tensor:
    """Return FP32 bit patterns as integers from 0 to 2^32 - 1."""
    return x.contiguous().view(torch.int32).long() & 0xFFFFFFFF


def round_stochastic(x: Tensor, fmt: str | Format | torch.dtype, overflow: Overflow = "inf") -> Tensor:
    """Round up with a probability equal to the dropped fraction: add random bits below one spacing, then truncate.

    Subnormals, and values beyond the largest of the format, are rounded to nearest.
    """
    target = get_format(fmt)
    dropped = FP32.mantissa_bits - target.mantissa_bits
    bits = _bits(x)
    kept = (bits + (random_bits(bits) & ((1 << dropped) - 1))) >> dropped << dropped
    stochastic = (kept - ((kept >> 31) << 32)).to(torch.int32).view(torch.float32)
    normal = (x.abs() >= target.min_normal) & (x.abs() <= target.max)  # rounding a larger value up would give infinity
    return torch.where(normal, stochastic, round_to(x, target, overflow=overflow))


def random_bits(bits: Tensor) -> Tensor:
    """Return 16 random bits for each number of rows of bit patterns (..., D).

    They are a hash of a factor and a start, which the row gives, and a key, which the column gives.
    A hash of each number's own bits would not do, because rows that repeat the same maxima have few
    distinct bit patterns. Rows of equal numbers have equal random bits.
    """
    first = bits[..., :COLUMNS]
    word = ((first & 0xFFFF) + (first >> 16)).sum(-1, keepdim=True)  # below 2^23
    key = (torch.arange(bits.shape[-1], device=bits.device) * KEY_STEP & 0x7FFF) | 1
    factor, start = hash_row(word)
    return ((factor * key + start) >> 8) & 0xFFFF


def hash_row(word: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factor (15 bits) and start (24 bits, the low 8 are 0) of a row whose numbers add up to `word`.

    This is a hash whose products and sums all stay below 2^31. Each round multiplies the low 15
    bits and squares the rest.
    """
    v = (word & 0xFFFF) * 12285 + (word >> 16) * 14973
    v = _hash_round(_hash_round(v, 26417), 31069)
    return (v >> 8) & 0x7FFF, _hash_round(v, 26417) & 0xFFFF00


def _hash_round(v: Tensor, factor: int) -> Tensor:
    return (v & 0x7FFF) * factor + (v >> 16) ** 2
