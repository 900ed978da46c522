"""Refusals of `to_fp16`: one clear line that names the value and the remedy, and a model that is as it was."""

import math

import pytest
import torch

import pasa
from pasa.fp16.conversion import Conversion
from tests.pasa.fp16.models import large

IDS = torch.arange(20)[None]
SAMPLE = {"input_ids": IDS, "use_cache": False}


def ours(hooks):
    """Return how many hooks there are beside those that transformers registers when hidden states are asked for."""
    return sum(not str(getattr(hook, "__module__", "")).startswith("transformers") for hook in hooks.values())


def state(model):
    """Return copies of all that a conversion changes: bits, hooks, epsilons and attention."""
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules = [
        (name, ours(module._forward_hooks), ours(module._forward_pre_hooks), getattr(module, "variance_epsilon", None))
        for name, module in model.named_modules()
    ]
    return tensors, modules, getattr(getattr(model, "config", None), "_attn_implementation", None)


def refused(error, match, model, *args, **kwargs):
    """Check that a conversion raises an error of one line, and changes nothing."""
    before = state(model)
    with pytest.raises(error, match=match) as caught:
        pasa.to_fp16(model, *args, **kwargs)
    assert "\n" not in str(caught.value)
    after = state(model)
    assert after[1:] == before[1:]
    assert before[0].keys() == after[0].keys()
    for name, tensor in before[0].items():
        assert after[0][name].dtype == tensor.dtype
        assert torch.equal(after[0][name], tensor)
    return str(caught.value)


@pytest.fixture
def model():
    return large("qwen2")


@pytest.mark.parametrize("margin", [math.nan, math.inf, 0, -1, 1e9, "4", None, True])
def test_a_margin_out_of_range(model, margin):
    assert repr(margin) in refused(ValueError, "margin must be a number from 1", model, SAMPLE, margin)


@pytest.mark.parametrize("keep", [True, "gpu", 1])
def test_an_unknown_place_for_the_original(model, keep):
    refused(ValueError, 'keep_original must be "cpu"', model, SAMPLE, keep_original=keep)


@pytest.mark.parametrize("sample", [[IDS], "hello", 5])
def test_a_sample_of_another_type(model, sample):
    refused(TypeError, f"got {type(sample).__name__}", model, sample)


@pytest.mark.parametrize(
    "sample", [{}, {"ids": IDS}, IDS[:, :0], IDS.float(), {"input_ids": IDS + 1000}, torch.arange(5)]
)
def test_a_sample_that_does_not_fit(model, sample):
    refused(ValueError, "Qwen2ForCausalLM does not run on the sample .*: pass sample=, a dict", model, sample)


def test_a_sample_on_another_device(model):
    refused(ValueError, "the sample is on meta, the model on cpu", model, IDS.to("meta"))


def test_a_sample_that_calls_nothing(model):
    refused(ValueError, "the sample calls no module", model, lambda _: None)


@pytest.mark.parametrize("run", [1, 2, 3])
def test_an_interruption_leaves_the_model_as_it_was(model, run):
    runs = []

    def interrupted(model):
        runs.append(None)
        if len(runs) == run:
            raise KeyboardInterrupt
        model(**SAMPLE)

    refused(KeyboardInterrupt, "", model, interrupted)


def test_embeddings_that_enter_the_stream_are_scaled_if_the_sample_holds_them(model):
    x = torch.randn(1, 20, 32)
    with torch.no_grad():
        truth = model(inputs_embeds=x).logits
        pasa.to_fp16(model, {"inputs_embeds": x})
        result = model(inputs_embeds=x.half()).logits
    assert (result - truth).abs().max() < 1e-2 * truth.abs().max()


def test_embeddings_that_the_sample_did_not_hold(model):
    pasa.to_fp16(model, SAMPLE)
    with pytest.raises(ValueError, match=r"scaled for calls without .'inputs_embeds'"):
        model(inputs_embeds=torch.randn(1, 20, 32).half())


