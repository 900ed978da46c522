"""Random calls of `attention_varlen`: sequences one behind the other."""

from __future__ import annotations

from itertools import accumulate
from random import Random

import torch

import pasa
from pasa.eval.random_calls import attention
from pasa.eval.random_calls.backends import available
from pasa.eval.random_calls.cases import Kind, Measures
from pasa.eval.random_calls.faults import Arguments, Fault, Params, altered, elsewhere, make_mistake, pick, put
from pasa.eval.random_calls.inputs import indices, make
from pasa.eval.random_calls.truth import pieces


def draw(rng: Random) -> Params:
    """Draw sequences one behind the other; one may be empty."""
    params = attention.draw(rng) | {"mask": "none", "garbage": "none", "batch": 1, "layout": "HND", "operator": False}
    count = rng.randint(1, 4)
    rows, keys = ([rng.choice((0, 1, 2, 5, 17, 33)) for _ in range(count)] for _ in range(2))
    rows[0], keys[0] = max(rows[0], 1), max(keys[0], 1)
    changed = {"rows": sum(rows), "keys": sum(keys), "row_lengths": rows, "key_lengths": keys, "strides": "contiguous"}
    changed |= {"wide": rng.random() < 0.5, "spaced": rng.random() < 0.3, "diagnose": False, "lse": True}
    return params | changed


def run(params: Params) -> Measures:
    """Judge each sequence on its own."""
    call = make(params)
    arguments: Arguments = {name: x[0].transpose(0, 1) for name, x in (("q", call.q), ("k", call.k), ("v", call.v))}
    for name, lengths in (("q", params["row_lengths"]), ("k", params["key_lengths"])):
        arguments[f"cu_seqlens_{name}"] = indices(params, list(accumulate(lengths, initial=0)))
        arguments[f"max_seqlen_{name}"] = max(lengths)
    arguments |= {"is_causal": params["causal"], "scale": params["scale"], "return_lse": True}
    arguments |= {"config": attention.config_of(params), "backend": params["backend"]}
    make_mistake(FAULTS, params, arguments)
    with available(params["backend"]):
        out, lse = pasa.attention_varlen(**arguments)
    if out.shape != arguments["q"].shape or attention.misshapen(arguments["q"], lse, out.dtype):
        return {"shape": 1.0}
    return {"shape": 0.0} | attention.judged_apart(params, pieces(call)[0], out, lse)


def wrong_lengths(arguments: Arguments, rng: Random) -> None:
    """Give cumulative lengths that do not end with the tensor, fall, or do not begin with 0."""
    name, other = rng.sample(("cu_seqlens_q", "cu_seqlens_k"), 2)
    edges, last = arguments[name], arguments[name][-1:]
    beginning = torch.cat([edges[:1] + 1, edges[1:] + 1])
    falling = torch.cat([edges, last - 1, last])
    arguments[name] = rng.choice((torch.cat([edges[:-1], last + 1]), beginning, falling))
    for each in ("q", "k"):
        arguments[f"max_seqlen_{each}"] += 2
    missing = len(arguments[name]) - len(arguments[other])
    arguments[other] = torch.cat([arguments[other], arguments[other][-1:].expand(missing)])


def one_more(arguments: Arguments, rng: Random) -> None:
    """Give more sequences of keys than of queries."""
    arguments["cu_seqlens_k"] = torch.cat([arguments["cu_seqlens_k"], arguments["cu_seqlens_k"][-1:]])


FAULTS = {
    "lengths": Fault(wrong_lengths, ValueError, r"cu_seqlens_[qk]=.* does not rise from 0 to the"),
    "as many": Fault(one_more, ValueError, r"cu_seqlens_q has \d+ entries but cu_seqlens_k has"),
    "no edges": Fault(put(cu_seqlens_q=torch.zeros(1).int()), ValueError, r"cu_seqlens_q has shape"),
    "edges in a row": Fault(put(cu_seqlens_k=torch.zeros(2, 2).int()), ValueError, r"cu_seqlens_k has shape"),
    "edges of floats": Fault(put(cu_seqlens_q=torch.zeros(2)), TypeError, "cu_seqlens_q is torch.float32"),
    "edges as a list": Fault(put(cu_seqlens_k=[0, 1]), TypeError, "cu_seqlens_k is list"),
    "edges elsewhere": elsewhere("cu_seqlens_q", "cu_seqlens_q is on meta"),
    "longest too short": Fault(put(max_seqlen_k=-1), ValueError, "max_seqlen_k=-1 is below the longest sequence"),
    "longest not a number": Fault(
        pick("max_seqlen_q", 7.0, True, "7", None), TypeError, "max_seqlen_q=.* not an integer"
    ),
    "no tokens": altered("q", lambda x: x[:0], ValueError, "q is empty"),
    "heads first": altered("v", lambda x: x.unsqueeze(0), ValueError, "v has 4 dimensions"),
    "return_lse": Fault(put(return_lse=2), TypeError, "return_lse="),
    "a mask": Fault(put(attn_mask=None), TypeError, "unexpected keyword argument 'attn_mask'"),
}
SIMPLEST = {name: value for name, value in attention.SIMPLEST.items() if name not in ("rows", "keys", "batch")}
SIMPLEST |= {"wide": True, "spaced": False}
KIND = Kind(draw, run, 120, SIMPLEST, FAULTS)
