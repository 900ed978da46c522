"""Whose queries and keys these are, in models of both libraries, and their numbers against known data."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import transformers as hf

import pasa
from pasa.eval.accuracy.rmse.cases import RESONANCE_CASES
from pasa.eval.accuracy.rmse.resonance import shifted_keys, stored_scores
from pasa.eval.models.diagnose import probe as module
from pasa.eval.models.diagnose.probe import POINTS, Findings, extremes, head_pictures, head_statistics, probe
from pasa.eval.models.video.overflow import bias_scores, spatial_attention
from pasa.eval.models.video.tiny import sample_image, tiny_pipeline

LAYERS = ["model.layers.0.self_attn", "model.layers.1.self_attn"]


def frames(pipeline):
    options = {"height": 32, "width": 32, "num_frames": 2, "num_inference_steps": 2, "decode_chunk_size": 2}
    generator = torch.Generator().manual_seed(0)
    return pipeline(sample_image(32, 32), generator=generator, output_type="pt", **options).frames


def read(model, *lengths):
    """Run the model on prompts of these lengths."""
    with torch.no_grad():
        return [model(torch.arange(length)[None] % 10).logits for length in lengths]


def test_a_pipeline_names_the_modules_that_overflow():
    """All spatial heads of the biased UNet, and nothing else, is beyond FP16; the model computes what it did."""
    pipeline = tiny_pipeline()
    bias_scores(pipeline.unet)
    with pasa.patch_pipeline(pipeline, backend="reference"):
        expected = frames(pipeline)
    with probe(pipeline) as findings:
        assert torch.equal(frames(pipeline), expected)
    spatial = {f"unet.{name}" for name in spatial_attention(pipeline.unet)}
    assert {name for name, heads in findings.heads.items() if heads[0]["max_score"] > 65504} == spatial
    assert len(findings.heads) == 20, "every patched module is really called"
    assert {findings.calls[name] for name in spatial} == {2}, "one call a step"
    worst = findings.worst()
    assert (scores := [head["max_score"] for head in worst]) == sorted(scores, reverse=True)
    assert worst[0]["sequence_bias"] > 0.99
    assert not any(module._forward_hooks for module in pipeline.unet.modules())
    single = [head for name, heads in findings.heads.items() if name.endswith("attn2") for head in heads]
    causes = {tuple(head[name] for name in ("keys_seen", "resonance", "sequence_bias", "phase")) for head in single}
    assert causes == {(1, None, None, None)}, "cross-attention with one key has no cause"


def test_scores_are_those_of_the_models_own_queries_and_keys(language_model):
    """Largest score of each head against q and k as eager attention gets them."""
    seen = []

    def spy(module, query, key, value, mask, **kwargs):
        seen.append((query @ key.repeat_interleave(2, 1).mT).abs().amax((0, 2, 3)))
        return query.transpose(1, 2).contiguous(), None

    with probe(language_model) as findings:
        read(language_model, 21)
    assert list(findings.heads) == LAYERS
    hf.AttentionInterface.register("spy", spy)
    try:
        language_model.set_attn_implementation("spy")
        read(language_model, 21)
    finally:
        del hf.AttentionInterface._global_mapping["spy"]
    largest = [head["max_score"] for head in findings.heads[LAYERS[0]]]
    assert largest == pytest.approx(seen[0].tolist(), rel=2**-9)


def test_the_largest_call_is_kept_and_named(language_model):
    with probe(language_model) as findings:
        read(language_model, 5)
        few = findings.heads[LAYERS[0]][0]["max_score"]
        read(language_model, 60)
        many = findings.heads[LAYERS[0]][0]["max_score"]
        read(language_model, 7)
    heads = findings.heads[LAYERS[0]]
    assert few < many == heads[0]["max_score"]
    assert findings.calls == dict.fromkeys(LAYERS, 3)
    assert {(head["call"], head["queries"]) for head in heads} == {(2, 60)}
    assert {head["tiles"] for head in heads} == {3}, "of all calls"


def test_a_compiled_model_is_probed_layer_by_layer(language_model):
    """A captured graph has no hooks to tell layers apart; the probe leaves it captured for afterwards."""
    compiled = torch.compile(language_model, backend="eager")
    expected = read(compiled, 9)
    with probe(compiled) as findings:
        read(compiled, 9)
    assert [name.rpartition("layers.")[2] for name in findings.calls] == ["0.self_attn", "1.self_attn"]
    assert torch.equal(read(compiled, 9)[0], expected[0])


def test_memory_does_not_grow_with_the_calls(language_model):
    """The counts of a video's temporal layers are megabytes a call."""
    with pasa.record_diagnostics() as own, probe(language_model):
        read(language_model, 5, 5, 5)
        assert len(pasa.diagnostics._open[-1]) <= 1
    assert len(own) == 6, "a caller's own records are left alone"


