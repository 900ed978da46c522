"""Parts of diffusion models that scaling must follow: skips, shortcuts, gates, constants, FP32 modules, entries."""

import copy
import warnings

import accelerate
import pytest
import torch
from torch import nn

import pasa
from tests.pasa.fp16.diffusion_models import FAMILIES, Family, draw
from tests.pasa.fp16.planned import distance, planned


def powers(plan):
    """Return the exponent of each parameter that is scaled as a whole, and of each epsilon."""
    scales = {name: parts[0][2] for name, parts in plan.scales.items() if parts[0][1] is None}
    return scales | {f"{place.module}.{place.attribute}": power for place, power in plan.constants.items()}


def enlarge(model, name, factor):
    with torch.no_grad():
        model.get_parameter(name).mul_(factor)


def other(name, **arguments):
    """Return a family with other arguments of the call."""
    family = FAMILIES[name]
    return Family(family.build, family.arguments | arguments, family.large, family.method)


def converted(family, sample, model):
    """Return a model's result after conversion relative to that before, and the handle."""
    truth = family.run(model)[0]
    handle = pasa.to_fp16(model, sample.run)
    result = family.run(model)[0]
    assert result.isfinite().all()
    return distance(result, truth), handle


def test_skips_of_a_unet_share_one_power_of_two():
    """Both halves of what is concatenated before a GroupNorm are divided by it together."""
    family = FAMILIES["unet"]
    factors = powers(planned(family.model(), family.run))
    stream = factors["conv_in.weight"]
    assert stream > 0
    assert factors["conv_in.bias"] == stream
    for block in ("down_blocks.0.resnets.0", "mid_block.resnets.1", "up_blocks.0.resnets.0", "up_blocks.1.resnets.1"):
        assert factors[f"{block}.norm1.eps"] == 2 * stream
        assert factors[f"{block}.conv2.bias"] == stream
    assert "conv_out.weight" not in factors


def test_linear_readers_pass_the_scaled_stream_on():
    """A shortcut or sampler writes what enters it times its weight, so its bias follows both."""
    family = FAMILIES["unet"]
    factors = powers(planned(family.model(), family.run))
    entering = dict.fromkeys(("down_blocks.0.downsamplers.0.conv", "down_blocks.1.resnets.0.conv_shortcut"), "conv_in")
    entering |= dict.fromkeys((f"up_blocks.0.resnets.{index}.conv_shortcut" for index in (0, 1)), "conv_in")
    entering["up_blocks.0.upsamplers.0.conv"] = "up_blocks.0.resnets.1.conv2"
    for reader, writer in entering.items():
        assert factors[f"{reader}.bias"] == factors.get(f"{reader}.weight", 0) + factors[f"{writer}.bias"] > 0
    assert not any(f"{reader}.weight" in factors for reader in list(entering)[:2])


def test_a_convolution_between_two_norms_has_its_own_power_of_two():
    """The time embedding is added between them, so it takes the same one."""
    family = FAMILIES["unet"]
    model, block = family.model(), "down_blocks.1.resnets.0"
    before = powers(planned(model, family.run))
    enlarge(model, f"{block}.conv1.weight", 1e7)
    factors = powers(planned(model, family.run))
    power = factors[f"{block}.conv1.weight"]
    assert power > 0
    assert factors[f"{block}.time_emb_proj.weight"] == factors[f"{block}.time_emb_proj.bias"] == power
    assert factors[f"{block}.norm2.eps"] == 2 * power
    assert factors["conv_in.weight"] == before["conv_in.weight"]
    error, _ = converted(family, family, model)
    assert error < 0.03


@pytest.mark.parametrize("name", ["dit", "sd3", "flux", "wan", "cogvideox"])
def test_of_a_gate_and_an_output_projection_only_one_is_scaled(name):
    """A block adds gate * projection(norm * (1 + scale) + shift); the modulation itself stays as it is."""
    family = FAMILIES[name]
    factors = powers(planned(family.model(), family.run))
    modulations = ("norm1.linear", "norm1_context.linear", "norm.linear", "norm2.linear", "scale_shift", "time_proj")
    assert any(name.endswith(("to_out.0.weight", "net.2.weight", "ffn.net.2.weight")) for name in factors)
    assert not [name for name in factors if any(part in name for part in modulations)]


