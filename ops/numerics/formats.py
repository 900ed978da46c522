"""Describe the number formats of the modelled hardware in one table, and round to them with one routine.

A rounding model is data: an experiment names a format, a rounding and an overflow mode, and `round_to` returns the
rounded values in the dtype it was given, so that the caller keeps computing in FP32 or FP64.

Overflow modes. ``"inf"`` is IEEE 754: infinity, or NaN in a format without infinities. ``"saturate"`` is what Ascend
310P and 910A always do and what other Ascend parts offer as a mode: the largest finite value, and 0 in place of NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

Rounding: TypeAlias = Literal["nearest", "stochastic", "toward_zero", "odd"]
Overflow: TypeAlias = Literal["inf", "saturate"]

ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
OVERFLOWS: tuple[Overflow, ...] = get_args(Overflow)


@dataclass(frozen=True)
class Format:
    """Describe a binary floating-point format with subnormals by plain numbers.

    Attributes
    ----------
    name : str
        The key in `FORMATS`.
    exponent_bits, mantissa_bits : int
        Widths of the stored fields; the leading one of the mantissa is not stored.
    max, min_normal, min_subnormal : float
        Largest finite value, smallest normal value, smallest value above zero.
    has_inf : bool
        Whether the format encodes infinities; without them an overflow is NaN.
    dtype : torch.dtype
        The torch dtype that stores it.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    max: float
    min_normal: float
    min_subnormal: float
    has_inf: bool
    dtype: torch.dtype

    @classmethod
    def ieee(cls, name: str, exponent_bits: int, mantissa_bits: int, dtype: torch.dtype) -> Format:
        """Derive a format whose top exponent is kept for infinities and NaN (IEEE 754-2019, 3.3 and 3.4)."""
        bias = (1 << (exponent_bits - 1)) - 1
        return cls(
            name=name,
            exponent_bits=exponent_bits,
            mantissa_bits=mantissa_bits,
            max=math.ldexp(2.0 - math.ldexp(1.0, -mantissa_bits), bias),
            min_normal=math.ldexp(1.0, 1 - bias),
            min_subnormal=math.ldexp(1.0, 1 - bias - mantissa_bits),
            has_inf=True,
            dtype=dtype,
        )

    @property
    def bias(self) -> int:
        """Return what is added to the exponent before it is stored; 1 - bias is the exponent of `min_normal`."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def overflow_threshold(self) -> float:
        """Return the magnitude beyond which rounding to nearest overflows: `max` plus half a spacing.

        The midpoint itself goes to the even neighbour: it overflows in the IEEE formats (65520 in FP16), whose `max`
        is odd, and stays finite in E4M3 (464), whose `max` is even.
        """
        half_quantum_exponent = math.frexp(self.max)[1] - 1 - self.mantissa_bits - 1
        return self.max + math.ldexp(1.0, half_quantum_exponent)

    def fits_in(self, carrier: Format) -> bool:
        """Return whether every value of this format is also a value of `carrier`."""
        return self.exponent_bits <= carrier.exponent_bits and self.mantissa_bits <= carrier.mantissa_bits


_FP64 = Format.ieee("fp64", 11, 52, torch.float64)  # used to carry and compute values, never as a target of rounding

FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        Format.ieee("fp32", 8, 23, torch.float32),
        Format.ieee("fp16", 5, 10, torch.float16),
        Format.ieee("bf16", 8, 7, torch.bfloat16),
        # OCP FP8 specification 1.0: E4M3 gives the top exponent to numbers and keeps only its last mantissa for NaN.
        replace(Format.ieee("fp8_e4m3", 4, 3, torch.float8_e4m3fn), max=448.0, has_inf=False),
        Format.ieee("fp8_e5m2", 5, 2, torch.float8_e5m2),
    )
}

FP16, FP32 = FORMATS["fp16"], FORMATS["fp32"]
FP16_MAX, FP32_MAX, E4M3_MAX = FP16.max, FP32.max, FORMATS["fp8_e4m3"].max
FP32_UNIT = 2.0**-24  # the largest relative error of one rounding to FP32

_CARRIERS: dict[torch.dtype, Format] = {carrier.dtype: carrier for carrier in (FP16, FORMATS["bf16"], FP32, _FP64)}


def get_format(fmt: str | Format | torch.dtype) -> Format:
    """Look a format up by its name or its torch dtype; a `Format` passes through.

    Raises
    ------
    ValueError
        If nothing in `FORMATS` has that name or dtype.
    """
    if isinstance(fmt, Format):
        return fmt
    for known in FORMATS.values():
        if fmt == known.name or fmt == known.dtype:
            return known
    raise ValueError(
        f"unknown number format {fmt!r}; known: " + ", ".join(f"{f.name} ({f.dtype})" for f in FORMATS.values())
    )


def round_to(
    x: Tensor,
    fmt: str | Format | torch.dtype,
    rounding: Rounding = "nearest",
    overflow: Overflow = "inf",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Round every element to a value of a format, with one rounding, and keep the dtype of the input.

    Parameters
    ----------
    x : Tensor
        Any shape; FP16, BF16, FP32 or FP64. Its dtype must hold every value of the format.
    fmt : str, Format or torch.dtype
        The format to round to.
    rounding : {"nearest", "stochastic", "toward_zero", "odd"}
        ``nearest``: ties to even. ``stochastic``: away from zero with a probability equal to the discarded fraction
        of the spacing. ``toward_zero``: drop the fraction. ``odd``: an inexact value goes to the neighbour whose last
        mantissa bit is 1, so that a later rounding to a format at least two bits narrower equals a direct one
        (Boldo & Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    overflow : {"inf", "saturate"}
        ``inf``: beyond the range the result is +/-inf, NaN in a format without infinities; ``toward_zero`` and
        ``odd`` stop at the largest finite value unless `x` itself is infinite. ``saturate``: the largest finite
        value with the sign of `x`, and 0 for NaN.
    generator : torch.Generator, optional
        On the device of `x`. Needed by ``stochastic``, not consulted by the others.

    Returns
    -------
    Tensor
        Shape and dtype of `x`. It may be `x` itself where the cast changes nothing: do not write into it.

    Raises
    ------
    TypeError
        If the dtype of `x` is no carrier or cannot hold the values of the format.
    ValueError
        On an unknown format, rounding or overflow mode, and on ``stochastic`` without a generator.

    Notes
    -----
    Nearest rounding of FP32 and narrower input is one torch cast: it is the hot path of the emulated kernels.
    FP64 input takes the general path because torch casts FP64 to 16 and 8 bits through FP32, rounding twice.
    """
    target = get_format(fmt)
    _check_modes(rounding, overflow, generator)
    _check_carrier(x.dtype, target)
    if rounding == "nearest" and (x.dtype is not torch.float64 or target.dtype is torch.float32):
        return _nearest_by_cast(x, target, overflow)
    wide = x.double()
    magnitude = _round_magnitude(wide.abs(), target, rounding, generator)
    return _apply_overflow(torch.copysign(magnitude, wide), target, overflow).to(x.dtype)


