"""Tests of patching transformers models: modules selected and refused, and that `unpatch` leaves no trace."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

import pasa
from pasa.ops import registry
from pasa.patching.callbacks import BINDING
from tests.versions import since


def registered():
    return set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)


@torch.no_grad()
def logits(model, batch):
    ids, mask = batch
    return model(ids, attention_mask=mask).logits


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_unpatching_restores_every_bit_and_leaves_nothing(tiny, batch, attention):
    model, names = tiny("qwen2", attention), registered()
    expected = logits(model, batch)
    handle = pasa.patch_pipeline(model)
    assert handle.active
    assert not torch.equal(logits(model, batch), expected)
    handle.unpatch()
    handle.unpatch()
    assert not handle.active
    assert torch.equal(logits(model, batch), expected)
    assert model.config._attn_implementation == attention
    assert registered() == names
    assert not model._forward_pre_hooks
    assert not any(BINDING in vars(module) for module in model.modules())


def test_patching_changes_neither_weights_nor_saved_config(tiny):
    model = tiny("llama")
    state, config = copy.deepcopy(model.state_dict()), model.config.to_json_string()
    with pasa.patch_pipeline(model):
        assert model.config.to_json_string() == config
        assert model.state_dict().keys() == state.keys()
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_context_manager_restores_after_an_exception(tiny):
    model, names = tiny("qwen2"), registered()
    with pytest.raises(KeyError, match="inside"), pasa.patch_pipeline(model):
        raise KeyError("inside")
    assert model.config._attn_implementation == "eager"
    assert registered() == names


def test_patching_twice_gives_the_same_handle(tiny, batch):
    model = tiny("qwen2")
    handle = pasa.patch_pipeline(model)
    patched = logits(model, batch)
    assert pasa.patch_pipeline(model) is handle
    assert torch.equal(logits(model, batch), patched)
    model.set_attn_implementation("eager")
    again = pasa.patch_pipeline(model)
    assert torch.equal(logits(model, batch), patched), "patching again must bring back what was switched off by hand"
    again.unpatch()
    assert pasa.patch_pipeline(model) is not handle


def test_patching_with_other_settings_is_refused(tiny):
    model = tiny("qwen2")
    with pasa.patch_pipeline(model):
        with pytest.raises(ValueError, match="already patched"):
            pasa.patch_pipeline(model, config=pasa.PasaConfig(precision="fp32"))
        with pytest.raises(ValueError, match="already patched"):
            pasa.patch_pipeline(model, policy=lambda name, module: "layers.0" in name)
    with pasa.patch_pipeline(model, config=pasa.PasaConfig(precision="fp32")):
        pass


def test_report_names_what_was_patched_and_why_not(tiny):
    model = tiny("qwen2")
    with pasa.patch_pipeline(model, policy=lambda name, module: name.endswith("layers.1.self_attn")) as handle:
        report = handle.report()
    assert report.patched == ("model.layers.1.self_attn",)
    assert report.skipped == (("model.layers.0.self_attn", "declined by the policy"),)
    assert report.as_dict()["host"] == "transformers: Qwen2ForCausalLM"
    assert "1 of 2 attention modules run PASA" in str(report)
    assert dict(report.serves)["cpu"] == "sdpa"
    assert "serves   cpu: sdpa" in str(report)
    assert "layers.0.self_attn: declined by the policy" in str(report)
    assert [name for name, _ in handle.report().removed] == ["model.layers.1.self_attn"], "it outlives the patch"


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["qwen2", "gemma3", "gpt2"])
def test_modules_that_the_policy_declines_keep_their_own_attention(tiny, batch, name, attention, padded):
    """Modules that the policy declines compute the same bits, although all masks of the model are now made for PASA."""
    model = tiny(name, attention)
    batch = batch if padded else (batch[0], None)
    seen = []
    first = next(module for module in model.modules() if type(module).__name__.endswith("Attention"))
    first.register_forward_hook(lambda module, args, output: seen.append(output[0].clone()))
    expected = logits(model, batch)
    with pasa.patch_pipeline(model, policy=lambda name, module: module is not first) as handle:
        changed = logits(model, batch)
    assert len(handle.report().removed) == 1
    visible = batch[1].bool() if padded else torch.ones_like(batch[0], dtype=torch.bool)
    assert torch.equal(seen[0][visible], seen[1][visible])
    assert not torch.equal(changed[visible], expected[visible])


def test_a_fallback_with_masks_of_another_form_is_refused(tiny):
    model = tiny("qwen2")
    model.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(NotImplementedError, match=r"layers\.0.*'flex_attention'"):
        pasa.patch_pipeline(model, policy=lambda name, module: "layers.1" in name)
    with pasa.patch_pipeline(model):
        assert model.config._attn_implementation == "pasa+other"
    assert model.config._attn_implementation == "flex_attention"


def test_two_models_with_different_settings(tiny, batch):
    one, two = tiny("qwen2"), tiny("qwen2")
    configs = [pasa.PasaConfig(precision=name) for name in ("fp32", "pasa")]
    expected = []
    for config in configs:
        with pasa.patch_pipeline(one, config=config):
            expected.append(logits(one, batch))
    assert not torch.equal(*expected)
    first = pasa.patch_pipeline(one, config=configs[0])
    second = pasa.patch_pipeline(two, config=configs[1])
    assert torch.equal(logits(one, batch), expected[0])
    assert torch.equal(logits(two, batch), expected[1])
    first.unpatch()
    assert torch.equal(logits(two, batch), expected[1]), "undoing one patch must not touch the other"
    second.unpatch()


@pytest.mark.parametrize("first_out", [0, 1])
def test_two_models_that_share_a_config(tiny, batch, first_out):
    models = [tiny("qwen2", "sdpa")]
    torch.manual_seed(1)
    models.append(hf.Qwen2ForCausalLM(models[0].config).eval())
    assert models[0].config is models[1].config
    expected, names = [logits(model, batch) for model in models], registered()
    handles = [pasa.patch_pipeline(models[0])]
    assert torch.equal(logits(models[1], batch)[1], expected[1][1]), "the other model was not patched"
    handles.append(pasa.patch_pipeline(models[1]))
    handles[first_out].unpatch()
    assert torch.equal(logits(models[first_out], batch)[1], expected[first_out][1])
    assert not torch.equal(logits(models[1 - first_out], batch)[1], expected[1 - first_out][1])
    handles[1 - first_out].unpatch()
    assert all(torch.equal(logits(model, batch), value) for model, value in zip(models, expected, strict=True))
    assert registered() == names


@since("4.57", "a config of nested configs does not take an attention for each")
def test_nested_configs_are_switched_and_restored_one_by_one(tiny_vl):
    model = tiny_vl({"": "eager", "text_config": "eager", "vision_config": "sdpa"})
    config = model.config
    with pasa.patch_pipeline(model) as handle:
        assert len(handle.report().patched) == 4
        assert config.text_config._attn_implementation == "pasa+eager"
        assert config.vision_config._attn_implementation == "pasa+fused"
    assert config.text_config._attn_implementation == "eager"
    assert config.vision_config._attn_implementation == "sdpa"
    with pasa.patch_pipeline(model, policy=lambda name, module: "visual" not in name):
        assert config.vision_config._attn_implementation == "sdpa", "nothing there was selected"


def test_a_wrapped_model_and_a_pipeline(tiny, batch):
    model = tiny("qwen2")
    with pasa.patch_pipeline(torch.nn.Sequential(model)) as handle:
        assert handle.report().patched[0] == "0.model.layers.0.self_attn"
    pipeline = hf.TextGenerationPipeline.__new__(hf.TextGenerationPipeline)
    pipeline.model = model
    with pasa.patch_pipeline(pipeline) as handle:
        assert len(handle.report().patched) == 2


def test_models_out_of_reach_are_refused_before_anything_changes():
    names = registered()
    model = hf.OpenAIGPTLMHeadModel(hf.OpenAIGPTConfig(n_embd=32, n_layer=1, n_head=2, vocab_size=97))
    with pytest.raises(NotImplementedError, match=r"OpenAIGPTLMHeadModel \(.*Attention computes its attention itself"):
        pasa.patch_pipeline(model)
    assert registered() == names


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_modules_left_out_keep_their_choice_of_keys(tiny, batch, name):
    """A layer with sparse attention that the policy declines computes what it did before.

    Story: for any attention name but "eager" and "sdpa" such a layer passes its choice of keys to the attention
    function, and eager attention ignores it. So a layer that the policy declined attended to all keys. A layer of GLM
    uses the choice of the layer before it.
    """
    model = tiny(name)
    outputs = []
    hook = model.model.layers[0].self_attn.register_forward_hook(lambda module, args, output: outputs.append(output[0]))
    logits(model, batch)
    with pasa.patch_pipeline(model, policy=lambda name, module: "layers.0" not in name) as handle:
        logits(model, batch)
        assert handle.report().patched == ("model.layers.1.self_attn",)
    hook.remove()
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-6)


def test_attention_weights_cannot_be_asked_for(tiny, batch):
    """A patched model refuses ``output_attentions=True``.

    Story: transformers collects the weights itself, got None, and silently returned an empty tuple.
    """
    model = tiny("qwen2")
    with pasa.patch_pipeline(model):
        with pytest.raises(NotImplementedError, match="Qwen2ForCausalLM: output_attentions"):
            model(batch[0], output_attentions=True)
        with pytest.raises(NotImplementedError, match="output_attentions"):
            model.generate(batch[0], max_new_tokens=2, return_dict_in_generate=True, output_attentions=True)
    assert len(model(batch[0], output_attentions=True).attentions) == 2


def test_dropout_is_refused_while_training(tiny, batch):
    model = tiny("llama", attention_dropout=0.1)
    with pasa.patch_pipeline(model):
        logits(model, batch)
        model.train()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        with pytest.raises(NotImplementedError, match=r"LlamaAttention: dropout=0\.1"):
            logits(model, batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_trains_under_autocast(tiny, batch, dtype):
    """A patched model trains under autocast, with at most twice the unpatched model's distance to FP32.

    Story: under autocast, rotary embeddings leave q and k in FP32, but not v, and the call with two dtypes was refused.
    Autocast casts the inputs of torch's own attention.
    """
    model = tiny("qwen2")
    golden = logits(model, batch)
    with torch.autocast("cpu", dtype=dtype):
        plain = logits(model, batch)
        with pasa.patch_pipeline(model):
            found = model(batch[0], attention_mask=batch[1]).logits
    seen = batch[1].bool()
    assert float((found - golden)[seen].detach().abs().max()) <= 2 * float((plain - golden)[seen].abs().max())
    found.float()[seen].pow(2).mean().backward()
    assert all(torch.isfinite(x.grad).all() for x in model.parameters() if x.grad is not None)
    assert any(x.grad is not None and x.grad.any() for x in model.model.layers[0].self_attn.q_proj.parameters())


def test_report_names_the_backend_that_the_models_own_calls_get(tiny, monkeypatch):
    """The report names the backend that serves calls of this model's dtype, head dimension and config.

    Story: it named the backend of FP16 calls with head dimension 64 and default options for every model and config. So
    it said "cuda: triton" although the first call ran the emulation.
    """
    monkeypatch.setattr(registry, "device_types", lambda: ("cuda", "cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    served = {
        config: dict(pasa.patch_pipeline(tiny("qwen2"), config=config).report().serves)["cuda"]
        for config in (None, pasa.PasaConfig(overflow="saturate"))
    }
    why = "overflow saturate is not among inf"
    assert list(served.values()) == ["triton", f"reference (triton: {why}; sdpa: {why})"]
    wide = tiny("qwen2", head_dim=320)
    with pasa.patch_pipeline(wide) as handle:
        assert "head dim 320 is outside 1 to 256" in dict(handle.report().serves)["cuda"]
    with pasa.patch_pipeline(tiny("deepseek_v3", qk_nope_head_dim=312, qk_head_dim=320)) as handle:  # head_dim is 8
        assert "head dim 320 is outside 1 to 256" in dict(handle.report().serves)["cuda"]
    with pasa.patch_pipeline(wide, config=pasa.PasaConfig(precision="partial"), backend="triton") as handle:
        assert dict(handle.report().serves)["cuda"].startswith("nobody (no backend can serve this call: triton: precis")
