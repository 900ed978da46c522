"""Numbers for random cases: ordinary ones, and those that provoke overflow, underflow, cancellation or ties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

FP16_MAX = 65504.0
LARGEST = {torch.float16: FP16_MAX, torch.bfloat16: 65280.0, torch.float32: FP16_MAX}  # 65280: BF16 has none between
GARBAGE = (torch.nan, torch.inf, -torch.inf)


@dataclass(frozen=True)
class Draw:
    """Normal numbers to start from, and where further ones come from.

    Attributes
    ----------
    q : Tensor (B, Hq, Sq, D), FP32
    k : Tensor (B, Hkv, Skv, D), FP32
    rng : Random
        For parameters.
    source : torch.Generator
        For tensors.
    """

    q: Tensor
    k: Tensor
    rng: Random
    source: torch.Generator

    def uniform(self, shape: torch.Size) -> Tensor:
        """Numbers from 0 to 1."""
        return torch.rand(shape, generator=self.source)

    def sign(self, shape: torch.Size) -> Tensor:
        """1 or -1."""
        return torch.randint(0, 2, shape, generator=self.source) * 2.0 - 1


Pair = tuple[Tensor, Tensor]


def randn(draw: Draw) -> Pair:
    """N(0, 1)."""
    return draw.q, draw.k


def mean(draw: Draw) -> Pair:
    """Uniform around a mean, as the paper's random cases."""
    amplitude, middle = draw.rng.choice((0.5, 5.0, 20.0)), draw.rng.choice((0.0, 10.0, 20.0, 30.0))
    q, k = (amplitude * (2 * draw.uniform(x.shape) - 1) + middle for x in (draw.q, draw.k))
    return q, k


def bias(draw: Draw) -> Pair:
    """N(0, 1) and a constant on some channels that all keys share, and all queries."""
    size, count = draw.rng.choice((20.0, 80.0, 200.0, 500.0, 2000.0)), draw.rng.choice((1, 4, 16))
    channels = draw.rng.sample(range(draw.k.shape[-1]), count)
    offset = torch.zeros(draw.k.shape[-1])
    offset[channels] = size * draw.sign(torch.Size([count]))
    return draw.q + offset, draw.k + offset


def drift(draw: Draw) -> Pair:
    """A bias that changes along the keys: every block has another anchor."""
    reach = draw.rng.choice((3.0, 30.0, 300.0))
    q, k = draw.q.clone(), draw.k.clone()
    q[..., :8] += 40
    k[..., :8] += torch.linspace(-reach, reach, k.shape[-2]).unsqueeze(-1)
    return q, k


def blocks(draw: Draw) -> Pair:
    """A bias on a channel that some blocks of 128 keys have, of either sign, and others lack; they may have no weight,
    or all of it."""
    size, channel = draw.rng.choice((80.0, 500.0, 2000.0, 30000.0)), draw.rng.randrange(draw.k.shape[-1])
    signs = torch.randint(-1, draw.rng.choice((1, 2)), (-(-draw.k.shape[-2] // 128),), generator=draw.source)
    q, k = draw.q.clone(), draw.k.clone()
    q[..., channel] = size
    k[..., channel] += size * signs.repeat_interleave(128)[: draw.k.shape[-2]]
    return q, k


def repeated(draw: Draw) -> Pair:
    """About half of the keys are one key, and every query points to it: many maxima that are equal."""
    same = (draw.uniform(draw.k.shape[:-1]) < 0.5).unsqueeze(-1)
    k = torch.where(same, draw.k[..., :1, :], draw.k)
    groups = draw.q.shape[1] // k.shape[1]
    return 0.1 * draw.q + draw.k[..., :1, :].repeat_interleave(groups, 1), k


def constant(draw: Draw) -> Pair:
    """All keys are equal."""
    return 3 * draw.q, draw.k[..., :1, :].expand(draw.k.shape)


def resonance(draw: Draw) -> Pair:
    """A wave along the head dimension that queries and keys share up to its sign."""
    wave = 300 * torch.sin(0.7 * torch.arange(draw.q.shape[-1]))
    q, k = (wave * draw.sign(torch.Size([*x.shape[:-1], 1])) + x for x in (draw.q, draw.k))
    return q, k


def each(change: Callable[[Draw, Tensor], Tensor]) -> Callable[[Draw], Pair]:
    """Change queries and keys alike."""
    return lambda draw: (change(draw, draw.q), change(draw, draw.k))


def widened(draw: Draw, x: Tensor) -> Tensor:
    """Exponents from -20 to 13."""
    return x * 2.0 ** torch.randint(-20, 14, x.shape, generator=draw.source)


def largest(draw: Draw, x: Tensor) -> Tensor:
    """+-65504."""
    return FP16_MAX * draw.sign(x.shape)


def outliers(draw: Draw, x: Tensor) -> Tensor:
    """One in fifty at +-30000."""
    return x + 30000 * draw.sign(x.shape) * (draw.uniform(x.shape) < 0.02)


def denormal(draw: Draw, x: Tensor) -> Tensor:
    """Subnormal in FP16."""
    return x * 2.0**-20


def same(draw: Draw, x: Tensor) -> Tensor:
    """As they are."""
    return x


def shifted(draw: Draw, x: Tensor) -> Tensor:
    """All of one sign."""
    return x + 20


ORDINARY = ("randn", "mean", "bias", "drift", "repeated", "constant")
SCORES: dict[str, Callable[[Draw], Pair]] = {
    "randn": randn,
    "mean": mean,
    "bias": bias,
    "drift": drift,
    "blocks": blocks,
    "repeated": repeated,
    "constant": constant,
    "resonance": resonance,
    "wide": each(widened),
    "largest": each(largest),
    "outliers": each(outliers),
    "denormal": each(denormal),
}
"""Queries and keys by name of the data."""

ORDINARY_VALUES = ("randn", "shifted")
VALUES: dict[str, Callable[[Draw, Tensor], Tensor]] = {
    "randn": same,
    "shifted": shifted,
    "wide": widened,
    "largest": largest,
    "outliers": outliers,
    "denormal": denormal,
}


def fit(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`, where every value has to fit into FP16."""
    return x.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
