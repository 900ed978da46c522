"""Hostile inputs are what their names say, and break what they are meant to break."""

from __future__ import annotations

import pytest
import torch

import pasa
from pasa.eval.check_device import hostile
from pasa.eval.random_calls.truth import naive_fp16

SHAPE = (1, 2, 1, 24, 80, 64)
ATTEND = pasa.attention


@pytest.mark.parametrize("bound", [1e4, 1e6, 1e8, 1e10])
def test_scores_reach_what_they_are_said_to(bound):
    call, truth, _ = hostile.prepared((f"{bound:g} nats", "none", SHAPE))
    assert float(truth.products.max()) == pytest.approx(bound, rel=1e-2)
    assert call.v.min() >= 1
    assert call.v.max() <= 2


def test_sinks_outliers_and_rows_without_keys():
    (sink, _, _), (outlier, _, _) = (hostile.prepared((f"{name} key", "none", SHAPE)) for name in ("sink", "outlier"))
    assert not sink.k[:, :, 7].any()
    assert sink.k[:, :, 8:].min() > 299
    assert outlier.k[:, :, 7].abs().max() > 20 * outlier.k[:, :, 8:].abs().max()
    assert hostile.prepared(("scale 1", "bool", SHAPE))[1].fully_masked.sum() == 2
    assert hostile.prepared(("scale 1", "bool", (1, 2, 2, 1, 33, 8)))[1].fully_masked.sum() == 0


@pytest.mark.parametrize("kind", ["scale 65504", "1e+06 nats", "bias 8000"])
def test_naive_fp16_attention_is_found_wrong(monkeypatch, kind):
    case = (kind, "none", SHAPE)
    call, truth, _ = hostile.prepared(case)
    monkeypatch.setattr(pasa, "attention", lambda *inputs, **options: (naive_fp16(call), truth.lse))
    assert hostile.measure(case, "sdpa", "cpu")["faults"] > 0


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("kind", hostile.KINDS)
def test_backends_are_right(kind, backend):
    measured = hostile.measure((kind, "causal", SHAPE), backend, "cpu")
    assert measured["faults"] == measured["outside"] == 0
    assert measured["error"] <= 1


@pytest.mark.parametrize(
    ("change", "kind", "measure"),
    [
        (lambda out, lse: (out * 1.01, lse), "scale 1", "error"),
        (lambda out, lse: (out + 1.01, lse), "1e+10 nats", "outside"),
        (lambda out, lse: (out.masked_fill(out > 2, torch.nan), lse), "scale 4", "faults"),
        (lambda out, lse: (out + torch.inf, lse), "V 65504", "faults"),
        (lambda out, lse: (out, lse + torch.inf), "scale 1", "faults"),
    ],
)
def test_a_wrong_result_is_found(monkeypatch, change, kind, measure):
    monkeypatch.setattr(pasa, "attention", lambda *inputs, **options: change(*ATTEND(*inputs, **options)))
    assert hostile.measure((kind, "none", SHAPE), "sdpa", "cpu")[measure] > (1 if measure == "error" else 0)


def test_a_mask_that_is_ignored_is_found(monkeypatch):
    monkeypatch.setattr(pasa, "attention", lambda *x, **options: ATTEND(*x, **options | {"attn_mask": None}))
    measured = hostile.measure(("scale 1", "bool", SHAPE), "sdpa", "cpu")
    assert measured["faults"] > 0
    assert measured["error"] > 1
