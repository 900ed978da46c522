"""Patched models whose attention the Ascend C kernels serve, on the CPU twin: padding on the left, sliding windows.

The call names the backend, so a call that the kernels refuse is an error. Logits may err from those of eager attention
in FP32 by twice what those of the reference err by, which rounds the same tensors to FP16, plus 1e-3.
"""

import pytest
import torch
import transformers

import pasa
from pasa.ops.attention.ascend import backend as npu_backend
from tests.inputs import max_error

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 256,
}
LAYERS, TOKENS = SIZES["num_hidden_layers"], 150  # more than one block of keys
MODELS = {
    "Qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config(**SIZES)),
    "Mistral": (transformers.MistralForCausalLM, transformers.MistralConfig(**SIZES, sliding_window=20)),
}


def build(name):
    torch.manual_seed(0)
    model, config = MODELS[name]
    config._attn_implementation = "eager"
    built = model(config).eval()
    for module in built.modules():
        if isinstance(module, torch.nn.Linear):  # initial weights give scores so small that every row is a mean
            torch.nn.init.normal_(module.weight, std=module.in_features**-0.5)
    return built


def batch(padded):
    """Return token ids and masks of three sequences, two of them padded on the left, one by more than a block."""
    ids = torch.randint(5, 97, (3, TOKENS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :40] = mask[2, :140] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture(params=["npu", "npu_310p"])
def served(request, monkeypatch):
    """Return a list of the calls that the kernels of a chip serve."""
    request.getfixturevalue(request.param)
    calls, kernels = [], npu_backend._kernels

    def noting(call, *args, **how):
        calls.append((call, how.get("mask")))
        return kernels(call, *args, **how)

    monkeypatch.setattr(npu_backend, "_kernels", noting)
    return calls


@torch.no_grad()
def logits(model, inputs, backend):
    if backend is None:
        return model(**inputs).logits
    with pasa.patch_pipeline(model, policy="all", backend=backend):
        return model(**inputs).logits


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_a_batch(served, name, padded):
    model, inputs = build(name), batch(padded)
    eager, emulated, found = (logits(model, inputs, backend) for backend in (None, "reference", "npu"))
    assert len(served) == LAYERS
    assert all((mask is not None or call.window[0] >= 0) == (padded or name == "Mistral") for call, mask in served)
    there = inputs["attention_mask"].bool()
    assert max_error(found[there], eager[there]) <= 2 * max_error(emulated[there], eager[there]) + 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_generation(served, name):
    """Decoding over the cache of a padded batch: one query row beside a mask."""
    model, inputs = build(name), batch(padded=True)
    how = {"max_new_tokens": 3, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(**inputs, **how, pad_token_id=0)
    with pasa.patch_pipeline(model, policy="all", backend="npu"):
        found = model.generate(**inputs, **how, pad_token_id=0)
    assert len(served) == 3 * LAYERS
    assert torch.equal(found.sequences, expected.sequences)
    for step, right in zip(found.logits, expected.logits, strict=True):
        assert max_error(step, right) <= 0.02 * right.std()