def test_residuals_of_a_controlnet():
    from diffusers import UNet2DConditionModel

    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 32),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    ).eval()
    call = {"sample": torch.randn(1, 4, 8, 8), "timestep": 5, "encoder_hidden_states": torch.randn(1, 7, 32)}
    pasa.to_fp16(unet, call)
    call = {name: value if name == "timestep" else value.half() for name, value in call.items()}
    with torch.no_grad():
        assert unet(**call).sample.isfinite().all()
        with pytest.raises(ValueError, match=r"scaled for calls without .'mid_block_additional_residual'"):
            unet(**call, mid_block_additional_residual=torch.zeros(1, 32, 4, 4).half())


class Block(torch.nn.Module):
    """A module of no library: two projections around an activation."""

    def __init__(self, activation):
        super().__init__()
        self.up, self.act, self.down = torch.nn.Linear(8, 8), activation, torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


def test_a_module_of_no_library_is_converted():
    block, x = Block(torch.nn.ReLU()), torch.randn(4, 8)
    with torch.no_grad():
        block.up.weight.mul_(1e6), block.up.bias.mul_(1e6)
        block.down.weight.mul_(1e-6)
        truth = block(x)
        pasa.to_fp16(block, x)
        assert (block(x.half()) - truth).abs().max() < 1e-2 * truth.abs().max()


def test_a_tensor_that_feeds_an_operator_without_a_rule():
    block = Block(torch.nn.GELU())
    with torch.no_grad():
        block.up.weight.mul_(1e6)
    refused(NotImplementedError, r"up computes values up to .* because of act \(feeds gelu\)", block, torch.randn(4, 8))


def test_a_module_that_stores_its_scores():
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = torch.nn.Linear(8, 8)

        def forward(self, x):
            q = self.proj(x)
            return (q @ q.transpose(-1, -2)).softmax(-1) @ x

    refused(
        NotImplementedError,
        "the model stores attention scores, .* cannot be patched",
        Attention(),
        torch.randn(1, 4, 8),
    )


def test_quantised_weights(model):
    weight = model.model.layers[0].mlp.down_proj
    for dtype in (torch.int8, torch.float8_e4m3fn):
        weight.weight = torch.nn.Parameter(torch.zeros(32, 64).to(dtype), requires_grad=False)
        refused(NotImplementedError, rf"down_proj.weight is {dtype}: load the model unquantised", model, SAMPLE)
    model.quantization_method = "bitsandbytes"
    refused(NotImplementedError, "quantised weights", model, SAMPLE)


def test_a_parameter_of_another_class(model):
    class Packed(torch.nn.Parameter):
        pass

    model.lm_head.weight = Packed(model.lm_head.weight.data)
    refused(NotImplementedError, "lm_head.weight is a Packed", model, SAMPLE)


@pytest.mark.parametrize("loaded", ["_hf_peft_config_loaded", "peft_config"])
def test_an_adapter(model, loaded):
    setattr(model, loaded, {"default": 1})
    refused(NotImplementedError, "has an adapter: merge it first", model, SAMPLE)
    setattr(model, loaded, None)
    pasa.to_fp16(model, SAMPLE)
    setattr(model, loaded, {"default": 1})
    with pytest.raises(RuntimeError, match="an adapter was loaded into Qwen2ForCausalLM after it was scaled"):
        model(IDS)


def test_an_adapter_of_peft():
    import peft

    model = large("qwen2")
    config = peft.LoraConfig(target_modules=["down_proj"], init_lora_weights=False)
    with pytest.raises(NotImplementedError, match="merge it first"):
        pasa.to_fp16(peft.get_peft_model(model, config), SAMPLE)
    model = large("qwen2")
    pasa.to_fp16(model, SAMPLE)
    adapted = peft.get_peft_model(model, config).eval()
    with pytest.raises(RuntimeError, match="undo, merge the adapter"):
        adapted(IDS)


def test_undo_restores_a_model_in_which_an_adapter_was_loaded_since():
    """Story: the adapter renames the weights that it wraps. They stayed scaled and in FP16, beside others in FP32."""
    import peft

    model = large("qwen2")
    truth, bits = model(IDS).logits, state(model)[0]
    handle = pasa.to_fp16(model, SAMPLE, keep_original="cpu")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["down_proj"])).eval()
    handle.undo()
    assert torch.equal(adapted(IDS).logits, truth)
    restored = adapted.unload().state_dict()
    assert restored.keys() == bits.keys()
    assert all(torch.equal(restored[name], bits[name]) for name in bits)


