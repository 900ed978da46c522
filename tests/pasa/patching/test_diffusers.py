"""Tests of patching diffusers pipelines: modules selected and refused, and that `unpatch` leaves no trace."""

from __future__ import annotations

import copy
from functools import cache

import accelerate
import diffusers
import pytest
import torch
import transformers as hf
from diffusers.hooks import apply_group_offloading
from diffusers.models.attention_processor import (
    AttnProcessor,
    AttnProcessor2_0,
    FusedAttnProcessor2_0,
    SanaMultiscaleAttnProcessor2_0,
)

import pasa
from pasa.eval.models.video.tiny import sample_image, tiny_pipeline, tiny_unet
from pasa.patching.diffusers_attention import PasaAttnProcessor
from tests.pasa.patching.unets import classic_unet

hf.logging.set_verbosity_error()


@pytest.fixture
def unet():
    torch.manual_seed(0)
    return tiny_unet()


def frames(pipeline, **options):
    """Return two frames of 64 x 64 pixels, (1, 2, 3, 64, 64), always from the same noise."""
    wanted = {"height": 64, "width": 64, "num_frames": 2, "num_inference_steps": 2, "decode_chunk_size": 2} | options
    generator = torch.Generator().manual_seed(42)
    return pipeline(sample_image(64, 64), generator=generator, output_type="pt", **wanted).frames


@torch.no_grad()
def denoised(unet, frames=3):
    """Return the output of one UNet step, (1, frames, 4, 16, 16)."""
    draw = torch.Generator().manual_seed(1)
    latents, image = torch.randn(1, frames, 8, 16, 16, generator=draw), torch.randn(1, 1, 32, generator=draw)
    return unet(latents, torch.tensor([3.0]), image, torch.tensor([[6.0, 127.0, 0.02]])).sample


def processors(pipeline):
    return {**pipeline.unet.attn_processors, **{f"vae.{k}": v for k, v in pipeline.vae.attn_processors.items()}}


def test_every_attention_of_the_pipeline_is_patched_and_reported(pipeline):
    with pasa.patch_pipeline(pipeline) as handle:
        report = handle.report()
        assert all(isinstance(each, PasaAttnProcessor) for each in processors(pipeline).values())
    assert report.host == "diffusers: StableVideoDiffusionPipeline"
    assert len(report.patched) == 20
    assert report.skipped == report.notes == ()
    assert {name.split(".")[0] for name in report.patched} == {"unet", "vae", "image_encoder"}
    assert "unet.mid_block.attentions.0.temporal_transformer_blocks.0.attn2" in report.patched
    assert "20 of 20 attention modules run PASA" in str(report)


def test_unpatching_restores_the_very_same_processors_and_every_bit(pipeline):
    before, expected = processors(pipeline), frames(pipeline)
    handle = pasa.patch_pipeline(pipeline)
    assert handle.active
    changed = frames(pipeline)
    assert 0 < (changed - expected).abs().max() < 1e-2
    handle.unpatch()
    handle.unpatch()
    after = processors(pipeline)
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert pipeline.image_encoder.config._attn_implementation == "sdpa"
    assert torch.equal(frames(pipeline), expected)


def test_neither_weights_nor_saved_config_change(pipeline, tmp_path):
    state = copy.deepcopy(pipeline.unet.state_dict())
    with pasa.patch_pipeline(pipeline):
        now = pipeline.unet.state_dict()
        assert now.keys() == state.keys()
        assert all(torch.equal(now[name], state[name]) for name in state)
        pipeline.save_pretrained(tmp_path)
    loaded = diffusers.StableVideoDiffusionPipeline.from_pretrained(tmp_path)
    assert torch.equal(frames(loaded), frames(pipeline))


def test_context_manager_restores_after_an_exception(pipeline):
    before = processors(pipeline)
    with pytest.raises(KeyError, match="inside"), pasa.patch_pipeline(pipeline):
        raise KeyError("inside")
    assert processors(pipeline) == before


def test_patching_twice_gives_the_same_handle(pipeline):
    handle = pasa.patch_pipeline(pipeline)
    patched = frames(pipeline)
    assert pasa.patch_pipeline(pipeline) is handle
    assert torch.equal(frames(pipeline), patched)
    handle.unpatch()
    again = pasa.patch_pipeline(pipeline)
    assert again is not handle
    again.unpatch()


def test_patching_with_other_settings_is_refused(pipeline):
    with pasa.patch_pipeline(pipeline):
        with pytest.raises(ValueError, match="already patched"):
            pasa.patch_pipeline(pipeline, config=pasa.PasaConfig(precision="fp32"))
        with pytest.raises(ValueError, match="already patched"):
            pasa.patch_pipeline(pipeline.unet)
        with pytest.raises(ValueError, match="already patched"):
            pasa.patch_pipeline(pipeline, policy=lambda name, module: "attn1" in name)


