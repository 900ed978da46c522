"""Whose queries and keys these are, in models of both libraries."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

import pasa
from pasa.eval.models.diagnose.probe import find_module, probe
from pasa.eval.models.video.overflow import bias_scores, spatial_attention
from pasa.eval.models.video.tiny import sample_image, tiny_pipeline

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


def test_a_language_model(language_model):
    """Largest score of each head against the model's own q and k, taken from eager attention."""
    ids, seen = torch.arange(21)[None] % 10, []

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
        language_model(torch.arange(5)[None] % 10)
        few = findings.heads["model.layers.0.self_attn"][0].statistics.max_score
        language_model(torch.arange(60)[None] % 10)
        many = findings.heads["model.layers.0.self_attn"][0].statistics.max_score
        language_model(torch.arange(5)[None] % 10)
    assert few < many == findings.heads["model.layers.0.self_attn"][0].statistics.max_score
    assert findings.calls["model.layers.0.self_attn"] == 3


def test_a_policy_chooses_what_is_looked_at(language_model):
    with torch.no_grad(), probe(language_model, policy=lambda name, module: "layers.1" in name) as findings:
        language_model(torch.arange(5)[None] % 10)
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


def test_the_worst_call_is_named(language_model):
    with torch.no_grad(), probe(language_model) as findings:
        for length in (5, 60, 7):
            language_model(torch.arange(length)[None] % 10)
    heads = findings.heads["model.layers.0.self_attn"]
    assert {head.call for head in heads} == {2}
    assert {head.statistics.queries for head in heads} == {60}
    assert {head.tiles for head in heads} == {3}, "of all calls"


def test_a_compiled_model_is_looked_at_layer_by_layer(language_model):
    """A captured graph has no hooks to tell layers apart; the probe leaves it captured for afterwards."""
    ids = torch.arange(9)[None]
    compiled = torch.compile(language_model, backend="eager")
    with torch.no_grad():
        expected = compiled(ids).logits
        with probe(compiled) as findings:
            compiled(ids)
        assert [name.rpartition("layers.")[2] for name in findings.calls] == ["0.self_attn", "1.self_attn"]
        assert torch.equal(compiled(ids).logits, expected)


def test_models_that_are_moved_by_hooks():
    """Offload wraps the forward of whole models; the attention inside is looked at all the same."""
    pipeline = tiny_pipeline()
    pipeline.enable_model_cpu_offload(device="cpu")
    with probe(pipeline) as findings:
        frames(pipeline)
    assert not findings.uncalled()


def test_what_is_not_looked_at_is_told(language_model):
    with torch.no_grad(), probe(language_model, policy=lambda name, module: "layers.1" in name) as findings:
        pass
    assert findings.report.skipped == (("model.layers.0.self_attn", "declined by the policy"),)
    assert findings.uncalled() == ["model.layers.1.self_attn"]


def test_cross_attention_with_one_key_has_no_cause():
    pipeline = tiny_pipeline()
    with probe(pipeline) as findings:
        frames(pipeline)
    single = [head.statistics for name, heads in findings.heads.items() if name.endswith("attn2") for head in heads]
    assert single
    assert {(head.keys_seen, head.resonance, head.sequence_bias, head.phase) for head in single} == {
        (1, None, None, None)
    }


def test_memory_does_not_grow_with_the_calls(language_model):
    """The counts of a video's temporal layers are megabytes a call."""
    with torch.no_grad(), pasa.record_diagnostics() as own, probe(language_model):
        for _ in range(3):
            language_model(torch.arange(5)[None])
        inner = pasa.diagnostics._open[-1]
        assert len(inner) <= 1
    assert len(own) == 6, "a caller's own records are left alone"


def test_calls_with_values_that_are_not_finite_are_left_out(language_model):
    torch.nn.init.constant_(language_model.model.layers[1].self_attn.q_proj.bias, torch.nan)
    with torch.no_grad(), probe(language_model) as findings:
        language_model(torch.arange(5)[None])
    assert findings.broken == {"model.layers.1.self_attn": 1}
    assert list(findings.heads) == ["model.layers.0.self_attn"]


def test_what_pasa_stores_is_what_its_diagnostics_say(language_model):
    ids, name = torch.arange(30)[None] % 10, "model.layers.1.self_attn"
    with torch.no_grad(), probe(language_model) as findings:
        language_model(ids)
    with (
        torch.no_grad(),
        pasa.patch_pipeline(language_model, backend="reference"),
        pasa.record_diagnostics() as records,
    ):
        language_model(ids)
    assert [head.stored for head in findings.heads[name]] == records[1].max_score_after[0].tolist()
    visible = records[1].max_score_before[0].tolist()
    assert all(head.statistics.max_score >= seen for head, seen in zip(findings.heads[name], visible, strict=True))


def test_progress_is_told_call_by_call(language_model):
    told = []
    with torch.no_grad(), probe(language_model, seen=lambda *call: told.append(call)):
        language_model(torch.arange(5)[None])
    assert told == [("model.layers.0.self_attn", 1), ("model.layers.1.self_attn", 1)]
