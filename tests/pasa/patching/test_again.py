"""Tests of patching a model again: nested, after PASA was removed, with other settings; and reports after `unpatch`."""

from __future__ import annotations

import pytest
import torch

import pasa

LAYERS = ("model.layers.0.self_attn", "model.layers.1.self_attn")


@torch.no_grad()
def logits(model, batch):
    return model(batch[0]).logits


def test_an_inner_block_leaves_the_outer_patched(tiny, batch):
    """The end of an inner `with` block leaves the model patched until the outer block ends.

    Story: after the inner block the model silently ran sdpa inside the outer one.
    """
    model = tiny("qwen2", "sdpa")
    own = logits(model, batch)
    with pasa.patch_pipeline(model) as outer:
        patched = logits(model, batch)
        with pasa.patch_pipeline(model) as inner:
            assert inner is outer
        assert outer.active
        assert torch.equal(logits(model, batch), patched)
    assert not outer.active
    assert torch.equal(logits(model, batch), own)


def test_unpatch_inside_of_blocks_undoes_at_once(tiny, batch):
    model = tiny("qwen2", "sdpa")
    own = logits(model, batch)
    with pasa.patch_pipeline(model) as outer:
        with pasa.patch_pipeline(model) as inner:
            inner.unpatch()
            assert torch.equal(logits(model, batch), own)
        with pasa.patch_pipeline(model) as anew:
            assert anew is not outer
        assert model.config._attn_implementation == "sdpa"


def test_a_report_after_unpatch_says_so(tiny):
    """The report of an undone patch says that it is undone, and which modules it had patched.

    Story: an undone handle still reported "2 of 2 attention modules run PASA" and "serves cpu: reference".
    """
    handle = pasa.patch_pipeline(tiny("qwen2"))
    assert not handle.report().undone
    handle.unpatch()
    report = handle.report()
    assert report.undone
    assert (report.patched, report.serves) == ((), ())
    assert tuple(name for name, _ in report.removed) == LAYERS, "what was patched can still be read"
    assert "Qwen2ForCausalLM: the patch is undone, 0 of 2 attention modules run PASA by it" in str(report)


def test_a_report_after_unpatch_of_a_patch_that_found_nothing_to_do(tiny):
    handle = pasa.patch_pipeline(tiny("qwen2"), policy="auto")
    handle.unpatch()
    assert "the patch is undone, 0 of 2 attention modules run PASA by it" in str(handle.report())


def test_patching_anew_remembers_what_the_user_has_set(tiny, batch):
    """Undoing a second patch restores the attention that the user has set meanwhile.

    Story: after set_attn_implementation("eager"), a second patch and its undoing, the model ran sdpa.
    """
    model = tiny("qwen2", "sdpa")
    first = pasa.patch_pipeline(model)
    model.set_attn_implementation("eager")
    expected = logits_unwarned(model, batch)
    second = pasa.patch_pipeline(model)
    assert second is not first
    assert not first.active
    assert second.report().patched == LAYERS
    assert not torch.equal(logits(model, batch), expected)
    first.unpatch()
    assert second.active, "the old handle has nothing more to undo"
    second.unpatch()
    assert model.config._attn_implementation == "eager"
    assert torch.equal(logits(model, batch), expected)


def test_patching_anew_with_other_settings_after_all_was_taken_out(tiny):
    model = tiny("qwen2", "sdpa")
    pasa.patch_pipeline(model)
    model.set_attn_implementation("eager")
    with pasa.patch_pipeline(model, backend="reference") as handle:
        assert handle.report().patched == LAYERS
    assert model.config._attn_implementation == "eager"


def test_patching_anew_where_a_part_was_taken_out(tiny_vl):
    """The part that the user did not change gets its original attention back, the other part what the user has set."""
    model = tiny_vl("sdpa")
    first = pasa.patch_pipeline(model)
    model.model.language_model.set_attn_implementation("eager")
    second = pasa.patch_pipeline(model)
    assert not first.active
    assert second.report().removed == ()
    second.unpatch()
    config = model.config
    assert config.text_config._attn_implementation == "eager"
    assert config.vision_config._attn_implementation == "sdpa"


def logits_unwarned(model, batch):
    with pytest.warns(UserWarning, match="no longer run PASA"):
        return logits(model, batch)


def test_what_differs_is_told_of_the_settings_and_of_the_modules(tiny):
    """The error for a conflicting second patch names the settings and modules that differ.

    Story: it said "already patched with config=None, backend=None, context_parallel=None on 1 modules", which were just
    the settings of the second call.
    """
    model = tiny("qwen2")
    with pasa.patch_pipeline(model, policy=lambda name, module: "layers.0" in name):
        with pytest.raises(
            ValueError, match=r"already patched \(modules: 1\), .*\(model.layers.1.self_attn added\).*unpatch"
        ):
            pasa.patch_pipeline(model)
        message = r"\(backend='reference' instead of None; model.layers.1.self_attn added\)"
        with pytest.raises(ValueError, match=message):
            pasa.patch_pipeline(model, backend="reference")
    with pasa.patch_pipeline(model), pytest.raises(ValueError, match=r"\(model.layers.0.self_attn left out\)"):
        pasa.patch_pipeline(model, policy=lambda name, module: "layers.1" in name)