def test_a_refused_second_patch_leaves_no_trace(pipeline):
    """The call fails if the image encoder is patched with other settings, and leaves no UNet module patched."""
    before = processors(pipeline)
    with (
        pasa.patch_pipeline(pipeline.image_encoder, config=pasa.PasaConfig(precision="fp32")),
        pytest.raises(ValueError, match="already patched"),
    ):
        pasa.patch_pipeline(pipeline)
    assert processors(pipeline) == before


def test_processors_that_somebody_else_set_meanwhile_are_not_overwritten(unet):
    handle, other = pasa.patch_pipeline(unet), AttnProcessor()
    unet.mid_block.attentions[0].transformer_blocks[0].attn1.set_processor(other)
    handle.unpatch()
    kinds = [type(each) for each in unet.attn_processors.values()]
    assert unet.mid_block.attentions[0].transformer_blocks[0].attn1.processor is other
    assert kinds.count(AttnProcessor2_0) == 15


@pytest.mark.parametrize(
    ("policy", "count"),
    [
        (lambda name, module: name.endswith("transformer_blocks.0.attn1") and "temporal" not in name, 4),
        (lambda name, module: name.startswith("image_encoder"), 2),
        (lambda name, module: module.heads == 2 if name.startswith("unet") else False, 4),
    ],
    ids=["spatial", "image encoder", "by module"],
)
def test_policies_see_names_with_the_component_and_the_module(pipeline, policy, count):
    before = processors(pipeline)
    with pasa.patch_pipeline(pipeline, policy=policy) as handle:
        report = handle.report()
        assert len(report.patched) == count
        assert sum(isinstance(each, PasaAttnProcessor) for each in processors(pipeline).values()) == sum(
            not name.startswith("image") for name in report.patched
        )
    assert processors(pipeline) == before
    declined = [name for name, reason in report.skipped if "declined by the policy" in reason]
    assert len(declined) + count in (20, 19), "one line may stand for the whole image encoder"


def test_a_policy_that_selects_nothing_is_an_error(pipeline):
    with pytest.raises(NotImplementedError, match=r"nothing to patch in StableVideo.*declined by the policy"):
        pasa.patch_pipeline(pipeline, policy=lambda name, module: False)


def test_bare_models_wrapped_models_and_fused_projections(pipeline, unet):
    with pasa.patch_pipeline(pipeline.vae) as handle:
        assert handle.report().patched == ("encoder.mid_block.attentions.0", "decoder.mid_block.attentions.0")
    with pasa.patch_pipeline(torch.nn.Sequential(unet)) as handle:
        assert handle.report().patched[0].startswith("0.down_blocks")
    expected = denoised(unet)
    for module in unet.modules():
        if isinstance(module, diffusers.models.attention_processor.Attention):
            module.fuse_projections()
            module.to_q.weight.data.zero_() if not module.is_cross_attention else None
            module.set_processor(FusedAttnProcessor2_0())
    with pasa.patch_pipeline(unet):
        error = (denoised(unet) - expected).abs().max()
    assert 0 < error < 1e-3 * expected.abs().max()


OFFLOADS = {
    "model offload": lambda p: p.enable_model_cpu_offload(device="cpu"),
    "hooks of accelerate": lambda p: [accelerate.cpu_offload_with_hook(m, "cpu") for m in (p.unet, p.vae)],
    "weights on meta between": lambda p: [accelerate.cpu_offload(m, "cpu") for m in (p.unet, p.vae)],
    "group offload": lambda p: apply_group_offloading(
        p.unet, onload_device=torch.device("cpu"), offload_type="leaf_level"
    ),
    "forward chunking": lambda p: p.unet.enable_forward_chunking(),
}


@cache
def resident():
    """Return the frames of a pipeline that is not offloaded, unpatched and patched."""
    pipeline = tiny_pipeline()
    expected = frames(pipeline)
    with pasa.patch_pipeline(pipeline):
        return expected, frames(pipeline)


@pytest.mark.parametrize("patched_first", [True, False])
@pytest.mark.parametrize("name", OFFLOADS)
def test_offloading_and_chunking_change_nothing(name, patched_first):
    """Offloading and chunking give the same bits as without, whether the patch came before or after them.

    The accelerator is replaced by the CPU; the hooks are the real ones.
    """
    expected, patched = resident()
    fresh = tiny_pipeline()
    if not patched_first:
        OFFLOADS[name](fresh)
    with pasa.patch_pipeline(fresh):
        if patched_first:
            OFFLOADS[name](fresh)
        assert torch.equal(frames(fresh), patched)
    assert torch.equal(frames(fresh), expected)


def test_a_patched_unet_compiles_as_one_graph(unet):
    with torch.no_grad(), pasa.patch_pipeline(unet):
        patched = denoised(unet)
        assert torch.equal(denoised(torch.compile(unet, backend="eager", fullgraph=True)), patched)


