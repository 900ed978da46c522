"""An evolutionary search for inputs that break the guarantee: genes are parameters of structured inputs.

python -m pasa.eval.random_calls.fuzz.search [EVALUATIONS] [SEED]
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

import pasa
from pasa.eval.random_calls.fuzz import truth
from pasa.eval.random_calls.fuzz.backends import NPU, REFERENCE, TRITON, absent, available
from pasa.ops.attention.options import ACCUMULATES, OVERFLOWS

PROFILES = ("none", "ramp", "alternate", "blocks", "sign", "wave")
VALUES = ("largest", "signs", "alternate", "normal", "one", "subnormal", "after")
POPULATION, CHILDREN = 8, 4
BROKEN = 1e6  # for each number that is not finite


@dataclass(frozen=True)
class Genes:
    """A call.

    Attributes
    ----------
    base, slope, noise : float
        q and k are `base` on some columns, plus `slope` times a profile along the keys, plus noise.
    outliers, size : float
        Share and size of single large elements.
    ties : float
        Share of keys that are the first key.
    columns : float
        Share of columns that have base and profile.
    exponent : float
        Of the scale, base 2.
    """

    keys: int = 130
    dim: int = 16
    base: float = 0.0
    slope: float = 0.0
    noise: float = 1.0
    outliers: float = 0.0
    size: float = 30000.0
    ties: float = 0.0
    columns: float = 0.5
    exponent: float = -2.0
    profile: str = "none"
    values: str = "largest"
    seed: int = 0


def make(genes: Genes) -> tuple[Tensor, Tensor, Tensor]:
    """q (1, 1, 5, D), k and v (1, 1, Skv, D), FP16, all finite."""
    g = torch.Generator().manual_seed(genes.seed)
    q, k = (genes.noise * torch.randn(1, 1, n, genes.dim, generator=g) for n in (5, genes.keys))
    chosen = torch.rand(genes.dim, generator=g) < genes.columns
    at = torch.arange(genes.keys)
    along = {
        "none": torch.zeros(genes.keys),
        "ramp": torch.linspace(-1, 1, genes.keys),
        "alternate": 1.0 - 2 * (at % 2),
        "blocks": 1.0 - 2 * (at // 128 % 2),
        "sign": torch.randn(genes.keys, generator=g).sign(),
        "wave": torch.sin(0.7 * at),
    }[genes.profile]
    q[..., chosen] += genes.base
    k[..., chosen] += genes.base + genes.slope * along.unsqueeze(-1)
    for x in (q, k):
        x[torch.rand(x.shape, generator=g) < genes.outliers] += genes.size
    k[:, :, torch.rand(genes.keys, generator=g) < genes.ties] = k[:, :, :1].clone()
    fit = (x.clamp(-truth.FP16_MAX, truth.FP16_MAX).half() for x in (q, k))
    return *fit, values(genes, g)  # type: ignore[return-value]


def values(genes: Genes, g: torch.Generator) -> Tensor:
    """V, mostly of the largest numbers."""
    shape = (1, 1, genes.keys, genes.dim)
    normal, at = torch.randn(shape, generator=g), torch.arange(genes.keys).unsqueeze(-1)
    found = {
        "largest": torch.ones(shape),
        "signs": normal.sign(),
        "alternate": (1.0 - 2 * (at % 2)).expand(shape),
        "after": torch.where(at < 128, 0.0, 1.0).expand(shape),
    }
    if genes.values in found:
        return (truth.FP16_MAX * found[genes.values]).half()
    return {"normal": normal, "one": torch.ones(shape), "subnormal": normal * 2.0**-22}[genes.values].half()


def mutate(genes: Genes, rng: Random) -> Genes:
    """One to three genes changed."""
    changes: dict[str, Callable[[], object]] = {
        "keys": lambda: rng.choice((1, 2, 31, 127, 128, 129, 130, 260, 300)),
        "dim": lambda: rng.choice((1, 16, 16, 32, 64)),
        "base": lambda: rng.choice((0.0, 1.0, -1.0)) * 2.0 ** rng.uniform(-4, 16),
        "slope": lambda: rng.choice((0.0, 1.0)) * 2.0 ** rng.uniform(-8, 16),
        "noise": lambda: rng.choice((0.0, 1.0)) * 2.0 ** rng.uniform(-24, 14),
        "outliers": lambda: rng.choice((0.0, rng.random() * 0.1)),
        "size": lambda: 2.0 ** rng.uniform(-10, 16),
        "ties": rng.random,
        "columns": rng.random,
        "exponent": lambda: rng.choice((-2.0, rng.uniform(-30, 6), rng.uniform(-80, 80))),
        "profile": lambda: rng.choice(PROFILES),
        "values": lambda: rng.choice(VALUES),
        "seed": lambda: rng.getrandbits(20),
    }
    chosen = rng.sample(list(changes), rng.randint(1, 3))
    return dataclasses.replace(genes, **{name: changes[name]() for name in chosen})  # type: ignore[arg-type]


def badness(genes: Genes, backend: str, config: pasa.PasaConfig) -> float:
    """The worst error over its bound, and `BROKEN` for every number that is not finite."""
    q, k, v = make(genes)
    scale = 2.0**genes.exponent
    with available(backend):
        out, lse = pasa.attention(q, k, v, scale=scale, config=config, backend=backend, return_lse=True)
    true, _ = truth.find_truth(q, k, v, None, False, scale)
    stores = 1 + 2 * (-(-genes.keys // config.block_k) + 1) * (config.accumulate == "fp16")
    how = truth.Arithmetic(backend != TRITON, stores, q.dtype, config.softmax != "safe")
    found = truth.judge(true, out, lse, how)
    return BROKEN * found["finite"] + max(found[name] for name in ("range", "heavy", "error", "lse"))


def search(backend: str, config: pasa.PasaConfig, evaluations: int, seed: int) -> tuple[float, Genes]:
    """The worst that mutation and selection find."""
    rng = Random(f"search {backend} {config} {seed}")
    best = [(badness(genes, backend, config), genes) for genes in (Genes(), Genes(values="normal"))]
    while evaluations > 0:
        parents = [genes for _, genes in best]
        fresh = [mutate(rng.choice(parents), rng) for _ in range(CHILDREN)] + [mutate(mutate(Genes(), rng), rng)]
        best += [(badness(genes, backend, config), genes) for genes in fresh]
        best = sorted(best, key=lambda found: -found[0])[:POPULATION]
        evaluations -= len(fresh)
    return best[0]


def modes(backend: str) -> list[pasa.PasaConfig]:
    """Every arithmetic that is promised not to overflow."""
    overflows = ("inf",) if backend == TRITON else OVERFLOWS
    accumulates = ACCUMULATES if backend == REFERENCE else ("fp32",)
    return [
        pasa.PasaConfig(softmax=softmax, overflow=overflow, accumulate=accumulate)
        for softmax in ("safe", "unbiased")
        for overflow in overflows
        for accumulate in accumulates
    ]


def main(arguments: list[str]) -> int:
    """Search on every backend that is here; 1 if a bound is broken."""
    evaluations, seed = (int(x) for x in (*arguments, *("400", "0")[len(arguments) :]))
    broken = 0
    for backend in (REFERENCE, NPU, TRITON):
        if (why := absent(backend)) is not None:
            print(f"{backend}: {why}")
            continue
        for config in modes(backend):
            worst, genes = search(backend, config, evaluations // (8 if backend == TRITON else 1), seed)
            broken += worst > 1
            print(f"{backend} {config.softmax} {config.overflow} {config.accumulate}: {worst:.4g} {genes}", flush=True)
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
