"""Random batches of the same sequences, for tests that a sequence has the same bits in each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import pasa

HEADS = ((4, 2), (3, 1), (2, 2), (8, 1))
DIMS = (16, 40, 64, 128)
BIASES = (0.0, 0.0, 60.0, 4000.0)  # at 60, FP16 scores overflow; at 4000, FP32 sums of them have no digit left
SPREADS = (*(1.0,) * 7, 1000.0)  # at 1000, no anchor helps, and every split needs the exact pass
FEATURES: tuple[dict[str, Any], ...] = ({}, {}, {"window": (37, 0)}, {"softcap": 20.0}, {"sinks": True})
Bits = tuple[Tensor, ...]  # output (rows, Hq, D), log-sum-exp (rows, Hq) and largest scores (Hq,) of a sequence


class Sequence(NamedTuple):
    """Hold queries (rows, Hq, D), and keys and values (keys, Hkv, D); `hidden` keys, first ones if negative, pad."""

    q: Tensor
    k: Tensor
    v: Tensor
    hidden: int = 0


@dataclass(frozen=True)
class Pool:
    """Hold sequences that are batched in one way, and the arguments of all calls.

    Attributes
    ----------
    kind : str
        A key of `KINDS`.
    sequences : tuple of Sequence
        Those of "dense" and "masked" calls have equally many rows and keys.
    how : dict
    """

    kind: str
    sequences: tuple[Sequence, ...]
    how: dict[str, Any]

    def attend(self, members: list[int], g: torch.Generator) -> list[Bits]:
        """Return the results of each member of a batch."""
        return KINDS[self.kind]([self.sequences[each] for each in members], g, self.how)


def draw(kind: str, seed: int, size: int = 5, device: str = "cpu", **how: Any) -> Pool:
    """Draw a pool; half of the sequences have keys with a bias, some have large ones, and the last has a NaN."""
    g = torch.Generator().manual_seed(seed)
    heads, dim = HEADS[pick(g, len(HEADS))], DIMS[pick(g, len(DIMS))]
    feature = dict(FEATURES[pick(g, len(FEATURES))]) if kind != "masked" else {}
    if feature.get("sinks"):
        feature["sinks"] = torch.randn(heads[0], generator=g)
    if kind in ("decode", "anchored"):
        lengths = [(1, 1 + pick(g, 700)) for _ in range(size)]
    elif kind in ("dense", "masked"):
        rows = (1, 5, 70, 150)[pick(g, 4)]
        lengths = [(rows, rows + pick(g, 150 if rows > 5 else 700))] * size
    else:
        rows_of = [(1, 1 + pick(g, 8), 1 + pick(g, 60))[pick(g, 3)] for _ in range(size)]
        lengths = [(rows, rows + pick(g, 150)) for rows in rows_of]
    sequences = tuple(one(g, heads, dim, *length) for length in lengths)
    sequences[-1].k[0, 0, 0] = torch.nan
    sequences = tuple(Sequence(*(x.to(device) for x in each[:3])) for each in sequences)
    if kind == "masked":
        sequences = tuple(each._replace(hidden=pick(g, 80) - 40) for each in sequences)
    if feature.get("sinks") is not None:
        feature["sinks"] = feature["sinks"].to(device)
    return Pool(kind, sequences, {"is_causal": bool(pick(g, 2)), "return_lse": True, **feature, **how})


def one(g: torch.Generator, heads: tuple[int, int], dim: int, rows: int, keys: int) -> Sequence:
    """Draw a sequence."""
    q, k, v = (torch.randn(n, h, dim, generator=g) for n, h in ((rows, heads[0]), (keys, heads[1]), (keys, heads[1])))
    k[:, :, : dim // 2] += BIASES[pick(g, len(BIASES))]
    k *= SPREADS[pick(g, len(SPREADS))]
    k.clamp_(-60000.0, 60000.0)
    q[:, :, : dim // 4] += 2.0 * pick(g, 2)
    return Sequence(q.half(), k.half(), v.half())


def pick(g: torch.Generator, count: int) -> int:
    """Draw an integer from 0 to count - 1."""
    return int(torch.randint(count, (1,), generator=g))


def batches(pool: Pool, count: int, seed: int) -> Iterator[tuple[list[int], torch.Generator]]:
    """Yield members of random batches, which may occur twice, and a generator for how they are laid out."""
    g = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield [pick(g, len(pool.sequences)) for _ in range(2 + pick(g, 3))], g


def changed(pool: Pool, count: int, seed: int) -> int:
    """Return how many of `count` random batches change a bit of a member, compared with a batch of it alone."""
    alone: dict[int, Bits] = {}
    different = 0
    for members, g in batches(pool, count, seed):
        for each in members:
            if each not in alone:
                (alone[each],) = pool.attend([each], torch.Generator().manual_seed(seed))
        got = pool.attend(members, g)
        different += not all(same(own, alone[each]) for own, each in zip(got, members, strict=True))
    return different


def same(a: Bits, b: Bits) -> bool:
    """Return whether all bits are equal; NaN equals NaN."""
    return len(a) == len(b) and all(
        bool(((x == y) & (x.signbit() == y.signbit()) | (x.isnan() & y.isnan())).all()) and x.shape == y.shape
        for x, y in zip(a, b, strict=True)
    )


# ---- kinds of batches


def dense(members: list[Sequence], _: torch.Generator, how: dict[str, Any]) -> list[Bits]:
    """Stack sequences into (B, H, S, D)."""
    q, k, v = (torch.stack([getattr(each, name).transpose(0, 1) for each in members]) for name in "qkv")
    out, lse, *top = pasa.attention(q, k, v, **how)
    return [(out[b].transpose(0, 1), lse[b].T, *(x[b] for x in top)) for b in range(len(members))]


def masked(members: list[Sequence], g: torch.Generator, how: dict[str, Any]) -> list[Bits]:
    """Stack sequences of which some keys, first or last ones, are hidden as padding is."""
    keys = members[0].k.shape[0]
    visible = torch.ones(len(members), 1, 1, keys, dtype=torch.bool)
    for b, each in enumerate(members):
        visible[b, ..., slice(0, -each.hidden) if each.hidden < 0 else slice(keys - each.hidden, keys)] = False
    return dense(members, g, how | {"attn_mask": visible.to(members[0].q.device)})


def packed(members: list[Sequence], _: torch.Generator, how: dict[str, Any]) -> list[Bits]:
    """Put sequences one after another."""
    q, k, v = (torch.cat([getattr(each, name) for each in members]) for name in "qkv")
    cu = [torch.tensor([0, *(len(getattr(each, name)) for each in members)]).cumsum(0).int() for name in "qk"]
    longest = [int(each.diff().max()) for each in cu]
    out, lse, *top = pasa.attention_varlen(q, k, v, *(each.to(q.device) for each in cu), *longest, **how)
    spans = [slice(*cu[0][b : b + 2].tolist()) for b in range(len(members))]
    return [(out[span], lse[span], *(x[b] for x in top)) for b, span in enumerate(spans)]


def decode(members: list[Sequence], g: torch.Generator, how: dict[str, Any]) -> list[Bits]:
    """Put sequences of one query each into pages, without cumulative lengths."""
    cache = in_pages(members, g)
    q = torch.cat([each.q for each in members])
    how = how | hints(members, g)
    if how.pop("anchored", False):
        how["key_anchors"] = page_anchors(members, *cache)
    out, lse, *top = pasa.attention_paged(q, *cache, **how)
    return [(out[b : b + 1], lse[b : b + 1], *(x[b] for x in top)) for b in range(len(members))]


def paged(members: list[Sequence], g: torch.Generator, how: dict[str, Any]) -> list[Bits]:
    """Put sequences into pages, with padding behind the queries."""
    cache, padding = in_pages(members, g), pick(g, 4)
    q = torch.cat([each.q for each in members])
    q = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, padding), value=torch.nan)
    cu = torch.tensor([0, *(len(each.q) for each in members)]).cumsum(0).int()
    how = how | hints(members, g) | {"cu_seqlens_q": cu.to(q.device)}
    if pick(g, 2):
        how["max_seqlen_q"] = int(cu.diff().max())
    out, lse, *top = pasa.attention_paged(q, *cache, **how)
    spans = [slice(*cu[b : b + 2].tolist()) for b in range(len(members))]
    return [(out[span], lse[span], *(x[b] for x in top)) for b, span in enumerate(spans)]


def anchored(members: list[Sequence], g: torch.Generator, how: dict[str, Any]) -> list[Bits]:
    """Do the same in pages that keep anchors."""
    return decode(members, g, how | {"anchored": True})


def page_anchors(members: list[Sequence], k_cache: Tensor, v_cache: Tensor, table: Tensor, _: Tensor) -> Tensor:
    """Return the anchors that writing all keys gives; the keys are written again."""
    slots = k_cache.shape[1]
    at = [torch.arange(len(each.k), device=table.device) for each in members]
    where = torch.cat([row.long()[n // slots] * slots + n % slots for row, n in zip(table, at, strict=True)])
    anchors = torch.zeros(len(k_cache), *k_cache.shape[2:], dtype=torch.float16, device=k_cache.device)
    k, v = (torch.cat([getattr(each, name) for each in members]) for name in "kv")
    pasa.write_pages(k, v, k_cache, v_cache, where, anchors)
    return anchors


def hints(members: list[Sequence], g: torch.Generator) -> dict[str, Any]:
    """Return a bound of the number of keys in half of the calls."""
    return {"max_seqlen_k": max(len(each.k) for each in members)} if pick(g, 2) else {}


def in_pages(members: list[Sequence], g: torch.Generator, slots: int = 16) -> tuple[Tensor, ...]:
    """Return caches whose free slots hold NaN, a table of pages in random order, and the numbers of keys."""
    counts = [-(-len(each.k) // slots) for each in members]
    order = torch.randperm(sum(counts) + 2, generator=g)
    table = torch.zeros(len(members), max(counts) + pick(g, 3), dtype=torch.int32)
    shape = (len(order), slots, *members[0].k.shape[1:])
    caches = [members[0].k.new_full(shape, torch.nan) for _ in range(2)]
    for b, each in enumerate(members):
        pages = order[sum(counts[:b]) : sum(counts[: b + 1])]
        table[b, : counts[b]] = pages
        for cache, x in zip(caches, (each.k, each.v), strict=True):
            at = torch.arange(len(x))
            cache[pages[at // slots].to(x.device), (at % slots).to(x.device)] = x
    device = members[0].q.device
    return *caches, table.to(device), torch.tensor([len(each.k) for each in members], dtype=torch.int32).to(device)


KINDS: dict[str, Callable[[list[Sequence], torch.Generator, dict[str, Any]], list[Bits]]] = {
    "dense": dense,
    "masked": masked,
    "packed": packed,
    "decode": decode,
    "anchored": anchored,
    "paged": paged,
}