def test_all_is_undone_after_an_exception(language_model):
    with pytest.raises(KeyError, match="inside"), probe(language_model):
        raise KeyError("inside")
    assert language_model.config._attn_implementation == "sdpa"
    assert not any(module._forward_pre_hooks for module in language_model.modules())


def test_what_pasa_stores_is_what_its_diagnostics_say(language_model):
    with probe(language_model) as findings:
        read(language_model, 30)
    with pasa.patch_pipeline(language_model, backend="reference"), pasa.record_diagnostics() as records:
        read(language_model, 30)
    heads, visible = findings.heads[LAYERS[1]], records[1].max_score_before[0].tolist()
    assert [head["stored"] for head in heads] == records[1].max_score_after[0].tolist()
    assert all(head["max_score"] >= seen for head, seen in zip(heads, visible, strict=True))


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("case", RESONANCE_CASES, ids=lambda case: case.name)
def test_resonance_and_bias_are_seen_in_the_papers_cases(case):
    """Figures 6, 7, 12 and 14: waves in opposition or in phase, scores beyond FP16, keys alike along the sequence."""
    small = dataclasses.replace(case, shape=(1, 2, 256, case.shape[3]))
    q, k, _ = small.tensors(0)
    for head in head_statistics(q, k):
        expected = -1 if case.phase == 180 else 1
        assert head["resonance"] == pytest.approx(expected, abs=0.02)
        assert head["sequence_bias"] > 0.99
        assert head["max_score"] > 65504
        assert head["overflow_share"] > 0.01
        assert head["phase"] == case.phase
        assert head["scores"][0 if case.phase == 180 else 1] == expected * head["max_score"]
        assert max(map(abs, head["shifted_keys"])) < 0.2 * max(map(abs, head["keys"])), "the shift takes the wave away"


def test_data_without_a_cause():
    """1/sqrt(S) is the bias of independent keys, 1/sqrt(D) the correlation of independent vectors (4 times that)."""
    for head in head_statistics(randn(1, 4, 400, 128), randn(1, 4, 400, 128, seed=1)):
        assert head["sequence_bias"] == pytest.approx(1 / math.sqrt(400), rel=0.3)
        assert abs(head["resonance"]) < 4 / math.sqrt(128)
        assert (head["phase"], head["overflow_share"]) == (None, 0)
    (head,) = head_statistics(torch.ones(1, 1, 3, 8), torch.zeros(1, 1, 5, 8))
    assert (head["resonance"], head["sequence_bias"], head["max_score"]) == (0, 0, 0), "constant and zero vectors"


def test_scores_and_ranges_by_hand():
    """Two query heads share the keys (1, 0) and (-3, 2); the queries are (2, 1) and (0, -5)."""
    q = torch.tensor([[[[2.0, 1.0]], [[0.0, -5.0]]]])
    k = torch.tensor([[[[1.0, 0.0], [-3.0, 2.0]]]])
    first, second = head_statistics(q, k)
    assert (first["scores"], first["max_score"]) == ((-4.0, 2.0), 4.0)
    assert (second["scores"], second["max_score"]) == ((-10.0, 0.0), 10.0)
    assert first["keys"] == second["keys"] == (-3.0, 2.0)
    assert first["shifted_keys"] == (-3.0, 2.0), "keys on both sides of 0 keep no anchor"
    shared, _ = head_statistics(q, k + torch.tensor([4.0, 4.0]))
    assert shared["shifted_keys"] == (-2.0, 2.0), "the mean is (3, 5)"
    assert first["sequence_bias"] == pytest.approx(math.sqrt(2 / 7))
    assert first["resonance"] == pytest.approx(-1)
    assert second["resonance"] == pytest.approx(-1), "(0, -5) falls, (-1, 1) rises"
    q, k = torch.tensor([[[[1.0], [1000.0]]]]), torch.tensor([[[[70.0], [80.0], [65.0], [90.0]]]])
    assert head_statistics(q, k)[0]["overflow_share"] == 3 / 8, "of the second query: 70,000 and above"


