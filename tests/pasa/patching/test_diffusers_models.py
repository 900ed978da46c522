"""Tests of patching various diffusers models: those that are served, skipped or refused, with the reason."""

from __future__ import annotations

import copy
import importlib

import diffusers
import pytest
import torch
import transformers as hf
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from diffusers.models.attention_processor import SanaLinearAttnProcessor2_0, SanaMultiscaleAttnProcessor2_0
from diffusers.models.autoencoders.autoencoder_kl_wan import WanAttentionBlock
from torch.nn.attention.flex_attention import create_block_mask

import pasa
from pasa.patching.callbacks import Callbacks
from pasa.patching.diffusers_attention import make_dispatched, needs_flex

hf.logging.set_verbosity_error()


def vae(channels):
    torch.manual_seed(0)
    return diffusers.AutoencoderKLTemporalDecoder(block_out_channels=(channels,)).eval()


def test_the_vaes_head_of_512_is_served():
    """The VAE's single head is as wide as the layer, 512. The Triton kernels serve at most 256."""
    model = vae(512)
    image = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.encode(image).latent_dist.mean
        with pasa.patch_pipeline(model) as handle:
            error = (model.encode(image).latent_dist.mean - expected).abs().max()
            assert handle.report().patched
    assert 0 < error < 1e-3 * expected.abs().max()


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
    """UNets of Stable Diffusion and ModelScope run with a padded text: the last 5 tokens of the second text."""
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
    """Models of the dispatched kind agree with their original attention.

    HunyuanVideo has a mask, Flux joint and single blocks, and Wan self- and cross-attention.
    """
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
    """Two models patched with different settings each run with their own.

    With one shared name in the dispatcher, the config of the last patch would serve all models.
    """
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


def test_another_backend_chosen_while_patched_is_noticed():
    """A change of the attention backend while patched is reported, and refused by a second patch.

    Story: `set_attention_backend` turned PASA off, and neither the handle nor a second patch noticed.
    """
    model = wan()
    with pasa.patch_pipeline(model):
        model.set_attention_backend("native")
        with pytest.raises(ValueError, match="was given another processor or backend"):
            pasa.patch_pipeline(model)


def test_models_with_other_processors_are_refused_by_name():
    """A model whose attention is not softmax of scores is refused; Sana's self-attention is linear."""
    model = wan()
    for module in model.modules():
        if hasattr(module, "processor"):
            module.processor = SanaLinearAttnProcessor2_0()
    with pytest.raises(NotImplementedError, match=r"WanTransformer3DModel is not.*SanaLinearAttnProcessor2_0, which"):
        pasa.patch_pipeline(model)


def test_an_autoencoder_with_other_processors_is_skipped_and_its_pipeline_patched(pipeline):
    """An autoencoder whose processors cannot be replaced is skipped, and the rest of its pipeline is patched.

    Sana's autoencoder has linear attention.
    """
    pipeline.vae.set_attn_processor(SanaMultiscaleAttnProcessor2_0())
    with pasa.patch_pipeline(pipeline) as handle:
        assert len(handle.report().patched) == 18
    (reason,) = {reason for name, reason in handle.report().skipped}
    assert reason.startswith("PASA cannot take the place of SanaMultiscaleAttnProcessor2_0, which calls neither")
    with pytest.raises(NotImplementedError, match=r"nothing to patch in AutoencoderKLTemporal.*SanaMultiscaleAttn"):
        pasa.patch_pipeline(pipeline.vae)


def test_adapters_and_attention_without_processor_are_skipped_with_the_reason(pipeline):
    class Adapter(torch.nn.Module):
        pass

    class OwnAttention(torch.nn.Module):
        pass

    adapted = pipeline.unet.mid_block.attentions[0].transformer_blocks[0].attn2
    adapted.set_processor(Adapter())
    pipeline.vae.own = OwnAttention()
    with pasa.patch_pipeline(pipeline) as handle:
        skipped = dict(handle.report().skipped)
        assert len(handle.report().patched) == 19
    assert skipped["unet.mid_block.attentions.0.transformer_blocks.0.attn2"] == "PASA cannot take the place of Adapter"
    assert skipped["vae.own"] == "OwnAttention computes its attention itself, without a processor"


def wan_vae():
    torch.manual_seed(0)
    return diffusers.AutoencoderKLWan(base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1).eval()


