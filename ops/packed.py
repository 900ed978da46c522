"""Packed sequences: which tile of tokens belongs to which sequence, worked out on the device."""

from __future__ import annotations

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
        Sequence, and number of the tile within it; the sequence is -1 in rows that are not needed.
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
