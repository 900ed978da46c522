"""Rounding of attention outputs to 16 bits without the one-sided error of two equal maxima.

Where a row's weight is shared by two equal maxima, its outputs are (v_1 + v_2) / 2 and a trifle: halves of values that
16 bits hold. What the rounding drops is then no random fraction. It sits at a tie, or at a quarter or an eighth where
the values lie some binades apart, and the trifle decides all ties of the row the same way ("Why Low-Precision
Transformer Training Fails", arXiv:2510.04212; section 3.2). A factor on the row, which the cure published there
applies, cancels when O is divided by l before it is rounded, so such rows are told by what they drop and rounded
stochastically, which has no such bias. The row's own bits draw the lots: no state, no generator, the same answer again.

Of three, five, six and seven equal maxima the outputs drop thirds, fifths, sixths and sevenths. The waves that find
halves, quarters and eighths do not see those; up to 17 % of such rows are flagged, and the others keep their bias: up
to 0.06 spacings of six, 0.05 of three, 0.03 of five, 0.02 of seven, where values lie in one binade, and less than 0.01
where they are N(0, 1) (eval/rounding_bias). Waves for thirds would double the counters of every kernel.

All arithmetic here is that of 32-bit integers without overflow, so that every kernel can do it bit for bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pasa.ops.numerics.formats import FORMATS, Format, Overflow, get_format, round_to

COLUMNS = 64  # of a row are looked at; they share its weights, so more would say little more
# Sigmas by which a wave's signs must lean: 49 of 64 columns. One in 10,000 random rows has one of four that does.
LEANING = 4.25
# Of the columns' keys: the best of 56 steps that were tried. Keys of 64 columns are 260 apart or more. Of 256 columns
# two pairs have keys 14 apart and lots that correlate by 0.45: signs of 1,024 rows then have a spectral norm of up to
# 1.33 times that of coins.
KEY_STEP = 31865
FP32 = FORMATS["fp32"]


def round_unbiased(x: Tensor, fmt: str | Format | torch.dtype, overflow: Overflow = "inf") -> Tensor:
    """Round rows to nearest, or stochastically where the bits to be dropped are not random.

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
        Values of the format. Less than one spacing from `x`; values that the format holds stay; finite where nearest
        is.

    Raises
    ------
    TypeError
        If `x` is not FP32, whose bits this reads.
    """
    if x.dtype != torch.float32:
        raise TypeError(f"round_unbiased reads the bits of FP32, not of {x.dtype}")
    target = get_format(fmt)
    drawn = round_drawn(x, target, overflow)
    return torch.where(is_structured(x, target), drawn, round_to(x, target, overflow=overflow))


def is_structured(x: Tensor, fmt: str | Format | torch.dtype, columns: int = COLUMNS) -> Tensor:
    """Which rows (..., 1) of `x` (..., D) drop bits that repeated maxima have put in order.

    Let f be the dropped fraction of a spacing. Square waves sin and cos of f with periods 1/4 and 1/8 are signs as
    random as coins for a random row. If one of them leans by 4.25 sigma, then the f of the row stand near each other
    modulo its period. Rows whose f are all near 0 are left alone: one key has all their weight, rounding to nearest
    errs by what is left of the others, and any other rounding by more.
    """
    dropped = FP32.mantissa_bits - get_format(fmt).mantissa_bits
    bits = _bits(x[..., :columns])
    columns = bits.shape[-1]
    limit = leaning(columns)

    def wave(word: Tensor, place: int) -> Tensor:
        """Signs of the bit `place` below the last one that is kept, summed over the columns."""
        return 2 * ((word >> (dropped - place)) & 1).sum(-1, keepdim=True) - columns

    edges = bits ^ (bits << 1)  # a bit and the next one differ: the cosine of the same period
    leans = torch.zeros_like(bits[..., :1], dtype=torch.bool)
    for word in (bits, edges):
        for place in (3, 4):
            leans |= wave(word, place).abs() >= limit
    return leans & (wave(edges, 1) > -limit)


def leaning(columns: int) -> int:
    """How far the signs of that many columns must lean: their number less twice the fewer ones."""
    return math.ceil(LEANING * math.sqrt(columns))


def _bits(x: Tensor) -> Tensor:
    """FP32 bit patterns as integers from 0 to 2^32 - 1."""
    return x.contiguous().view(torch.int32).long() & 0xFFFFFFFF


def round_drawn(x: Tensor, fmt: str | Format | torch.dtype, overflow: Overflow = "inf") -> Tensor:
    """Up with the probability of the dropped fraction: add a random number below one spacing, cut off the rest.

    Subnormals, and what lies beyond the largest value, are rounded to nearest.
    """
    target = get_format(fmt)
    dropped = FP32.mantissa_bits - target.mantissa_bits
    bits = _bits(x)
    kept = (bits + (lots(bits) & ((1 << dropped) - 1))) >> dropped << dropped
    drawn = (kept - ((kept >> 31) << 32)).to(torch.int32).view(torch.float32)
    normal = (x.abs() >= target.min_normal) & (x.abs() <= target.max)  # a draw beyond would be infinite
    return torch.where(normal, drawn, round_to(x, target, overflow=overflow))


def lots(bits: Tensor) -> Tensor:
    """16 random bits for each number of rows of bit patterns (..., D).

    The row gives a factor and a start, the column a key: a number's own bits would not do, as rows that repeat the
    same maxima have few bit patterns. Rows of equal numbers have equal lots.
    """
    first = bits[..., :COLUMNS]
    word = ((first & 0xFFFF) + (first >> 16)).sum(-1, keepdim=True)  # below 2^23
    key = (torch.arange(bits.shape[-1], device=bits.device) * KEY_STEP & 0x7FFF) | 1
    factor, start = drawn_by(word)
    return ((factor * key + start) >> 8) & 0xFFFF


def drawn_by(word: Tensor) -> tuple[Tensor, Tensor]:
    """Factor (15 bits) and start (24 bits, the low 8 of them 0) of a row whose numbers add up to `word`.

    A hash whose every product and sum stays below 2^31: rounds that multiply the low 15 bits and square the others.
    """
    v = (word & 0xFFFF) * 12285 + (word >> 16) * 14973
    v = _stir(_stir(v, 26417), 31069)
    return (v >> 8) & 0x7FFF, _stir(v, 26417) & 0xFFFF00


def _stir(v: Tensor, factor: int) -> Tensor:
    return (v & 0x7FFF) * factor + (v >> 16) ** 2