def test_image_and_text_tokens_of_flux_share_one_stream():
    family = FAMILIES["flux"]
    factors = powers(planned(family.model(), family.run))
    stream = factors["x_embedder.weight"]
    assert stream == factors["context_embedder.weight"] > 0
    assert factors["transformer_blocks.0.ff.net.2.bias"] == factors["transformer_blocks.0.ff_context.net.2.bias"]


RESIDUALS = {
    "down_block_additional_residuals": tuple(
        9000 * draw(2, *shape) for shape in ((16, 8, 8), (16, 8, 8), (16, 4, 4), (32, 4, 4))
    ),
    "mid_block_additional_residual": 9000 * draw(2, 32, 4, 4),
}


def test_residuals_of_a_controlnet_are_scaled_at_entry():
    family = other("unet", **RESIDUALS)
    error, _ = converted(family, family, family.model())
    assert error < 0.02


def test_residuals_that_the_sample_did_not_hold_are_refused():
    family, model = FAMILIES["unet"], FAMILIES["unet"].model()
    pasa.to_fp16(model, family.run)
    with pytest.raises(ValueError, match=r"scaled for calls without .*down_block_additional_residuals"):
        other("unet", **RESIDUALS).run(model)


def test_a_gate_that_overflows_stays_in_fp32():
    """GELU cannot be scaled. The smallest module around it stays in FP32, and its product is scaled as before."""
    family, model = FAMILIES["unet"], FAMILIES["unet"].model()
    feed_forward = "down_blocks.0.attentions.0.transformer_blocks.0.ff"
    with torch.no_grad():
        model.get_parameter(f"{feed_forward}.net.0.proj.weight")[64:] *= 3e5
    enlarge(model, f"{feed_forward}.net.2.weight", 1e-5)
    error, handle = converted(family, family, model)
    assert error < 0.02
    assert [name for name, _ in handle.report().fp32] == [f"{feed_forward}.net.0"]


def test_gelu_outputs_that_overflow_keep_the_module_around_them_in_fp32():
    """The next layer reads them, so the module that holds both stays in FP32; Flux's single block holds them itself."""
    family, model = FAMILIES["flux"], FAMILIES["flux"].model()
    enlarge(model, "transformer_blocks.0.ff.net.0.proj.weight", 3e5)
    enlarge(model, "transformer_blocks.0.ff.net.2.weight", 1e-5)
    enlarge(model, "single_transformer_blocks.1.proj_mlp.weight", 3e5)
    with torch.no_grad():
        model.single_transformer_blocks[1].proj_out.weight[:, 32:] *= 1e-5
    error, handle = converted(family, family, model)
    assert error < 0.01
    assert [name for name, _ in handle.report().fp32] == ["transformer_blocks.0.ff", "single_transformer_blocks.1"]


@pytest.mark.parametrize(("name", "shape"), [("dit", (2, 4, 12, 12)), ("cogvideox", (1, 2, 4, 12, 12))])
def test_position_embeddings_for_another_size_are_scaled_too(name, shape):
    """Story: the model computes them anew, while those of the usual size are a buffer; only the buffer was scaled."""
    family, model = FAMILIES[name], FAMILIES[name].model()
    larger = other(name, hidden_states=draw(*shape))
    error, handle = converted(larger, family, model)
    assert error < 0.01
    assert converted(larger, larger, larger.model())[0] < 0.01
    positions = "pos_embed" if name == "dit" else "patch_embed"
    assert [each.power > 0 for each in handle.report().modules if each.module == positions] == [True]


