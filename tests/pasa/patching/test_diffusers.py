"""The life of a patch in a diffusers pipeline: what is selected, what is refused, and that nothing of it remains."""

from __future__ import annotations

import copy

import accelerate
import diffusers
import pytest
import torch
import transformers as hf
from diffusers.hooks import apply_group_offloading
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from diffusers.models.attention_processor import (
    AttnProcessor,
    AttnProcessor2_0,
    FusedAttnProcessor2_0,
    MochiVaeAttnProcessor2_0,
)

import pasa
from pasa.eval.video.tiny import sample_image, tiny_pipeline, tiny_unet
from pasa.patching.diffusers_attention import PasaAttnProcessor

hf.logging.set_verbosity_error()


@pytest.fixture
def pipeline():
    """A fresh tiny Stable Video Diffusion pipeline, FP32: 16 attention modules in the UNet, 2 in the VAE, 2 in CLIP."""
    return tiny_pipeline()


@pytest.fixture
def unet():
    torch.manual_seed(0)
    return tiny_unet()


def frames(pipeline, **options):
    """Two frames of 64 x 64, (1, 2, 3, 64, 64); the same noise every time."""
    wanted = {"height": 64, "width": 64, "num_frames": 2, "num_inference_steps": 2, "decode_chunk_size": 2} | options
    generator = torch.Generator().manual_seed(42)
    return pipeline(sample_image(64, 64), generator=generator, output_type="pt", **wanted).frames


@torch.no_grad()
def denoised(unet, frames=3):
    """One step of a UNet: (1, frames, 4, 16, 16)."""
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
    """The image encoder alone is patched otherwise: nothing of the UNet may be left patched by the failing call."""
    before = processors(pipeline)
    with (
        pasa.patch_pipeline(pipeline.image_encoder, config=pasa.PasaConfig(precision="fp32")),
        pytest.raises(ValueError, match="already patched"),
    ):
        pasa.patch_pipeline(pipeline)
    assert processors(pipeline) == before


def test_a_copy_of_a_patched_model_is_refused_not_guessed_at(unet):
    with pasa.patch_pipeline(unet):
        twin = copy.deepcopy(unet)
        with pytest.raises(ValueError, match="copied from a patched model"):
            pasa.patch_pipeline(twin)


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


@pytest.mark.parametrize("patched_first", [True, False])
@pytest.mark.parametrize("name", OFFLOADS)
def test_offloading_and_chunking_change_nothing(pipeline, name, patched_first):
    """Same bits as without, whichever came first. A CPU stands in for the accelerator; the hooks are the real ones."""
    expected = frames(pipeline)
    with pasa.patch_pipeline(pipeline):
        patched = frames(pipeline)
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


def vae(channels):
    torch.manual_seed(0)
    return diffusers.AutoencoderKLTemporalDecoder(block_out_channels=(channels,)).eval()


def test_the_vaes_head_of_512_is_served_and_noted():
    """One head as wide as the layer: 512 in the real VAE. The reference alone is that wide, and the report says so."""
    model = vae(512)
    image = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.encode(image).latent_dist.mean
        with pasa.patch_pipeline(model) as handle:
            error = (model.encode(image).latent_dist.mean - expected).abs().max()
    assert 0 < error < 1e-3 * expected.abs().max()
    assert [name for name, _ in handle.report().notes] == list(handle.report().patched)
    assert "head dim 512: only backend 'reference' serves it; it emulates" in str(handle.report())


def test_heads_too_wide_for_the_backend_are_skipped_with_the_reason(pipeline):
    with pytest.raises(NotImplementedError, match=r"head dim 512 is more than 256, the most of backend 'triton'"):
        pasa.patch_pipeline(vae(512), backend="triton")
    with pytest.raises(NotImplementedError, match=r"head dim 544 is more than 512, the most of any backend"):
        pasa.patch_pipeline(vae(544))
    pipeline.vae = vae(512)
    with pasa.patch_pipeline(pipeline, backend="triton") as handle:
        assert len(handle.report().patched) == 18
        assert [name.split(".")[0] for name, _ in handle.report().skipped] == ["vae", "vae"]


BLOCKS = {"block_out_channels": (32, 64), "attention_head_dim": 8, "cross_attention_dim": 32, "norm_num_groups": 8}
UNETS = {
    "image": (diffusers.UNet2DConditionModel, {"sample_size": 16, "layers_per_block": 1}, (2, 4, 16, 16)),
    "video": (diffusers.UNet3DConditionModel, {"sample_size": 16, "layers_per_block": 1}, (2, 4, 3, 16, 16)),
}


