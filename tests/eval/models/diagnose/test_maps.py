"""Small pictures of large matrices, and which heads get them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import pasa
from pasa.eval.accuracy.rmse.cases import RESONANCE_CASES
from pasa.eval.accuracy.rmse.resonance import shifted_keys, stored_scores
from pasa.eval.models.diagnose import maps, probe
from pasa.eval.models.diagnose.maps import POINTS, extremes, head_pictures


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_score_that_stands_alone_is_in_the_picture(sign):
    """Every 8th column of 1,000 would miss column 3. Small matrices are shown whole."""
    x = torch.zeros(300, 1000)
    x[200, 3] = sign * 7
    x[200, 4] = -sign * 3
    shown = extremes(x)
    assert shown.shape == (POINTS, POINTS)
    assert (shown.min(), shown.max()) == ((0, 7) if sign > 0 else (-7, 0))
    assert torch.equal(extremes(x[195:202, :POINTS]), x[195:202, :POINTS])


@pytest.mark.parametrize("case", RESONANCE_CASES, ids=lambda case: case.name)
def test_pictures_are_those_of_the_resonance_experiment(case):
    """The same matrices as the paper's figures are drawn of, K' and S' in the same units."""
    small = dataclasses.replace(case, shape=(1, 1, 300, case.shape[3]))
    q, k, _ = (x.float() for x in small.tensors(0))
    config = pasa.PasaConfig()
    moved, stored = shifted_keys(k, config)[0, 0], stored_scores(q, k, config)
    expected = {"Q": q[0, 0], "K": k[0, 0], "K'": moved, "S": (q @ k.mT)[0, 0], "S'": stored}
    shown = head_pictures(q[0, 0], k[0, 0])
    assert list(shown) == list(expected)
    for name, matrix in expected.items():
        assert torch.equal(shown[name].values, extremes(matrix)), name
        assert shown[name].shape == tuple(matrix.shape)


def test_long_sequences_are_sampled_and_a_single_key_is_drawn(monkeypatch):
    monkeypatch.setattr(maps, "ROWS", 40)
    shown = head_pictures(torch.randn(1000, 16), torch.randn(700, 16))
    assert shown["S"].shape == shown["S'"].shape == (40, 700)
    assert shown["Q"].shape == (1000, 16)
    assert head_pictures(torch.randn(5, 16), torch.randn(1, 16))["S'"].shape == (5, 1)


def test_pictures_are_kept_of_the_worst_call_of_the_worst_modules(monkeypatch):
    """Pictures are made only of a head that is worse than those kept."""
    made = []
    monkeypatch.setattr(probe, "MODULES", 2)
    monkeypatch.setattr(probe, "head_pictures", lambda q, k: made.append(1) or {})
    findings, q = probe.Findings(None), torch.randn(4, 8)
    calls = (("a", 1, 5), ("b", 1, 3), ("c", 1, 1), ("b", 2, 9), ("b", 3, 8), ("c", 2, 6), ("b", 4, 9))
    for module, call, score in calls:
        findings.offer(module, 0, call, float(score), q, q)
    assert [(each.module, each.call, each.max_score) for each in findings.maps] == [("b", 2, 9.0), ("c", 2, 6.0)]
    assert len(made) == 4
