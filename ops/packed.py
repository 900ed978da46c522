"""Divide packed sequences into tiles of tokens, on the device, or into batches of padded sequences, on the host.

The batches are for kernels without packing: each pads its sequences to the longest of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise

import torch
from torch import Tensor


def tile_table(cu_seqlens: Tensor, block: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Cut every sequence into tiles of `block` tokens, without asking the device for a number.

    Parameters
    ----------
    cu_seqlens : Tensor (sequences + 1,), integer
        Cumulative lengths, from 0 to `tokens`.
    block : int
    tokens : int

    Returns
    -------
    table : Tensor (tokens // block + sequences, 2), INT32
        Sequence, and number of the tile within it; the sequence is -1 in unused rows.
    first : Tensor (sequences,), INT32
        The row of each sequence's first tile.
    """
    counts = (cu_seqlens.diff() + block - 1) // block
    ends = counts.cumsum(0)
    sequences = counts.shape[0]
    rows = torch.arange(tokens // block + sequences, device=cu_seqlens.device)
    sequence = torch.searchsorted(ends, rows, right=True)
    used = sequence < sequences
    first = ends - counts
    within = rows - first[sequence.clamp(max=sequences - 1)]
    table = torch.stack([torch.where(used, sequence, -1), within], 1)
    return table.int(), first.int()


def largest_by_sequence(top: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the largest of the numbers (T, H) of each sequence's tokens, (sequences, H); NaN if one is NaN.

    A sequence without tokens has -inf. Tokens behind the last sequence count for none.
    """
    row = torch.arange(len(top), device=top.device)
    sequences = len(cu_seqlens) - 1
    owner = torch.searchsorted(cu_seqlens[1:].to(row), row, right=True)  # `sequences` for padding
    largest = top.new_full((sequences + 1, top.shape[1]), -torch.inf)
    return largest.scatter_reduce(0, owner[:, None].expand_as(top), top, "amax")[:-1]


Span = tuple[int, int]  # of tokens: the first, and the one behind the last


def group_sequences(
    edges_q: Sequence[int], edges_k: Sequence[int], kind: Callable[[int, int], Hashable]
) -> list[tuple[list[Span], list[Span]]]:
    """Group the sequences that have queries and keys by the kind of their lengths.

    Parameters
    ----------
    edges_q, edges_k : sequence of int
        Cumulative lengths.
    kind : callable
        Maps the number of queries and the number of keys of a sequence to the kind of its group.

    Returns
    -------
    list of (list of Span, list of Span)
        The spans of each group's queries, and of its keys.
    """
    groups: dict[Hashable, tuple[list[Span], list[Span]]] = {}
    for rows, keys in zip(pairwise(edges_q), pairwise(edges_k), strict=True):
        if rows[0] < rows[1] and keys[0] < keys[1]:
            group = groups.setdefault(kind(rows[1] - rows[0], keys[1] - keys[0]), ([], []))
            group[0].append(rows)
            group[1].append(keys)
    return list(groups.values())


def gather(x: Tensor, spans: Sequence[Span]) -> Tensor:
    """Return the tokens (T, H, D) of each span as (spans, H, longest, D); shorter spans repeat their last token."""
    index, _ = _token_index(spans)
    return x[index.to(x.device)].transpose(1, 2).contiguous()


def scatter(x: Tensor, batch: Tensor, spans: Sequence[Span]) -> None:
    """Write (spans, H, longest, D) into the tokens (T, H, D) of each span, without the padding."""
    index, real = (part.to(x.device) for part in _token_index(spans))
    x[index[real]] = batch.transpose(1, 2)[real]


def _token_index(spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """Return the token numbers (spans, longest), and which of them belong to their span."""
    first, behind = torch.tensor(spans).T.unsqueeze(-1)
    index = first + torch.arange(int((behind - first).max()))
    return torch.minimum(index, behind - 1), index < behind
