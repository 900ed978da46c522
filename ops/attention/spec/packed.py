"""Attend to packed sequences, or to batch entries, one after another by a function that attends to one sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from pasa.ops.attention.call import Call, Results
from pasa.ops.attention.spec.diagnostics import ScoreCounts


def attend_apart(attend: Callable[[Call], Results], call: Call) -> Results:
    """Attend within packed sequences: each one sees only itself. Lengths are read on the host.

    Rows of a sequence without keys give 0, and their log-sum-exp is that of `without_keys`. Tables of diagnostics are
    joined, (1, Hq, 7).
    """
    q, k, v = call.q, call.k, call.v
    edges_q, edges_k = call.edges()
    out, lse = torch.zeros_like(q), without_keys(call, q.shape[:2])
    max_logits = lse.new_full((call.sequences, q.shape[1]), -torch.inf) if call.max_logits else None
    joined = ScoreCounts(1, q.shape[1], q.device) if call.diagnose else None
    for index, ((q0, q1), (k0, k1)) in enumerate(zip(pairwise(edges_q), pairwise(edges_k), strict=True)):
        if q0 == q1 or k0 == k1:
            continue
        one_q, one_k, one_v = (x.transpose(0, 1).unsqueeze(0) for x in (q[q0:q1], k[k0:k1], v[k0:k1]))
        if call.options.batch_invariant:
            one_q, one_k, one_v = one_q.clone(), one_k.clone(), one_v.clone()
        one = attend(replace(call, q=one_q, k=one_k, v=one_v, cu_q=None, cu_k=None).narrowed())
        out[q0:q1], lse[q0:q1] = one.out[0].transpose(0, 1), one.lse[0].T
        if max_logits is not None and one.max_logits is not None:
            max_logits[index] = one.max_logits[0]
        if joined is not None and one.counts is not None:
            joined.join(one.counts)
    return Results(out, lse, max_logits, None if joined is None else joined.table)


def attend_each(attend: Callable[[Call], Results], call: Call) -> Results:
    """Attend to one batch entry of a dense call after another, so that the bits of an entry depend on no other.

    A library may choose another algorithm for other shapes or addresses. So every entry is copied to memory of its own,
    and its call has the shape of a batch of one.
    """
    q, k, v, mask = call.q, call.k, call.v, call.mask
    parts = []
    for b in range(len(q)):
        own = mask if mask is None or mask.dim() < 4 or len(mask) == 1 else mask[b : b + 1]
        one_q, one_k, one_v = (x[b : b + 1].clone() for x in (q, k, v))
        parts.append(attend(replace(call, q=one_q, k=one_k, v=one_v, mask=own)))
    return concatenated(parts)


def concatenated(parts: list[Results]) -> Results:
    """Return the results of all batch entries as those of one call."""
    outs, lses, *optional = ([x for x in each if x is not None] for each in zip(*parts, strict=True))
    return Results(torch.cat(outs), torch.cat(lses), *(torch.cat(each) if each else None for each in optional))


def without_keys(call: Call, shape: torch.Size, heads: int = -1) -> Tensor:
    """Return the log-sum-exp of rows that see no key: the sink of their head, or -inf.

    `heads` is the dimension of `shape` that counts the query heads.
    """
    lse = torch.full(shape, -torch.inf, dtype=torch.float32, device=call.q.device)
    if call.sinks is not None:
        by_head = lse.movedim(heads, -1)
        by_head.copy_(call.sinks.float().expand(by_head.shape))
    return lse
