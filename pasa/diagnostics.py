"""Per-call diagnostics of attention, recorded while a context is open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionRecord:
    """What the scores of one attention call did; every field is (B, Hq), FP64.

    Attributes
    ----------
    max_score_before : Tensor
        max |q.k| over visible pairs, unscaled and unshifted: what must stay below 65504 in plain FP16 attention.
    max_score_after : Tensor
        max |stored tile value|, in the tile's own units.
    nonfinite, saturated : Tensor
        Visible scores stored as infinity or NaN, and as +/-65504. With the exact recovery such a score lies so far
        below its row's maximum that its weight is 0 (README.md of the operator), so it does no harm. A NaN or
        infinity in the input is not counted: it is answered with NaN where it is seen.
    rescued_tiles, tiles : Tensor
        Tiles kept in FP32, and all tiles.
    """

    max_score_before: Tensor
    max_score_after: Tensor
    nonfinite: Tensor
    saturated: Tensor
    rescued_tiles: Tensor
    tiles: Tensor


_open: list[list[AttentionRecord]] = []


@contextmanager
def record_diagnostics() -> Iterator[list[AttentionRecord]]:
    """Collect one `AttentionRecord` per attention call made inside the context, in order.

    Recording costs one more score GEMM per call; outside the context nothing is computed. Calls inside a graph that
    torch.compile captured before the context was opened are recaptured. Calls of all threads are recorded.

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
        _open[:] = [other for other in _open if other is not records]  # lists are equal while empty


def recording() -> bool:
    """Whether any context is open."""
    return bool(_open)


def record(counts: Tensor) -> None:
    """Hand one call's table (B, Hq, 6) to every open context."""
    entry = AttentionRecord(*counts.unbind(-1))
    for records in _open:
        records.append(entry)
