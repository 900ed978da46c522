"""The table of cases that are timed: shapes and data, and the work of a case."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from pasa.eval.kit.error_metrics import PAPER_SHAPE as SHAPE
from pasa.eval.kit.error_metrics import generator
from pasa.eval.speed import recorded

Entry = TypeVar("Entry")
HALF_BYTES = 2
CONSTANTS: dict[str, tuple[str, float]] = {
    "constant": ("qk", 20.0),  # q.k near 51,000 at D = 128
    **{
        f"{part}-constant-{value}": (part, float(value))
        for part in ("q", "k", "qk")
        for value in (5, 20, 40)
        if (part, value) != ("qk", 20)
    },
}
"""To which of Q and K a kind of data adds which constant; `constant` is the name of qk-constant-20 in stored runs."""
CHANNEL_BIAS, BIASED_CHANNELS = 80.0, 16  # as BiasCase of the RMSE benchmark: q.k near 102,000
# Standard deviation of the scores in nats: median and largest head of SmolLM2-135M on 1,024 tokens of text.
SPREADS = {"spread-2.7": 2.7, "spread-6.9": 6.9}
OUTLIER = 20.0  # factor of one key's length: its scores have a standard deviation of 20 nats
_NAMES = {"q": "Q", "k": "K", "qk": "Q and K"}
DATA = {
    "randn": "Q, K, V from N(0, 1)",
    **{name: f"{_NAMES[parts]} from N(0, 1) + {value:g}" for name, (parts, value) in CONSTANTS.items()},
    "channels": f"Q and K from N(0, 1), {CHANNEL_BIAS:g} added to {BIASED_CHANNELS} channels",
    "outlier-key": f"from N(0, 1), the middle key times {OUTLIER:g}",
    **{
        name: f"from N(0, 1), Q times {spread:g}: the deviation of the scores in nats"
        for name, spread in SPREADS.items()
    },
    "recorded": f"from layers of SmolLM2-135M-Instruct on text, {recorded.TILING}",
}
FORMULA = (
    "TFLOPS = 4 B Hq Sq Skv D / time; causal with Sq = Skv: half of it; otherwise causal: Sq Skv becomes the number of "
    "visible (query, key) pairs"
)


@dataclass(frozen=True)
class Inputs:
    """Tensors of a case: q (B, Hq, Sq, D), k and v (B, Hkv, Skv, D), and a boolean mask (B, 1, 1 or Sq, Skv) or None.

    A mask (True: visible) includes the causality of its case, as masks of transformers do; `causal` is then False.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    decode: bool
    mask: Tensor | None = None

    @property
    def visibility(self) -> dict[str, Any]:
        """Return the options of `scaled_dot_product_attention` and `pasa.attention` that say who sees which keys."""
        return {"is_causal": self.causal} if self.mask is None else {"attn_mask": self.mask}

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v."""
        return self.q, self.k, self.v

    def copy(self) -> Inputs:
        """Return the same numbers in other memory: a measured implementation may write into them."""
        mask = None if self.mask is None else self.mask.clone()
        return dataclasses.replace(self, q=self.q.clone(), k=self.k.clone(), v=self.v.clone(), mask=mask)


@dataclass(frozen=True)
class SpeedCase:
    """One shape (B, Hq, Hkv, Sq, Skv, D) with one kind of data; a biased case is named ``shape+data``."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    rows: int
    keys: int
    dim: int
    causal: bool = False  # bottom-right aligned
    decode: bool = False  # few rows, many keys, judged by memory traffic; not causal, since some peers align top-left
    data: str = "randn"  # a key of `DATA`
    graphed: bool = False  # timed inside a CUDA graph as well, because eager calls are bound by their launches
    padded: bool = False  # left-padded sequences, by a boolean mask

    @property
    def flops(self) -> float:
        """Return the multiplications and additions of the two products, by `FORMULA`."""
        rows, keys = self.rows, self.keys
        pairs = float(rows * keys)
        if self.causal and rows == keys:
            pairs /= 2
        elif self.causal:
            pairs = float(sum(min(max(row + 1 + keys - rows, 0), keys) for row in range(rows)))
        return 4.0 * self.batch * self.heads * pairs * self.dim

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of K and V in FP16, which decoding reads at the least."""
        return 2 * self.batch * self.kv_heads * self.keys * self.dim * HALF_BYTES

    @property
    def bytes(self) -> int:
        """Return the bytes of Q, K, V, the output and the mask, with K and V expanded to all query heads."""
        vectors = 2 * self.batch * self.heads * (self.rows + self.keys)
        masked = self.batch * self.keys * (self.rows if self.causal else 1)
        return vectors * self.dim * HALF_BYTES + (masked if self.padded else 0)

    @property
    def shape(self) -> str:
        """Return such as ``(1, 28/4, 8192, 128) causal``; Sq x Skv where they differ."""
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        lengths = f"{self.keys}" if self.rows == self.keys else f"{self.rows} x {self.keys}"
        return f"({self.batch}, {heads}, {lengths}, {self.dim}) {'causal' if self.causal else 'full'}"

    @property
    def described(self) -> dict[str, Any]:
        """Return what a stored run says of the case."""
        return {
            "name": self.name, "shape": self.shape, "data": self.data, "decode": self.decode, "padded": self.padded
        }  # fmt: skip

    def inputs(self, device: torch.device | str) -> Inputs:
        """Return the tensors, the same on every call on one kind of device."""
        mask = self.mask(device) if self.padded else None
        if self.data == "recorded":
            q, k, v = recorded.tile(self.batch, self.heads, self.kv_heads, self.rows, self.keys, self.dim, device)
        else:
            sizes = (("q", self.heads, self.rows), ("k", self.kv_heads, self.keys), ("v", self.kv_heads, self.keys))
            q, k, v = (self._draw(*each, device) for each in sizes)
        return Inputs(q, k, v, self.causal and mask is None, self.decode, mask)

    def paddings(self) -> Tensor:
        """Return how many keys at the left of each sequence are padding (B,): at most half; the first has none."""
        drawn = torch.randint(self.keys // 2 + 1, (self.batch,), generator=generator(0, self.name, "padding"))
        drawn[0] = 0
        return drawn

    def mask(self, device: torch.device | str) -> Tensor:
        """Return the boolean mask of left-padded sequences (B, 1, 1 or Sq, Skv), with causality if the case has it."""
        keys = torch.arange(self.keys, device=device)
        visible = (keys >= self.paddings().to(device)[:, None])[:, None, None]
        if not self.causal:
            return visible
        rows = torch.arange(self.rows, device=device)[:, None]
        return visible & (keys <= rows + self.keys - self.rows)

    def _draw(self, part: str, heads: int, length: int, device: torch.device | str) -> Tensor:
        # A CUDA generator: drawing 147 million numbers on the CPU takes longer than timing them.
        source = torch.Generator(device).manual_seed(generator(0, self.name.partition("+")[0], part).initial_seed())
        x = torch.randn(self.batch, heads, length, self.dim, generator=source, device=device)
        parts, constant = CONSTANTS.get(self.data, ("", 0.0))
        if part in parts:
            x += constant
        if self.data == "channels" and part != "v":
            x[..., :BIASED_CHANNELS] += CHANNEL_BIAS
        if self.data == "outlier-key" and part == "k":
            x[:, :, length // 2] *= OUTLIER
        if part == "q":
            x *= SPREADS.get(self.data, 1.0)
        return x.half()


PLAIN_CASES = (
    SpeedCase("paper", SHAPE[0], SHAPE[1], SHAPE[1], SHAPE[2], SHAPE[2], SHAPE[3], graphed=True),
    # Qwen2-7B has 28 query heads on 4 key heads.
    *(
        SpeedCase(f"qwen2-{n}k", 1, 28, 4, 1024 * n, 1024 * n, 128, causal=True, graphed=n == 8)
        for n in (2, 4, 8, 16, 32)
    ),
    SpeedCase("qwen2-8k-full", 1, 28, 4, 8192, 8192, 128),
    SpeedCase("gqa-2x4k", 2, 32, 8, 4096, 4096, 128, graphed=True),
    SpeedCase("image-4k", 1, 24, 24, 4096, 4096, 128, graphed=True),
    SpeedCase("image-4x1k", 4, 16, 16, 1024, 1024, 64, graphed=True),
    SpeedCase("svd", 50, 5, 5, 9216, 9216, 64),
    SpeedCase("svd-2", 50, 10, 10, 2304, 2304, 64),
    *(
        SpeedCase(f"decode-{rows}x{n}k", 1, 28, 4, rows, 1024 * n, 128, decode=True, graphed=True)
        for n in (32, 128)
        for rows in (1, 16)
    ),
    SpeedCase("decode-batch-16x8k", 16, 28, 4, 1, 8192, 128, decode=True, graphed=True),
)
BIASED = ("paper", "qwen2-8k", "svd", "decode-1x128k")  # run again with keys that share a bias: a shift is active
CASES = (
    *PLAIN_CASES,
    *(
        dataclasses.replace(case, name=f"{case.name}+{data}", data=data)
        for case in PLAIN_CASES
        if case.name in BIASED
        for data in ("constant", "channels")
    ),
)


def select(known: Mapping[str, Entry], names: Sequence[str] | None) -> tuple[Entry, ...]:
    """Return the entries of these names, or all; ValueError for an unknown name."""
    for name in names or ():
        if name not in known:
            raise ValueError(f"{name!r} is not one of {sorted(known)}")
    return tuple(known[name] for name in dict.fromkeys(names or known))


def select_cases(names: Sequence[str] | None = None, data: Sequence[str] | None = None) -> tuple[SpeedCase, ...]:
    """Return cases by name, or all of them; with `data` these shapes with each of these kinds of data."""
    if not data:
        return select({case.name: case for case in CASES}, names)
    shapes = select({case.name: case for case in PLAIN_CASES}, names)
    kinds = select({kind: kind for kind in DATA}, data)
    return tuple(
        case if kind == "randn" else dataclasses.replace(case, name=f"{case.name}+{kind}", data=kind)
        for case in shapes
        for kind in kinds
    )