def test_a_device_map_without_offloading(model):
    from accelerate import dispatch_model

    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    pasa.to_fp16(model, SAMPLE)
    assert model(IDS).logits.isfinite().all()


def test_compiled_models(model):
    with pytest.raises(TypeError, match="OptimizedModule is compiled: pass the original"):
        pasa.to_fp16(torch.compile(model, backend="eager"), SAMPLE)
    with pytest.raises(TypeError, match="is compiled"):
        pasa.to_fp16(torch.jit.script(torch.nn.Linear(3, 3)), torch.zeros(1, 3))


def test_host_memory_that_ends_while_the_original_is_kept(model, monkeypatch):
    """Story: the model stayed in FP16, with its hooks, and there was no handle to undo it."""

    def copies(conversion):
        raise MemoryError("no room for the original")

    monkeypatch.setattr(Conversion, "_copies", copies)
    refused(MemoryError, "no room", model, SAMPLE, keep_original="cpu")


def test_a_second_call(model):
    pasa.to_fp16(model, SAMPLE)
    refused(RuntimeError, "Qwen2ForCausalLM is converted already", model, SAMPLE)
    with pytest.raises(RuntimeError, match="Qwen2Model is converted already"):
        pasa.to_fp16(model.model, SAMPLE)


def test_a_model_of_fp16_whose_activations_overflow():
    model = large("gpt2")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-60000, 60000)
    model.half()
    pasa.to_fp16(model, SAMPLE)
    with torch.no_grad():
        assert model(IDS).logits.isfinite().all()


def test_weights_that_are_infinite_in_fp16(model):
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1e6)
    refused(ValueError, "down_proj.weight holds infinities or NaN: load the weights in FP32", model.half(), SAMPLE)


def test_a_model_that_overflows_bf16(model):
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.fill_(3e38)
    # Some processors (AMX) add the products in an order in which inf meets -inf.
    refused(OverflowError, r"model\.layers\.0\.mlp\.down_proj computes (inf|nan)", model, SAMPLE)


@pytest.mark.parametrize("settings", [{}, {"config": pasa.PasaConfig(accumulate="fp16")}])
def test_a_model_that_is_patched_already_keeps_its_patch(model, settings):
    with pasa.patch_pipeline(model, **settings) as patch:
        with pasa.to_fp16(model, SAMPLE, keep_original="cpu"), torch.no_grad():
            assert model(IDS).logits.isfinite().all()
        assert patch.active
        assert model.config._attn_implementation.startswith("pasa")
        with pytest.raises(KeyError):
            pasa.to_fp16(model, lambda model: {}["x"])
        assert patch.active
        assert model.config._attn_implementation.startswith("pasa")


def test_models_of_text_and_images_need_a_sample():
    from transformers import CLIPConfig, CLIPModel

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**small, "image_size": 8, "patch_size": 4}
    model = CLIPModel(CLIPConfig(text_config={**small, "vocab_size": 128}, vision_config=vision)).eval()
    refused(ValueError, "CLIPModel takes pixel_values beside text: pass sample=", model)


def test_the_built_in_sample_is_a_text_where_there_is_a_tokenizer(model, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    from pasa.fp16 import sampling

    words = {word: index for index, word in enumerate(sorted(set(sampling.TEXT.split()))[:100])}
    tokenizer = Tokenizer(models.WordLevel({**words, "[UNK]": 100}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    from transformers import PreTrainedTokenizerFast

    assert sampling._ids(model).shape == (1, sampling.TOKENS)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    model.name_or_path = str(tmp_path)
    ids = sampling._ids(model)
    assert 0 < ids.shape[1] < sampling.TOKENS
    assert int(ids.max()) <= 100
    pasa.to_fp16(model)
    with torch.no_grad():
        assert model(ids, output_hidden_states=True).hidden_states[-2].isfinite().all()
