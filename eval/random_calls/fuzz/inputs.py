"""Tensors of random calls: numbers, masks, strides, and NaN or infinity among them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from pasa.eval.random_calls.fuzz.cases import SEED, Params
from pasa.eval.random_calls.soak.data import GARBAGE, SCORES, VALUES, Draw, fit
from pasa.eval.random_calls.soak.layouts import LAYOUTS

WIDE_DATA = ("bias",)  # they need 16 columns
LOWEST = (-65504.0, torch.finfo(torch.float32).min, -torch.inf)  # what models write for "hidden"
MASKS = ("none", "bool", "float", "float16", "bfloat16", "row", "keys", "scalar", "heads", "padding", "padding-float",
         "expanded", "strided")  # fmt: skip
STRIDES = (*(name for name in LAYOUTS if name != "heads last"), "stepped", "reversed")
"""How the same numbers lie in memory."""


@dataclass
class Call:
    """Heads first: q (B, Hq, Sq, D), k and v (B, Hkv, Skv, D), mask (..., Sq, Skv)."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None


def make(params: Params) -> Call:
    """The tensors of a case, contiguous."""
    rng = Random(params[SEED])
    source = torch.Generator().manual_seed(rng.getrandbits(62))
    batch, kv_heads, dim = params["batch"], params["heads"], params["dim"]
    heads = kv_heads * params["groups"]
    sizes = (heads, params["rows"]), (kv_heads, params["keys"]), (kv_heads, params["keys"])
    q, k, v = (torch.randn(batch, count, length, dim, generator=source) for count, length in sizes)
    draw = Draw(q, k, rng, source)
    wanted = params["data"] if dim >= 16 or params["data"] not in WIDE_DATA else "mean"
    dtype = getattr(torch, params["dtype"])
    tensors = *SCORES[wanted](draw), VALUES[params["values"]](draw, v)
    q, k, v = (fit(x, dtype).clone() for x in tensors)
    if params["strides"] == "expanded":  # one head of keys for all
        k, v = (x[:, :1].expand(x.shape).clone() for x in (k, v))
    mask = draw_mask(params["mask"], q, k, rng, source)
    call = Call(q, k, v, mask)
    plant(params, call, rng)
    return call


def draw_mask(kind: str, q: Tensor, k: Tensor, rng: Random, source: torch.Generator) -> Tensor | None:
    """One of `MASKS` for q (B, Hq, Sq, D) and k (B, Hkv, Skv, D); a row or an entry may see nothing."""
    if kind == "none":
        return None
    batch, heads, rows, keys = *q.shape[:3], k.shape[2]
    shapes = {"row": (rows, 1), "keys": (keys,), "scalar": (), "heads": (heads, 1, 1), "float": (batch, 1, rows, keys)}
    if kind in ("padding", "padding-float"):
        first = torch.randint(0, keys + 1, (batch, 1, 1, 1), generator=source)
        keep = torch.arange(keys) >= first if rng.random() < 0.5 else torch.arange(keys) < first
        return keep if kind == "padding" else torch.where(keep, 0.0, rng.choice(LOWEST))
    shape = shapes.get(kind, (batch, heads, rows, keys))
    keep = torch.rand(shape, generator=source) < rng.choice((0.1, 0.7, 1.0))
    if kind in ("bool", "float") and rng.random() < 0.5:
        keep[..., rng.randrange(rows), :] = False
    if kind in ("float", "float16", "bfloat16"):
        bias = rng.choice((1.0, 1.0, 1e4)) * torch.randn(keep.shape, generator=source)
        return torch.where(keep, bias, -torch.inf).to(torch.float32 if kind == "float" else getattr(torch, kind))
    if kind == "expanded":
        return keep[:1, :1].expand(keep.shape)
    return keep.mT.contiguous().mT if kind == "strided" else keep


def indices(params: Params, values: Any) -> Tensor:
    """Integers as a call is given them: 32 or 64 bits, and perhaps every other number of a tensor."""
    x = torch.as_tensor(values).to(torch.int64 if params["wide"] else torch.int32)
    return torch.stack([x, torch.full_like(x, -5)], -1)[..., 0] if params["spaced"] else x


def plant(params: Params, call: Call, rng: Random) -> None:
    """Put NaN or infinity into one to three places, in place."""
    name = params["garbage"]
    x = {"query": call.q, "key": call.k, "value": call.v, "mask": call.mask}.get(name)
    if x is None or (name == "mask" and not x.is_floating_point()):
        return
    for _ in range(rng.randint(1, 3)):
        place: tuple[int | slice, ...] = tuple(rng.randrange(n) for n in x.shape)
        if params["strides"] == "expanded" and name in ("key", "value"):
            place = (place[0], slice(None), *place[2:])  # one head stands for all
        x[place] = rng.choice(GARBAGE[:2] if name == "mask" else GARBAGE)


def lay_out(kind: str, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """The same numbers, lying otherwise."""
    if kind == "stepped":  # every other row of a longer tensor
        q, k, v = (torch.stack([x, x], 3).flatten(2, 3)[:, :, ::2] for x in (call.q, call.k, call.v))
        return q, k, v
    if kind == "reversed":  # batch and heads in the wrong order
        q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (call.q, call.k, call.v))
        return q, k, v
    return LAYOUTS[kind](call.q, call.k, call.v)
