"""The exact recovery keeps a tile in FP32 beyond 6 nats, and moves what its weights are relative to beyond 4.

Scores are written down in nats: D = 64, a query selects channels, and the blocks are 128 keys long. Bounds: a weight is
stored in FP16, and an FP16 score is off by at most 2^-8 units (README.md of the operator on an NPU).
"""

import pytest
import torch

import pasa
from pasa import PasaConfig

BLOCK, DIM = 128, 64


def call(*rows, values=None):
    """Attend with one query a row; each row lists the score of every block, or of every key of a block."""
    q, k = torch.zeros(1, 1, len(rows), DIM), torch.zeros(1, 1, BLOCK * len(rows[0]), DIM)
    for i, blocks in enumerate(rows):
        q[..., i, i] = 8.0  # the scale is 1 / 8
        scores = [torch.as_tensor(block, dtype=torch.float32).expand(BLOCK) for block in blocks]
        k[..., i] = torch.cat(scores)
    v = torch.ones(k.shape) if values is None else values
    with pasa.record_diagnostics() as records:
        out = pasa.attention(q.half(), k.half(), v.half(), config=PasaConfig(), backend="reference")
    expected, _ = pasa.golden_attention(q.half(), k.half(), v.half())
    return int(records[0].rescued_tiles), int(records[0].flushed_tiles), out.double(), expected.double()


@pytest.mark.parametrize(("rise", "rescued", "flushed"), [(3.9, 0, 0), (4.1, 0, 1), (5.9, 0, 1), (6.1, 1, 1)])
def test_four_nats_move_a_reference_and_six_keep_a_tile_in_fp32(rise, rescued, flushed):
    assert call([0, 0, 0, rise])[:2] == (rescued, flushed)


@pytest.mark.parametrize(("first", "second", "rescued"), [(0, -7.0, 1), (0, -5.9, 0), (0, 6.1, 1)])
def test_a_second_tile_refers_to_the_guess_of_the_first_so_distances_count_on_both_sides(first, second, rescued):
    assert call([first, second, 0, 0])[0] == rescued


def test_a_move_of_one_row_moves_the_others_by_less_than_four_nats():
    """The second row's reference moves to 3, so its rise to 6.9 is one of 3.9."""
    assert call([0, 0, 0, 5, 5, 5], [0, 0, 0, 3, 3, 6.9])[:2] == (0, 1)


def test_a_third_tile_far_below_its_reference_stays_in_fp16():
    assert call([0, 0, -7.0, -7.0])[:2] == (0, 0)


def test_a_tile_refers_to_what_the_weights_were_relative_to_two_blocks_before():
    """The fourth block is 1 nat above the third, which moved the reference by 5.5, and 6.5 above the second."""
    assert call([0, 0, 5.5, 6.5])[:2] == (1, 2)
    assert call([0, 0, 5.5, 5.5, 6.5])[:2] == (0, 1)


def test_a_move_of_one_row_moves_all_rows_of_its_tile_and_lowers_none():
    """The first row rises by 5 nats where the second falls by 200: exp(200) is beyond FP32."""
    values = torch.arange(4.0).repeat_interleave(BLOCK).reshape(1, 1, -1, 1).expand(1, 1, -1, DIM)
    rescued, flushed, out, expected = call([0, 0, 0, 5], [0, 0, 0, -200], values=values)
    assert (rescued, flushed) == (0, 1)
    assert (out - expected).abs().max() <= 3 * 2.0**-9


@pytest.mark.parametrize("rise", [3.9, 5.0, 20.0])
def test_weights_of_a_rise_fit_into_fp16(rise):
    """2^10 e^4 does, but not much more. Half of the keys are 0.5 nats below the others, so a weight that saturates
    moves the mean of the values by up to 0.12."""
    alternating = torch.tensor([rise, rise - 0.5]).repeat(BLOCK // 2)
    values = torch.tensor([1.0, 0.0]).repeat(2 * BLOCK).reshape(1, 1, -1, 1).expand(1, 1, -1, DIM)
    _, _, out, expected = call([0, 0, 0, alternating], values=values)
    assert (out - expected).abs().max() <= 2.0**-8


def test_weights_far_below_a_sink_keep_their_digits():
    """A weight 16 nats below the reference is stored as 2^-13.1, where FP16 rounds by at most 2^-25: 2^-11.9 of the
    weight. With a lift of 2^4 it would be 2^-5.9."""
    sink = torch.full((BLOCK,), -16.0)
    sink[0] = 0.0
    values = torch.ones(1, 1, 4 * BLOCK, DIM)
    values[..., 0, :] = 0.0
    _, _, out, expected = call([sink, -16.0, -16.0, -16.0], values=values)
    assert (out / expected - 1).abs().max() <= 2.0**-9
