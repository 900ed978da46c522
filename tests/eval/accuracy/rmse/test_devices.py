"""Errors of backends beside torch's attention: what is compared, what fails, and which keys have anchors."""

from __future__ import annotations

import math

import pytest
import torch

import pasa
from pasa.eval.accuracy.rmse import devices
from pasa.eval.accuracy.rmse.cases import PAPER_CASES, BiasCase
from pasa.eval.kit.attention_calls import AttentionCalls
from pasa.eval.kit.error_metrics import generator

NAMES = [*(case.name for case in PAPER_CASES), "bias(80)", "bias(80) of K"]
SIZES = {"heads": 1, "seq": 48, "seeds": [0]}


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(devices, "BIAS_SEEDS", 1)


def test_backends_are_compared_with_torch_on_all_cases(few):
    result = devices.BACKENDS.measure(**SIZES)
    assert result["gate"] == {"passed": True, "limit": devices.LIMIT, "failures": []}
    assert [row["case"] for row in result["ratios"]] == [
        *(case.name for case in PAPER_CASES),
        "bias(80)",
        "bias(80) of K",
    ]
    assert list(result["ratios"][0]["rmse"]) == ["torch FP32", "torch FP16", "sdpa", "reference"]
    text = devices.BACKENDS.markdown(result)
    assert "bias(80) of K: `sdpa`" in text
    assert "not judged: it keeps scores in FP16" in text


def test_a_backend_that_errs_more_than_torch_fails(few, monkeypatch):
    right = devices._serve
    monkeypatch.setattr(devices, "_serve", lambda name, *inputs: right(name, *inputs) * 1.01)
    result = devices.BACKENDS.measure(**SIZES)
    assert not result["gate"]["passed"]
    assert any(line.startswith("sdpa on uniform(0,0.5): ") for line in result["gate"]["failures"])
    assert not any(line.startswith("reference") for line in result["gate"]["failures"])


def test_a_bias_of_k_alone_leaves_q():
    q, k, _ = (x.float() for x in BiasCase(80, (1, 1, 64, 32), keys_only=True).tensors(0))
    assert abs(float(q.mean())) < 0.2
    assert abs(float(k[..., :16].mean()) - 80) < 1


def test_shares_of_columns_and_heads_with_anchors():
    q, v = torch.randn(2, 1, 4, 600, 8).half()
    k = torch.randn(1, 4, 600, 8).half()
    assert devices.anchored(q, k, v) == (0.0, 0.0)
    k[:, 1, :, 3] = 20.0
    k[:, 2, :, :2] += 50.0
    assert devices.anchored(q, k, v) == (3 / 32, 0.5)
    assert devices.anchored(q, k[:, :, :100], v[:, :, :100]) == (0.0, 0.0), "too few keys"


def test_layers_are_recorded_in_order_with_both_errors():
    records: list[dict[str, object]] = []
    told: list[int] = []

    def record(q, k, v):
        devices._record_layer(records, "small", told.append, q, k, v)

    q, (k, v) = (
        torch.randn(1, 4, 600, 16, generator=generator(0)),
        torch.randn(2, 1, 2, 600, 16, generator=generator(1)),
    )
    with AttentionCalls(record, values=True):
        for bias in (0, 1000):
            pasa.attention(q + bias / 100, k + bias, v, is_causal=True)
    assert told == [0, 1]
    assert [each["columns"] for each in records] == [0.0, 1.0]
    assert records[0]["with"] == records[0]["without"]
    assert records[1]["with"] < 0.5 * records[1]["without"]
    [row] = devices.layer_table({"records": records}).rows
    assert row[:4] == ["small", "2", "50 %", "50 %"]


def test_pooled_errors_are_root_mean_squares():
    assert devices.pooled([3.0, 4.0]) == pytest.approx(math.sqrt(12.5))
