"""The kernel of decoding on the twin: inputs, caches in pages, launches, and an emulation of its arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.ascend_c.kernel_runs import BLOCK, Call, Run, array, read
from tests.ascend_c.twin_build import Program

LIFT = 2.0**15  # of the kernel's weights


@dataclass(frozen=True)
class Pages:
    """Hold a cache in pages (pages, slots, Hkv, D) and its table.

    `starts` are those of the sequences in q (T, Hq, D); without them every sequence has one token.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    lengths: Tensor
    starts: Tensor | None = None


def make_call(
    batch: int, heads: int, kv_heads: int, rows: int, keys: int, dim: int, bias: float = 0.0, **how: Any
) -> Call:
    """Return a call of N(0, 1) tensors, of which queries and keys have a bias."""
    g = torch.Generator().manual_seed(rows * 1000 + keys)
    q, k, v = (
        torch.randn(batch, n, s, dim, generator=g) for n, s in ((heads, rows), (kv_heads, keys), (kv_heads, keys))
    )
    return Call((q + bias).half(), (k + bias).half(), v.half(), **how)


def by_tokens(q: Tensor, kv_heads: int) -> Tensor:
    """Return q (B, Hq, Sq, D) as the kernel takes it where a sequence has several tokens: (Hkv, B Sq, G, D)."""
    return q.unflatten(1, (kv_heads, -1)).permute(1, 0, 3, 2, 4).flatten(1, 2)


def launch_decode(program: Program, x: Call, pages: Pages | None = None, **options: Any) -> Run:
    """Run pasa_decode on the twin, on the tensors of a call, or on pages with the call's settings."""
    batch, heads, rows, dim = x.q.shape
    kv_heads = x.k.shape[1]
    several = rows > 1
    settings = x.settings() | {"rows": batch * rows, "tokens": rows, "grouped": int(several)}
    arrays = {"q": by_tokens(x.q, kv_heads) if several else x.q, "k": x.k, "v": x.v}
    if x.starts is not None:
        settings |= {"batch": x.starts.shape[1] - 1, "tokens": 1, "grouped": 1, "starts": 1}
        arrays |= {"q": by_tokens(x.q, kv_heads), "starts": x.starts.int()}
    if x.lengths is not None:
        arrays["lengths"] = x.lengths.int()
    if pages is not None:
        several = pages.starts is not None
        settings |= {"rows": len(pages.q), "tokens": 1, "grouped": int(several), "starts": int(several), "lengths": 1}
        settings |= {"batch": len(pages.lengths), "pages": len(pages.k), "slots": pages.k.shape[1]}
        settings |= {"table_columns": pages.table.shape[1], "keys": pages.table.shape[1] * pages.k.shape[1]}
        q = pages.q.unsqueeze(0).transpose(1, 2)
        arrays = {"q": by_tokens(q, kv_heads) if several else pages.q, "k": pages.k, "v": pages.v}
        arrays |= {"table": pages.table.int(), "lengths": pages.lengths.int()}
        if several:
            arrays["starts"] = pages.starts.int()
    if x.sinks is not None:
        arrays["sinks"] = x.sinks.float()
    report = program.run("decode", {name: array(each) for name, each in arrays.items()}, **settings | options)
    result = Run(report)
    if report["ok"]:
        dtype = x.unbiased or torch.float16
        shape = (kv_heads, settings["rows"], heads // kv_heads) if settings["grouped"] else (settings["rows"], heads)
        out = read(program, "out", np.float16, (*shape, dim)).view(dtype)
        lse = read(program, "lse", np.float32, shape)
        if settings["grouped"]:
            out, lse = out.transpose(0, 1).flatten(1, 2), lse.transpose(0, 1).flatten(1, 2)
        if pages is None:
            out, lse = out.unflatten(0, (batch, rows)).transpose(1, 2), lse.unflatten(0, (batch, rows)).transpose(1, 2)
        result.arrays |= {"out": out.contiguous(), "lse": lse.contiguous()}
    return result


def put_into_pages(x: Call, slots: int, starts: list[int] | None = None, seed: int = 0) -> Pages:
    """Return the keys of a call in pages at random places, with NaN in every slot that no sequence has reached.

    `starts` picks the last queries of each sequence: starts[b + 1] - starts[b] of them.
    """
    batch, kv_heads, keys, dim = x.k.shape
    rows = x.q.shape[2]
    lengths = torch.full((batch,), keys) if x.lengths is None else x.lengths
    columns = -(-keys // slots)
    g = torch.Generator().manual_seed(seed)
    table = torch.randperm(batch * columns + 3, generator=g)[: batch * columns].view(batch, columns)
    caches = []
    for tensor in (x.k, x.v):
        cache = torch.full((batch * columns + 3, slots, kv_heads, dim), torch.nan, dtype=torch.float16)
        for b, length in enumerate(lengths.tolist()):
            at = torch.arange(length)
            cache[table[b, at // slots], at % slots] = tensor[b, :, :length].transpose(0, 1)
        caches.append(cache)
    table[(torch.arange(columns) * slots) >= lengths[:, None]] = -7  # behind the last page, nothing is read
    if starts is None:
        return Pages(x.q[:, :, 0], *caches, table, lengths)
    counts = [end - start for start, end in pairwise(starts)]
    q = torch.cat([x.q[b, :, rows - n :].transpose(0, 1) for b, n in enumerate(counts)])
    return Pages(q, *caches, table, lengths, torch.tensor(starts))


def emulate(x: Call) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp in the kernel's arithmetic, for keys without a common bias and all in one part.

    Scores are FP32 sums. Weights are FP16 multiples of 2^-15, relative to the running maximum. O and l are FP32 sums.
    """
    group = x.q.shape[1] // x.k.shape[1]
    q, k, v = x.q.float(), *(each.float().repeat_interleave(group, 1) for each in (x.k, x.v))
    keys, rows = k.shape[2], q.shape[2]
    last = torch.arange(rows).unsqueeze(1) + keys - rows if x.causal else torch.full((rows, 1), keys)
    top = torch.full((*q.shape[:3], 1), -torch.inf)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for start in range(0, keys, BLOCK):
        part = slice(start, start + BLOCK)
        scores = q @ k[:, :, part].mT * x.softmax_scale
        scores = scores.masked_fill(torch.arange(start, min(start + BLOCK, keys)) > last, -torch.inf)
        now = torch.maximum(top, scores.amax(-1, keepdim=True))
        keep = torch.exp(top - now).nan_to_num()
        weights = (LIFT * torch.exp(scores - now)).nan_to_num().half().float()
        out, total = out * keep + weights @ v[:, :, part], total * keep + weights.sum(-1, keepdim=True)
        top = now
    none = total == 0
    lse = (top + torch.log(total / LIFT)).masked_fill(none, -torch.inf).squeeze(-1)
    return (out / total.masked_fill(none, 1.0)).half(), lse