def test_grouped_heads_see_their_own_keys():
    k = torch.stack([torch.full((5, 4), value) for value in (1.0, 10.0)])[None]
    assert [head["max_score"] for head in head_statistics(torch.ones(1, 6, 3, 4), k)] == [4.0] * 3 + [40.0] * 3


def test_long_sequences_are_sampled_with_both_ends(monkeypatch):
    for size, kept in ((3, [0, 1, 2]), (4, [0, 1, 2, 3]), (10, [0, 3, 6, 9])):
        assert module.sample(torch.arange(size)[None], 1, 4).tolist() == [kept]
    monkeypatch.setattr(module, "ROWS", 2)
    q = torch.zeros(1, 1, 9, 4)
    q[0, 0, 8] = 7.0
    assert head_statistics(q, torch.ones(1, 1, 3, 4))[0]["max_score"] == 28.0, "the last row is among them"


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_score_that_stands_alone_is_in_the_picture(sign):
    """Every 8th column of 1,000 would miss column 3. Small matrices are shown whole."""
    x = torch.zeros(300, 1000)
    x[200, 3] = sign * 7
    x[200, 4] = -sign * 3
    shown = extremes(x)
    assert shown.shape == (POINTS, POINTS)
    assert (shown.min(), shown.max()) == ((0, 7) if sign > 0 else (-7, 0))
    assert torch.equal(extremes(x[195:202, :POINTS]), x[195:202, :POINTS])


@pytest.mark.parametrize("case", RESONANCE_CASES, ids=lambda case: case.name)
def test_pictures_are_those_of_the_resonance_experiment(case):
    """The same matrices as the paper's figures are drawn of, K' and S' in the same units."""
    small = dataclasses.replace(case, shape=(1, 1, 300, case.shape[3]))
    q, k, _ = (x.float() for x in small.tensors(0))
    config = pasa.PasaConfig()
    moved, stored = shifted_keys(k, config)[0, 0], stored_scores(q, k, config)
    expected = {"Q": q[0, 0], "K": k[0, 0], "K'": moved, "S": (q @ k.mT)[0, 0], "S'": stored}
    shown = head_pictures(q[0, 0], k[0, 0])
    assert list(shown) == list(expected)
    for name, matrix in expected.items():
        assert torch.equal(shown[name].values, extremes(matrix)), name
        assert shown[name].shape == tuple(matrix.shape)


def test_long_sequences_are_sampled_and_a_single_key_is_drawn(monkeypatch):
    monkeypatch.setattr(module, "ROWS", 40)
    shown = head_pictures(torch.randn(1000, 16), torch.randn(700, 16))
    assert shown["S"].shape == shown["S'"].shape == (40, 700)
    assert shown["Q"].shape == (1000, 16)
    assert head_pictures(torch.randn(5, 16), torch.randn(1, 16))["S'"].shape == (5, 1)


def test_pictures_are_kept_of_the_worst_call_of_the_worst_modules(monkeypatch):
    """Pictures are made only of a head that is worse than those kept."""
    made = []
    monkeypatch.setattr(module, "MODULES", 2)
    monkeypatch.setattr(module, "head_pictures", lambda q, k: made.append(1) or {})
    findings, q = Findings(None), torch.randn(4, 8)
    calls = (("a", 1, 5), ("b", 1, 3), ("c", 1, 1), ("b", 2, 9), ("b", 3, 8), ("c", 2, 6), ("b", 4, 9))
    for name, call, score in calls:
        findings.offer(name, 0, call, float(score), q, q)
    assert [(each.module, each.call, each.max_score) for each in findings.maps] == [("b", 2, 9.0), ("c", 2, 6.0)]
    assert len(made) == 4