def test_a_compiled_component_can_be_patched(pipeline):
    expected = denoised(pipeline.unet)
    with pasa.patch_pipeline(pipeline):
        patched = denoised(pipeline.unet)
    pipeline.unet.forward = torch.compile(pipeline.unet.forward, backend="eager")
    assert torch.equal(denoised(pipeline.unet), expected)
    with pasa.patch_pipeline(pipeline):
        assert torch.equal(denoised(pipeline.unet), patched)
    compiled = torch.compile(tiny_pipeline().unet, backend="eager")
    with pasa.patch_pipeline(compiled) as handle:
        assert len(handle.report().patched) == 16
        assert handle.report().patched[0].startswith("_orig_mod.")


def test_processors_put_aside_while_patched_do_not_outlive_the_patch():
    """PASA's processors that diffusers saved while the model was patched do not outlive the patch.

    Story: `fuse_qkv_projections` saved PASA's processors, and `unfuse` restored them after the patch was undone. The
    model then ran PASA for good, and patching it again returned the handle that was no longer active.
    """
    unet = classic_unet()
    own = dict(unet.attn_processors)
    first = pasa.patch_pipeline(unet)
    unet.fuse_qkv_projections()
    with pytest.raises(ValueError, match="was given another processor or backend after it was patched"):
        pasa.patch_pipeline(unet)
    first.unpatch()
    unet.unfuse_qkv_projections()
    with pasa.patch_pipeline(unet) as second:
        assert second is not first
        assert second.active
    assert all(unet.attn_processors[name] is each for name, each in own.items())


def test_a_pipeline_is_not_patched_by_patching_its_unet(pipeline):
    """Patching a pipeline whose UNet is already patched does not return the UNet's handle.

    Story: that handle was returned, and the image encoder silently kept its attention.
    """
    with (
        pasa.patch_pipeline(pipeline.unet),
        pytest.raises(ValueError, match=r"already patched \(modules: 16\).* image_enc.* added"),
    ):
        pasa.patch_pipeline(pipeline)
    unet_alone, no_vae = (lambda name, module: name.startswith("unet")), (lambda name, module: name[:3] != "vae")
    with pasa.patch_pipeline(pipeline, policy=unet_alone), pytest.raises(ValueError, match="already patched"):
        pasa.patch_pipeline(pipeline, policy=no_vae)


def test_an_encoder_patched_alone_keeps_its_patch(pipeline):
    """An encoder that was patched alone stays patched when the pipeline's patch ends.

    Story: leaving the pipeline's patch undid the encoder's patch.
    """
    encoder = pasa.patch_pipeline(pipeline.image_encoder)
    with pytest.raises(ValueError, match="image_encoder is already patched"):
        pasa.patch_pipeline(pipeline)
    assert encoder.active
    with pasa.patch_pipeline(pipeline.unet):
        assert encoder.active
    encoder.unpatch()


def test_a_policy_for_encoders_alone_gives_one_handle(pipeline):
    def policy(name, module):
        return name.startswith("image_encoder")

    first = pasa.patch_pipeline(pipeline, policy=policy)
    assert len(first.report().patched) == 2
    assert pasa.patch_pipeline(pipeline, policy=policy) is first
    first.unpatch()


def test_somebody_elses_class_of_the_same_name_is_left_alone(unet):
    """A processor class of another package is left alone, even if its name is that of a diffusers class.

    Story: processors were recognised by the name of their class only.
    """
    foreign = type("AttnProcessor2_0", (), {"__call__": lambda self, attn, hidden_states, **given: hidden_states * 0})()
    unet.set_attn_processor(foreign)
    with pytest.raises(NotImplementedError, match="cannot take the place of AttnProcessor2_0"):
        pasa.patch_pipeline(unet)


def test_one_model_under_two_names_is_patched_once(pipeline):
    pipeline.register_modules(unet=pipeline.unet, image_encoder=pipeline.image_encoder)
    twice = type("Twice", (), {"components": {"a": pipeline.unet, "b": pipeline.unet}, "__module__": "diffusers.x"})()
    with pasa.patch_pipeline(twice) as handle:
        assert len(handle.report().patched) == 16
        assert all(name.startswith("a.") for name in handle.report().patched)


def test_a_compiled_autoencoder_with_other_processors_is_skipped_as_well(pipeline):
    """A compiled autoencoder whose processors cannot be replaced is skipped, like one that is not compiled.

    Story: a compiled model was recognised by the class of its wrapper.
    """
    for module in pipeline.vae.modules():
        if hasattr(module, "set_processor"):
            module.set_processor(SanaMultiscaleAttnProcessor2_0())
    pipeline.vae = torch.compile(pipeline.vae)
    with pasa.patch_pipeline(pipeline) as handle:
        assert len(handle.report().patched) == 18
        assert len(handle.report().skipped) == 2
