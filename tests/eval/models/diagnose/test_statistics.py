"""The numbers of a head against data whose answer is known."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from pasa.eval.accuracy.rmse.cases import RESONANCE_CASES
from pasa.eval.models.diagnose import maps, probe
from pasa.eval.models.diagnose.probe import head_statistics


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("case", RESONANCE_CASES, ids=lambda case: case.name)
def test_resonance_and_bias_are_seen_in_the_papers_cases(case):
    """Figures 6, 7, 12 and 14: waves in opposition or in phase, scores beyond FP16, keys alike along the sequence."""
    small = dataclasses.replace(case, shape=(1, 2, 256, case.shape[3]))
    q, k, _ = small.tensors(0)
    for head in head_statistics(q, k):
        expected = -1 if case.phase == 180 else 1
        assert head["resonance"] == pytest.approx(expected, abs=0.02)
        assert head["sequence_bias"] > 0.99
        assert head["max_score"] > 65504
        assert head["overflow_share"] > 0.01
        assert head["phase"] == case.phase
        assert head["scores"][0 if case.phase == 180 else 1] == expected * head["max_score"]
        assert max(map(abs, head["shifted_keys"])) < 0.2 * max(map(abs, head["keys"])), "the shift takes the wave away"


def test_data_without_a_cause():
    """1/sqrt(S) is the bias of independent keys, 1/sqrt(D) the correlation of independent vectors (4 times that)."""
    for head in head_statistics(randn(1, 4, 400, 128), randn(1, 4, 400, 128, seed=1)):
        assert head["sequence_bias"] == pytest.approx(1 / math.sqrt(400), rel=0.3)
        assert abs(head["resonance"]) < 4 / math.sqrt(128)
        assert head["phase"] is None
        assert head["overflow_share"] == 0
        assert head["max_score"] < 100


def test_scores_and_ranges_by_hand():
    """Two query heads share the keys (1, 0) and (-3, 2); the queries are (2, 1) and (0, -5)."""
    q = torch.tensor([[[[2.0, 1.0]], [[0.0, -5.0]]]])
    k = torch.tensor([[[[1.0, 0.0], [-3.0, 2.0]]]])
    first, second = head_statistics(q, k)
    assert (first["scores"], first["max_score"]) == ((-4.0, 2.0), 4.0)
    assert (second["scores"], second["max_score"]) == ((-10.0, 0.0), 10.0)
    assert first["keys"] == second["keys"] == (-3.0, 2.0)
    assert first["shifted_keys"] == (-3.0, 2.0), "keys on both sides of 0 keep no anchor"
    shared, _ = head_statistics(q, k + torch.tensor([4.0, 4.0]))
    assert shared["shifted_keys"] == (-2.0, 2.0), "the mean is (3, 5)"
    assert first["sequence_bias"] == pytest.approx(math.sqrt(2 / 7))
    assert first["resonance"] == pytest.approx(-1)
    assert second["resonance"] == pytest.approx(-1), "(0, -5) falls, (-1, 1) rises"


def test_constant_and_zero_vectors_have_no_correlation():
    (head,) = head_statistics(torch.ones(1, 1, 3, 8), torch.zeros(1, 1, 5, 8))
    assert (head["resonance"], head["sequence_bias"], head["max_score"]) == (0.0, 0.0, 0.0)


def test_grouped_heads_see_their_own_keys():
    k = torch.stack([torch.full((5, 4), value) for value in (1.0, 10.0)])[None]
    q = torch.ones(1, 6, 3, 4)
    assert [head["max_score"] for head in head_statistics(q, k)] == [4.0] * 3 + [40.0] * 3


def test_long_sequences_are_sampled_with_both_ends(monkeypatch):
    for size, kept in ((3, [0, 1, 2]), (4, [0, 1, 2, 3]), (10, [0, 3, 6, 9])):
        assert maps.sample(torch.arange(size)[None], 1, 4).tolist() == [kept]
    monkeypatch.setattr(probe, "ROWS", 2)
    q = torch.zeros(1, 1, 9, 4)
    q[0, 0, 8] = 7.0
    assert head_statistics(q, torch.ones(1, 1, 3, 4))[0]["max_score"] == 28.0, "the last row is among them"


def test_share_of_scores_beyond_fp16():
    """Three of 2 x 4 scores, all of the second query, are 70,000 and above."""
    q, k = torch.tensor([[[[1.0], [1000.0]]]]), torch.tensor([[[[70.0], [80.0], [65.0], [90.0]]]])
    assert head_statistics(q, k)[0]["overflow_share"] == 3 / 8
