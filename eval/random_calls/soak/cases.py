"""Random cases: each comes from the seed and its index alone."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Any

import torch
from torch import Tensor

from pasa.eval.random_calls.soak.data import GARBAGE, ORDINARY, ORDINARY_VALUES, SCORES, VALUES, Draw, fit
from pasa.eval.random_calls.soak.families import PAPER, Family, draw_families
from pasa.eval.random_calls.soak.layouts import LAYOUTS
from pasa.eval.random_calls.soak.masks import draw_mask, seen_rows

GARBAGE_SHARE, REPEAT_EVERY = 0.1, 20
EMULATED_SHARE = 0.4  # of which about half are ordinary: a fifth of all are compared
SCALES = (None,) * 7 + (1e-4, 1.0, 30.0)
SMALL_ROWS, SMALL_KEYS, SMALL_DIM = 40, 140, 128  # what Triton's interpreter does in a second


@dataclass(frozen=True)
class SoakCase:
    """One call.

    Attributes
    ----------
    seed, index : int
        Where it comes from.
    family : Family
    rows, keys : tuple of int
        Sq and Skv, one for each sequence if packed.
    data, values : str
        Keys of `data.SCORES` and `data.VALUES`.
    scale : float, optional
    garbage : str
        "none", or which of "query", "key", "value", "mask" holds a NaN or infinity.
    where : str
        "seen" or "hidden": whether it is put where few rows see it.
    emulated : bool
        Compare with the reference's emulation of the same arithmetic.
    poisoned : bool
        Memory that the call allocates is filled with NaN first.
    """

    seed: int
    index: int
    family: Family
    rows: tuple[int, ...]
    keys: tuple[int, ...]
    data: str
    values: str
    scale: float | None
    garbage: str
    where: str
    emulated: bool
    poisoned: bool

    @property
    def repeated(self) -> bool:
        """Run twice, to be compared bit for bit."""
        return self.index % REPEAT_EVERY == 0

    @property
    def ordinary(self) -> bool:
        """Scores and values that an FP16 emulation is good at."""
        return self.data in ORDINARY and self.values in ORDINARY_VALUES

    def describe(self) -> dict[str, Any]:
        """Flat and JSON-able."""
        found = dataclasses.asdict(self)
        family = {("family" if name == "name" else name): value for name, value in found.pop("family").items()}
        return {name: found[name] for name in ("seed", "index")} | family | found


@dataclass(frozen=True)
class Inputs:
    """Tensors of a call as the caller holds them: (B, H, S, D), (B, S, H, D) or packed (T, H, D)."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    cu_q: Tensor | None
    cu_k: Tensor | None


def draw_case(seed: int, index: int, small: bool = False) -> SoakCase:
    """Case `index` of a seed; `small` ones have the same variety and sizes for an interpreter."""
    rng = Random(f"case {seed} {index}")
    family = rng.choice(draw_families(seed))
    if small:
        family = shrink(family)
    count = family.batch if family.packed else 1
    rows, keys = ([_length(rng, bounds, family) for _ in range(count)] for bounds in (family.rows, family.keys))
    if family.packed:  # a sequence may be empty; not all of them, and not the first
        rows, keys = (_packed(rng, lengths) for lengths in (rows, keys))
    paper = family.recovery == PAPER
    garbage = "none"
    if rng.random() < GARBAGE_SHARE and not paper:
        garbage = rng.choice(("query", "key", "key", "value", "value", *("mask",) * 3 * ("float" in family.mask)))
    data = rng.choice((*ORDINARY, *SCORES))  # ordinary ones twice as often
    return SoakCase(
        seed,
        index,
        family,
        tuple(rows),
        tuple(keys),
        "randn" if paper else data,
        "randn" if paper or rng.random() < 0.5 else rng.choice(list(VALUES)),
        None if paper else rng.choice(SCALES),
        garbage,
        rng.choice(("seen", "hidden")),
        paper or rng.random() < EMULATED_SHARE,
        rng.random() < 0.5,
    )


