"""Logits in FP32 from a head in FP16."""

import copy

import torch
from torch import nn

import pasa
from pasa.fp16 import logits
from tests.pasa.fp16.models import large

IDS = torch.arange(20)[None]


def test_near_logits_stay_apart(monkeypatch):
    """Story: rounded to FP16, FP32's own logits named another most probable token in 3 of 1,000 places."""
    monkeypatch.setattr(logits, "ROWS", 7)
    torch.manual_seed(0)
    head = nn.Linear(16, 40).half()
    model = nn.Module()
    model.get_output_embeddings, model.head = lambda: head, head
    x = torch.randn(2, 3, 16).half()
    truth = nn.functional.linear(x.double(), head.weight.double(), head.bias.double())
    before = head(x)
    ((path, undo),) = logits.widen_logits({"": model})
    after = head(x)
    assert (path, after.dtype, after.shape) == ("head", torch.float32, (2, 3, 40))
    assert (after - truth).abs().max() < 1e-6 < 1e-4 < (before - truth).abs().max()
    undo()
    assert torch.equal(head(x), before)


def test_a_copy_of_a_converted_model_has_a_head_of_its_own():
    model = large("qwen2")
    pasa.to_fp16(model, IDS)
    twin = copy.deepcopy(model)
    before = twin(IDS).logits
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert model(IDS).logits.abs().max() == 0
    assert torch.equal(twin(IDS).logits, before)
    assert before.dtype == torch.float32
