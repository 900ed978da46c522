"""Whose queries and keys these are, in models of both libraries."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

import pasa
from pasa.eval.diagnose.probe import find_module, probe
from pasa.eval.video.overflow import bias_scores, spatial_attention
from pasa.eval.video.tiny import sample_image, tiny_pipeline

hf.logging.set_verbosity_error()


def frames(pipeline):
    options = {"height": 32, "width": 32, "num_frames": 2, "num_inference_steps": 2, "decode_chunk_size": 2}
    return pipeline(
        sample_image(32, 32), generator=torch.Generator().manual_seed(0), output_type="pt", **options
    ).frames


def test_a_pipeline_names_the_modules_that_overflow():
    """All spatial heads of the biased UNet, and nothing else, is beyond FP16; the model computes what it did."""
    pipeline = tiny_pipeline()
    bias_scores(pipeline.unet)
    with pasa.patch_pipeline(pipeline):
        expected = frames(pipeline)
    with probe(pipeline) as findings:
        assert torch.equal(frames(pipeline), expected)
    spatial = {f"unet.{name}" for name in spatial_attention(pipeline.unet)}
    assert {name for name, heads in findings.heads.items() if heads[0].statistics.max_score > 65504} == spatial
    assert len(findings.heads) == 20, "every patched module is really called"
    assert {findings.calls[name] for name in spatial} == {2}, "one call a step"
    worst = findings.worst()
    assert len(worst) == sum(len(heads) for heads in findings.heads.values())
    assert (scores := [head.statistics.max_score for *_, head in worst]) == sorted(scores, reverse=True)
    assert worst[0][2].statistics.sequence_bias > 0.99
    assert not any(module._forward_hooks for module in pipeline.unet.modules())


@pytest.fixture
def language_model():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**sizes, num_key_value_heads=2, vocab_size=97)).eval()


def test_a_language_model(language_model):
    """Largest score of each head against the model's own q and k, taken from eager attention."""
    ids, seen = torch.arange(21)[None], []

    def spy(module, query, key, value, mask, **kwargs):
        seen.append((query @ key.repeat_interleave(2, 1).mT).abs().amax((0, 2, 3)))
        return query.transpose(1, 2).contiguous(), None

    with torch.no_grad(), probe(language_model) as findings:
        language_model(ids)
    assert list(findings.heads) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    hf.AttentionInterface.register("spy", spy)
    try:
        language_model.set_attn_implementation("spy")
        with torch.no_grad():
            language_model(ids)
    finally:
        del hf.AttentionInterface._global_mapping["spy"]
    found = [head.statistics.max_score for head in findings.heads["model.layers.0.self_attn"]]
    assert found == pytest.approx(seen[0].tolist(), rel=2**-9)


def test_the_largest_call_is_kept(language_model):
    with torch.no_grad(), probe(language_model) as findings:
        language_model(torch.arange(5)[None])
        few = findings.heads["model.layers.0.self_attn"][0].statistics.max_score
        language_model(torch.arange(60)[None])
        many = findings.heads["model.layers.0.self_attn"][0].statistics.max_score
        language_model(torch.arange(5)[None])
    assert few < many == findings.heads["model.layers.0.self_attn"][0].statistics.max_score
    assert findings.calls["model.layers.0.self_attn"] == 3


def test_a_policy_chooses_what_is_looked_at(language_model):
    with torch.no_grad(), probe(language_model, policy=lambda name, module: "layers.1" in name) as findings:
        language_model(torch.arange(5)[None])
    assert list(findings.heads) == ["model.layers.1.self_attn"]


def test_all_is_undone_after_an_exception(language_model):
    with pytest.raises(KeyError, match="inside"), probe(language_model):
        raise KeyError("inside")
    assert language_model.config._attn_implementation == "sdpa"
    assert not any(module._forward_pre_hooks for module in language_model.modules())


def test_modules_are_found_by_the_names_of_reports(language_model):
    pipeline = tiny_pipeline()
    for thing in (pipeline, language_model):
        with pasa.patch_pipeline(thing) as handle:
            assert all(hasattr(find_module(thing, name), "forward") for name in handle.report().patched)
    text = hf.TextGenerationPipeline.__new__(hf.TextGenerationPipeline)
    text.model = language_model
    assert find_module(text, "model.layers.0.self_attn") is language_model.model.layers[0].self_attn