def shrink(family: Family) -> Family:
    """The same in small."""
    rows, keys = ((min(low, most // 2), min(high, most)) for (low, high), most in zip(
        (family.rows, family.keys), (SMALL_ROWS, SMALL_KEYS), strict=True
    ))  # fmt: skip
    group = family.heads // family.kv_heads
    batch = min(family.batch, 3 if family.packed else 2)
    small = {"rows": rows, "keys": keys, "batch": batch, "heads": group, "kv_heads": 1}
    return dataclasses.replace(family, **small, dim=min(family.dim, SMALL_DIM))  # type: ignore[arg-type]


def _length(rng: Random, bounds: tuple[int, int], family: Family) -> int:
    """Log-uniform; multiples of 16, or odd: Triton compiles anew for arguments that 16 divides."""
    low, high = bounds
    if low == high:
        return low
    length = round(math.exp(rng.uniform(math.log(low), math.log(high))))
    if family.aligned:
        return max(16, length // 16 * 16)
    return length | 1 if length < high else (length - 1) | 1


def _packed(rng: Random, lengths: list[int]) -> list[int]:
    """Sequences but for the first may be empty; a sum of odd lengths stays odd."""
    drawn = [lengths[0], *(0 if rng.random() < 0.15 else n for n in lengths[1:])]
    drawn[0] += 1 - sum(drawn) % 2 if lengths[0] % 2 else 0
    return drawn


def make_inputs(case: SoakCase, device: torch.device) -> Inputs:
    """The tensors; drawn on the CPU, so that they are the same everywhere."""
    family, rng = case.family, Random(f"data {case.seed} {case.index}")
    source = torch.Generator().manual_seed(rng.getrandbits(62))
    batch = 1 if family.packed else family.batch
    sizes = (family.heads, sum(case.rows)), (family.kv_heads, sum(case.keys)), (family.kv_heads, sum(case.keys))
    q, k, v = (torch.randn(batch, heads, length, family.dim, generator=source) for heads, length in sizes)
    draw = Draw(q, k, rng, source)
    q, k = SCORES[case.data](draw)
    v = VALUES[case.values](draw, v)
    dtype = getattr(torch, family.dtype)
    q, k, v = (fit(x, dtype).clone() for x in (q, k, v))
    if family.layout == "expanded":  # one head of keys for all
        k, v = (x[:, :1].expand(x.shape).clone() for x in (k, v))
    mask = draw_mask(family.mask, q, k, rng, source, mild=family.recovery == PAPER)
    plant(case, q, k, v, mask, rng)
    q, k, v = (x.to(device) for x in (q, k, v))
    if not family.packed:
        return Inputs(*LAYOUTS[family.layout](q, k, v), None if mask is None else mask.to(device), None, None)
    packed = LAYOUTS[family.layout](*(x[0].transpose(0, 1).contiguous() for x in (q, k, v)))
    edges = [torch.tensor([0, *accumulate(n)], dtype=torch.int32, device=device) for n in (case.rows, case.keys)]
    return Inputs(*packed, None, *edges)


def plant(case: SoakCase, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rng: Random) -> None:
    """Put NaN or infinity into one to three places, in place."""
    if case.garbage == "none":
        return
    seen = seen_rows(mask, case.family.causal and not case.family.packed, q, k)  # (B, Skv): how many rows see a key
    for _ in range(rng.randint(1, 3)):
        entry, bad = rng.randrange(q.shape[0]), rng.choice(GARBAGE)
        fewest = (seen[entry] == seen[entry].min()).nonzero().flatten().tolist()
        key = rng.choice(fewest) if case.where == "hidden" else rng.randrange(k.shape[2])
        head, column = rng.randrange(k.shape[1]), rng.randrange(q.shape[-1])
        heads = slice(None) if case.family.layout == "expanded" else head  # one head stands for all
        if case.garbage == "query":
            q[entry, rng.randrange(q.shape[1]), rng.randrange(q.shape[2]), column] = bad
        elif case.garbage == "mask" and mask is not None:
            mask[..., rng.randrange(mask.shape[-2]), key] = rng.choice((torch.nan, torch.inf))
        else:
            (k if case.garbage == "key" else v)[entry, heads, key, column] = bad
