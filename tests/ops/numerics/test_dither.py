"""Rounding rows without one-sided error: the hash, the detection of such rows, and their stochastic rounding.

Statistical bounds: the mean of N independent errors must lie within Z_BOUND standard deviations of
that mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pasa.ops.numerics.dither import (
    COLUMNS,
    FLAG_SIGMAS,
    flag_limit,
    hash_row,
    is_structured,
    random_bits,
    round_unbiased,
)
from pasa.ops.numerics.formats import FORMATS, OVERFLOWS, round_to

FORMATS_16 = ("bf16", "fp16")
Z_BOUND = 5.0  # in standard deviations: two-sided chance 6e-7 for one comparison
ROWS, DIM = 4096, 64


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def spacing(x: Tensor, fmt: str) -> Tensor:
    """Return the distance between the values of the format around x, in FP64."""
    target = FORMATS[fmt]
    exponent = torch.frexp(x.double().abs()).exponent - 1
    return torch.exp2((exponent.clamp(min=1 - target.bias) - target.mantissa_bits).double())


def repeated_maxima(fmt: str, seed: int = 0, noise: float = 1e-4, binades: int = 1, maxima: int = 2) -> Tensor:
    """Return rows (ROWS, DIM): the mean of `maxima` positive values of the format, plus a tiny positive remainder."""
    g = generator(seed)
    v = 1 + torch.rand(maxima, ROWS, DIM, generator=g)
    v = round_to(v * 2.0 ** torch.randint(binades, v.shape, generator=g), fmt)
    rest = torch.rand(ROWS, DIM, generator=g)
    return v.mean(0) + (noise if fmt == "bf16" else noise / 8) * rest


def sure_mean(error: Tensor, variance: Tensor) -> float:
    """Return the mean error in standard deviations of the mean, from the variance of every element."""
    return float(error.sum() / variance.sum().sqrt())


@dataclass
class Bounds:
    """Bound an integer from both sides, and check that no operation overflows 32 bits."""

    low: int
    high: int

    def _checked(self) -> Bounds:
        assert 0 <= self.low <= self.high < 2**31
        return self

    def __and__(self, mask: int) -> Bounds:
        return Bounds(0, min(self.high, mask))

    def __rshift__(self, places: int) -> Bounds:
        return Bounds(self.low >> places, self.high >> places)

    def __mul__(self, factor: int) -> Bounds:
        return Bounds(self.low * factor, self.high * factor)._checked()

    def __add__(self, other: Bounds) -> Bounds:
        return Bounds(self.low + other.low, self.high + other.high)._checked()

    def __pow__(self, power: int) -> Bounds:
        return Bounds(self.low**power, self.high**power)._checked()


def test_every_product_and_sum_of_the_hash_fits_in_31_bits():
    """Every product and sum of the hash fits in 31 bits, shown by interval arithmetic through the code itself.

    The last lines check the products and sums of a factor and a key.
    """
    factor, start = hash_row(Bounds(0, COLUMNS * 2 * 0xFFFF))  # type: ignore[arg-type]
    assert (factor.high, start.high) == (2**15 - 1, 0xFFFF00)
    assert (factor * 0x7FFF + start).high < 2**31


def bits_of(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32).long() & 0xFFFFFFFF


def rows_of_bits(kind: str) -> Tensor:
    """Return bit patterns (ROWS, DIM); all kinds but the first two are rows that repeat their maxima."""
    g = generator(9)
    if kind == "consecutive":
        return torch.arange(0x3F800000, 0x3F800000 + ROWS * DIM).view(ROWS, DIM)
    if kind == "random":
        return torch.randint(2**32, (ROWS, DIM), generator=g)
    if kind == "of their own":
        return bits_of(repeated_maxima("bf16"))
    v = round_to(1 + torch.rand(2 if kind == "two keys" else 300, DIM, generator=g), "bf16")
    if kind == "two keys":  # all rows have the same two keys and differ by a tiny remainder
        return bits_of(v.mean(0) + 1e-4 * torch.rand(ROWS, 1, generator=g) * torch.rand(DIM, generator=g))
    return bits_of(v[torch.randint(300, (2, ROWS), generator=g)].mean(0))  # without a remainder


def test_random_bits_are_integers_of_16_bits_and_the_same_again():
    words = torch.randint(2**32, (1 << 10, DIM), generator=generator(2))
    assert torch.equal(random_bits(words), random_bits(words.clone()))
    assert random_bits(words).min() >= 0
    assert random_bits(words).max() < 2**16


KINDS = ("consecutive", "random", "of their own", "two keys", "pairs of 300 keys")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bit", [15, 14, 12, 11])
def test_random_bits_are_coins_in_rows_and_columns(kind, bit):
    """The random bits are fair coins in rows and in columns.

    Bits 15 and 12 decide ties of BF16 and FP16, the next ones quarters. Story: the bits were once a
    hash of each number's own bits. Rows that share their maxima have few bit patterns, so columns
    had means of 9 standard deviations, and all numbers together one of 24.
    """
    words = rows_of_bits(kind).unique(dim=0)
    coins = 2.0 * ((random_bits(words) >> bit) & 1) - 1
    assert abs(float(coins.mean())) * math.sqrt(coins.numel()) < Z_BOUND
    column = coins.mean(0) * math.sqrt(len(words))
    assert float(column.square().mean().sqrt()) < 1.5  # 1 for coins; of 64 columns: +- 0.09
    norm = float(torch.linalg.matrix_norm(coins, 2))
    # The norm of fair coins; far more if rows share a pattern.
    assert norm < 1.4 * (math.sqrt(len(words)) + math.sqrt(DIM))


def test_random_bits_of_256_columns_are_nearly_coins():
    """The random bits of 256 columns are nearly fair coins.

    The widest rows have the closest column keys. With a step of 1 between keys, bit 15 has 9 times
    the norm of coins, and 1.5 times with 511.
    """
    numbers = random_bits(torch.randint(2**32, (1024, 256), generator=generator(3)))
    for bit in range(8, 16):
        norm = float(torch.linalg.matrix_norm(2.0 * ((numbers >> bit) & 1) - 1, 2))
        assert norm < 1.4 * (math.sqrt(1024) + math.sqrt(256))


@pytest.mark.parametrize("fmt", FORMATS_16)
@pytest.mark.parametrize(("maxima", "binades"), [(2, 1), (2, 3), (4, 1)])
@pytest.mark.parametrize("sign", [1, -1])
def test_structured_rows_are_rounded_without_bias(fmt, maxima, binades, sign):
    """Rows with repeated maxima are rounded without bias.

    Rounding to nearest errs to one side by more than 20 standard deviations; stochastic rounding
    does not. f (1 - f) is the variance of a stochastic rounding.
    """
    x = sign * repeated_maxima(fmt, seed=maxima + binades, maxima=maxima, binades=binades)
    structured = is_structured(x, fmt).squeeze(-1)
    assert structured.double().mean() > 0.9
    x = x[structured]
    step = spacing(x, fmt)
    f = (x.double() / step).abs() % 1
    rounded = (round_unbiased(x, fmt) - x.double()) / step
    assert abs(sure_mean(rounded, f * (1 - f))) < Z_BOUND
    nearest = (round_to(x, fmt) - x.double()) / step
    if (maxima, binades) == (2, 1):
        assert sign * sure_mean(nearest, f * (1 - f)) > 4 * Z_BOUND


@pytest.mark.parametrize("fmt", FORMATS_16)
@pytest.mark.parametrize(("maxima", "most_flagged"), [(3, 0.25), (5, 0.05), (6, 0.25), (7, 0.05)])
def test_other_counts_of_maxima_keep_their_bias(fmt, maxima, most_flagged):
    """Rows with other numbers of equal maxima keep most of their bias, as documented.

    Story: thirds were said to have little bias. Where values lie in one binade, rows of three and
    six equal maxima err by up to 0.06 spacings. The rule flags few of them, because periods of a
    quarter and an eighth of a spacing do not detect thirds, fifths or sevenths. This is a
    documented limit; an improvement of the rule will fail here.
    """
    x = repeated_maxima(fmt, seed=maxima, maxima=maxima, noise=2e-4)
    assert is_structured(x, fmt).double().mean() < most_flagged
    step = spacing(x, fmt)
    nearest, ours = (((rounded - x.double()) / step).mean(1) for rounded in (round_to(x, fmt), round_unbiased(x, fmt)))
    if maxima in (3, 6):
        assert abs(float(nearest.mean())) > 4 * Z_BOUND * float(nearest.std()) / math.sqrt(ROWS)
    assert abs(float(ours.mean())) < abs(float(nearest.mean())) + Z_BOUND * float(ours.std()) / math.sqrt(ROWS)
    assert abs(float(ours.mean())) > 0.75 * abs(float(nearest.mean())) - Z_BOUND * float(ours.std()) / math.sqrt(ROWS)


@pytest.mark.parametrize("fmt", FORMATS_16)
def test_a_value_is_rounded_up_as_often_as_its_fraction(fmt):
    """A value is rounded up with the frequency of its dropped fraction, even within each tenth of the fractions."""
    x = torch.cat([repeated_maxima(fmt, seed, noise=2e-3) for seed in range(4)])
    x = x[is_structured(x, fmt).squeeze(-1)]
    f = (x.double() / spacing(x, fmt)) % 1
    up = (round_unbiased(x, fmt) > x) | (f == 0)
    for tenth in range(10):
        within = (f > tenth / 10) & (f < (tenth + 1) / 10)
        if within.sum() > 1000:
            p = f[within]
            assert abs(sure_mean(up[within] - p, p * (1 - p))) < Z_BOUND


@pytest.mark.parametrize("fmt", FORMATS_16)
@pytest.mark.parametrize("overflow", OVERFLOWS)
def test_values_of_the_format_stay(fmt, overflow):
    """All values of the format stay: subnormals, zeros of both signs, the largest, infinities.

    NaN becomes what `round_to` makes of it.
    """
    codes = torch.arange(-(2**15), 2**15).to(torch.int16).view(FORMATS[fmt].dtype).float()
    for width in (64, 128):
        rows = codes.view(-1, width)
        assert same_bits(round_unbiased(rows, fmt, overflow), round_to(rows, fmt, overflow=overflow))
        shuffled = codes[torch.randperm(len(codes), generator=generator(3))].view(-1, width)
        assert same_bits(round_unbiased(shuffled, fmt, overflow), round_to(shuffled, fmt, overflow=overflow))


def same_bits(one: Tensor, other: Tensor) -> bool:
    nan = other.isnan()
    return torch.equal(one.isnan(), nan) and torch.equal(bits_of(one)[~nan], bits_of(other)[~nan])


@pytest.mark.parametrize("fmt", FORMATS_16)
@pytest.mark.parametrize("overflow", OVERFLOWS)
def test_what_is_not_a_normal_number_is_rounded_to_nearest(fmt, overflow):
    """Numbers that are not normal are rounded to nearest, even if their row is rounded stochastically."""
    target = FORMATS[fmt]
    odd = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, target.min_subnormal * 0.6, target.min_normal * 0.99])
    x = repeated_maxima(fmt)
    x[:, : len(odd)] = odd
    x = x[is_structured(x, fmt).squeeze(-1)]
    assert len(x) > ROWS / 2
    got = round_unbiased(x, fmt, overflow)
    assert same_bits(got[:, : len(odd)], round_to(x, fmt, overflow=overflow)[:, : len(odd)])
    assert not torch.equal(got[:, len(odd) :], round_to(x, fmt, overflow=overflow)[:, len(odd) :])


@pytest.mark.parametrize("fmt", FORMATS_16)
@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("share", [1e-6, 0.25, 0.49, 0.51, 0.75])
def test_stochastic_rounding_never_overflows_what_nearest_keeps(fmt, overflow, share):
    """Stochastic rounding never overflows where nearest does not.

    O / l may exceed the largest value by an FP32 rounding error. Rounded up, it would be infinite
    in one row of many.
    """
    target = FORMATS[fmt]
    step = float(spacing(torch.tensor([target.max]), fmt))
    x = repeated_maxima(fmt)
    x[:, ::2] = min(target.max + share * step, FORMATS["fp32"].max)
    assert is_structured(x, fmt).any()
    nearest = round_to(x, fmt, overflow=overflow)
    assert torch.equal(round_unbiased(x, fmt, overflow).isfinite(), nearest.isfinite())


@given(
    rows=st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=32, max_size=32),
    fmt=st.sampled_from(FORMATS_16),
    overflow=st.sampled_from(OVERFLOWS),
    tied=st.booleans(),
)
def test_any_row_goes_to_a_neighbour(rows, fmt, overflow, tied):
    """Every number goes to a value of the format less than one spacing away, on the same side of zero.

    The result is finite wherever rounding to nearest is.
    """
    x = torch.tensor(rows)
    if tied:  # halves plus a tiny remainder: rows that are rounded stochastically
        x = round_to(torch.frexp(x.nan_to_num(1.0)).mantissa.abs().clamp(0.5, 0.99), fmt)
        x += (spacing(x, fmt) * 0.501).float()
        assert is_structured(x, fmt).all()
    got, nearest = round_unbiased(x, fmt, overflow), round_to(x, fmt, overflow=overflow)
    assert torch.equal(got.isfinite(), nearest.isfinite())
    assert torch.equal(got.isnan(), nearest.isnan())
    finite = nearest.isfinite() & x.isfinite() & (x.abs() <= FORMATS[fmt].max)
    assert torch.equal(round_to(got, fmt)[finite], got[finite])
    assert ((got - x.double()).abs()[finite] < spacing(x, fmt)[finite]).all()
    assert (got * x.sign() >= 0)[finite].all()


@pytest.mark.parametrize("fmt", FORMATS_16)
@pytest.mark.parametrize("dim", [8, 32, 64, 80, 128])
def test_random_rows_are_left_to_nearest(fmt, dim):
    """Random rows are rounded to nearest: one in 10,000 is flagged, at most one in 1,000 here.

    Stochastic rounding has twice the variance, so errors grow by at most 1e-3.
    """
    g = generator(dim)
    x = torch.randn(20000, dim, generator=g) * torch.rand(20000, 1, generator=g).exp()
    assert is_structured(x, fmt).double().mean() <= 1e-3
    errors = [float((y - x.double()).norm()) for y in (round_unbiased(x, fmt), round_to(x, fmt))]
    assert errors[0] <= (1 + 1e-3) * errors[1]


@pytest.mark.parametrize("fmt", FORMATS_16)
def test_rows_of_one_key_are_left_to_nearest(fmt):
    """Rows in which one key has nearly all the weight are rounded to nearest.

    Nearest errs by the weight of the other keys, and stochastic rounding by more.
    """
    x = round_to(1 + torch.rand(ROWS, DIM, generator=generator(4)), fmt)
    assert not is_structured(x, fmt).any()
    assert not is_structured(x + x.amin() * (1e-4 if fmt == "bf16" else 1e-5), fmt).any()


@pytest.mark.parametrize("fmt", FORMATS_16)
@pytest.mark.parametrize("dim", [1, 2, 7, 8, 18])
def test_too_few_columns_are_never_flagged(fmt, dim):
    """Rows with too few columns are never flagged: 4.25 sigma of 18 signs are more than 18."""
    assert not is_structured(repeated_maxima(fmt)[:, :dim], fmt).any()
    assert flag_limit(dim) > dim


def test_how_far_signs_must_deviate():
    assert [flag_limit(columns) for columns in (18, 19, 32, 64)] == [19, 19, 25, 34]
    assert flag_limit(COLUMNS) == math.ceil(FLAG_SIGMAS * math.sqrt(COLUMNS))


@pytest.mark.parametrize("fmt", FORMATS_16)
def test_the_first_columns_decide(fmt):
    x = torch.randn(ROWS, 2 * COLUMNS, generator=generator(5))
    x[:, COLUMNS:] = repeated_maxima(fmt)
    assert torch.equal(is_structured(x, fmt), is_structured(x[:, :COLUMNS], fmt))
    assert is_structured(x.flip(-1), fmt).double().mean() > 0.9


@pytest.mark.parametrize("fmt", FORMATS_16)
def test_the_answer_depends_on_the_row_alone(fmt):
    """The result depends on the row alone, not on the call, the rest of the batch, or its place in memory."""
    x = repeated_maxima(fmt)
    got = round_unbiased(x, fmt)
    assert torch.equal(got, round_unbiased(x.clone(), fmt))
    assert torch.equal(got[7:9], round_unbiased(x[7:9], fmt))
    assert torch.equal(got, round_unbiased(x.T.contiguous().T, fmt))
    assert torch.equal(got.view(64, 64, DIM), round_unbiased(x.view(64, 64, DIM), fmt))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_carriers_are_refused(dtype):
    with pytest.raises(TypeError, match=str(dtype)):
        round_unbiased(torch.ones(2, 64, dtype=dtype), "bf16")


def test_published_example_bit_for_bit():
    """The published example holds bit for bit: a sticky bit decides the tie, away from zero.

    arXiv:2510.04212, section 3.2.
    """
    first, second = torch.tensor(-2.4071154594421387), torch.tensor(-2.296875)
    assert [int(bits_of(x)) for x in (first, second)] == [0b11000000000110100000111000101110, 0b11000000000100110 << 15]
    total = first + second
    assert int(bits_of(total)) == 0b11000000100101101000011100010111
    assert total.item() == -4.703990459442139
    rounded = round_to(total, "bf16")
    assert rounded.item() == -4.71875
    assert (rounded - total).item() == -0.014759540557861328


def binary(text: str) -> float:
    whole, fraction = text.split(".")
    return int(whole + fraction, 2) / 2 ** len(fraction)


def test_two_large_one_small():
    """A tiny third addend turns a tie into a rounding up, but rows of such sums go down as often as they should.

    1.0000001 + 1.0000100 is a tie and goes to even; plus 0.0000000001 it goes up (kexue.fm/archives/11371).
    """
    large = torch.tensor(binary("1.0000001")) + torch.tensor(binary("1.0000100"))
    assert large.item() == binary("10.0000101")
    assert round_to(large, "bf16").item() == binary("10.000010")
    total = large + binary("0.0000000001")
    assert total.item() == binary("10.0000101001")
    assert round_to(total, "bf16").item() == binary("10.000011")
    same = binary("0.000001")  # one spacing of the sum
    row = total + same * torch.arange(60 * 64).view(64, 60).fmod(60)  # below 4
    rounded = round_unbiased(row.float(), "bf16")
    nearest = round_to(row.float(), "bf16")
    assert (nearest > row).all()
    f = torch.tensor(binary("0.1001"), dtype=torch.float64)
    up = (rounded > row)[0].double()  # all rows are equal
    assert abs(float((up - f).sum() / (60 * f * (1 - f)).sqrt())) < Z_BOUND
