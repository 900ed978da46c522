"""Numbers for random calls: ordinary ones, and those that provoke overflow, underflow, cancellation or ties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from pasa.ops.numerics.formats import FP16_MAX

LARGEST = {torch.float16: FP16_MAX, torch.bfloat16: 65280.0, torch.float32: FP16_MAX}  # 65280: BF16 has none between
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Draw:
    """N(0, 1) queries (B, Hq, Sq, D) and keys (B, Hkv, Skv, D) to start from, and the sources of further numbers."""

    q: Tensor
    k: Tensor
    rng: Random
    source: torch.Generator

    def uniform(self, shape: torch.Size) -> Tensor:
        """Return numbers from 0 to 1."""
        return torch.rand(shape, generator=self.source)

    def sign(self, shape: torch.Size) -> Tensor:
        """Return 1 or -1."""
        return torch.randint(0, 2, shape, generator=self.source) * 2.0 - 1


def mean(draw: Draw) -> Pair:
    """Return uniform numbers around a mean, as the paper's random cases."""
    amplitude, middle = draw.rng.choice((0.5, 5.0, 20.0)), draw.rng.choice((0.0, 10.0, 20.0, 30.0))
    q, k = (amplitude * (2 * draw.uniform(x.shape) - 1) + middle for x in (draw.q, draw.k))
    return q, k


def bias(draw: Draw) -> Pair:
    """Return N(0, 1) and a constant on some channels that all keys share, and all queries."""
    size, count = draw.rng.choice((20.0, 80.0, 200.0, 500.0, 2000.0)), draw.rng.choice((1, 4, 16))
    channels = draw.rng.sample(range(draw.k.shape[-1]), count)
    offset = torch.zeros(draw.k.shape[-1])
    offset[channels] = size * draw.sign(torch.Size([count]))
    return draw.q + offset, draw.k + offset


def drift(draw: Draw) -> Pair:
    """Return keys with a bias that changes along them: every block has another anchor."""
    reach = draw.rng.choice((3.0, 30.0, 300.0))
    q, k = draw.q.clone(), draw.k.clone()
    q[..., :8] += 40
    k[..., :8] += torch.linspace(-reach, reach, k.shape[-2]).unsqueeze(-1)
    return q, k


def blocks(draw: Draw) -> Pair:
    """Return keys with a bias of either sign on a channel in some blocks of 128, which may have no weight or all."""
    size, channel = draw.rng.choice((80.0, 500.0, 2000.0, 30000.0)), draw.rng.randrange(draw.k.shape[-1])
    signs = torch.randint(-1, draw.rng.choice((1, 2)), (-(-draw.k.shape[-2] // 128),), generator=draw.source)
    q, k = draw.q.clone(), draw.k.clone()
    q[..., channel] = size
    k[..., channel] += size * signs.repeat_interleave(128)[: draw.k.shape[-2]]
    return q, k


def repeated(draw: Draw) -> Pair:
    """Return keys of which half are one key that every query points to: many maxima that are equal."""
    same = (draw.uniform(draw.k.shape[:-1]) < 0.5).unsqueeze(-1)
    k = torch.where(same, draw.k[..., :1, :], draw.k)
    groups = draw.q.shape[1] // k.shape[1]
    return 0.1 * draw.q + draw.k[..., :1, :].repeat_interleave(groups, 1), k


def resonance(draw: Draw) -> Pair:
    """Return a wave along the head dimension that queries and keys share up to its sign."""
    wave = 300 * torch.sin(0.7 * torch.arange(draw.q.shape[-1]))
    q, k = (wave * draw.sign(torch.Size([*x.shape[:-1], 1])) + x for x in (draw.q, draw.k))
    return q, k


VALUES: dict[str, Callable[[Draw, Tensor], Tensor]] = {
    "randn": lambda draw, x: x,
    "shifted": lambda draw, x: x + 20,
    "wide": lambda draw, x: x * 2.0 ** torch.randint(-20, 14, x.shape, generator=draw.source),  # exponents
    "largest": lambda draw, x: FP16_MAX * draw.sign(x.shape),
    "outliers": lambda draw, x: x + 30000 * draw.sign(x.shape) * (draw.uniform(x.shape) < 0.02),
    "denormal": lambda draw, x: x * 2.0**-20,  # subnormal in FP16
}


def both(name: str) -> Callable[[Draw], Pair]:
    """Change queries and keys as `VALUES` changes values."""
    return lambda draw: (VALUES[name](draw, draw.q), VALUES[name](draw, draw.k))


SCORES: dict[str, Callable[[Draw], Pair]] = {
    "randn": lambda draw: (draw.q, draw.k),
    "mean": mean,
    "bias": bias,
    "drift": drift,
    "blocks": blocks,
    "repeated": repeated,
    "constant": lambda draw: (3 * draw.q, draw.k[..., :1, :].expand(draw.k.shape)),
    "resonance": resonance,
    **{name: both(name) for name in ("wide", "largest", "outliers", "denormal")},
}
# what same-precision arithmetic is good at
ORDINARY, ORDINARY_VALUES = ("randn", "mean", "bias", "drift", "repeated", "constant"), ("randn", "shifted")


def fit(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in `dtype`, where every value has to fit into FP16."""
    return x.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
