"""Packed sequences are padded in groups."""

import torch

from pasa.ops.packed import gather, group_sequences, scatter

EDGES_Q, EDGES_K = [0, 2, 2, 5, 7], [0, 4, 6, 6, 10]


def test_groups_leave_out_what_has_no_queries_or_no_keys():
    assert group_sequences(EDGES_Q, EDGES_K, lambda rows, keys: None) == [([(0, 2), (5, 7)], [(0, 4), (6, 10)])]
    assert group_sequences([0, 0], [0, 3], lambda rows, keys: None) == []


def test_groups_are_of_a_kind():
    edges = [0, 3, 5, 8]
    by_rows = group_sequences(edges, edges, lambda rows, keys: rows)
    assert [rows for rows, _ in by_rows] == [[(0, 3), (5, 8)], [(3, 5)]]


def test_padding_goes_there_and_back():
    x = torch.randn(9, 3, 4)
    spans = [(1, 3), (3, 8), (8, 9)]
    batch = gather(x, spans)
    assert batch.shape == (3, 3, 5, 4)
    for i, (start, stop) in enumerate(spans):
        assert torch.equal(batch[i, :, : stop - start], x[start:stop].transpose(0, 1))
        assert torch.equal(batch[i, :, stop - start :], x[stop - 1][:, None].expand(-1, 5 - (stop - start), -1))
    back = torch.zeros_like(x)
    scatter(back, batch, spans)
    assert torch.equal(back[1:], x[1:])
    assert not back[0].any()
