"""An evolutionary search for inputs that break the guarantee: genes are parameters of structured inputs.

python -m tests.adversarial_search [EVALUATIONS] [SEED]
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
from pasa.eval.random_calls.backends import NPU, REFERENCE, TRITON, absent, available
from pasa.eval.random_calls.inputs import Call
from pasa.eval.random_calls.judge import Arithmetic, judge
from pasa.eval.random_calls.number_draws import fit
from pasa.eval.random_calls.truth import find_truth
from pasa.ops.attention.options import CHOICES
from pasa.ops.numerics.formats import FP16_MAX

POPULATION, CHILDREN = 8, 4
BROKEN = 1e6  # for each number that is not finite
PROFILES: dict[str, Callable[[int], Tensor]] = {
    "none": lambda keys: torch.zeros(keys),
    "ramp": lambda keys: torch.linspace(-1, 1, keys),
    "alternate": lambda keys: 1.0 - 2 * (torch.arange(keys) % 2),
    "blocks": lambda keys: 1.0 - 2 * (torch.arange(keys) // 128 % 2),
    "wave": lambda keys: torch.sin(0.7 * torch.arange(keys)),
}
"""What is added to keys, along them; "sign" is random."""
VALUES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "largest": lambda normal, at: FP16_MAX * torch.ones_like(normal),
    "signs": lambda normal, at: FP16_MAX * normal.sign(),
    "alternate": lambda normal, at: FP16_MAX * (1.0 - 2 * (at % 2)).expand(normal.shape),
    "normal": lambda normal, at: normal,
    "one": lambda normal, at: torch.ones_like(normal),
    "subnormal": lambda normal, at: normal * 2.0**-22,
    "after": lambda normal, at: FP16_MAX * torch.where(at < 128, torch.zeros_like(normal), 1.0),
}
"""V of N(0, 1) numbers and the keys' indices."""


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
    """Return q (1, 1, 5, D), k and v (1, 1, Skv, D), FP16, all finite."""
    g = torch.Generator().manual_seed(genes.seed)
    q, k = (genes.noise * torch.randn(1, 1, n, genes.dim, generator=g) for n in (5, genes.keys))
    chosen = torch.rand(genes.dim, generator=g) < genes.columns
    sign = torch.randn(genes.keys, generator=g).sign()  # drawn whatever the profile, so that others keep their numbers
    along = sign if genes.profile == "sign" else PROFILES[genes.profile](genes.keys)
    q[..., chosen] += genes.base
    k[..., chosen] += genes.base + genes.slope * along.unsqueeze(-1)
    for x in (q, k):
        x[torch.rand(x.shape, generator=g) < genes.outliers] += genes.size
    k[:, :, torch.rand(genes.keys, generator=g) < genes.ties] = k[:, :, :1].clone()
    normal = torch.randn(k.shape, generator=g)
    v = VALUES[genes.values](normal, torch.arange(genes.keys).unsqueeze(-1))
    return fit(q, torch.float16), fit(k, torch.float16), v.half()


def mutate(genes: Genes, rng: Random) -> Genes:
    """Change one to three genes."""
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
        "profile": lambda: rng.choice((*PROFILES, "sign")),
        "values": lambda: rng.choice(list(VALUES)),
        "seed": lambda: rng.getrandbits(20),
    }
    chosen = rng.sample(list(changes), rng.randint(1, 3))
    return dataclasses.replace(genes, **{name: changes[name]() for name in chosen})  # type: ignore[arg-type]


def badness(genes: Genes, backend: str, config: pasa.PasaConfig) -> float:
    """Return the worst error over its bound, and `BROKEN` for every number that is not finite."""
    q, k, v = make(genes)
    call = Call(q, k, v, None, False, 2.0**genes.exponent)
    with available(backend):
        out, lse = pasa.attention(q, k, v, scale=call.scale, config=config, backend=backend, return_lse=True)
    stores = 1 + 2 * -(-genes.keys // config.block_k) * (config.accumulate == "fp16")
    how = Arithmetic(q.dtype, stores, config.softmax != "safe")
    measures = judge(find_truth(call, fp16_scores=backend != TRITON), out, lse, how)
    return BROKEN * measures["finite"] + max(measures[name] for name in ("range", "heavy", "error", "lse"))


def search(backend: str, config: pasa.PasaConfig, evaluations: int, seed: int) -> tuple[float, Genes]:
    """Return the worst that mutation and selection find."""
    rng = Random(f"search {backend} {config} {seed}")
    best = [(badness(genes, backend, config), genes) for genes in (Genes(), Genes(values="normal"))]
    while evaluations > 0:
        parents = [genes for _, genes in best]
        fresh = [mutate(rng.choice(parents), rng) for _ in range(CHILDREN)] + [mutate(mutate(Genes(), rng), rng)]
        best += [(badness(genes, backend, config), genes) for genes in fresh]
        best = sorted(best, key=lambda each: -each[0])[:POPULATION]
        evaluations -= len(fresh)
    return best[0]


def modes(backend: str) -> list[pasa.PasaConfig]:
    """Return every arithmetic that is promised not to overflow."""
    overflows = ("inf",) if backend == TRITON else CHOICES["overflow"]
    accumulates = CHOICES["accumulate"] if backend == REFERENCE else ("fp32",)
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
