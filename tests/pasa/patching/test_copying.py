"""A copy of a patched model is an unpatched model, whether copied in memory or saved and loaded elsewhere."""

from __future__ import annotations

import copy
import io
import subprocess
import sys

import pytest
import torch

import pasa
from tests.versions import skip_diffusers

IDS = torch.randint(5, 97, (2, 21), generator=torch.Generator().manual_seed(1))
WITHOUT_PASA = """
import sys
sys.modules["pasa"] = None  # importing it is an error
import torch
model, ids, expected = torch.load(sys.argv[1], weights_only=False)
assert torch.equal(model(ids).logits, expected)
"""


def save_and_load(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "save and load": save_and_load}


@torch.no_grad()
def output(model):
    """Return the model's output for fixed inputs."""
    draw = torch.Generator().manual_seed(1)
    if type(model).__name__ == "WanTransformer3DModel":
        latents, text = torch.randn(1, 4, 2, 8, 8, generator=draw), torch.randn(1, 9, 16, generator=draw)
        return model(latents, torch.tensor([3]), text).sample
    if type(model).__name__ == "UNetSpatioTemporalConditionModel":
        latents, image = torch.randn(1, 2, 8, 16, 16, generator=draw), torch.randn(1, 1, 32, generator=draw)
        return model(latents, torch.tensor([3.0]), image, torch.tensor([[6.0, 127.0, 0.02]])).sample
    return model(IDS).logits


@pytest.fixture(params=["qwen2, sdpa", "qwen2, eager", "unet", "wan"])
def model(request, tiny):
    if request.param in ("unet", "wan"):
        skip_diffusers()
    torch.manual_seed(0)
    if request.param == "unet":
        from pasa.eval.models.video.tiny import tiny_unet

        return tiny_unet()
    if request.param == "wan":
        import diffusers

        sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4}
        return diffusers.WanTransformer3DModel(**sizes, text_dim=16, freq_dim=32, ffn_dim=32, num_layers=1).eval()
    return tiny(*request.param.split(", "))


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_is_an_unpatched_model_that_can_be_patched(model, how):
    """A copy of a patched model is unpatched, runs without PASA, and can be patched.

    Story: the copy kept the name of the patched attention, its bindings and its hooks. It ran as long as the original
    was patched, then raised KeyError: 'pasa', and could not be patched even after set_attn_implementation("sdpa").
    """
    expected = output(model)
    with pasa.patch_pipeline(model) as handle:
        patched = output(model)
        twin = COPIES[how](model)
        assert torch.equal(output(twin), expected)
        with pasa.patch_pipeline(twin) as second:
            assert second is not handle
            assert torch.equal(output(twin), patched)
        assert torch.equal(output(model), patched), "undoing the copy's patch must not touch the original"
    assert torch.equal(output(twin), expected)
    with pasa.patch_pipeline(twin):
        assert torch.equal(output(twin), patched)
    assert not torch.equal(patched, expected)


def test_a_model_saved_while_patched_loads_without_pasa(tiny, tmp_path):
    """A model that was saved while patched can be loaded where PASA is not installed.

    Story: the process that loaded it raised KeyError: 'pasa'.
    """
    model, file = tiny("qwen2", "sdpa"), tmp_path / "model.pt"
    expected = output(model)
    with pasa.patch_pipeline(model):
        torch.save((model, IDS, expected), file)
    run = [sys.executable, "-c", WITHOUT_PASA, str(file)]
    result = subprocess.run(run, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_copy_gives_its_attention_weights(tiny):
    """A copy returns attention weights, because the hook that refuses them is not copied."""
    model = tiny("qwen2", "eager")
    with pasa.patch_pipeline(model):
        twin = copy.deepcopy(model)
        assert len(twin(IDS, output_attentions=True).attentions) == 2
        with pytest.raises(NotImplementedError, match="output_attentions"):
            model(IDS, output_attentions=True)


def test_a_guarded_model_can_be_copied(tiny):
    """A model with a guard can be copied and pickled.

    Story: the guard of policy="auto" holds weak references, which cannot be pickled.
    """
    model = tiny("llama", "sdpa")
    expected = output(model)
    with pasa.patch_pipeline(model, policy="auto") as handle:
        assert handle.guarded
        for twin in (copy.deepcopy(model), save_and_load(model)):
            assert torch.equal(output(twin), expected)


def test_a_shallow_copy_of_an_attention_module_can_be_patched(tiny):
    """A shallow copy shares the mark of the patch, keeps it when the original is unpatched, and can be patched."""
    model = tiny("qwen2", "sdpa")
    expected, own = output(model), model.model.layers[0].self_attn
    with pasa.patch_pipeline(model):
        patched = output(model)
        model.model.layers[0].self_attn = copy.copy(own)
    assert torch.equal(output(model), expected)
    with pasa.patch_pipeline(model):
        assert torch.equal(output(model), patched)
