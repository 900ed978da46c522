"""Processors that call torch's scaled_dot_product_attention themselves, as those of SD 3, run PASA when patched."""

from __future__ import annotations

import copy

import pytest
import torch

import pasa
from pasa.patching.callbacks import Callbacks
from pasa.patching.sdpa_calls import calls_attention, make_attention, redirected
from tests.versions import skip_diffusers

skip_diffusers()
import diffusers  # noqa: E402

SMALL = {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2}
LATENT = {"in_channels": 4, "out_channels": 4}


def randn(*shape, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sd3():
    model = diffusers.SD3Transformer2DModel(
        **SMALL, **LATENT, sample_size=8, patch_size=2, joint_attention_dim=32, caption_projection_dim=32,
        pooled_projection_dim=16, pos_embed_max_size=8, qk_norm="rms_norm",
    )  # fmt: skip
    return model, {
        "hidden_states": randn(2, 4, 8, 8),
        "encoder_hidden_states": randn(2, 7, 32, seed=4),
        "pooled_projections": randn(2, 16, seed=5),
        "timestep": torch.tensor([3, 3]),
    }


def cogvideox():
    model = diffusers.CogVideoXTransformer3DModel(
        **SMALL, **LATENT, time_embed_dim=8, text_embed_dim=16, sample_width=8, sample_height=8, sample_frames=5,
        max_text_seq_length=7, use_rotary_positional_embeddings=True,
    )  # fmt: skip
    angles = randn(2 * 16, 16, seed=6)
    return model, {
        "hidden_states": randn(1, 2, 4, 8, 8),
        "encoder_hidden_states": randn(1, 7, 16, seed=4),
        "timestep": torch.tensor([3]),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }


def hunyuandit():
    model = diffusers.HunyuanDiT2DModel(
        num_layers=2, num_attention_heads=2, attention_head_dim=16, hidden_size=32, in_channels=4, patch_size=2,
        sample_size=8, cross_attention_dim=16, cross_attention_dim_t5=16, pooled_projection_dim=16, text_len=5,
        text_len_t5=4, activation_fn="gelu-approximate",
    )  # fmt: skip
    angles = randn(16, 16, seed=6)
    return model, {
        "hidden_states": randn(1, 4, 8, 8),
        "timestep": torch.tensor([3.0]),
        "encoder_hidden_states": randn(1, 5, 16, seed=4),
        "text_embedding_mask": torch.tensor([[1, 1, 1, 0, 0]]),
        "encoder_hidden_states_t5": randn(1, 4, 16, seed=5),
        "text_embedding_mask_t5": torch.tensor([[1, 1, 1, 0]]),
        "image_meta_size": torch.full((1, 6), 8.0),
        "style": torch.tensor([0]),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }


MODELS = [(sd3, 2), (cogvideox, 2), (hunyuandit, 4)]


def seeded(build):
    """Return a model whose matrices are drawn so that attention matters, and its inputs."""
    torch.manual_seed(0)
    model, inputs = build()
    for each in model.parameters():
        if each.ndim > 1:
            each.data.normal_(std=(each.numel() / each.shape[0]) ** -0.5)
    return model.eval(), inputs


@torch.no_grad()
def output(model, inputs):
    half = next(model.parameters()).dtype == torch.float16
    cast = lambda x: x.half() if half and isinstance(x, torch.Tensor) and x.is_floating_point() else x  # noqa: E731
    return model(**{name: cast(value) for name, value in inputs.items()}, return_dict=False)[0].float()


@pytest.mark.parametrize(("build", "count"), MODELS)
def test_models_agree_with_fp32(build, count):
    """An FP16 model is as close to the FP32 model with PASA as with SDPA, which keeps its scores in FP32 on a CPU."""
    model, inputs = seeded(build)
    truth, half = output(model, inputs), copy.deepcopy(model).half()
    before = output(half, inputs)
    processors = [module.processor for module in half.modules() if hasattr(module, "processor")]
    with pasa.patch_pipeline(half, backend="reference") as handle:  # the other one is torch's own on a CPU
        assert len(handle.report().patched) == count
        assert not handle.report().skipped
        patched = output(half, inputs)
    bound = 1.5 * (before - truth).abs().max()
    assert 0 < (patched - truth).abs().max() <= bound
    assert not torch.equal(patched, before)
    assert torch.equal(output(half, inputs), before)
    after = [module.processor for module in half.modules() if hasattr(module, "processor")]
    assert all(one is two for one, two in zip(processors, after, strict=True))


@pytest.mark.parametrize(("build", "count"), MODELS)
def test_fp32_models_agree(build, count):
    model, inputs = seeded(build)
    expected = output(model, inputs)
    with pasa.patch_pipeline(model):
        patched = output(model, inputs)
        compiled = output(torch.compile(model, backend="eager"), inputs)
    assert 0 < (patched - expected).abs().max() < 1e-3 * expected.abs().max()
    assert torch.equal(compiled, patched)


def test_a_compiled_block_has_one_graph():
    torch._dynamo.reset()  # other tests of this process have compiled the same code
    model, inputs = seeded(sd3)
    with pasa.patch_pipeline(model):
        patched = output(model, inputs)
        assert torch.equal(output(torch.compile(model, backend="eager", fullgraph=True), inputs), patched)


def test_gradients_reach_the_projections():
    """A patched SD 3 trains: its gradients are those of the unpatched model but for FP16's roundings."""
    model, inputs = seeded(sd3)

    def gradients():
        model.zero_grad()
        model(**inputs, return_dict=False)[0].square().mean().backward()
        return [block.attn.to_q.weight.grad.clone() for block in model.transformer_blocks]

    expected = gradients()
    with pasa.patch_pipeline(model):
        for ours, theirs in zip(gradients(), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-2 * float(theirs.abs().max()))
            assert not torch.equal(ours, theirs)


def test_scores_that_overflow_in_fp16_are_served():
    """Keys with a bias of 400 in every channel give scores of 2.5e6, which FP16 cannot hold."""
    model, inputs = seeded(cogvideox)
    for block in model.transformer_blocks:
        block.attn1.norm_q.bias.data += 400.0
        block.attn1.norm_k.bias.data += 400.0
    inputs.pop("image_rotary_emb")  # a rotation would turn the bias into scores that differ by key
    truth, half = output(model, inputs), copy.deepcopy(model).half()
    with pasa.patch_pipeline(half):
        patched = output(half, inputs)
    assert patched.isfinite().all()
    assert (patched - truth).abs().max() <= 1.5 * (output(half, inputs) - truth).abs().max()


def test_a_copy_of_a_patched_model_is_unpatched():
    model, inputs = seeded(sd3)
    expected = output(model, inputs)
    with pasa.patch_pipeline(model):
        twin = copy.deepcopy(model)
    assert torch.equal(output(twin, inputs), expected)


class Host:
    """A class outside of this package that calls torch's function by each of its names."""

    def by_torch(self, q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def by_module(self, q, k, v):
        return torch.relu(torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=2.0))

    def not_at_all(self, q, k, v):
        return torch.relu(q)


@pytest.mark.parametrize("name", ["by_torch", "by_module"])
def test_calls_by_any_name_are_redirected(name):
    q, k, v = (randn(1, 2, 5, 8, seed=seed) for seed in range(3))
    function = getattr(Host, name)
    attend = make_attention(pasa.PasaConfig(precision="fp32"), None, Callbacks(), "Host")
    assert calls_attention(function)
    out, expected = redirected(function, attend)(None, q, k[:, :, :4], v[:, :, :4]), function(None, q, k, v)
    expected = function(None, q, k[:, :, :4], v[:, :, :4])
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-3)
    assert not torch.equal(out, expected)
    assert torch.equal(function(None, q, k, v), function(None, q, k, v))


def test_other_functions_are_left_alone():
    assert not calls_attention(Host.not_at_all)
    assert not calls_attention(torch.relu)


def test_dropout_is_refused_by_name():
    q = randn(1, 2, 5, 8)
    with pytest.raises(NotImplementedError, match=r"Host: dropout_p=0\.5.*model\.eval\(\)"):
        make_attention(None, None, Callbacks(), "Host")(q, q, q, dropout_p=0.5)
