"""Random caches in pages: how they lie in memory, how `write_pages` fills them, and calls of `attention_paged`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from random import Random

import torch
from torch import Tensor

import pasa
from pasa.eval.random_calls import attention
from pasa.eval.random_calls.backends import NPU, REFERENCE, TRITON, available
from pasa.eval.random_calls.cases import SEED, Kind, Measures, Params
from pasa.eval.random_calls.inputs import Call, indices, make

SLOTS = (16, 16, 16, 16, 16, 32, 48, 64, 112, 1, 2, 7, 24, 100, 128, 130)
LENGTHS = (0, 1, 2, 15, 16, 17, 33, 64, 65, 100, 200)
STALE = (torch.nan, torch.inf, 0.0)
FILLS = ("at once", "grown", "cut")
SPARE = 3  # pages that no sequence has
GROWN = 3  # tokens of a sequence that are written one at a time
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "together": lambda x: x,
    "beside": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "heads first": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "gapped": lambda x: torch.nn.functional.pad(x, (3, 0, 1, 0, 0, 0, 0, x.shape[1]), value=7.0)[
        :, : x.shape[1], :, 1:, 3:
    ],
}
"""Of keys and values (2, pages, slots, Hkv, D): the same numbers, lying otherwise."""


@dataclass
class Cache:
    """Sequences in pages; their keys and values are those of a call (1, Hkv, keys, D), one after another."""

    both: Tensor  # keys and values (2, pages, slots, Hkv, D)
    plain: Tensor  # the same, contiguous, filled by indexing
    anchors: Tensor | None  # (pages, Hkv, D)
    table: Tensor  # as `attention_paged` takes it
    lengths: Tensor  # of sequences, its seq_lens
    slots: Tensor  # where each key of the call is
    members: list[Tensor]  # which keys of the call a sequence has


def draw_cache(rng: Random, backend: str | None = None) -> Params:
    """Draw an arithmetic, sequences, the pages and how they are filled; `backend` is the NPU's or one of the others."""
    params = attention.draw(rng, backend) | {"mask": "none", "batch": 1, "layout": "HND", "strides": "contiguous"}
    interpreted = rng.random() < 0.05
    params |= {"backend": TRITON if interpreted else REFERENCE, "groups": rng.choice((1, 1, 2, 4, 7, 16, 17, 20))}
    if backend == NPU:
        interpreted = False
        params |= {"backend": NPU}
    if interpreted:
        params |= {"precision": "pasa", "recovery": "exact", "beta": None, "dim": min(params["dim"], 256)}
        params |= {"heads": min(params["heads"], 2 if params["groups"] <= 4 else 1)}
    params = attention.serve(params, rng) | {"operator": rng.random() < 0.2}
    params["diagnose"] &= backend != NPU or not params["operator"]
    few, most = (LENGTHS[:8], 2) if interpreted else (LENGTHS, 4)
    not_finite = ("query",) if backend == NPU else ("query", "key", "value")  # as `attention.serve` says
    lengths = [rng.choice(few) for _ in range(rng.randint(1, most))]
    return params | {
        "lengths": lengths, "keys": max(1, sum(lengths)), "rows": len(lengths),
        "prefix": [0, *(rng.choice((0, 0, 1, 3)) for _ in lengths[1:])],
        "garbage": rng.choice(not_finite) if rng.random() < 0.1 else "none",
        "block_k": 5 if params["block_k"] == 1 else params["block_k"], "slots": rng.choice(SLOTS),
        "view": rng.choice(list(VIEWS)), "stale": rng.randrange(len(STALE)), "fill": rng.choice(FILLS),
        "anchors": rng.random() < (0.8 if interpreted else 0.5),
        "wide": rng.random() < 0.5, "spaced": rng.random() < 0.3,
    }  # fmt: skip


