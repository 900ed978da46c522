"""Paged caches for tests."""

from typing import NamedTuple

import torch
from torch import Tensor

import pasa
from tests.inputs import max_error


class Pages(NamedTuple):
    """Hold a batch whose keys are in pages, and the same keys one sequence after another."""

    q: Tensor  # (T, Hq, D)
    k_cache: Tensor
    v_cache: Tensor
    table: Tensor
    lengths: Tensor
    k: Tensor  # (sum of lengths, Hkv, D)
    v: Tensor
    cu_q: Tensor | None = None
    anchors: Tensor | None = None

    @property
    def how(self) -> dict[str, Tensor]:
        """Return the keyword arguments of `attention_paged`."""
        how = {"cu_seqlens_q": self.cu_q, "key_anchors": self.anchors}
        return {name: x for name, x in how.items() if x is not None}

    @property
    def slots(self) -> Tensor:
        """Return the slot of every key, as `write_pages` expects them."""
        per_page = self.k_cache.shape[1]
        rows = zip(self.table.long(), self.lengths.tolist(), strict=True)
        each = [(row, torch.arange(n, device=row.device)) for row, n in rows]
        return torch.cat([row[at // per_page] * per_page + at % per_page for row, at in each])

    def anchored(self) -> "Pages":
        """Return the same pages with the anchors that writing all keys gives."""
        anchors = torch.zeros(self.k_cache.shape[0], *self.k_cache.shape[2:]).half()
        pasa.write_pages(self.k, self.v, self.k_cache, self.v_cache, self.slots, anchors)
        return self._replace(anchors=anchors)

    def to(self, device: str) -> "Pages":
        """Return the same pages with all tensors on a device."""
        return Pages(*(x if x is None else x.to(device) for x in self))

    def attend(self, device: str = "cpu", **how) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp on the CPU."""
        here = self.to(device)
        call = (here.q, here.k_cache, here.v_cache, here.table, here.lengths)
        how = {"backend": "reference", "return_lse": True} | here.how | how
        out, lse = pasa.attention_paged(*call, **how)
        return out.cpu(), lse.cpu()

    @property
    def edges(self) -> tuple[list[int], list[int]]:
        """Return the cumulative numbers of queries and of keys."""
        queries = range(len(self.lengths) + 1) if self.cu_q is None else self.cu_q.tolist()
        return list(queries), [0, *self.lengths.cumsum(0).tolist()]

    def golden(self, is_causal: bool = False, **how) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp in FP64, sequence by sequence; 0 and -inf where there is no key.

        how: further arguments of `golden_attention`.
        """
        out, lse = torch.zeros(self.q.shape).double(), torch.full(self.q.shape[:2], -torch.inf).double()
        queries, keys = self.edges
        for b, n in enumerate(self.lengths.tolist()):
            rows, span = slice(*queries[b : b + 2]), slice(*keys[b : b + 2])
            if n and rows.start < rows.stop:
                heads_first = [x.transpose(0, 1)[None] for x in (self.q[rows], self.k[span], self.v[span])]
                one, one_lse = pasa.golden_attention(*heads_first, is_causal=is_causal, **how)
                out[rows], lse[rows] = one[0].transpose(0, 1), one_lse[0].T
        return out, lse


def make_pages(
    lengths: list[int],
    heads: tuple[int, int] = (4, 2),
    dim: int = 64,
    slots: int = 16,
    *,
    queries: list[int] | None = None,
    bias: float = 0.0,
    stale: float = torch.nan,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> Pages:
    """Return N(0, 1) queries, keys and values with a bias on 8 dimensions of q and k; pages are in random order.

    Slots that no sequence has reached, and unused pages, hold `stale`. Table entries behind a sequence's last
    page name no page.
    """
    g = torch.Generator().manual_seed(seed)
    rows = len(lengths) if queries is None else sum(queries)
    keys = sum(lengths), heads[1]
    q, k, v = (torch.randn(*shape, dim, generator=g) for shape in ((rows, heads[0]), keys, keys))
    q[..., :8] += bias
    k[..., :8] += bias
    q, k, v = (x.to(dtype) for x in (q, k, v))
    counts = [-(-n // slots) for n in lengths]
    order = torch.randperm(sum(counts) + 3, generator=g)
    table = torch.full((len(lengths), max(max(counts), 1) + 1), 10**6, dtype=torch.int32)
    table[::2] = -1
    k_cache, v_cache = (torch.full((len(order), slots, heads[1], dim), stale, dtype=dtype) for _ in range(2))
    at = 0
    for b, (n, pages) in enumerate(zip(lengths, counts, strict=True)):
        table[b, :pages] = order[sum(counts[:b]) : sum(counts[:b]) + pages]
        where = torch.arange(n)
        page = table[b].long()[where // slots]
        k_cache[page, where % slots], v_cache[page, where % slots] = k[at : at + n], v[at : at + n]
        at += n
    cu_q = None if queries is None else torch.tensor([0, *queries]).cumsum(0).int()
    return Pages(q, k_cache, v_cache, table, torch.tensor(lengths, dtype=torch.int32), k, v, cu_q)


def worst(got: tuple[Tensor, Tensor], golden: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Return the largest errors of the output, and of the log-sum-exp of rows that see a key.

    Both sides must agree on which rows those are.
    """
    seen = golden[1] > -torch.inf
    assert torch.equal(got[1] > -torch.inf, seen)
    assert torch.isfinite(got[0]).all()
    return max_error(got[0], golden[0]), float((got[1] - golden[1])[seen].abs().max()) if seen.any() else 0.0
