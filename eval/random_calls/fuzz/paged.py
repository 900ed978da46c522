"""Random calls of `attention_paged` over caches that `write_pages` has filled."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise
from random import Random
from typing import Any

import torch
from torch import Tensor

import pasa
from pasa.eval.random_calls.fuzz import attention, caches
from pasa.eval.random_calls.fuzz.attention import change, pick, put
from pasa.eval.random_calls.fuzz.backends import REFERENCE, TRITON, available
from pasa.eval.random_calls.fuzz.cases import SEED, Arguments, Fault, Kind, Measures, Params, spoil
from pasa.eval.random_calls.fuzz.inputs import Call, indices, make

Found = tuple[Tensor, Tensor | None]


def draw(rng: Random) -> Params:
    """One query for each sequence, or a few, and rows of none."""
    params = caches.draw(rng)
    if rng.random() < (0.75 if params["backend"] == TRITON else 0.5):
        queries, padding = None, 0
    else:
        queries, padding = (
            [rng.choice((0, 1, 2, 2 if params["backend"] == TRITON else 5)) for _ in params["own"]],
            rng.choice((0, 0, 3)),
        )
        padding = max(padding, 1 - sum(queries))
    rows = (len(params["own"]) if queries is None else sum(queries)) + padding
    longest = rng.choice(("none", "exact", "above"))
    return params | {"queries": queries, "padding": padding, "rows": rows, "longest": longest}


def arguments_of(params: Params, call: Call, cache: caches.Cache) -> Arguments:
    """What `attention_paged` is called with."""
    queries = params["queries"]
    arguments: Arguments = {"q": call.q[0].transpose(0, 1), "k_cache": cache.both[0], "v_cache": cache.both[1]}
    arguments |= {"block_table": cache.table, "seq_lens": cache.lengths, "key_anchors": cache.anchors}
    if queries is not None:
        arguments["cu_seqlens_q"] = indices(params, list(accumulate(queries, initial=0)))
    if params["longest"] != "none":
        above = 7 * (params["longest"] == "above")
        arguments |= {"max_seqlen_q": max([*(queries or ()), 1]) + above}
        arguments |= {"max_seqlen_k": max(int(cache.lengths.max()), 1) + above}
    arguments |= {"is_causal": params["causal"], "scale": params["scale"], "return_lse": params["lse"]}
    return arguments | {"config": attention.config_of(params), "backend": params["backend"]}


def run(params: Params) -> Measures:
    """Fill a cache, call, and judge each sequence on its own."""
    call = make(params)
    if params["padding"]:
        call.q[:, :, -params["padding"] :] = torch.nan
    with available(params["backend"]):
        cache = caches.fill(params, call, Random(params[SEED]))
        arguments = arguments_of(params, call, cache)
        spoil(FAULTS, params, arguments)
        watched: AbstractContextManager[list[Any]] = (
            pasa.record_diagnostics() if params["diagnose"] else nullcontext([])
        )
        with watched as records:
            given: Any = pasa.attention_paged(**arguments)
        if params["fault"] is not None:
            return {}
        found: Found = given if params["lse"] else (given, None)
        if misshapen(arguments["q"], *found):
            return {"shape": 1.0}
        measures = {"shape": 0.0} | caches.filled(params, cache, call)
        if params["operator"]:
            measures["same"] = by_operator(params, arguments, found)
    if params["diagnose"]:
        measures["diagnosed"] = float(len(records) != 1 or records[0].tiles.shape != (1, call.q.shape[1]))
    return measures | judge(params, call, cache, *found)


def misshapen(q: Tensor, out: Tensor, lse: Tensor | None) -> bool:
    """Whether shapes or types are not those documented."""
    wrong = out.shape != q.shape or out.dtype != q.dtype
    return wrong or (lse is not None and (lse.shape != q.shape[:2] or lse.dtype != torch.float32))


def by_operator(params: Params, arguments: Arguments, found: Found) -> float:
    """How many numbers differ when torch.ops.pasa.attention_paged is called itself, and without the anchors where they
    serve no kernel; and shapes on the device meta."""
    arguments = {name: x for name, x in arguments.items() if name not in ("return_lse", "config")}
    arguments |= {name: params[name] for name in attention.CONFIG}
    if params["backend"] == REFERENCE:
        arguments["key_anchors"] = None
    again = torch.ops.pasa.attention_paged(**arguments)
    meta = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in arguments.items()}
    shapes = [(x.shape, x.dtype) for x in torch.ops.pasa.attention_paged(**meta)]
    return unequal(found, again[:2]) + (shapes != [(x.shape, x.dtype) for x in again])


def unequal(found: Found, again: Found) -> float:
    """How many numbers differ; a NaN is one."""
    pairs = [(a, b) for a, b in zip(found, again, strict=True) if a is not None and b is not None]
    return float(sum(int((a.nan_to_num(nan=7.0) != b.nan_to_num(nan=7.0)).sum()) for a, b in pairs))


def judge(params: Params, call: Call, cache: caches.Cache, out: Tensor, lse: Tensor | None) -> Measures:
    """The worst of all sequences; rows of none give 0 and -inf."""
    queries = [1] * len(cache.members) if params["queries"] is None else params["queries"]
    edges = list(accumulate(queries, initial=0))
    worst = {"blind": blind(out[edges[-1] :], None if lse is None else lse[edges[-1] :])}
    for (q0, q1), keys in zip(pairwise(edges), cache.members, strict=True):
        if q0 == q1:
            continue
        one_lse = None if lse is None else lse[q0:q1].T.unsqueeze(0)
        if len(keys):
            part = Call(call.q[:, :, q0:q1], call.k[:, :, keys], call.v[:, :, keys], None)
            found = attention.worth(params, part, out[q0:q1].transpose(0, 1).unsqueeze(0), one_lse)
        else:
            found = {"blind": blind(out[q0:q1], one_lse)}
        worst = {name: max(worst.get(name, 0.0), found.get(name, 0.0)) for name in worst | found}
    return worst


def blind(out: Tensor, lse: Tensor | None) -> float:
    """How many numbers of rows without a key are not 0, or not -inf."""
    return float((out != 0).sum() + (0 if lse is None else (lse != -torch.inf).sum()))


# ---- what is refused, and with which words


def one_key(arguments: Arguments, **changes: Tensor) -> None:
    """Every sequence has one key, in page 0, and one query."""
    batch = len(arguments["seq_lens"])
    arguments |= {"seq_lens": torch.ones(batch).int(), "block_table": torch.zeros(batch, 2).int(), "cu_seqlens_q": None}
    arguments |= {"q": arguments["q"][:1].nan_to_num().expand(batch, -1, -1)} | changes


def stale(arguments: Arguments, rng: Random) -> None:
    """Anchors that keys cannot lose: 1 - 60000 is no FP16 number."""
    cache = torch.ones_like(arguments["k_cache"]).contiguous()
    anchors = torch.full((len(cache), *cache.shape[2:]), 60000.0).half()
    one_key(arguments, k_cache=cache, v_cache=cache, key_anchors=anchors)


def no_page(arguments: Arguments, rng: Random) -> None:
    """A page that the cache has not got."""
    table = torch.full((len(arguments["seq_lens"]), 2), rng.choice((-1, len(arguments["k_cache"]), 10**6)))
    one_key(arguments, block_table=table)


def too_large(arguments: Arguments, rng: Random) -> None:
    """A finite number that FP16 does not hold, in a query."""
    for name in ("q", "k_cache", "v_cache"):
        arguments[name] = torch.ones_like(arguments[name], dtype=torch.float32).contiguous()
    arguments["key_anchors"] = None
    one_key(arguments)
    arguments["q"] = arguments["q"] * rng.choice((65536.0, -1e30))


def rows_of_none(arguments: Arguments, rng: Random) -> None:
    """Not one query for each sequence."""
    arguments |= {"q": arguments["q"][:1].expand(len(arguments["seq_lens"]) + 1, -1, -1), "cu_seqlens_q": None}


def edges(arguments: Arguments, rng: Random) -> None:
    """Cumulative lengths that do not begin with 0, fall, or end behind the queries."""
    batch, rows = len(arguments["seq_lens"]), len(arguments["q"])
    wrong = ([1] * (batch + 1), [0] * batch + [rows + 1], [0] * (batch - 1) + [1, 0], [0] * batch + [-1])
    arguments["cu_seqlens_q"] = torch.tensor(rng.choice(wrong if batch > 1 else wrong[:2]))


def groups(heads: int, dim: int, **how: Any) -> Any:
    """A spoiler: two sequences of one key; so many query heads for two key heads, or 129 for one."""

    def give(arguments: Arguments, rng: Random) -> None:
        cache = torch.zeros(1, 16, 1 if heads == 129 else 2, dim).half()
        arguments |= {"q": torch.zeros(2, heads, dim).half(), "k_cache": cache, "v_cache": cache, "key_anchors": None}
        arguments |= {"seq_lens": torch.ones(2).int(), "block_table": torch.zeros(2, 1).int(), "cu_seqlens_q": None}
        arguments.update(how)

    return give


def elsewhere(name: str) -> Fault:
    """A tensor on the device meta."""
    return Fault(change(name, by=lambda x: x.to("meta")), ValueError, f"{name} is on meta but k_cache is on cpu")


SHARED = ("causal", "return_lse", "scale", "scale not a number", "config", "backend", "backend not a name",
          "capability", "keyword")  # fmt: skip
FAULTS = caches.ANCHOR_FAULTS | caches.CACHE_FAULTS | {name: attention.FAULTS[name] for name in SHARED} | {
    "anchors of other keys": Fault(stale, ValueError, "key_anchors are not those of the keys in k_cache"),
    "not a tensor": Fault(pick("q", None, 3, [1.0]), TypeError, r"q is a \w+, not a Tensor"),
    "rank": Fault(change("q", by=lambda x: x[None]), ValueError, r"q has 4 dimensions .* expected 3"),
    "another type": Fault(change("q", by=caches.other_type), TypeError, r"q is torch\.\w+ but k_cache is torch"),
    "queries elsewhere": elsewhere("q"),
    "head dim": Fault(change("q", by=lambda x: torch.cat([x, x], -1)), ValueError, "not of the cache's head dim"),
    "no queries": Fault(change("q", by=lambda x: x[:0]), ValueError, r"q \(0, .* is empty"),
    "head groups": Fault(groups(3, 4), ValueError, "3 query heads are not a multiple of 2 key heads"),
    "head dim beyond all": Fault(groups(2, 513), NotImplementedError, "head dim 513 is outside"),
    "heads beyond a tile": Fault(
        groups(129, 16, backend=TRITON, config=None), NotImplementedError,
        "129 query heads share a key head of a paged cache; at most 128|no backend can serve this call: triton",
    ),
    "too large": Fault(too_large, ValueError, r"q has \d+ values beyond the FP16 range"),
    "gradients": Fault(
        change("q", by=lambda x: x.detach().clone().requires_grad_()), NotImplementedError,
        "attention_paged has no gradient, and q requires one",
    ),
    "table of floats": Fault(
        change("block_table", by=Tensor.float), TypeError, "block_table is torch.float32, not an int32 or int64 Tensor"
    ),
    "table as a list": Fault(put(block_table=[[0]]), TypeError, "block_table is a list, not a Tensor"),
    "a table's row": Fault(change("block_table", by=lambda x: x[0]), ValueError, "block_table has 1 dimensions"),
    "more tables": Fault(
        change("block_table", by=lambda x: torch.cat([x, x])), ValueError, r"block_table .* does not fit \d+ seq_lens"
    ),
    "table elsewhere": Fault(change("block_table", by=lambda x: x.to("meta")), ValueError, "block_table is on meta"),
    "no such page": Fault(no_page, ValueError, r"block_table names page -?\d+, but the cache has \d+ pages"),
    "lengths of 16 bits": Fault(change("seq_lens", by=lambda x: x.short()), TypeError, "seq_lens is torch.int16, not"),
    "lengths beyond the table": Fault(
        change("seq_lens", by=lambda x: x + 10**6), ValueError, "but the block table has room for 0 to"
    ),
    "lengths below 0": Fault(change("seq_lens", by=lambda x: x - 10**6), ValueError, r"seq_lens are -\d+ to"),
    "lengths elsewhere": Fault(change("seq_lens", by=lambda x: x.to("meta")), ValueError, "seq_lens is on meta"),
    "rows": Fault(rows_of_none, ValueError, r"q has \d+ rows for \d+ sequences; give cu_seqlens_q"),
    "edges": Fault(edges, ValueError, r"cu_seqlens_q=.* does not rise from 0 to at most the \d+ tokens of q"),
    "more edges": Fault(
        put(cu_seqlens_q=torch.zeros(9).int()), ValueError, r"cu_seqlens_q has 9 entries for \d sequences"
    ),
    "edges of floats": Fault(put(cu_seqlens_q=torch.zeros(2)), TypeError, "cu_seqlens_q is torch.float32, not"),
    "longest": Fault(
        lambda a, rng: a.update({rng.choice(("max_seqlen_q", "max_seqlen_k")): rng.choice((0, -1, 7.0, True, "7"))}),
        ValueError, "max_seqlen_[qk]=.* is not a positive integer",
    ),
}  # fmt: skip
SIMPLEST = caches.SIMPLEST | {"longest": "none"}
KINDS = {"attention_paged": Kind(draw, run, 80, SIMPLEST, FAULTS), "write_pages": caches.KIND}