def _check_modes(rounding: str, overflow: str, generator: torch.Generator | None) -> None:
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding={rounding!r} is not one of {ROUNDINGS}")
    if overflow not in OVERFLOWS:
        raise ValueError(f"overflow={overflow!r} is not one of {OVERFLOWS}")
    if rounding == "stochastic" and generator is None:
        raise ValueError(
            "rounding='stochastic' needs generator=torch.Generator, got None: results must be reproducible"
        )


def _check_carrier(dtype: torch.dtype, target: Format) -> None:
    carrier = _CARRIERS.get(dtype)
    if carrier is None:
        raise TypeError(f"cannot round a tensor of {dtype}; supported: {', '.join(map(str, _CARRIERS))}")
    if not target.fits_in(carrier):
        raise TypeError(f"{dtype} cannot hold every value of {target.name}: convert the tensor to a wider dtype first")


def _nearest_by_cast(x: Tensor, target: Format, overflow: str) -> Tensor:
    """Round to nearest by the dtype cast, which torch does in one rounding up to FP32 input."""
    if overflow == "saturate":
        return _apply_overflow(x, target, overflow).to(target.dtype).to(x.dtype)
    if target.has_inf:
        return x.to(target.dtype).to(x.dtype)
    # Releases of torch disagree on whether a cast beyond E4M3 saturates or gives NaN: keep it inside the range.
    inside = x.clamp(-target.max, target.max).to(target.dtype).to(x.dtype)
    return inside.masked_fill(x.abs() > target.overflow_threshold, math.nan)


def _round_magnitude(magnitude: Tensor, target: Format, rounding: str, generator: torch.Generator | None) -> Tensor:
    """Round non-negative FP64 values to the spacing of the format, its exponent unbounded above.

    Scaling by powers of two is exact, so the rounding to an integer is the only one.
    """
    exponent = torch.frexp(magnitude).exponent - 1  # frexp's mantissa lies in [0.5, 1)
    quantum_exponent = exponent.clamp(min=1 - target.bias) - target.mantissa_bits
    scaled = magnitude * _power_of_two(-quantum_exponent)
    below = scaled.floor()
    if rounding == "nearest":
        kept = scaled.round()
    elif rounding == "stochastic":
        uniform = torch.rand(scaled.shape, generator=generator, dtype=torch.float64, device=scaled.device)
        kept = below + (uniform < scaled - below)
    elif rounding == "odd":
        kept = below + ((scaled > below) & (below.remainder(2) == 0))
    else:
        kept = below
    rounded = kept * _power_of_two(quantum_exponent)
    if rounding in ("toward_zero", "odd"):
        rounded = rounded.clamp(max=target.max)
    return torch.where(magnitude.isfinite(), rounded, magnitude)  # frexp does not define the exponent of inf and NaN


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2**exponent in FP64 from its bits, which is exact.

    exp2 may be off by an ulp, and ldexp goes through FP32.
    """
    return ((exponent.long() + _FP64.bias) << _FP64.mantissa_bits).view(torch.float64)


def _apply_overflow(x: Tensor, target: Format, overflow: str) -> Tensor:
    """Replace values beyond the largest finite one, and NaN if the mode has none."""
    if overflow == "saturate":
        return x.clamp(-target.max, target.max).nan_to_num(nan=0.0)
    beyond = math.inf if target.has_inf else math.nan
    return x.masked_fill(x > target.max, beyond).masked_fill(x < -target.max, -beyond)
