"""Per-call diagnostics of attention, recorded while a context is open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionRecord:
    """Statistics of the scores of one attention call; every field is (B, Hq), FP64.

    Attributes
    ----------
    max_score_before : Tensor
        max |q.k| over visible pairs, unscaled and unshifted. Plain FP16 attention overflows if it exceeds 65504.
    max_score_after : Tensor
        max |stored tile value|, in the tile's own units.
    nonfinite, saturated : Tensor
        Numbers of visible scores stored as infinity or NaN, and as +/-65504. With the exact recovery such a score is
        harmless, because it is so far below its row's maximum that its weight is 0 (README.md of the operator).
        Scores with a NaN or infinity of the input are not counted; they make the rows that see them NaN.
    rescued_tiles, flushed_tiles, tiles : Tensor
        Numbers of tiles kept in FP32, of tiles before which the output of earlier ones was rescaled, and of all tiles.
        Backend `npu` counts tiles of 64 rows that see a key, whatever `block_q` is.
    """

    max_score_before: Tensor
    max_score_after: Tensor
    nonfinite: Tensor
    saturated: Tensor
    rescued_tiles: Tensor
    flushed_tiles: Tensor
    tiles: Tensor


_open: list[list[AttentionRecord]] = []


@contextmanager
def record_diagnostics() -> Iterator[list[AttentionRecord]]:
    """Collect one `AttentionRecord` per attention call made inside the context, in order.

    Recording costs one more score GEMM per call; outside the context it costs nothing. Graphs that torch.compile
    captured before the context was opened are captured again. Calls of all threads are recorded.

    Examples
    --------
    >>> q = k = v = torch.full((1, 1, 2, 64), 40, dtype=torch.float16)
    >>> with pasa.record_diagnostics() as records:
    ...     out = pasa.attention(q, k, v)
    >>> records[0].max_score_before  # 64 * 40 * 40: beyond 65504
    tensor([[102400.]], dtype=torch.float64)
    >>> records[0].max_score_after  # the keys' mean went first
    tensor([[0.]], dtype=torch.float64)
    """
    records: list[AttentionRecord] = []
    _open.append(records)
    try:
        yield records
    finally:
        _open[:] = [other for other in _open if other is not records]  # by identity, because empty lists are equal


def recording() -> bool:
    """Return whether any recording context is open."""
    return bool(_open)


def record(counts: Tensor) -> None:
    """Add one call's table (B, Hq, 7) to the records of every open context."""
    entry = AttentionRecord(*counts.unbind(-1))
    for records in _open:
        records.append(entry)