@torch.no_grad()
def test_blocks_of_autoencoders_without_a_processor():
    """Blocks that call SDPA in their forward run PASA while patched; their copies and the restored blocks do not."""
    model, clip = wan_vae(), torch.randn(1, 3, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    blocks = [model.encoder.mid_block.attentions[0], model.decoder.mid_block.attentions[0]]
    for block in blocks:
        torch.nn.init.normal_(block.proj.weight)  # it is zero at first
    kind = type(blocks[0])
    expected = model(clip).sample
    with pasa.patch_pipeline(model, config=pasa.PasaConfig(precision="fp32")) as handle:
        assert handle.report().patched == ("encoder.mid_block.attentions.0", "decoder.mid_block.attentions.0")
        assert pasa.patch_pipeline(model, config=pasa.PasaConfig(precision="fp32")) is handle
        with pytest.raises(ValueError, match="already patched"):
            pasa.patch_pipeline(model)
        with pasa.watch(model) as watched:
            assert 0 < (model(clip).sample - expected).abs().max() < 1e-3 * expected.abs().max()
        assert watched.report().passed == 2 * 16
        copied = copy.deepcopy(model)
        assert torch.equal(copied(clip).sample, expected)
        assert type(copied.encoder.mid_block.attentions[0]) is kind
    assert torch.equal(model(clip).sample, expected)
    assert type(blocks[0]) is type(blocks[1]) is kind
    with pasa.patch_pipeline(copied):
        assert not torch.equal(copied(clip).sample, expected)


def test_blocks_of_autoencoders_that_are_too_wide_are_skipped_with_the_reason():
    with pytest.raises(NotImplementedError, match=r"head dim 544 is more than 512, the most of any backend"):
        pasa.patch_pipeline(torch.nn.ModuleDict({"attn": WanAttentionBlock(544)}))


def test_an_encoder_out_of_reach_is_skipped_with_the_reason(pipeline):
    """An encoder that computes attention itself is skipped, and the rest of its pipeline is patched."""
    config = hf.OpenAIGPTConfig(n_embd=32, n_layer=1, n_head=2, vocab_size=97)
    pipeline.register_modules(image_encoder=hf.OpenAIGPTModel(config))
    with pasa.patch_pipeline(pipeline) as handle:
        ((name, reason),) = handle.report().skipped
    assert name == "image_encoder"
    assert "Attention computes its attention itself" in reason


def test_a_position_bias_of_an_encoder_is_served(pipeline):
    """A T5 encoder, which adds a position bias in every layer, is patched with its pipeline."""
    config = hf.T5Config(d_model=64, d_kv=16, d_ff=96, num_layers=1, num_heads=4, vocab_size=97)
    pipeline.register_modules(image_encoder=hf.T5EncoderModel(config))
    with pasa.patch_pipeline(pipeline) as handle:
        assert not handle.report().skipped
        assert "image_encoder.encoder.block.0.layer.0.SelfAttention" in handle.report().patched


def test_an_object_without_models_names_its_class():
    with pytest.raises(TypeError, match="DDIMScheduler holds no model"):
        pasa.patch_pipeline(diffusers.DDIMScheduler())
    blocks = {"block_out_channels": (32,), "down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}
    with pytest.raises(NotImplementedError, match="nothing to patch in UNet2DModel"):
        pasa.patch_pipeline(diffusers.UNet2DModel(**blocks, add_attention=False))


def anyflow():
    from diffusers.models.transformers.transformer_anyflow_far import AnyFlowFARTransformer3DModel

    return AnyFlowFARTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=16, freq_dim=32,
        ffn_dim=32, num_layers=1, rope_max_seq_len=32,
    )  # fmt: skip


def test_processors_that_need_flex_are_skipped_by_name():
    """Processors that pass block masks, which only the dispatcher's backend "flex" accepts, are skipped by name.

    Story: AnyFlow's causal processor and LTX 2's neighbourhood attention were reported as patched, and raised at the
    first call.
    """
    with pasa.patch_pipeline(anyflow()) as handle:
        skipped = dict(handle.report().skipped)
        assert all("attn1" not in name for name in handle.report().patched)
    assert "AnyFlowCausalAttnProcessor, which needs the attention backend 'flex'" in skipped["blocks.0.attn1"]


@pytest.mark.parametrize("name", ["LTX2VideoVaeNeighborhoodAttnProcessor", "Kandinsky6SRAttnProcessor"])
def test_a_model_of_such_processors_alone_is_refused(name):
    """A model with only processors that need "flex" is refused.

    The class of the processor names "flex" as its default or in its code. The rest of the model does not matter.
    """
    from diffusers.models.autoencoders import ltx2_diffusion_decoder
    from diffusers.models.transformers import transformer_kandinsky6_sr

    processor = next(
        getattr(file, name)() for file in (ltx2_diffusion_decoder, transformer_kandinsky6_sr) if hasattr(file, name)
    )
    model = wan()
    for module in model.modules():
        if hasattr(module, "processor"):
            module.processor = processor
    with pytest.raises(NotImplementedError, match=f"WanTransformer3DModel is not supported.*{name}"):
        pasa.patch_pipeline(model)
    assert all(module.processor is processor for module in model.modules() if hasattr(module, "processor"))


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("transformer_qwenimage21", "QwenImage21FlexAttnProcessor"),
        ("transformer_wan_animate_2", "WanAnimate2AttnProcessor"),
    ],
)
def test_processors_that_ask_for_flex_in_one_of_their_calls_are_not_called_patched(file, name):
    """A processor that asks for "flex" in only some of its calls is not reported as patched.

    Story: it was, because its other calls ran PASA.
    """
    module = importlib.import_module(f"diffusers.models.transformers.{file}")
    assert needs_flex(getattr(module, name)())


def test_block_masks_of_a_sparse_model_are_refused_at_patching_and_at_the_call():
    """Block masks are refused when patching a model that makes them, and in a call that passes one.

    Kandinsky 5 makes block masks if its config says so. The caller of any model may pass one.
    """
    model = diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=4, in_text_dim=16, in_text_dim2=8, time_dim=16, out_visual_dim=4, model_dim=32, ff_dim=32,
        num_text_blocks=1, num_visual_blocks=1, axes_dims=(4, 4, 8), attention_type="nabla",
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match="attention_type='nabla'"):
        pasa.patch_pipeline(model)
    q = torch.randn(1, 4, 2, 16)
    mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 4, 4, device="cpu")
    with pytest.raises(NotImplementedError, match="attn_mask of type BlockMask"):
        make_dispatched(None, None, Callbacks())(q, q, q, attn_mask=mask)
