"""Random weights whose scores spread as a trained model's, or are beyond FP16."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from pasa.eval.kit import random_model
from pasa.eval.kit.timing import quantile
from pasa.eval.models.generation import weights
from pasa.eval.speed import recorded

CPU = torch.device("cpu")


def test_the_configuration_is_qwen2_7b() -> None:
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**random_model.CONFIGS["qwen2-7b"]))
    assert sum(p.numel() for p in model.parameters()) == 7_615_616_512
    assert model.model.layers[0].self_attn.head_dim == 128


def test_targets_are_the_recorded_quantiles() -> None:
    targets = weights.target_spreads(28)
    assert targets == sorted(targets)
    assert targets[0] > weights.HEAD_SPREADS[0.0]
    assert targets[-1] < weights.HEAD_SPREADS[1.0]
    assert quantile(targets, 0.5) == pytest.approx(weights.HEAD_SPREADS[0.5], rel=0.01)
    many = weights.target_spreads(1000)
    assert weights.describe_spreads(many) == pytest.approx(
        {f"{share:g}": value for share, value in weights.HEAD_SPREADS.items()}, rel=0.02
    )


def test_the_recorded_spreads_are_those_of_the_recording() -> None:
    """They are of 90 heads; the figures have three digits."""
    spreads: list[float] = []
    for q, k, _ in recorded.layers():
        scores = q[0].float() @ k[0].float().repeat_interleave(q.shape[1] // k.shape[1], 0).mT * q.shape[-1] ** -0.5
        seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
        spreads += scores[:, seen].std(1).tolist()
    found = weights.describe_spreads(sorted(spreads))
    assert found == pytest.approx({f"{share:g}": value for share, value in weights.HEAD_SPREADS.items()}, abs=0.006)


def test_scores_spread_as_asked() -> None:
    """Layers are scaled one by one on the values of before, which later layers change: within 10 %."""
    model = random_model.build(random_model.CONFIGS["tiny"], CPU)
    before = sorted(torch.cat(weights.measured_spreads(model, torch.arange(60)[None])).tolist())
    reached = weights.spread_scores(model)
    assert before[-1] < 1.0, "so that something was to be done"
    assert reached == pytest.approx(sorted(weights.target_spreads(4) * 2), rel=0.1)


def test_the_bias_is_one_constant_in_every_score() -> None:
    """It is in the dimension of each head that turns most slowly."""
    model = random_model.build(random_model.CONFIGS["tiny"], CPU)
    for bias in (7, 5):
        weights.set_bias(model, bias)
    attention = model.model.layers[1].self_attn
    for projection, heads in ((attention.q_proj, 4), (attention.k_proj, 2)):
        expected = torch.zeros(heads, 64, dtype=torch.float16)
        expected[:, 31] = 5
        assert torch.equal(projection.bias.view(heads, 64), expected)
