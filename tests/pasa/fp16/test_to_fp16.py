"""A whole model in FP16: the same function, no overflow, and the way back."""

import copy

import pytest
import torch

import pasa
from tests.pasa.fp16.models import large

IDS = torch.arange(20)[None]


def outputs(model):
    """Return logits and hidden states of a model."""
    with torch.no_grad():
        out = model(IDS, output_hidden_states=True, use_cache=False)
    return [out.logits, *out.hidden_states]


@pytest.mark.parametrize("family", ["qwen2", "gemma3", "gpt2"])
def test_undo_restores_every_bit(family):
    model = large(family)
    before, truth = copy.deepcopy(model.state_dict()), outputs(model)
    with pasa.to_fp16(model, IDS, keep_original="cpu") as handle:
        assert handle.report().modules
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(one, other) for one, other in zip(outputs(model), truth, strict=True))
