"""Zig-zag chunks compute every score of the causal triangle once, with the same work on every rank."""

import pytest
import torch

from pasa.ops.ring import layout

SIZES = [(2, 4), (2, 37), (3, 7), (3, 130), (4, 8), (4, 129), (5, 97)]


def positions(rank, total, ranks):
    return torch.cat([torch.arange(total)[chunk] for chunk in layout.chunks_of(rank, total, ranks)])


@pytest.mark.parametrize(("ranks", "total"), [(1, 2), (1, 9), *SIZES])
def test_the_steps_of_all_ranks_are_the_causal_triangle(ranks, total):
    early = tuple(first for first, _ in layout.lengths(total, ranks))
    seen = torch.zeros(total, total, dtype=torch.int)
    for rank in range(ranks):
        for source in range(ranks):
            part = layout.visible_part(rank, source, early)
            rows, keys = positions(rank, total, ranks)[part.rows], positions(source, total, ranks)[part.keys]
            tile = torch.ones(len(rows), len(keys), dtype=torch.int)
            seen[rows[:, None], keys] += tile.tril(len(keys) - len(rows)) if part.is_causal else tile
    assert torch.equal(seen, torch.ones_like(seen).tril())


@pytest.mark.parametrize(("ranks", "total"), SIZES)
def test_all_ranks_have_the_same_work_in_every_step(ranks, total):
    """All ranks have the same work in every step, up to the one token by which chunks differ.

    That token is at most a row and a column of a tile of 2 x 1 chunks.
    """
    early = tuple(first for first, _ in layout.lengths(total, ranks))
    chunk = -(-total // (2 * ranks))
    for step in range(1, ranks):
        work = []
        for rank in range(ranks):
            source = (rank - step) % ranks
            part = layout.visible_part(rank, source, early)
            rows, keys = positions(rank, total, ranks)[part.rows], positions(source, total, ranks)[part.keys]
            work.append(len(rows) * len(keys))
        assert max(work) - min(work) <= 4 * chunk


@pytest.mark.parametrize(("ranks", "total"), SIZES)
def test_chunks_differ_by_one_token_at_most(ranks, total):
    every = [length for both in layout.lengths(total, ranks) for length in both]
    assert sum(every) == total
    assert max(every) - min(every) <= 1


def test_too_few_tokens_are_refused():
    with pytest.raises(ValueError, match="a sequence of 7 tokens is too short for 4 ranks"):
        layout.chunk_edges(7, 4)