@pytest.mark.parametrize("name", UNETS)
def test_other_unets_with_a_masked_text(name):
    """Stable Diffusion's and ModelScope's; of the second text the last 5 tokens are padding."""
    build, sizes, shape = UNETS[name]
    direction = "3D" if name == "video" else "2D"
    blocks = {"down_block_types": (f"CrossAttnDownBlock{direction}", f"DownBlock{direction}"), **BLOCKS, **sizes}
    blocks["up_block_types"] = (f"UpBlock{direction}", f"CrossAttnUpBlock{direction}")
    torch.manual_seed(0)
    unet, draw = build(**blocks).eval(), torch.Generator().manual_seed(1)
    latents, text = torch.randn(*shape, generator=draw), torch.randn(2, 11, 32, generator=draw)
    mask = {"encoder_attention_mask": torch.arange(11) < torch.tensor([11, 6])[:, None]} if name == "image" else {}
    with torch.no_grad():
        expected = unet(latents, 3, text, **mask).sample
        unmasked = unet(latents, 3, text).sample
        with pasa.patch_pipeline(unet) as handle:
            error = (unet(latents, 3, text, **mask).sample - expected).abs().max()
        assert torch.equal(unet(latents, 3, text, **mask).sample, expected)
    assert handle.report().skipped == ()
    assert 0 < error < 1e-3 * expected.abs().max()
    assert not mask or error < 0.05 * (unmasked - expected).abs().max(), "the test must be able to see the mask"


def wan():
    return diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=32,
        ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip


def flux():
    return diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip


def hunyuan():
    return diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, patch_size=1, text_embed_dim=16, pooled_projection_dim=8,
        rope_axes_dim=(2, 4, 4),
    )  # fmt: skip


def dispatched_output(model):
    draw = torch.Generator().manual_seed(3)
    randn = lambda *shape: torch.randn(*shape, generator=draw)  # noqa: E731
    latents, text, time = randn(1, 4, 2, 8, 8), randn(1, 9, 16), torch.tensor([3])
    kind = type(getattr(model, "_orig_mod", model))
    with torch.no_grad():
        if kind is diffusers.WanTransformer3DModel:
            return model(latents, time, text).sample
        if kind is diffusers.HunyuanVideoTransformer3DModel:
            padding = (torch.arange(9) < 6)[None].float()
            return model(latents, time, text, padding, randn(1, 8), torch.tensor([6.0])).sample
        places = {"img_ids": randn(24, 3).round(), "txt_ids": torch.zeros(7, 3)}
        return model(randn(1, 24, 16), randn(1, 7, 32), randn(1, 32), time, **places).sample


@pytest.mark.parametrize(("build", "count"), [(wan, 4), (flux, 2), (hunyuan, 3)])
def test_models_of_the_new_style_run_through_the_dispatcher(build, count):
    """HunyuanVideo brings a mask; Flux joint and single blocks; Wan self- and cross-attention."""
    torch.manual_seed(0)
    model = build().eval()
    known, expected, before = list(_AttentionBackendRegistry._backends), dispatched_output(model), model.attn_processors
    with pasa.patch_pipeline(model) as handle:
        patched = dispatched_output(model)
        assert 0 < (patched - expected).abs().max() < 1e-3 * expected.abs().max()
        assert len(handle.report().patched) == count
        assert pasa.patch_pipeline(model) is handle
        assert torch.equal(dispatched_output(torch.compile(model, backend="eager", fullgraph=True)), patched)
    assert torch.equal(dispatched_output(model), expected)
    assert all(model.attn_processors[name] is before[name] for name in before)
    assert list(_AttentionBackendRegistry._backends) == known


def test_two_patched_models_keep_their_own_settings():
    """Story: all patches would share one name in the dispatcher, and the last one's config would serve all models."""
    torch.manual_seed(0)
    first, second = wan().eval(), wan().eval()
    alone = {}
    for precision, model in (("fp32", first), ("fp16", second)):
        with pasa.patch_pipeline(model, config=pasa.PasaConfig(precision=precision)):
            alone[precision] = dispatched_output(model)
    one = pasa.patch_pipeline(first, config=pasa.PasaConfig(precision="fp32"))
    with pasa.patch_pipeline(second, config=pasa.PasaConfig(precision="fp16")):
        assert torch.equal(dispatched_output(first), alone["fp32"])
        assert torch.equal(dispatched_output(second), alone["fp16"])
    assert torch.equal(dispatched_output(first), alone["fp32"]), "the name must outlive the other patch"
    one.unpatch()


def test_models_with_other_processors_are_refused_by_name():
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, time_embed_dim=2, text_embed_dim=8,
        num_layers=1, sample_width=8, sample_height=8, sample_frames=8, max_text_seq_length=8,
    )  # fmt: skip
    before = model.attn_processors
    with pytest.raises(NotImplementedError, match=r"CogVideoXTransformer3DModel is not.*CogVideoXAttnProcessor2_0"):
        pasa.patch_pipeline(model)
    assert model.attn_processors == before


def test_an_autoencoder_with_other_processors_is_skipped_and_its_pipeline_patched(pipeline):
    """Sana's has linear attention, Mochi's a processor of its own; the transformer beside it is what matters."""
    pipeline.vae.set_attn_processor(MochiVaeAttnProcessor2_0())
    with pasa.patch_pipeline(pipeline) as handle:
        assert len(handle.report().patched) == 18
    reasons = {reason for name, reason in handle.report().skipped}
    assert reasons == {"PASA cannot take the place of MochiVaeAttnProcessor2_0"}
    with pytest.raises(NotImplementedError, match=r"nothing to patch in AutoencoderKLTemporal.*MochiVaeAttnProcessor"):
        pasa.patch_pipeline(pipeline.vae)