def lay_out(params: Params, call: Call, rng: Random) -> Cache:
    """Return empty pages in random order. Later sequences may begin with full pages of the first."""
    slots, lengths = params["slots"], params["lengths"]
    counts = [-(-n // slots) for n in lengths]
    prefix = [min(n, lengths[0] // slots) for n in params["prefix"]]
    order = list(range(sum(counts) + SPARE))
    rng.shuffle(order)
    width = max(map(sum, zip(counts, prefix, strict=True))) + 1
    table = torch.tensor([[rng.choice((-1, 10**6))] * width for _ in lengths])
    where, members, begin = [], [], 0
    for b, count in enumerate(counts):
        pages = order[sum(counts[:b]) : sum(counts[:b]) + count]
        row = table[0, : prefix[b]].tolist() + pages
        table[b, : len(row)] = torch.tensor(row, dtype=torch.int64)
        at = torch.arange(lengths[b])
        where.append(torch.tensor([*pages, 0])[at // slots] * slots + at % slots)
        members.append(torch.cat([torch.arange(prefix[b] * slots), begin + at]))
        begin += lengths[b]
    shape = (2, len(order), slots, *call.k.shape[1::2])
    plain = torch.full(shape, STALE[params["stale"]], dtype=call.k.dtype)
    anchors = torch.zeros(shape[1], *shape[3:]).half() if params["anchors"] else None
    both, seq_lens = VIEWS[params["view"]](plain.clone()), indices(params, [len(each) for each in members])
    return Cache(both, plain, anchors, indices(params, table), seq_lens, torch.cat(where), members)


def writes(params: Params, call: Call, cache: Cache, rng: Random) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield slots, keys and values of one write after another; all keys of the call stand there at the end."""
    source = torch.Generator().manual_seed(rng.getrandbits(62))
    both = torch.stack([call.k[0], call.v[0]]).transpose(1, 2)[:, : len(cache.slots)]
    keys = torch.arange(len(both[0])).split(params["lengths"])
    last = {"at once": 0, "grown": GROWN, "cut": 0}[params["fill"]]
    first = torch.cat([each[: max(len(each) - last, 0)] for each in keys])
    if params["fill"] == "cut":  # drafts to the end of a page, from some key on
        kept = [each[: rng.randrange(len(each))] if len(each) else each for each in keys]
        drafts = [draft_slots(params, cache, each, keep) for each, keep in zip(keys, kept, strict=True)]
        at = torch.cat([cache.slots[torch.cat(kept)], *drafts])
        wrong = 100 * torch.randn(2, sum(map(len, drafts)), *both.shape[2:], generator=source)
        wrong[0, : rng.choice((0, 3))] = rng.choice(STALE)
        yield at, *torch.cat([both[:, torch.cat(kept)], wrong.to(both.dtype)], 1)
        first = torch.cat([each[len(keep) :] for each, keep in zip(keys, kept, strict=True)])
    first = first[torch.randperm(len(first), generator=source)]
    yield cache.slots[first], *both[:, first]
    for step in range(-last, 0):
        token = torch.cat([each[step : len(each) + step + 1] for each in keys if len(each) >= -step] or [first[:0]])
        yield cache.slots[token], *both[:, token]


def draft_slots(params: Params, cache: Cache, keys: Tensor, kept: Tensor) -> Tensor:
    """Return the slots of a sequence from the first that is not kept to the end of its last page."""
    if not len(keys):
        return keys
    last = int(cache.slots[keys[-1]])
    behind = torch.arange(last + 1, (last // params["slots"] + 1) * params["slots"])
    return torch.cat([cache.slots[keys[len(kept) :]], behind])


def padded(at: Tensor, k: Tensor, v: Tensor, rng: Random) -> tuple[Tensor, Tensor, Tensor]:
    """Add tokens that have no slot: before the others, among them, and behind the end of the mapping."""
    holes = sorted(rng.randrange(len(at) + 1) for _ in range(rng.choice((0, 1, 3))))
    token = [*range(len(at))]
    for hole in reversed(holes):
        token.insert(hole, -1)
    behind = [-1] * rng.choice((0, 2)) if token else [-1]
    nothing = torch.full_like(k[:1], torch.nan) if len(k) else k.new_full((1, *k.shape[1:]), 9.0)
    at = torch.cat([at, at.new_tensor([rng.choice((-1, -9))])])[token]
    k, v = (torch.cat([x, nothing])[token + behind] for x in (k, v))
    return at, k, v


def fill(params: Params, call: Call, rng: Random) -> Cache:
    """Make every write of a case."""
    cache = lay_out(params, call, rng)
    write = writer(params)
    for slots, new_k, new_v in list(writes(params, call, cache, rng)):  # all are drawn before `padded` draws
        for new, plain in zip((new_k, new_v), cache.plain, strict=True):
            plain.flatten(0, 1)[slots] = new
        at, k, v = padded(slots, new_k, new_v, rng)
        k_cache, v_cache = cache.both
        mapping = indices(params, at)
        write(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=mapping, key_anchors=cache.anchors)
    if cache.anchors is not None:  # of pages that no sequence has
        unused = torch.ones(len(cache.anchors), dtype=torch.bool)
        unused[cache.slots // params["slots"]] = False
        cache.anchors[unused] = torch.nan
    return cache


def writer(params: Params) -> Callable[..., None]:
    """Return who writes: the Triton kernels where they attend, the operator itself, or the public function."""
    if not params["operator"] and params["backend"] != TRITON:
        return pasa.write_pages
    write: Callable[..., None] = torch.ops.pasa.write_pages
    if params["backend"] == TRITON:
        from pasa.ops.attention.triton.paged.launch import write_pages as write

    def after_checks(slot_mapping: Tensor, k: Tensor, v: Tensor, **caches: Tensor | None) -> None:
        if n := len(slot_mapping):
            write(k=k[:n], v=v[:n], slot_mapping=slot_mapping, **caches)

    return after_checks


def memory(x: Tensor) -> Tensor:
    """Return all numbers of a tensor's storage, those between its elements too."""
    return x.new_empty(0).set_(x.untyped_storage())


def check_fill(params: Params, cache: Cache, call: Call) -> Measures:
    """Count the numbers that differ from the plain fill, and the anchors that are not what they must be."""
    bits = torch.int32 if cache.plain.dtype == torch.float32 else torch.int16
    written, expected = memory(cache.both), memory(VIEWS[params["view"]](cache.plain))
    # A NaN that is changed to another type and back has other bits.
    differ = (written.view(bits) != expected.view(bits)) & ~(written.isnan() & expected.isnan())
    measures = {"cache": float(differ.sum())}
    if cache.anchors is not None:
        measures["anchors"] = wrong_anchors(cache.anchors, call.k[0].transpose(0, 1), cache)
    return measures


def wrong_anchors(anchors: Tensor, k: Tensor, cache: Cache) -> float:
    """Count what loses a bit of a key, k - a being no FP16 number, or is not NaN just where a key is not finite."""
    k, page = k[: len(cache.slots)].half().double(), cache.slots // cache.plain.shape[2]
    bad = torch.zeros(anchors.shape[:2], dtype=torch.int32)
    bad.index_add_(0, page, (~k.isfinite().all(-1)).int())
    each, must_be_nan = anchors[page].double(), (bad[page] > 0).unsqueeze(-1)
    left = k - each  # exact in FP64
    return float(((left.half().double() != left) & ~must_be_nan).sum() + (each.isnan() != must_be_nan).sum())


def run_write(params: Params) -> Measures:
    """Fill a cache and check all of its memory."""
    call = make(params)
    with available(params["backend"]):
        cache = fill(params, call, Random(params[SEED]))
    return check_fill(params, cache, call)


def draw_attention(rng: Random, backend: str | None = None) -> Params:
    """Draw one query for each sequence, or a few, and padding rows behind them; `backend` as in `draw_cache`."""
    params = draw_cache(rng, backend)
    interpreted, queries, padding = params["backend"] == TRITON, None, 0
    if rng.random() >= (0.75 if interpreted else 0.5):
        queries = [rng.choice((0, 1, 2, 2 if interpreted else 5)) for _ in params["lengths"]]
        padding = max(rng.choice((0, 0, 3)), 1 - sum(queries))
    rows = (len(params["lengths"]) if queries is None else sum(queries)) + padding
    longest = rng.choice(("none", "exact", "above"))
    return params | {"queries": queries, "padding": padding, "rows": rows, "longest": longest}


def arguments_of(params: Params, call: Call, cache: Cache) -> attention.Arguments:
    """Return what `attention_paged` is called with."""
    queries = params["queries"]
    arguments: attention.Arguments = {
        "q": call.q[0].transpose(0, 1),
        "k_cache": cache.both[0],
        "v_cache": cache.both[1],
    }
    arguments |= {"block_table": cache.table, "seq_lens": cache.lengths, "key_anchors": cache.anchors}
    if queries is not None:
        arguments["cu_seqlens_q"] = indices(params, list(accumulate(queries, initial=0)))
    if params["longest"] != "none":
        above = 7 * (params["longest"] == "above")
        arguments |= {"max_seqlen_q": max([*(queries or ()), 1]) + above}
        arguments |= {"max_seqlen_k": max(int(cache.lengths.max()), 1) + above}
    return arguments | attention.shared_arguments(params, call)


def run_attention(params: Params) -> Measures:
    """Fill a cache, call, and judge each sequence on its own."""
    call = make(params)
    if params["padding"]:
        call.q[:, :, -params["padding"] :] = torch.nan
    with available(params["backend"]):
        cache = fill(params, call, Random(params[SEED]))
        arguments = arguments_of(params, call, cache)
        queries = [1] * len(cache.members) if params["queries"] is None else params["queries"]
        result, measures = attention.checked(
            lambda: attention.heads_first(params, pasa.attention_paged(**arguments)), params, call.q
        )
        largest = attention.maxima(params, pasa.attention_paged, arguments, queries)
        measures |= check_fill(params, cache, call)
        if params["operator"] and not measures["shape"]:  # without the anchors where they serve no kernel
            arguments |= {"key_anchors": None} if params["backend"] == REFERENCE else {}
            measures["same"] = attention.by_operator(torch.ops.pasa.attention_paged, params, arguments, result)
    if measures["shape"]:
        return measures
    parts = [
        dataclasses.replace(call, q=call.q[:, :, first:last], k=call.k[:, :, keys], v=call.v[:, :, keys])
        for (first, last), keys in zip(pairwise(accumulate(queries, initial=0)), cache.members, strict=True)
        if first < last
    ]
    return measures | attention.judged_apart(params, parts, *result, largest)


SIMPLEST = attention.SIMPLEST_PACKED | {"slots": 16, "view": "together", "fill": "at once", "anchors": False}
KINDS = {
    "write_pages": Kind(draw_cache, run_write, 30, SIMPLEST),
    "attention_paged": Kind(draw_attention, run_attention, 80, SIMPLEST | {"longest": "none"}),
}
