"""Modules from which PASA has been removed are listed in the report, and one warning is issued."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers as hf

import pasa
from pasa.patching.callbacks import BINDING
from tests.pasa.patching.unets import classic_unet
from tests.versions import INSTALLED, since

hf.logging.set_verbosity_error()
if INSTALLED >= (5, 0):
    import diffusers
diffusion = since("5.0", "the installed diffusers needs a newer one")


@torch.no_grad()
def denoised(unet):
    draw = torch.Generator().manual_seed(1)
    return unet(torch.randn(1, 4, 8, 8, generator=draw), 3, torch.randn(1, 5, 32, generator=draw)).sample


@pytest.mark.parametrize("first", ["report", "call"])
def test_another_attention_set_in_a_transformers_model(tiny, batch, first):
    """After `set_attn_implementation` the report lists the modules as removed, and one warning is issued.

    The warning comes with the next call or report. Story: the report still said that 2 of 2 modules run PASA.
    """
    model = tiny("qwen2", "eager")
    with torch.no_grad():
        expected = model(batch[0]).logits
    handle = pasa.patch_pipeline(model)
    assert handle.report().removed == ()
    model.set_attn_implementation("sdpa")
    with pytest.warns(UserWarning, match=r"2 of 2 patched .* no longer run PASA .*names the attention 'sdpa'.*unpatch"):
        handle.report() if first == "report" else model(batch[0])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*no longer run PASA")
        report = handle.report()
        model(batch[0], output_attentions=True)  # allowed, because the model now runs sdpa
    assert report.patched == ()
    assert dict(report.removed).keys() == {"model.layers.0.self_attn", "model.layers.1.self_attn"}
    assert "Qwen2ForCausalLM: 0 of 2 attention modules run PASA" in str(report)
    assert "REMOVED  model.layers.0.self_attn: its config names the attention 'sdpa' now" in str(report)
    again = pasa.patch_pipeline(model)
    assert again.report().removed == (), "patched again"
    again.unpatch()
    assert model.config._attn_implementation == "sdpa", "what was set last"
    model.set_attn_implementation("eager")
    with torch.no_grad():
        assert torch.equal(model(batch[0]).logits, expected)


def slices(unet):
    for module in unet.modules():
        if isinstance(module, diffusers.models.attention_processor.Attention):
            module.set_attention_slice(1)


WAYS = {
    "fuse_qkv_projections": lambda unet: unet.fuse_qkv_projections(),
    "set_attention_slice": slices,
    "set_attn_processor": lambda unet: unet.set_attn_processor(diffusers.models.attention_processor.AttnProcessor()),
}


@diffusion
@pytest.mark.parametrize("way", WAYS)
def test_processors_that_diffusers_replaces(way):
    unet = classic_unet()
    handle = pasa.patch_pipeline(unet)
    WAYS[way](unet)
    with pytest.warns(UserWarning, match=rf"8 of 8 patched attention modules no longer run PASA .*{way}"):
        report = handle.report()
    assert len(report.removed) == 8
    assert all(way in reason for _, reason in report.removed)
    assert "0 of 8 attention modules run PASA" in str(report)
    handle.unpatch()
    assert len(handle.report().removed) == 8, "undone: what was patched"


@diffusion
def test_processors_that_are_put_back_are_not_removed():
    """Processors that were replaced in one call and restored later are not reported as removed.

    Story: every later report listed them as removed, although PASA ran again.
    """
    unet = classic_unet()
    handle = pasa.patch_pipeline(unet)
    ours = dict(unet.attn_processors)
    unet.set_attn_processor(diffusers.models.attention_processor.AttnProcessor())
    with pytest.warns(UserWarning, match="no longer run PASA"):
        denoised(unet)
    unet.set_attn_processor(ours)
    denoised(unet)
    assert handle.report().removed == ()
    assert "8 of 8 attention modules run PASA" in str(handle.report())


@diffusion
def test_another_backend_set_in_a_dispatched_model():
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4}
    model = diffusers.WanTransformer3DModel(**sizes, text_dim=16, freq_dim=32, ffn_dim=32, num_layers=1).eval()
    handle = pasa.patch_pipeline(model)
    model.set_attention_backend("native")
    with pytest.warns(UserWarning, match=r"backend 'native' \(set_attention_backend"):
        assert len(handle.report().removed) == 2
    model.reset_attention_backend()
    assert "attention backend None" in str(handle.report())
    handle.unpatch()


@diffusion
def test_a_pipeline_that_swaps_processors_for_the_time_of_a_call():
    """A pipeline that replaces PASA's processors only during a call is reported.

    Story: perturbed attention guidance sets its own processors and restores PASA's at the end, so nothing was visible
    after the call.
    """
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4).eval()
    parts = dict.fromkeys(("text_encoder", "tokenizer", "safety_checker", "feature_extractor"))
    pipe = diffusers.StableDiffusionPAGPipeline(
        vae=vae,
        unet=classic_unet(),
        scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
        **parts,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    pipe.set_pag_applied_layers(["mid"])
    text = torch.randn(2, 1, 5, 32, generator=torch.Generator().manual_seed(1))
    given = {"prompt_embeds": text[0], "negative_prompt_embeds": text[1], "num_inference_steps": 1}
    with pasa.patch_pipeline(pipe) as handle:
        before = handle.report().patched
        with pytest.warns(UserWarning, match=r"1 of .* PAGCFGIdentity.*the pipeline's perturbed attention guidance"):
            pipe(**given, height=8, width=8, pag_scale=3.0, output_type="latent")
        assert all(hasattr(each, BINDING) for each in pipe.unet.attn_processors.values()), "given back"
        report = handle.report()
        assert len(report.patched) == len(before) - 1
        assert "in its last call, PAGCFGIdentity" in str(report)
    assert not any(module._forward_pre_hooks for module in pipe.unet.modules())


@diffusion
def test_an_encoder_of_a_pipeline(pipeline):
    """Removed modules of an encoder are reported under their names in the pipeline."""
    with pasa.patch_pipeline(pipeline) as handle:
        pipeline.image_encoder.set_attn_implementation("eager")
        with pytest.warns(UserWarning, match="2 of 20 patched"):
            removed = dict(handle.report().removed)
        with pytest.raises(ValueError, match=r"image_encoder\S+ was patched, and its config names .*'eager'.*unpatch"):
            pasa.patch_pipeline(pipeline)
    assert all(name.startswith("image_encoder.vision_model") for name in removed)