def test_zeros_that_are_filled_under_another_name_are_no_zeros():
    """Story: they counted as zeros, which have every exponent, and a scaled tensor was added to them."""

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x):
            positions = x.new_zeros(4, 8)
            positions.data[2:].copy_(torch.arange(16.0).reshape(2, 8))
            return self.norm(self.embed(x) * 1e6 + positions)

    torch.manual_seed(0)
    model = Positions().eval()
    with pytest.raises(NotImplementedError, match=r"because of the model \(add needs one power of two\)"):
        planned(model, lambda model: model(draw(4, 8).to(model.embed.weight.dtype)))


def test_a_module_that_the_sample_did_not_run_raises():
    """The encoder of an autoencoder whose sample only decodes has unknown peaks."""
    family, model = FAMILIES["vae-decode"], FAMILIES["vae-decode"].model()
    pasa.to_fp16(model, family.run)
    with pytest.raises(RuntimeError, match=r"did not reach encoder.conv_in.*pass a sample that uses it"):
        FAMILIES["vae-encode"].run(model)


def test_tiled_and_sliced_decoding():
    """Tiles are blended outside of the modules that are scaled."""
    model, latents = FAMILIES["vae-decode"].model(), draw(2, 4, 24, 24)
    model.enable_tiling()
    model.enable_slicing()
    model.tile_latent_min_size, model.tile_sample_min_size = 8, 16

    def decode(model):
        with torch.no_grad():
            return model.decode(latents.to(model.dtype), return_dict=False)[0]

    truth = decode(model)
    pasa.to_fp16(model, FAMILIES["vae-decode"].run)
    assert distance(decode(model), truth) < 0.01


def test_encoding_and_decoding_in_one_sample():
    """Encoder and decoder are modules of their own, as the autoencoder's methods call them."""
    model, image = FAMILIES["vae-decode"].model(), draw(1, 3, 16, 16)
    run = lambda model: model(image.to(model.dtype), return_dict=False)[0]  # noqa: E731
    with torch.no_grad():
        truth = run(model)
        handle = pasa.to_fp16(model, run)
        assert distance(run(model), truth) < 0.02
    assert {each.module.split(".")[0] for each in handle.report().modules} == {"encoder", "decoder"}


def test_pipelines_no_longer_convert_a_scaled_autoencoder_to_fp32():
    family, model = FAMILIES["vae-decode"], FAMILIES["vae-decode"].model()
    assert model.config.force_upcast
    handle = pasa.to_fp16(model, family.run, keep_original="cpu")
    assert model.config.force_upcast is False
    handle.undo()
    assert model.config.force_upcast is True


def test_a_model_that_cannot_be_converted_keeps_its_config():
    family, model = FAMILIES["vae-decode"], FAMILIES["vae-decode"].model()
    before = copy.deepcopy(model.state_dict())
    enlarge(model, "decoder.conv_out.weight", 1e7)
    before["decoder.conv_out.weight"] *= 1e7
    with pytest.raises(NotImplementedError, match=r"decoder.conv_out computes values up to .*returns it"):
        pasa.to_fp16(model, family.run)
    assert model.config.force_upcast is True
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_model_that_is_moved_to_its_device_for_each_call():
    """`enable_model_cpu_offload` does so; its hook replaces a model's forward."""
    family, model = FAMILIES["sd3"], FAMILIES["sd3"].model()
    truth = family.run(model)[0]
    accelerate.cpu_offload_with_hook(model, execution_device="cpu")
    pasa.to_fp16(model, family.run)
    assert distance(family.run(model)[0], truth) < 0.01


def test_another_device_and_back():
    """`to` moves a scaled model, and nothing is counted as beyond the margin."""
    family, model = FAMILIES["unet"], FAMILIES["unet"].model()
    truth = family.run(model)[0]
    handle = pasa.to_fp16(model, family.run)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert distance(family.run(model.to("cpu"))[0], truth) < 0.02
    assert not handle.report().beyond


def test_a_sample_in_the_precision_of_the_original_model():
    """The tensors of a sample follow the model, which is BF16 when it is measured and FP16 when it is checked."""
    family = FAMILIES["unet"]
    model = family.model()
    truth = family.run(model)[0]
    pasa.to_fp16(model, family.arguments | {"return_dict": False})
    assert distance(family.run(model)[0], truth) < 0.02
