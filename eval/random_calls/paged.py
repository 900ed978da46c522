"""Random calls of `attention_paged` over caches that `write_pages` has filled."""

from __future__ import annotations

import dataclasses
from itertools import accumulate, pairwise
from random import Random
from typing import Any

import torch
from torch import Tensor

import pasa
from pasa.eval.random_calls import attention, caches, faults
from pasa.eval.random_calls.backends import REFERENCE, TRITON, available
from pasa.eval.random_calls.cases import Kind, Measures
from pasa.eval.random_calls.faults import SEED, Arguments, Fault, Params, altered, elsewhere, make_mistake, pick, put
from pasa.eval.random_calls.inputs import Call, indices, make


def draw(rng: Random) -> Params:
    """Draw one query for each sequence, or a few, and padding rows behind them."""
    params = caches.draw(rng)
    interpreted, queries, padding = params["backend"] == TRITON, None, 0
    if rng.random() >= (0.75 if interpreted else 0.5):
        queries = [rng.choice((0, 1, 2, 2 if interpreted else 5)) for _ in params["lengths"]]
        padding = max(rng.choice((0, 0, 3)), 1 - sum(queries))
    rows = (len(params["lengths"]) if queries is None else sum(queries)) + padding
    longest = rng.choice(("none", "exact", "above"))
    return params | {"queries": queries, "padding": padding, "rows": rows, "longest": longest}


def arguments_of(params: Params, call: Call, cache: caches.Cache) -> Arguments:
    """Return what `attention_paged` is called with."""
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
        make_mistake(FAULTS, params, arguments)
        out, lse, measures = attention.record(pasa.attention_paged, params, arguments, (1, call.q.shape[1]))
        if params["fault"] is not None:
            return {}
        if out.shape != arguments["q"].shape or attention.misshapen(arguments["q"], lse, out.dtype):
            return {"shape": 1.0}
        measures |= caches.check_fill(params, cache, call)
        if params["operator"]:  # without the anchors where they serve no kernel
            changed = {"key_anchors": None} if params["backend"] == REFERENCE else {}
            operator = torch.ops.pasa.attention_paged
            measures["same"] = attention.by_operator(operator, params, arguments | changed, (out, lse))
    queries = [1] * len(cache.members) if params["queries"] is None else params["queries"]
    parts = [
        dataclasses.replace(call, q=call.q[:, :, first:last], k=call.k[:, :, keys], v=call.v[:, :, keys])
        for (first, last), keys in zip(pairwise(accumulate(queries, initial=0)), cache.members, strict=True)
        if first < last
    ]
    return measures | attention.judged_apart(params, parts, out, lse)


# ---- what is refused, and with which words


def one_key(arguments: Arguments, **changes: Tensor) -> None:
    """Give every sequence one key, in page 0, and one query."""
    batch = len(arguments["seq_lens"])
    arguments |= {"seq_lens": torch.ones(batch).int(), "block_table": torch.zeros(batch, 2).int(), "cu_seqlens_q": None}
    arguments |= {"q": arguments["q"][:1].nan_to_num().expand(batch, -1, -1)} | changes


def stale(arguments: Arguments, rng: Random) -> None:
    """Give anchors that keys cannot lose: 1 - 60000 is no FP16 number."""
    cache = torch.ones_like(arguments["k_cache"]).contiguous()
    anchors = torch.full((len(cache), *cache.shape[2:]), 60000.0).half()
    one_key(arguments, k_cache=cache, v_cache=cache, key_anchors=anchors)


def no_page(arguments: Arguments, rng: Random) -> None:
    """Name a page that the cache does not have."""
    table = torch.full((len(arguments["seq_lens"]), 2), rng.choice((-1, len(arguments["k_cache"]), 10**6)))
    one_key(arguments, block_table=table)


def too_large(arguments: Arguments, rng: Random) -> None:
    """Put a finite number that FP16 does not hold into a query."""
    for name in ("q", "k_cache", "v_cache"):
        arguments[name] = torch.ones_like(arguments[name], dtype=torch.float32).contiguous()
    arguments["key_anchors"] = None
    one_key(arguments)
    arguments["q"] = arguments["q"] * rng.choice((65536.0, -1e30))


def rows_of_none(arguments: Arguments, rng: Random) -> None:
    """Give more queries than sequences."""
    arguments |= {"q": arguments["q"][:1].expand(len(arguments["seq_lens"]) + 1, -1, -1), "cu_seqlens_q": None}


def edges(arguments: Arguments, rng: Random) -> None:
    """Give cumulative lengths that do not begin with 0, fall, or end behind the queries."""
    batch, rows = len(arguments["seq_lens"]), len(arguments["q"])
    wrong = ([1] * (batch + 1), [0] * batch + [rows + 1], [0] * (batch - 1) + [1, 0], [0] * batch + [-1])
    arguments["cu_seqlens_q"] = torch.tensor(rng.choice(wrong if batch > 1 else wrong[:2]))


