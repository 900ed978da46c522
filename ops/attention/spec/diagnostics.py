"""Count the extremes of a call's scores before and after shifting, their overflow, and rescued tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from pasa.ops.attention.options import AttentionOptions
from pasa.ops.attention.spec.scores import Block, ScoreTile, matmul_rows, tiles_with
from pasa.ops.numerics.formats import FP16_MAX

FIELDS = ("max_score_before", "max_score_after", "nonfinite", "saturated", "rescued_tiles", "flushed_tiles", "tiles")
MAXIMA = 2  # the first fields are maxima, the others are counts


class ScoreCounts:
    """Collect a table (B, Hq, 7) in FP64, tile by tile; its columns are `FIELDS`.

    ``max_score_before`` is max |q.k|, unscaled and unshifted. ``max_score_after`` is max |stored
    tile value|. Both are taken over visible pairs. ``nonfinite`` and ``saturated`` (|x| = 65504)
    count visible scores that FP16 stored. A tile is block_q rows by block_k keys of one head; a
    rescued tile was kept in FP32. Before a flushed one the output of earlier tiles was rescaled,
    because a row's reference moved or the tile was rescued.
    """

    def __init__(self, batch: int, heads: int, device: torch.device) -> None:
        self.table = torch.zeros(batch, heads, len(FIELDS), dtype=torch.float64, device=device)

    def add(self, block: Block, tile: ScoreTile, flushed: Tensor, options: AttentionOptions) -> None:
        """Add the counts of one tile."""
        before, after = matmul_rows(block.q, block.k).abs(), tile.stored.abs()
        in_fp16 = torch.ones_like(after, dtype=torch.bool) if tile.rescued is None else ~tile.rescued.expand_as(after)
        if block.visible is not None:
            before, after = before.where(block.visible, 0.0), after.where(block.visible, 0.0)
        if options.precision == "fp32":
            in_fp16 = torch.zeros_like(in_fp16)
        every = torch.ones_like(block.q[..., :1], dtype=torch.bool)
        rescued = torch.zeros_like(every) if tile.rescued is None else tile.rescued
        columns = [
            before.amax((-1, -2)),
            after.amax((-1, -2)),
            (~torch.isfinite(after)).sum((-1, -2)),
            ((after == FP16_MAX) & in_fp16).sum((-1, -2)),
            tiles_with(rescued, block.rows_before, options.block_q).sum(-1),
            tiles_with(flushed, block.rows_before, options.block_q).sum(-1),
            tiles_with(every, block.rows_before, options.block_q).sum(-1),
        ]
        self.join(torch.stack([column.flatten(1, 2).double() for column in columns], -1))

    def join(self, other: Tensor) -> None:
        """Merge another table of the same shape into this one."""
        maxima = torch.fmax(self.table[..., :MAXIMA], other[..., :MAXIMA])
        self.table = torch.cat([maxima, self.table[..., MAXIMA:] + other[..., MAXIMA:]], -1)
