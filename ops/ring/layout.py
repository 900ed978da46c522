"""Map tokens to ranks, and find which keys of another rank a rank's queries see.

With n ranks a sequence is cut into 2n chunks. Rank r holds chunks r and 2n - 1 - r, one early and
one late (zig-zag), so that under a causal mask every rank has the same work in every step. For any
two ranks, the visible part of the score matrix is one rectangle or one triangle:

    own keys            all queries, causal: the two chunks lie in order, and so does the visible part
    keys of rank s < r  all queries see chunk s, none sees chunk 2n - 1 - s
    keys of rank s > r  chunk r sees nothing, chunk 2n - 1 - r sees both chunks
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

ALL = slice(None)


class Part(NamedTuple):
    """Hold the queries and keys of one step, as slices of the two ranks' tensors."""

    rows: slice
    keys: slice
    is_causal: bool


def chunk_edges(total: int, ranks: int) -> list[int]:
    """Return where the 2 * ranks chunks begin and end; lengths differ by at most one, longer chunks come first.

    Raises
    ------
    ValueError
        If there are fewer tokens than chunks.
    """
    size, longer = divmod(total, 2 * ranks)
    if not size:
        raise ValueError(
            f"a sequence of {total} tokens is too short for {ranks} ranks: pass {2 * ranks} tokens or more"
        )
    return [i * size + min(i, longer) for i in range(2 * ranks + 1)]


def chunks_of(rank: int, total: int, ranks: int) -> tuple[slice, slice]:
    """Return the two chunks that a rank holds, as slices of the sequence."""
    edges = chunk_edges(total, ranks)
    early, late = rank, 2 * ranks - 1 - rank
    return slice(edges[early], edges[early + 1]), slice(edges[late], edges[late + 1])


def lengths(total: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """Return the lengths of the early and the late chunk of every rank."""
    chunks = (chunks_of(rank, total, ranks) for rank in range(ranks))
    return tuple((early.stop - early.start, late.stop - late.start) for early, late in chunks)


def visible_part(rank: int, source: int, early: tuple[int, ...]) -> Part:
    """Return which keys of `source` the queries of `rank` see under a causal mask; `early`: early chunks' lengths."""
    if source == rank:
        return Part(ALL, ALL, True)
    if source < rank:
        return Part(ALL, slice(0, early[source]), False)
    return Part(slice(early[rank], None), ALL, False)


def cut(part: Part, start: int, stop: int, keys: int) -> Iterator[Part]:
    """Yield the parts in which keys start to stop - 1 are seen, for a rank that holds `keys` keys.

    Under the causal mask of a rank's own keys, these are a triangle and the rectangle below it.
    """
    first, last, _ = part.keys.indices(keys)
    first, last = max(first, start), min(last, stop)
    if first >= last:
        return
    seen = slice(first, last)
    if not part.is_causal:
        yield Part(part.rows, seen, False)
        return
    yield Part(seen, seen, True)
    if last < keys:
        yield Part(slice(last, None), seen, False)
