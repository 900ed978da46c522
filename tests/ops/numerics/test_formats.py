"""Rounding is checked at every value of every 16- and 8-bit format, and at and beside every midpoint of two values."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pasa.ops.numerics.formats import FORMATS, OVERFLOWS, ROUNDINGS, Format, Rounding, get_format, round_to

INF, NAN = math.inf, math.nan
SMALL_FORMATS = ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2")
CARRIERS = (torch.float32, torch.float64)
Z_BOUND = 5.0  # in standard deviations: two-sided chance 6e-7 for one comparison


def encodings(name: str) -> Tensor:
    """Return all values of a format in FP64, in the order of their codes."""
    fmt = FORMATS[name]
    bits = 1 + fmt.exponent_bits + fmt.mantissa_bits
    storage = torch.int16 if bits == 16 else torch.uint8
    codes = torch.arange(2**bits) - (2**15 if bits == 16 else 0)
    return codes.to(storage).view(fmt.dtype).double()


def grid(name: str) -> Tensor:
    """Return the finite values from +0 to the largest; position equals code, so its parity is that of the mantissa."""
    values = encodings(name)
    return values[values.isfinite() & ~values.signbit()].sort().values


def around_midpoints(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return midpoints of neighbours in `dtype`, the values of the format just below and above, and the even one."""
    values = grid(name)
    low, high = values[:-1], values[1:]
    middle = (low + high) / 2
    even = torch.where(torch.arange(len(low)) % 2 == 0, low, high)
    exact = middle.to(dtype)
    assert torch.equal(exact.double(), middle)
    return exact, torch.stack([low, high]), even


