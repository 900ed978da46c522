"""Input cases and arithmetics of the RMSE experiments, as tables.

Data follow Eq. 17 and 18 of arXiv:2503.01873; every tensor has a generator of its own, seeded by (seed, case, tensor),
so a case has the same data whether it runs alone or among others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from pasa import PasaConfig
from pasa.eval.kit.error_metrics import PAPER_SHAPE, generator

Shape: TypeAlias = tuple[int, int, int, int]
SHAPE: Shape = PAPER_SHAPE
OUTLIER_SHARE = 0.001  # p of the Bernoulli factor, Eq. 18


def draw(seed: int, name: str, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Return N(0, 1) for q, k and v, each from a generator of its own."""
    q, k, v = (torch.randn(shape, generator=generator(seed, name, part)) for part in "qkv")
    return q, k, v


@dataclass(frozen=True)
class RandomCase:
    """One case of figures 9 and 10: Q, K and V alike.

    `distribution` is "uniform" U(x0 - Am, x0 + Am), or "hybrid" N(x0, 1) + N(0, Am^2) * Bernoulli(0.001); `mean` is x0
    and `amplitude` Am. `paper_nan_share` is the share of NaN in the output of `partial`, table 4; None for the cases
    that do not overflow.
    """

    distribution: str
    mean: float
    amplitude: float
    shape: Shape = SHAPE
    paper_nan_share: float | None = None

    @property
    def name(self) -> str:
        """Name the case as ``uniform(20,0.5)``: x0 first, as in the paper's figures."""
        return f"{self.distribution}({self.mean:g},{self.amplitude:g})"

    def tensors(self, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw (q, k, v) in FP16, independent of each other."""
        q, k, v = (self._draw(generator(seed, self.name, part)) for part in "qkv")
        return q, k, v

    def _draw(self, source: torch.Generator) -> Tensor:
        if self.distribution == "uniform":
            return (self.mean + self.amplitude * (2 * torch.rand(self.shape, generator=source) - 1)).half()
        base = self.mean + torch.randn(self.shape, generator=source)
        outlier = torch.rand(self.shape, generator=source) < OUTLIER_SHARE
        return (base + outlier * self.amplitude * torch.randn(self.shape, generator=source)).half()


@dataclass(frozen=True)
class BiasCase:
    """N(0, 1) with a constant added to the first 16 channels of Q and K: a bias that both share; or of K alone."""

    bias: float
    shape: Shape = (1, 2, 1280, 128)
    channels: int = 16
    keys_only: bool = False

    @property
    def name(self) -> str:
        """Name the case as ``bias(200)``, or ``bias(200) of K``."""
        return f"bias({self.bias:g})" + " of K" * self.keys_only

    def tensors(self, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw (q, k, v) in FP16; V has no bias."""
        q, k, v = draw(seed, self.name, self.shape)
        q[..., : self.channels] += 0 if self.keys_only else self.bias
        k[..., : self.channels] += self.bias
        return q.half(), k.half(), v.half()


@dataclass(frozen=True)
class ResonanceCase:
    """A wave along the head dimension, the same at every position: the paper's second cause of overflow (figure 6).

    Q and K share the wavelength (channels per period). K's wave lags behind by `phase` degrees: 180 drives q.k far
    below zero, 0 far above. The amplitude of K drifts slowly along the sequence, by the share `drift`; the rows of Q
    have amplitudes within the share `row_spread` of `q_amplitude`; both carry noise of this standard deviation.
    """

    label: str
    shape: Shape
    phase: float
    q_amplitude: float
    k_amplitude: float
    row_spread: float = 0.5
    drift: float = 0.002
    noise: float = 1.0
    wavelength: float = 16.0

    @property
    def name(self) -> str:
        """Name the case as ``qwen-like, 180 deg``."""
        return f"{self.label}, {self.phase:g} deg"

    def tensors(self, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw (q, k, v) in FP16; V is N(0, 1)."""
        q, k, v = draw(seed, self.name, self.shape)
        rows, channels = self.shape[2:]
        angle = 2 * math.pi * torch.arange(channels) / self.wavelength
        spread = torch.rand((*self.shape[:3], 1), generator=generator(seed, self.name, "rows"))
        slow = torch.sin(2 * math.pi * torch.arange(rows) / rows).unsqueeze(-1)
        q_wave = self.q_amplitude * (1 + self.row_spread * (2 * spread - 1)) * torch.sin(angle)
        k_wave = self.k_amplitude * (1 + self.drift * slow) * torch.sin(angle - math.radians(self.phase))
        return (q_wave + self.noise * q).half(), (k_wave + self.noise * k).half(), v.half()


Case: TypeAlias = RandomCase | BiasCase | ResonanceCase


@dataclass(frozen=True)
class Arithmetic:
    """One column of the comparison; `what` is its line in the legend.

    The backend "reference" emulates an NPU; "triton" hides its scores; "torch" is torch's attention on FP32 tensors.
    """

    name: str
    config: PasaConfig
    what: str
    backend: str = "reference"


PAPER_CASES = (
    RandomCase("uniform", 0, 0.5),
    RandomCase("uniform", 10, 0.5),
    RandomCase("uniform", 20, 0.5),
    RandomCase("uniform", 30, 0.5, paper_nan_share=1.0),
    RandomCase("uniform", 20, 5),
    RandomCase("uniform", 20, 10),
    RandomCase("uniform", 20, 15, paper_nan_share=0.0012),
    RandomCase("uniform", 20, 20, paper_nan_share=0.0814),
    RandomCase("hybrid", 0, 10),
    RandomCase("hybrid", 10, 10),
    RandomCase("hybrid", 20, 10),
    RandomCase("hybrid", 30, 10, paper_nan_share=1.0),
    RandomCase("hybrid", 20, 20),
    RandomCase("hybrid", 20, 50, paper_nan_share=0.0004),
    RandomCase("hybrid", 20, 100, paper_nan_share=0.0111),
)
"""The 15 distinct cases of figures 9 and 10; six of them make table 4."""

BIAS_CASES = tuple(BiasCase(bias) for bias in (32, 80, 200, 500, 2000))

# Amplitudes that put q.k where the paper saw it: K in [-412, 234] and q.k in [-226360, 27757] for Qwen2-7B,
# K in [-34.44, 33.88] and q.k in [-86569, -67503] for the video model; fewer heads and positions.
RESONANCE_CASES = (
    ResonanceCase("qwen-like", (1, 4, 1408, 128), 180, q_amplitude=7.5, k_amplitude=300),
    ResonanceCase("qwen-like", (1, 4, 1408, 128), 0, q_amplitude=7.5, k_amplitude=300),
    ResonanceCase("svd-like", (1, 5, 1152, 64), 180, q_amplitude=73, k_amplitude=33, row_spread=0.12, noise=0.1),
)

PAPER, LETTER = PasaConfig(recovery="paper"), PasaConfig(recovery="paper", accumulate="fp16")
ARITHMETICS = (
    Arithmetic("fp32", PasaConfig(precision="fp32"), "FP16 inputs and P, all else FP32 (paper figure 1)"),
    Arithmetic("partial", PasaConfig(precision="partial"), "Q K^T stored in FP16 before scaling (paper figure 2)"),
    Arithmetic("fp16", PasaConfig(precision="fp16"), "everything FP16 (paper figure 3)"),
    Arithmetic("prescaled", PasaConfig(precision="prescaled"), "Q scaled before the product, stored in FP16"),
    Arithmetic("smooth_k", PasaConfig(precision="smooth_k"), "partial, after the mean of K is removed"),
    Arithmetic("pasa-paper", PAPER, "the published recovery, row statistics in FP32"),
    Arithmetic("pasa-paper-fp16", LETTER, "the published algorithm to the letter"),
    Arithmetic("pasa-exact", PasaConfig(), "ours, the default"),
    Arithmetic("pasa-exact-fp16", PasaConfig(accumulate="fp16"), "ours, output kept in FP16 between blocks"),
)
NAIVE, COMPETITOR, GATED = "partial", "fp32", "pasa-exact"
KERNELS = (
    Arithmetic("triton-fp32", PasaConfig(precision="fp32"), "kernel: plain FP32-softmax flash attention", "triton"),
    Arithmetic("triton-paper", PAPER, "kernel: the published recovery, rows in FP32", "triton"),
    Arithmetic("triton-paper-fp16", LETTER, "kernel: the published algorithm to the letter", "triton"),
    Arithmetic("triton-exact", PasaConfig(), "kernel: the default", "triton"),
    Arithmetic("triton-exact-fp16", PasaConfig(accumulate="fp16"), 'kernel: accumulate="fp16"', "triton"),
    Arithmetic("npu-paper", PAPER, "kernel in Ascend C: the published recovery", "npu"),
    Arithmetic("npu-exact", PasaConfig(), "kernel in Ascend C: the default", "npu"),
)
SDPA = Arithmetic("sdpa-fp32", PasaConfig(), "torch's attention on FP32 tensors, nothing rounded to FP16", "torch")
