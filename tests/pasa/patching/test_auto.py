"""Tests of policy="auto": modules at risk by their weights are patched; the others run as before, and are watched."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch

import pasa
from pasa.eval.kit.embedded_model import to_qwen2
from pasa.eval.kit.overflow_fixture import inject_overflow
from pasa.eval.models.video.overflow import bias_scores
from pasa.eval.models.video.tiny import tiny_unet


@pytest.fixture
def qwen2(tiny):
    return tiny("qwen2", num_hidden_layers=4, layer_types=["full_attention"] * 4)


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


def test_injected_layers_are_patched_and_no_other(qwen2, batch):
    model, _ = inject_overflow(qwen2, {1: 131072, 3: -80000}, pairs=4)
    with pasa.patch_pipeline(model, policy="auto", backend="reference") as handle:
        assert handle.report().patched == ("model.layers.1.self_attn", "model.layers.3.self_attn")
        skipped = dict(handle.report().skipped)
        assert set(skipped) == {"model.layers.0.self_attn", "model.layers.2.self_attn"}
        assert all("predicted safe: |q.k| up to" in reason for reason in skipped.values())
        auto = logits(model, batch[0])
        assert handle.report().alarms == ()
    with pasa.patch_pipeline(model, backend="reference"):
        every = logits(model, batch[0])
    own = logits(model, batch[0])
    assert torch.isfinite(auto).all()
    assert (auto - own).norm() <= 1.1 * (every - own).norm(), "fewer layers in FP16 are no farther from FP32"


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_model_without_risk_is_left_as_it_is(attention, tiny, batch):
    model = tiny("llama", attention)
    before = logits(model, batch[0])
    with pasa.patch_pipeline(model, policy="auto") as handle:
        assert handle.report().patched == ()
        assert len(handle.report().skipped) == 2
        assert model.config._attn_implementation == attention
        assert torch.equal(logits(model, batch[0]), before)
        assert "0 of 2 attention modules run PASA" in str(handle.report())
    assert not any(module._forward_hooks for module in model.modules())


def test_the_guard_warns_a_call_late_and_once(tiny, batch):
    """The guard warns once, one call late, if scores overflow in an unpatched module.

    The weights grow after the prediction, as in training, so nothing was patched.
    """
    model = tiny("llama")
    with pasa.patch_pipeline(model, policy="auto") as handle:
        with torch.no_grad():
            for side in ("q_proj", "k_proj"):
                getattr(model.model.layers[1].self_attn, side).weight.mul_(1000)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            logits(model, batch[0])
        with pytest.warns(UserWarning, match=r"model\.layers\.1\.self_attn was left unpatched") as caught:
            logits(model, batch[0])
        logits(model, batch[0])
        assert len(caught) == 1
        alarms = dict(handle.report().alarms)
        assert list(alarms) == ["model.layers.1.self_attn"]
        assert "ALARM" in str(handle.report())
    assert dict(handle.report().alarms) == alarms, "what was counted stays readable"


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "mistral", "qwen3"])
def test_the_guard_bounds_every_score(name, tiny, batch):
    """The guard's product of lengths, on which alarms are based, is above the largest score of the run, but not far."""
    model = tiny(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    with pasa.patch_pipeline(model, backend="reference") as every, pasa.record_diagnostics() as records:
        logits(model, batch[0])
        every.unpatch()
    with pasa.patch_pipeline(model, policy="auto") as handle:
        logits(model, batch[0])
        watched = handle._guard._watched
        assert len(watched) == len(records) == 2
        for one, record in zip(watched, records, strict=True):
            largest = record.max_score_before.amax(0).float()
            assert (largest <= one.bound() * 1.01).all(), "FP16 rounding of q and k is in the record"
            assert (one.bound() <= 100 * largest).all()


def test_a_key_of_an_earlier_call_is_remembered(tiny, batch):
    """The guard combines a long query with a long key of an earlier call, which decoding reads from the cache."""
    model = tiny("llama")
    with pasa.patch_pipeline(model, policy="auto") as handle:
        one = handle._guard._watched[0]
        logits(model, batch[0])
        prefill = one.bound()
        logits(model, batch[0][:, :1])
        assert torch.equal(one.bound(), prefill)


def test_not_a_number_raises_the_alarm(tiny, batch):
    model = tiny("llama")
    with pasa.patch_pipeline(model, policy="auto") as handle:
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight[0, 0] = torch.nan
        logits(model, batch[0])
        assert next(name for name, _ in handle.report().alarms) == "model.layers.0.self_attn"
    with pytest.raises(ValueError, match="NaN or infinity"):
        pasa.patch_pipeline(model, policy="auto")


def test_a_model_in_the_place_of_a_dead_one_has_a_guard(tiny):
    """A model at the memory address of a freed one gets a guard of its own.

    Story: handles were looked up by id(), so the next model at that address got the old handle and no guard.
    """
    gc.disable()
    try:
        model = tiny("llama")
        pasa.patch_pipeline(model, policy="auto")
        seen: set[int] = set()
        while id(model) not in seen:
            assert len(seen) < 300, "no address was used twice: nothing was tested"
            seen.add(id(model))
            del model
            model = tiny("llama")
            handle = pasa.patch_pipeline(model, policy="auto")
            logits(model, torch.ones(1, 3, dtype=torch.int64))
            assert handle._guard._watched[0].longest, "this model's own guard"
    finally:
        gc.enable()


def test_patching_twice_returns_the_handle(tiny, qwen2):
    plain = tiny("llama")
    first = pasa.patch_pipeline(plain, policy="auto")
    assert pasa.patch_pipeline(plain, policy="auto") is first
    hooks = len(plain.model.layers[0].self_attn.q_proj._forward_hooks)
    assert hooks == 1
    first.unpatch()
    assert pasa.patch_pipeline(plain, policy="auto") is not first
    model, _ = inject_overflow(qwen2, {1: 131072}, pairs=4)
    some = pasa.patch_pipeline(model, policy="auto")
    assert pasa.patch_pipeline(model, policy="auto") is some
    some.unpatch()


def test_a_patched_model_is_not_called_left_alone(tiny):
    """policy="auto" refuses a model that another handle has patched.

    Story: it reported 0 of 2 modules running PASA, all predicted safe, although both ran PASA.
    """
    model = tiny("llama")
    with pasa.patch_pipeline(model), pytest.raises(ValueError, match=r"layers\.0\.self_attn is already patched"):
        pasa.patch_pipeline(model, policy="auto")
    empty = pasa.patch_pipeline(model, policy="auto")
    with pasa.patch_pipeline(model), pytest.raises(ValueError, match="already patched"):
        pasa.patch_pipeline(model, policy="auto")
    assert pasa.patch_pipeline(model, policy="auto") is empty


def test_what_another_handle_patches_later_is_not_reported_as_skipped(tiny, batch):
    """Modules that another handle patches later are neither reported as skipped nor watched.

    Story: the guard warned of "left unpatched" modules that ran PASA.
    """
    model = tiny("llama")
    auto = pasa.patch_pipeline(model, policy="auto")
    own = auto.report()
    with pasa.patch_pipeline(model, backend="reference") as every:
        assert auto.report().patched == every.report().patched
        assert auto.report().skipped == ()
        assert "2 of 2 attention modules run PASA" in str(auto.report())
        assert "patched by another handle" in str(auto.report())
        with torch.no_grad():
            model.model.layers[1].self_attn.q_proj.weight.mul_(1000)
            model.model.layers[1].self_attn.k_proj.weight.mul_(1000)
        logits(model, batch[0])
        assert auto.report().alarms == ()
    assert auto.report() == own
    logits(model, batch[0])
    assert [name for name, _ in auto.report().alarms] == ["model.layers.1.self_attn"]


def test_a_watch_after_nothing_was_patched_says_what_to_do(tiny):
    model = tiny("llama")
    with pasa.patch_pipeline(model, policy="auto"):
        with pytest.raises(ValueError, match='left all modules alone; use policy="all" to watch them'):
            pasa.watch(model)
        with pasa.patch_pipeline(model), pasa.watch(model) as watched:
            assert len(watched.report().layers) == 2
    with pytest.raises(ValueError, match=r"call pasa\.patch_pipeline first"):
        pasa.watch(model)


def test_a_unet_is_patched_where_it_is_biased_or_unknown():
    torch.manual_seed(0)
    unet = tiny_unet()
    bias_scores(unet)
    with pasa.patch_pipeline(unet, policy="auto", backend="reference") as handle:
        patched = handle.report().patched
        assert len(patched) == 12
        assert sum(name.endswith("attn2") for name in patched) == 8, "encoder states: no weight bounds them"
        assert all("temporal" in name and name.endswith("attn1") for name, _ in handle.report().skipped)


def test_an_unknown_architecture_is_refused_by_name(tiny):
    with pytest.raises(NotImplementedError, match="architecture 'phi3' is not supported"):
        pasa.patch_pipeline(tiny("phi3"), policy="auto")


def test_zero_biases_are_no_risk(tiny, batch):
    """A Qwen2 whose biases are zero is not patched; the embedded model has this form, a Llama stored as Qwen2."""
    model = to_qwen2(tiny("llama"))
    before = logits(model, batch[0])
    with pasa.patch_pipeline(model, policy="auto") as handle:
        assert handle.report().patched == ()
        assert torch.equal(logits(model, batch[0]), before)


def test_the_guard_counts_inside_of_a_whole_graph(tiny, batch):
    """Under torch.compile with one whole graph the guard counts, and the report lists the alarm.

    It does not warn there, because reading the count on the host would break the graph.
    """
    model = tiny("llama", "sdpa")
    with pasa.patch_pipeline(model, policy="auto") as handle:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(logits(compiled, batch[0]), logits(model, batch[0]))
        with torch.no_grad():
            for side in ("q_proj", "k_proj"):
                getattr(model.model.layers[1].self_attn, side).weight.mul_(1000)
        logits(compiled, batch[0])
        assert [name for name, _ in handle.report().alarms] == ["model.layers.1.self_attn"]