def beside(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers just below and just above in the dtype of `x`."""
    return torch.nextafter(x, torch.full_like(x, -INF)), torch.nextafter(x, torch.full_like(x, INF))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def same(actual: Tensor, expected: Tensor) -> bool:
    """Return whether values and signs are equal, including signs of zeros; NaN equals NaN."""
    nan = expected.isnan()
    numbers = torch.equal(actual.isnan(), nan) and torch.equal(actual[~nan], expected[~nan].to(actual.dtype))
    return numbers and torch.equal(actual[~nan].signbit(), expected[~nan].signbit())


@pytest.mark.parametrize("name", FORMATS)
def test_table_agrees_with_torch(name: str) -> None:
    fmt, info = FORMATS[name], torch.finfo(FORMATS[name].dtype)
    assert (fmt.max, fmt.min_normal, fmt.min_subnormal) == (info.max, info.tiny, info.tiny * info.eps)
    assert math.ldexp(1.0, -fmt.mantissa_bits) == info.eps
    assert 1 + fmt.exponent_bits + fmt.mantissa_bits == info.bits
    assert fmt.min_normal == math.ldexp(1.0, 1 - fmt.bias)


@pytest.mark.parametrize("name", SMALL_FORMATS)
def test_table_agrees_with_encodings(name: str) -> None:
    fmt, values = FORMATS[name], encodings(name)
    assert fmt.max == values[values.isfinite()].max()
    assert fmt.min_subnormal == values[values > 0].min()
    assert fmt.has_inf == bool(values.isinf().any())


@pytest.mark.parametrize("name", FORMATS)
def test_get_format_takes_name_dtype_and_format(name: str) -> None:
    fmt = FORMATS[name]
    assert get_format(name) is fmt
    assert get_format(fmt.dtype) is fmt
    assert get_format(fmt) is fmt


@pytest.mark.parametrize("unknown", ["fp4", "FP16", "", torch.float64, torch.int8])
def test_get_format_names_what_it_does_not_know(unknown: str | torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"unknown number format .*; known: fp32 .*fp8_e5m2"):
        get_format(unknown)


@pytest.mark.parametrize("dtype", CARRIERS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", SMALL_FORMATS)
def test_every_encoding_is_kept(name: str, rounding: Rounding, dtype: torch.dtype) -> None:
    values = encodings(name).to(dtype)
    kept = round_to(values, name, rounding, generator=generator())
    assert kept.dtype is dtype
    assert same(kept, values)
    finite = values[values.isfinite()]
    assert same(round_to(finite, name, rounding, overflow="saturate", generator=generator()), finite)


@pytest.mark.parametrize("dtype", CARRIERS)
@pytest.mark.parametrize("name", SMALL_FORMATS)
def test_nearest_at_and_beside_every_midpoint(name: str, dtype: torch.dtype) -> None:
    middle, (low, high), even = around_midpoints(name, dtype)
    below, above = beside(middle)
    for sign in (1.0, -1.0):
        for point, expected in ((middle, even), (below, low), (above, high)):
            for overflow in OVERFLOWS:
                assert same(round_to(sign * point, name, overflow=overflow), sign * expected)


@pytest.mark.parametrize("name", SMALL_FORMATS)
def test_both_paths_agree_with_the_cast(name: str) -> None:
    middle, (low, _), _ = around_midpoints(name, torch.float32)
    points = torch.cat([middle, *beside(middle), low.float()])
    points = torch.cat([points, -points])
    cast = points.to(FORMATS[name].dtype).float()
    assert same(round_to(points, name), cast)
    assert same(round_to(points.double(), name), cast.double())


@pytest.mark.parametrize("dtype", CARRIERS)
@pytest.mark.parametrize("name", SMALL_FORMATS)
def test_directed_roundings_pick_the_defined_neighbour(name: str, dtype: torch.dtype) -> None:
    middle, (low, high), even = around_midpoints(name, dtype)
    odd = torch.where(even == low, high, low)
    for point in (middle, *beside(middle)):
        for sign in (1.0, -1.0):
            assert same(round_to(sign * point, name, "toward_zero"), sign * low)
            assert same(round_to(sign * point, name, "odd"), sign * odd)


@pytest.mark.parametrize("name", SMALL_FORMATS)
def test_rounding_to_odd_first_is_innocuous(name: str) -> None:
    middle, _, _ = around_midpoints(name, torch.float64)
    points = torch.cat([middle, *beside(middle)])
    points = torch.cat([points, -points])
    direct = round_to(points, name)
    assert same(round_to(round_to(points, "fp32", "odd"), name), direct)
    assert not same(round_to(round_to(points, "fp32", "nearest"), name), direct)


def test_fp64_is_rounded_once() -> None:
    """FP64 input is rounded once.

    Story: torch casts FP64 to FP16 through FP32. 1 + 2^-11 + 2^-40 lies above the tie; FP32 drops
    the 2^-40, and the tie then goes to the even 1. The first emulation cast its FP64 golden values
    like that and was an ulp off.
    """
    for name, tie in (("fp16", 2.0**-11), ("bf16", 2.0**-8), ("fp8_e4m3", 2.0**-4), ("fp8_e5m2", 2.0**-3)):
        x = torch.tensor([1 + tie + 2.0**-40, 1 + tie, 1 + tie - 2.0**-40], dtype=torch.float64)
        assert round_to(x, name).tolist() == [1 + 2 * tie, 1.0, 1.0]


def test_fp64_to_fp16_agrees_with_numpy() -> None:
    """FP64 to FP16 agrees with NumPy, which converts with one rounding."""
    exponents = torch.randint(-27, 18, (100_000,), generator=generator(1))
    x = torch.ldexp(torch.randn(100_000, generator=generator(2), dtype=torch.float64), exponents)
    with np.errstate(over="ignore"):
        expected = torch.from_numpy(x.numpy().astype(np.float16).astype(np.float64))
    assert same(round_to(x, "fp16"), expected)


def test_fp32_from_fp64() -> None:
    codes = torch.randint(0, 0x7F7FFFFE, (50_000,), generator=generator(3), dtype=torch.int32)
    low, high = codes.view(torch.float32).double(), (codes + 1).view(torch.float32).double()
    middle = (low + high) / 2
    odd = torch.where(codes % 2 == 0, high, low)
    assert same(round_to(middle, "fp32"), torch.where(codes % 2 == 0, low, high))
    for point, nearest in zip(beside(middle), (low, high), strict=True):
        assert same(round_to(point, "fp32"), nearest)
        assert same(round_to(point, "fp32", "toward_zero"), low)
        assert same(round_to(point, "fp32", "odd"), odd)


THRESHOLDS = {"fp32": 2.0**128 - 2.0**103, "fp16": 65520.0, "bf16": 2.0**128 - 2.0**119, "fp8_e5m2": 61440.0}


@pytest.mark.parametrize("dtype", CARRIERS)
@pytest.mark.parametrize("name", THRESHOLDS)
def test_nearest_overflows_from_the_threshold_on(name: str, dtype: torch.dtype) -> None:
    fmt = FORMATS[name]
    assert fmt.overflow_threshold == THRESHOLDS[name]
    at = torch.tensor([fmt.overflow_threshold], dtype=torch.float64).to(dtype)
    if at.isinf().any():
        return  # the threshold of FP32 is not an FP32 number
    below, above = beside(at)
    assert round_to(torch.cat([below, at, above, -below, -at]), name).tolist() == [fmt.max, INF, INF, -fmt.max, -INF]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, *CARRIERS])
def test_e4m3_overflow_is_nan_whatever_the_cast_does(dtype: torch.dtype) -> None:
    """Overflow of E4M3 gives NaN, whatever torch's cast does.

    Story: casts to E4M3 give NaN beyond 464 in some releases of torch and 448 in others. The
    emulated overflow must not change with the release. The midpoint 464 itself goes to the even
    448.
    """
    fmt = FORMATS["fp8_e4m3"]
    assert fmt.overflow_threshold == 464.0
    at = torch.tensor([464.0], dtype=dtype)
    beyond = torch.nextafter(at, torch.full_like(at, INF)) if dtype in CARRIERS else torch.tensor([466.0], dtype=dtype)
    x = torch.cat([at, -at, beyond, torch.tensor([480.0, -1000.0, INF, -INF, NAN], dtype=dtype)])
    expected = [448.0, -448.0, *[NAN] * 6]
    assert same(round_to(x, fmt), torch.tensor(expected))
    saturated = [448.0, -448.0, 448.0, 448.0, -448.0, 448.0, -448.0, 0.0]
    assert round_to(x, fmt, overflow="saturate").tolist() == saturated


@pytest.mark.parametrize("rounding", ["toward_zero", "odd"])
@pytest.mark.parametrize("name", SMALL_FORMATS)
def test_directed_roundings_do_not_overflow(name: str, rounding: Rounding) -> None:
    fmt = FORMATS[name]
    beyond = INF if fmt.has_inf else NAN
    x = torch.tensor([fmt.max * (1 + 2.0**-50), -1e300, INF, -INF], dtype=torch.float64)
    assert same(round_to(x, name, rounding), torch.tensor([fmt.max, -fmt.max, beyond, -beyond]))


@pytest.mark.parametrize("dtype", CARRIERS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", SMALL_FORMATS)
def test_saturation(name: str, rounding: Rounding, dtype: torch.dtype) -> None:
    limit = FORMATS[name].max
    largest = torch.finfo(dtype).max
    x = torch.tensor([INF, -INF, NAN, largest, -largest, limit, 0.0, -0.0], dtype=dtype)
    expected = torch.tensor([limit, -limit, 0.0, limit, -limit, limit, 0.0, -0.0], dtype=dtype)
    assert same(round_to(x, name, rounding, overflow="saturate", generator=generator()), expected)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", SMALL_FORMATS)
def test_tiny_values_keep_their_sign(name: str, rounding: Rounding) -> None:
    x = torch.tensor([5e-324, -5e-324, 1e-60, -1e-60, 0.0, -0.0], dtype=torch.float64)
    tiny = FORMATS[name].min_subnormal if rounding == "odd" else 0.0
    expected = torch.tensor([tiny, -tiny, tiny, -tiny, 0.0, -0.0], dtype=torch.float64)
    assert same(round_to(x, name, rounding, generator=generator()), expected)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("fraction", [2.0**-8, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("name", SMALL_FORMATS)
def test_stochastic_is_unbiased(name: str, fraction: float, sign: float) -> None:
    draws = 100_000
    values = grid(name)
    for code in (0, 2, len(values) // 2, len(values) - 2):  # subnormal, normal, and the last step below the maximum
        low, high = sign * values[code], sign * values[code + 1]
        x = (low + fraction * (high - low)).expand(draws)
        rounded = round_to(x, name, "stochastic", generator=generator(code))
        ups = rounded == high
        assert bool((ups | (rounded == low)).all())
        exact = float((x[0] - low) / (high - low))
        deviation = float(ups.double().mean()) - exact
        assert abs(deviation) <= Z_BOUND * math.sqrt(exact * (1 - exact) / draws)


def test_stochastic_overflows_with_the_discarded_fraction() -> None:
    draws = 100_000
    x = torch.full((draws,), 65504.0 + 8.0)  # a quarter of the way to 65536
    rounded = round_to(x, "fp16", "stochastic", generator=generator(4))
    assert bool(((rounded == 65504.0) | rounded.isinf()).all())
    assert abs(float(rounded.isinf().double().mean()) - 0.25) <= Z_BOUND * math.sqrt(0.25 * 0.75 / draws)


def test_stochastic_follows_its_seed() -> None:
    x = torch.randn(63, 127, generator=generator(5))
    first, again, other = (round_to(x, "bf16", "stochastic", generator=generator(seed)) for seed in (6, 6, 7))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, *CARRIERS])
@pytest.mark.parametrize("shape", [(), (0,), (1, 63, 1), (3, 0, 2)])
def test_shape_and_dtype_are_kept(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.full(shape, 1.3, dtype=dtype)
    for rounding in ROUNDINGS:
        rounded = round_to(x, "fp8_e5m2", rounding, generator=generator())
        assert (rounded.shape, rounded.dtype) == (x.shape, dtype)


def test_strided_input_is_not_written() -> None:
    x = torch.randn(64, 80, dtype=torch.float64, generator=generator(8)).t()[::3]
    before = x.clone()
    assert torch.equal(round_to(x, "fp16"), round_to(x.contiguous(), "fp16"))
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float16, "bf16"), (torch.float16, "fp32"), (torch.bfloat16, "fp16"), (torch.bfloat16, "fp32")],
)
def test_narrow_carriers_are_refused(dtype: torch.dtype, name: str) -> None:
    with pytest.raises(TypeError, match=f"{dtype} cannot hold every value of {name}"):
        round_to(torch.ones(1, dtype=dtype), name)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float8_e5m2])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=rf"cannot round a tensor of {dtype}; supported: torch\.float16"):
        round_to(torch.ones(1).to(dtype), "fp16")


def test_bad_modes_are_refused_by_name() -> None:
    x = torch.ones(1)
    up: Any = "up"
    wrap: Any = "wrap"
    with pytest.raises(ValueError, match=r"rounding='up' is not one of \('nearest', "):
        round_to(x, "fp16", up)
    with pytest.raises(ValueError, match=r"overflow='wrap' is not one of \('inf', 'saturate'\)"):
        round_to(x, "fp16", overflow=wrap)
    with pytest.raises(ValueError, match=r"'stochastic' needs generator=.*got None"):
        round_to(x, "fp16", "stochastic")


def half_quantum(x: float, fmt: Format) -> Fraction:
    """Return half the spacing of the format at |x|, from the definition."""
    exponent = max(math.frexp(x)[1] - 1, 1 - fmt.bias)
    return Fraction(2) ** (exponent - fmt.mantissa_bits - 1)


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(list(FORMATS)), data=st.data())
def test_nearest_is_within_half_an_ulp(name: str, data: st.DataObject) -> None:
    fmt = FORMATS[name]
    x = data.draw(st.floats(-fmt.max, fmt.max, allow_nan=False))
    (rounded,) = round_to(torch.tensor([x], dtype=torch.float64), fmt).tolist()
    assert abs(Fraction(rounded) - Fraction(x)) <= half_quantum(x, fmt)
    assert torch.tensor(rounded, dtype=torch.float64).to(fmt.dtype).double().item() == rounded
