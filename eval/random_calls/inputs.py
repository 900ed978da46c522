"""Tensors of random calls: numbers, masks, strides, and NaN or infinity among them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from pasa.eval.random_calls.backends import SDPA
from pasa.eval.random_calls.cases import SEED, Params
from pasa.eval.random_calls.number_draws import SCORES, VALUES, Draw, fit
from pasa.ops.numerics.formats import FP16_MAX, FP32_MAX

GARBAGE = (torch.nan, torch.inf, -torch.inf)
LOWEST = (-FP16_MAX, -FP32_MAX, -torch.inf)  # what models write for a key that is masked out
MASKS = ("none", "bool", "float", "float16", "bfloat16", "row", "keys", "scalar", "heads", "padding", "padding-float",
         "expanded", "strided")  # fmt: skip
BOOL_MASKS = tuple(name for name in MASKS if name != "none" and "float" not in name)
SINKS = {"ordinary": 3.0, "large": 1e4}  # standard deviations
NO_KEY = 0.1  # share of the entries whose padding leaves no key


@dataclass(frozen=True)
class Call:
    """A call, heads first."""

    q: Tensor  # (B, Hq, Sq, D)
    k: Tensor  # (B, Hkv, Skv, D)
    v: Tensor
    mask: Tensor | None  # broadcasts to (B, Hq, Sq, Skv)
    causal: bool  # the band is aligned to the last row and key
    scale: float
    sequences: tuple[tuple[int, int], ...] | None = None  # rows and keys of each that is packed into batch entry 0
    window: list[int] | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # (Hq,)

    def to(self, device: torch.device) -> Call:
        """Return the same call on a device."""
        moved: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return dataclasses.replace(self, **moved)

    def visible(self) -> Tensor:
        """Return which row sees which key: (B, Hq, Sq, Skv), bool."""
        rows, keys = self.q.shape[2], self.k.shape[2]
        seen = torch.ones(rows, keys, dtype=torch.bool, device=self.q.device)
        seen = seen.tril(keys - rows) if self.causal else seen
        left, right = self.window or (-1, -1)
        seen = seen.triu(keys - rows - left) if left >= 0 else seen
        seen = seen.tril(keys - rows + right) if right >= 0 else seen
        if self.mask is not None:
            seen = seen & (self.mask if self.mask.dtype == torch.bool else self.mask != -torch.inf)
        return seen.expand(*self.q.shape[:3], keys)


def guaranteed(params: Params) -> bool:
    """Return whether the arithmetic of a call is promised not to overflow."""
    modes = params["precision"], params["recovery"]
    return modes == ("pasa", "exact") and bool(params["softmax"] != "unbiased_paper")


def make(params: Params) -> Call:
    """Return the tensors of a case, contiguous; drawn on the CPU, so that they are the same everywhere."""
    rng = Random(params[SEED])
    source = torch.Generator().manual_seed(rng.getrandbits(62))
    batch, heads, dim = params["batch"], params["heads"], params["dim"]
    sizes = (heads * params["groups"], params["rows"]), (heads, params["keys"]), (heads, params["keys"])
    q, k, v = (torch.randn(batch, count, length, dim, generator=source) for count, length in sizes)
    draw = Draw(q, k, rng, source)
    data = "mean" if params["data"] == "bias" and dim < 16 else params["data"]  # the bias is on up to 16 channels
    dtype = getattr(torch, params["dtype"])
    q, k, v = (fit(x, dtype).clone() for x in (*SCORES[data](draw), VALUES[params["values"]](draw, v)))
    if params["strides"] == "expanded":  # one head of keys for all
        k, v = (x[:, :1].expand(x.shape).clone() for x in (k, v))
    mask = draw_mask(params["mask"], q, k, rng, source, mild=not guaranteed(params))
    scale = dim**-0.5 if params["scale"] is None else params["scale"]
    packed = "row_lengths" in params
    sequences = tuple(zip(params["row_lengths"], params["key_lengths"], strict=True)) if packed else None
    # Older cases have none of these parameters.
    sinks = SINKS[params["sinks"]] * torch.randn(q.shape[1], generator=source) if params.get("sinks") else None
    call = Call(q, k, v, mask, params["causal"], scale, sequences, params.get("window"), params.get("softcap"), sinks)
    plant(params, call, rng)
    return call


def draw_mask(kind: str, q: Tensor, k: Tensor, rng: Random, source: torch.Generator, mild: bool) -> Tensor | None:
    """Return one of `MASKS` for these queries and keys; it may mask out all keys of a row or an entry.

    A `mild` one adds N(0, 1) or -inf: in the FP16 row vectors of the published algorithm -3e38 is -inf, and a block of
    such keys NaN.
    """
    if kind == "none":
        return None
    batch, heads, rows, keys = *q.shape[:3], k.shape[2]
    if kind.startswith("padding"):
        keep = _padding(batch, keys, rng)
        return keep if kind == "padding" else torch.where(keep, 0.0, -torch.inf if mild else rng.choice(LOWEST))
    shapes = {"row": (rows, 1), "keys": (keys,), "scalar": (), "heads": (heads, 1, 1), "float": (batch, 1, rows, keys)}
    keep = torch.rand(shapes.get(kind, (batch, heads, rows, keys)), generator=source) < rng.choice((0.1, 0.7, 1.0))
    if kind in ("bool", "float") and rng.random() < 0.5:
        keep[..., rng.randrange(rows), :] = False
    if kind in ("float", "float16", "bfloat16"):
        size = 1.0 if mild else rng.choice((1.0, 1.0, 1e4))
        bias = torch.where(keep, size * torch.randn(keep.shape, generator=source), -torch.inf)
        return bias if kind == "float" else bias.to(getattr(torch, kind))
    if kind == "expanded":
        return keep[:1, :1].expand(keep.shape)
    return keep.mT.contiguous().mT if kind == "strided" else keep


def _padding(batch: int, keys: int, rng: Random) -> Tensor:
    """Return which keys each entry keeps, (B, 1, 1, Skv): the others lie at the left or at the right of all."""
    at, left = torch.arange(keys), rng.random() < 0.5
    hidden = [keys if rng.random() < NO_KEY else rng.randrange(keys) for _ in range(batch)]
    return torch.stack([at >= n if left else at < keys - n for n in hidden])[:, None, None]


def plant(params: Params, call: Call, rng: Random) -> None:
    """Put NaN or infinity into one to three places, in place: anywhere, or at a key that fewest rows see.

    Kernels of `sdpa` get no infinite key. Where they decode on a GPU, such a key has the weight 0 if its score is -inf,
    as in torch's attention, and the truth calls the row NaN.
    """
    name = params["garbage"]
    x = {"query": call.q, "key": call.k, "value": call.v, "mask": call.mask}.get(name)
    if x is None or not x.is_floating_point():
        return
    bad: tuple[float, ...] = GARBAGE[:2] if name == "mask" else GARBAGE
    if name == "key" and params["backend"] == SDPA and "group" in params:
        bad = GARBAGE[:1]
    alone = dataclasses.replace(call, causal=False) if call.sequences else call
    rows = alone.visible().sum((1, 2))  # that see a key: (B, Skv)
    for _ in range(rng.randint(1, 3)):
        place: list[int | slice] = [rng.randrange(n) for n in x.shape]
        if name != "query" and params["where"] == "hidden":
            seen = rows[place[0]]
            place[-1 if name == "mask" else 2] = rng.choice((seen == seen.min()).nonzero().flatten().tolist())
        if params["strides"] == "expanded" and name in ("key", "value"):
            place[1] = slice(None)  # one head stands for all
        x[tuple(place)] = rng.choice(bad)


# ---- how tensors lie in memory, with the same numbers

Three = tuple[Tensor, Tensor, Tensor]


def _each(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Three]:
    return lambda q, k, v: (change(q), change(k), change(v))


def _fused(q: Tensor, k: Tensor, v: Tensor) -> Three:
    """Return keys and values as two halves of one projection (B, S, 2, H, D)."""
    both = torch.stack([k.transpose(1, 2), v.transpose(1, 2)], 2)
    return q, both[:, :, 0].transpose(1, 2), both[:, :, 1].transpose(1, 2)


STRIDES: dict[str, Callable[[Tensor, Tensor, Tensor], Three]] = {
    "contiguous": _each(lambda x: x),
    "heads last": _each(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),  # (B, S, H, D) in memory
    "sliced": _each(lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]]),  # rows at twice their length
    "turned": _each(lambda x: x.mT.contiguous().mT),  # the last stride is not 1
    "offset": _each(lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)),  # one element off alignment
    "stepped": _each(lambda x: torch.stack([x, x], 3).flatten(2, 3)[:, :, ::2]),  # every other row of a longer tensor
    "reversed": _each(lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)),  # batch and heads in the other order
    "fused": _fused,
    "expanded": lambda q, k, v: (q, k[:, :1].expand(k.shape), v[:, :1].expand(v.shape)),  # heads by a stride of 0
}


def indices(params: Params, values: Any) -> Tensor:
    """Return integers as a call takes them: 64 bits in place of 32 if `wide`, every other number if `spaced`."""
    x = torch.as_tensor(values).to(torch.int64 if params.get("wide") else torch.int32)
    return torch.stack([x, torch.full_like(x, -5)], -1)[..., 0] if params.get("spaced") else x
