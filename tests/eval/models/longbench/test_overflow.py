"""Counting the scores that FP16 cannot store."""

import pytest
import torch
import transformers as hf

import pasa
from pasa.eval.kit.overflow_fixture import inject_overflow
from pasa.eval.models.longbench import overflow


def test_counts_by_hand():
    """Two queries at the end of three keys: the first does not see the last one. 65,520 is the first to overflow."""
    q = torch.tensor([[[[256.0], [256.0]]]])
    k = torch.tensor([[[[1.0], [255.9375], [256.0]]]])
    assert overflow.count_scores(q, k) == {"max_score": 65536.0, "overflows": 1 + 2, "scores": 5}
    assert overflow.BEYOND_FP16 == 65520


def test_chunks_and_grouped_heads_change_nothing(monkeypatch):
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 37, 8) * 100, torch.randn(2, 2, 41, 8) * 100
    whole = overflow.count_scores(q, k)
    monkeypatch.setattr(overflow, "ROWS", 10)
    assert overflow.count_scores(q, k) == whole
    scores = (q @ k.repeat_interleave(2, 1).mT).abs()
    visible = torch.ones(37, 41).tril(41 - 37).bool()
    assert whole["overflows"] == int((scores >= 65520)[..., visible].sum()) > 0
    assert whole["scores"] == 8 * int(visible.sum())


@pytest.mark.parametrize("offset", [0, 131072])
def test_layers_of_a_model(steady, offset):
    """Every score of every layer overflows in the fixture, none before the injection."""
    model = hf.Qwen2ForCausalLM.from_pretrained(steady).eval()
    if offset:
        model, _ = inject_overflow(model, offset)
    with pasa.patch_pipeline(model):
        layers = overflow.count_overflow(model, torch.arange(20)[None])
    assert [layer["scores"] for layer in layers] == [4 * 210] * 2
    assert [layer["overflows"] for layer in layers] == ([4 * 210] * 2 if offset else [0, 0])
    assert all((layer["max_score"] > 65520) == bool(offset) for layer in layers)