def test_adapters_and_attention_without_processor_are_skipped_with_the_reason(pipeline):
    class Adapter(torch.nn.Module):
        pass

    adapted = pipeline.unet.mid_block.attentions[0].transformer_blocks[0].attn2
    adapted.set_processor(Adapter())
    pipeline.vae = diffusers.AutoencoderKLWan(base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    with pasa.patch_pipeline(pipeline) as handle:
        skipped = dict(handle.report().skipped)
        assert len(handle.report().patched) == 17
    assert skipped["unet.mid_block.attentions.0.transformer_blocks.0.attn2"] == "PASA cannot take the place of Adapter"
    assert skipped["vae.encoder.mid_block.attentions.0"].startswith("WanAttentionBlock computes its attention itself")


def test_an_encoder_that_needs_more_is_skipped_with_the_reason(pipeline):
    """A T5 text encoder adds a position bias in every layer; a pipeline that has one can be patched all the same."""
    config = hf.T5Config(d_model=64, d_kv=16, d_ff=96, num_layers=1, num_heads=4, vocab_size=97)
    pipeline.register_modules(image_encoder=hf.T5EncoderModel(config))
    with pasa.patch_pipeline(pipeline) as handle:
        ((name, reason),) = handle.report().skipped
    assert name == "image_encoder"
    assert "T5Attention) needs position_bias" in reason


def test_an_object_without_models_names_its_class():
    with pytest.raises(TypeError, match="DDIMScheduler holds no model"):
        pasa.patch_pipeline(diffusers.DDIMScheduler())
    blocks = {"block_out_channels": (32,), "down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}
    with pytest.raises(NotImplementedError, match="nothing to patch in UNet2DModel"):
        pasa.patch_pipeline(diffusers.UNet2DModel(**blocks, add_attention=False))


def classic_unet():
    """A UNet whose projections can be fused."""
    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(32, 32),
        cross_attention_dim=32, attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ).eval()  # fmt: skip


def test_processors_put_aside_while_patched_do_not_outlive_the_patch():
    """Story: `fuse_qkv_projections` put our processors aside, and `unfuse` gave them back after the patch was undone.
    The model then ran PASA for good: patching it again returned the dead handle."""
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
    """Story: the handle of the UNet was returned, and the image encoder kept its attention without a word."""
    with pasa.patch_pipeline(pipeline.unet), pytest.raises(ValueError, match=r"already patched .* on 16 modules"):
        pasa.patch_pipeline(pipeline)
    unet_alone, no_vae = (lambda name, module: name.startswith("unet")), (lambda name, module: name[:3] != "vae")
    with pasa.patch_pipeline(pipeline, policy=unet_alone), pytest.raises(ValueError, match="already patched"):
        pasa.patch_pipeline(pipeline, policy=no_vae)


def test_an_encoder_patched_alone_keeps_its_patch(pipeline):
    """Story: leaving the pipeline's patch undid the encoder's."""
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
    """Story: processors were known by the name of their class."""
    foreign = type("AttnProcessor2_0", (), {"__call__": lambda self, attn, hidden_states, **given: hidden_states * 0})()
    unet.set_attn_processor(foreign)
    with pytest.raises(NotImplementedError, match="cannot take the place of AttnProcessor2_0"):
        pasa.patch_pipeline(unet)


def test_another_backend_chosen_while_patched_is_noticed():
    """Story: `set_attention_backend` turned PASA off while handle and second patch said that all was well."""
    model = wan()
    with pasa.patch_pipeline(model):
        model.set_attention_backend("native")
        with pytest.raises(ValueError, match="was given another processor or backend"):
            pasa.patch_pipeline(model)


def test_one_model_under_two_names_is_patched_once(pipeline):
    pipeline.register_modules(unet=pipeline.unet, image_encoder=pipeline.image_encoder)
    twice = type("Twice", (), {"components": {"a": pipeline.unet, "b": pipeline.unet}, "__module__": "diffusers.x"})()
    with pasa.patch_pipeline(twice) as handle:
        assert len(handle.report().patched) == 16
        assert all(name.startswith("a.") for name in handle.report().patched)


def test_a_compiled_autoencoder_with_other_processors_is_skipped_as_well(pipeline):
    """Story: a compiled model was known by the class of its wrapper."""
    for module in pipeline.vae.modules():
        if hasattr(module, "set_processor"):
            module.set_processor(MochiVaeAttnProcessor2_0())
    pipeline.vae = torch.compile(pipeline.vae)
    with pasa.patch_pipeline(pipeline) as handle:
        assert len(handle.report().patched) == 18
        assert len(handle.report().skipped) == 2