def groups(heads: int, dim: int, **how: Any) -> Any:
    """Give two sequences of one key, with so many query heads for two key heads, or 129 for one."""

    def give(arguments: Arguments, rng: Random) -> None:
        cache = torch.zeros(1, 16, 1 if heads == 129 else 2, dim).half()
        arguments |= {"q": torch.zeros(2, heads, dim).half(), "k_cache": cache, "v_cache": cache, "key_anchors": None}
        arguments |= {"seq_lens": torch.ones(2).int(), "block_table": torch.zeros(2, 1).int(), "cu_seqlens_q": None}
        arguments.update(how)

    return give


def no_length(arguments: Arguments, rng: Random) -> None:
    """Give a longest length that is none."""
    arguments[rng.choice(("max_seqlen_q", "max_seqlen_k"))] = rng.choice((0, -1, 7.0, True, "7"))


TOO_MANY_HEADS = "129 query heads share a key head of a paged cache; at most 128|no backend can serve this call: triton"
SHARED = ("causal", "return_lse", "scale", "scale not a number", "config", "backend", "backend not a name",
          "capability", "keyword")  # fmt: skip
FAULTS = {
    **caches.ANCHOR_FAULTS,
    **caches.CACHE_FAULTS,
    **{name: attention.FAULTS[name] for name in SHARED},
    "anchors of other keys": Fault(stale, ValueError, "key_anchors are not those of the keys in k_cache"),
    "not a tensor": Fault(pick("q", None, 3, [1.0]), TypeError, r"q is a \w+, not a Tensor"),
    "rank": altered("q", lambda x: x[None], ValueError, r"q has 4 dimensions .* expected 3"),
    "another type": altered("q", faults.other_type, TypeError, r"q is torch\.\w+ but k_cache is torch"),
    "queries elsewhere": elsewhere("q", "q is on meta but k_cache is on cpu"),
    "head dim": altered("q", faults.doubled(-1), ValueError, "not of the cache's head dim"),
    "no queries": altered("q", lambda x: x[:0], ValueError, r"q \(0, .* is empty"),
    "head groups": Fault(groups(3, 4), ValueError, "3 query heads are not a multiple of 2 key heads"),
    "head dim beyond all": Fault(groups(2, 513), NotImplementedError, "head dim 513 is outside"),
    "heads beyond a tile": Fault(groups(129, 16, backend=TRITON, config=None), NotImplementedError, TOO_MANY_HEADS),
    "too large": Fault(too_large, ValueError, r"q has \d+ values beyond the FP16 range"),
    "gradients": altered("q", faults.leaf, NotImplementedError, "attention_paged has no gradient, and q requires one"),
    "table of floats": altered("block_table", Tensor.float, TypeError, f"block_table {caches.INTEGERS}"),
    "table as a list": Fault(put(block_table=[[0]]), TypeError, "block_table is a list, not a Tensor"),
    "a table's row": altered("block_table", lambda x: x[0], ValueError, "block_table has 1 dimensions"),
    "more tables": altered("block_table", faults.doubled(0), ValueError, r"block_table .* does not fit \d+ seq_lens"),
    "table elsewhere": elsewhere("block_table", "block_table is on meta"),
    "no such page": Fault(no_page, ValueError, r"block_table names page -?\d+, but the cache has \d+ pages"),
    "lengths of 16 bits": altered("seq_lens", Tensor.short, TypeError, "seq_lens is torch.int16, not"),
    "lengths beyond the table": altered(
        "seq_lens", lambda x: x + 10**6, ValueError, "but the block table has room for 0 to"
    ),
    "lengths below 0": altered("seq_lens", lambda x: x - 10**6, ValueError, r"seq_lens are -\d+ to"),
    "lengths elsewhere": elsewhere("seq_lens", "seq_lens is on meta"),
    "rows": Fault(rows_of_none, ValueError, r"q has \d+ rows for \d+ sequences; give cu_seqlens_q"),
    "edges": Fault(edges, ValueError, r"cu_seqlens_q=.* does not rise from 0 to at most the \d+ tokens of q"),
    "more edges": Fault(
        put(cu_seqlens_q=torch.zeros(9).int()), ValueError, r"cu_seqlens_q has 9 entries for \d sequences"
    ),
    "edges of floats": Fault(put(cu_seqlens_q=torch.zeros(2)), TypeError, "cu_seqlens_q is torch.float32, not"),
    "longest": Fault(no_length, ValueError, "max_seqlen_[qk]=.* is not a positive integer"),
}
SIMPLEST = caches.SIMPLEST | {"longest": "none"}
KIND = Kind(draw, run, 80, SIMPLEST, FAULTS)
