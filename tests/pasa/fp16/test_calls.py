"""Calls of a converted model: generation with a cache, embeddings as inputs, and modules called on their own."""

import pytest
import torch

import pasa
from pasa.fp16.containers import float_leaves
from pasa.fp16.conversion import Conversion
from tests.pasa.fp16.models import FAMILIES, IDS, large, outputs
from tests.pasa.fp16.planned import largest_distance

PROMPTS = torch.tensor([[0, 0, 7, 8, 9, 10], [20, 21, 22, 23, 24, 25]])
MASK = (torch.arange(6) >= torch.tensor([[2], [0]])).long()


def embedding_sample(model):
    """Run a model on embeddings that its own module computed, and on ids."""
    model(input_ids=IDS, use_cache=False)
    model(inputs_embeds=model.get_input_embeddings()(IDS), use_cache=False)


@pytest.mark.parametrize("family", ["qwen2_tied", "gemma2", "glm4", "deepseek_v2", "gpt2", "opt_post_norm", "gpt_oss"])
def test_greedy_generation_with_a_cache_equals_fp32(family):
    model = large(family)
    options = {"max_new_tokens": 12, "do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": None}
    truth = model.generate(PROMPTS, attention_mask=MASK, **options)
    pasa.to_fp16(model)
    result = model.generate(PROMPTS, attention_mask=MASK, **options)
    assert torch.equal(result, truth)


@pytest.mark.parametrize("family", ["t5", "t5_gated"])
@pytest.mark.parametrize("sample", [None, FAMILIES["t5"].inputs()], ids=["built-in", "arguments"])
def test_generation_of_t5_calls_its_encoder_alone(family, sample):
    model = large(family)
    options = {
        "max_new_tokens": 8,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
    }
    truth = model.generate(IDS, **options)
    pasa.to_fp16(model, sample)
    assert torch.equal(model.generate(IDS, **options), truth)


@pytest.mark.parametrize("path", ["model", "model.embed_tokens", "model.layers.1", "lm_head"])
def test_a_module_within_a_scaled_model_refuses_calls_on_its_own(path):
    model = large("qwen2_tied")
    pasa.to_fp16(model, {"input_ids": IDS})
    inputs = IDS if path in ("model", "model.embed_tokens") else torch.randn(1, 4, 32).half()
    with pytest.raises(RuntimeError, match=rf"{path} is scaled by powers of two inside of Qwen2ForCausalLM.*call"):
        model.get_submodule(path)(inputs)
    model(IDS)


def test_a_module_that_the_sample_calls_on_its_own_gives_true_values():
    model = large("qwen2")
    with torch.no_grad():
        truth = model.model(IDS).last_hidden_state, model(IDS).logits
        pasa.to_fp16(model, lambda each: (each.model(IDS), each(IDS)))
        result = model.model(IDS).last_hidden_state, model(IDS).logits
    for one, other in zip(result, truth, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0, atol=5e-3 * other.abs().max().item())


def test_an_interrupted_call_leaves_nothing_behind():
    model = large("qwen2_tied")
    pasa.to_fp16(model, {"input_ids": IDS})
    truth = model(IDS).logits

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = model.lm_head.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(IDS)
    hook.remove()
    assert torch.equal(model(IDS).logits, truth)
    with pytest.raises(RuntimeError, match="inside of Qwen2ForCausalLM"):
        model.model(IDS)


@pytest.mark.parametrize("sample", [None, IDS, {"input_ids": IDS}], ids=["built-in", "tensor", "arguments"])
def test_hidden_states_are_true_although_the_sample_does_not_ask_for_them(sample):
    model = large("qwen2_tied")
    with torch.no_grad():
        truth = model(IDS, output_hidden_states=True).hidden_states
        pasa.to_fp16(model, sample)
        result = model(IDS, output_hidden_states=True).hidden_states
    for one, other in zip(result, truth, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0, atol=5e-3 * other.abs().max().item())


def test_calls_that_return_tuples():
    model = large("gpt2")
    arguments = {"input_ids": IDS, "return_dict": False, "use_cache": False, "output_hidden_states": True}
    with torch.no_grad():
        logits, states = model(**arguments)
        pasa.to_fp16(model, arguments)
        result = model(**arguments)
    for one, other in zip((result[0], *result[1]), (logits, *states), strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0, atol=5e-3 * other.abs().max().item())


def test_hidden_states_that_a_sample_function_does_not_return_are_refused():
    model = large("qwen2_tied")
    pasa.to_fp16(model, lambda each: each(IDS))
    assert model(IDS, labels=IDS).loss.isfinite()
    with pytest.raises(ValueError, match=r"calls that do not return \['hidden_states'\]"):
        model(IDS, output_hidden_states=True)


def test_embeddings_that_the_sample_did_not_hold_are_refused():
    model = large("qwen2_tied")
    embeddings = model.get_input_embeddings()(IDS).detach()
    pasa.to_fp16(model, {"input_ids": IDS})
    with pytest.raises(ValueError, match=r"was scaled for calls without .*inputs_embeds"):
        model(inputs_embeds=embeddings.half())


@pytest.mark.parametrize("family", ["qwen2", "qwen2_tied", "gemma", "gpt2", "opt"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_embeddings_of_the_original_model_are_scaled_where_they_enter(family, dtype):
    model = large(family)
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(IDS)
        truth = model(inputs_embeds=embeddings, use_cache=False).logits
        pasa.to_fp16(model, {"inputs_embeds": embeddings, "use_cache": False})
        result = model(inputs_embeds=embeddings.to(dtype), use_cache=False).logits
    torch.testing.assert_close(result.float(), truth, rtol=0, atol=5e-3 * truth.abs().max().item())


class Projector(torch.nn.Module):
    """Two models in a row: the second reads a hidden state of the first, as pipelines and image projectors do."""

    def __init__(self, tower) -> None:
        super().__init__()
        self.tower, self.norm = tower, torch.nn.LayerNorm(32)


def test_a_hidden_state_of_one_model_that_another_reads():
    """The state passes 65504: it leaves in FP32, and is scaled and rounded where it enters."""
    model = Projector(large("clip_vision")).eval()
    pixels = torch.randn(1, 3, 16, 16)

    def run():
        with torch.no_grad():
            dtype = model.tower.dtype
            return model.norm(model.tower(pixels.to(dtype), output_hidden_states=True).hidden_states[-2])

    truth = run()
    conversion = Conversion({"": model}, run, 4.0)
    conversion.plan_and_convert()
    conversion.run_in_fp16()
    assert conversion.plan.outputs["tower"]
    assert conversion.plan.inputs["norm"]
    torch.testing.assert_close(run().float(), truth, rtol=0, atol=5e-3)


@pytest.mark.parametrize("images", [1, 3])
def test_calls_with_another_number_of_images_than_the_sample(images):
    """The model returns the features of each image too: in FP32, as they were. The sample has two images."""
    model = large("llava")
    ids = torch.cat([IDS[:, :4], torch.full((1, 16 * images), 99), IDS[:, 4:]], 1)
    pixels = torch.randn(images, 3, 16, 16, generator=torch.Generator().manual_seed(1))

    def call(dtype):
        with torch.no_grad():
            return dict(float_leaves(model(input_ids=ids, pixel_values=pixels.to(dtype), use_cache=False)))

    truth = call(torch.float32)
    assert len(truth) >= 2, "logits and features of images"
    pasa.to_fp16(model, lambda each: outputs(each, "llava"))
    result = call(torch.float16)
    assert largest_distance(result, truth) < 5e-3


@pytest.mark.parametrize("family", ["qwen2", "qwen2_tied", "gemma", "gpt2"])
def test_ids_and_embeddings_of_the_model_itself(family):
    model = large(family)
    with torch.no_grad():
        truth = model(IDS, use_cache=False).logits
        pasa.to_fp16(model, embedding_sample)
        embeddings = model.get_input_embeddings()(IDS)
        results = model(IDS, use_cache=False).logits, model(inputs_embeds=embeddings, use_cache=False).logits
    for result in results:
        torch.testing.assert_close(result.float(), truth, rtol=0, atol=5e-3 * truth.abs().max().item())


def test_inference_mode_around_the_sample_or_the_conversion():
    """Story: operators arrive undivided there, so that a linear layer had no rule and the model was refused."""

    def sample(each):
        with torch.inference_mode():
            return each(IDS)

    model = large("qwen2")
    truth = model(IDS).logits.detach()
    handle = pasa.to_fp16(model, sample, keep_original="cpu")
    torch.testing.assert_close(model(IDS).logits, truth, rtol=0, atol=5e-3 * truth.abs().max().item())
    with torch.inference_mode():
        handle.undo()
        pasa.to_fp16(model, {"input_ids": IDS}, keep_original="cpu").undo()
    model(IDS).logits.sum().backward()
    with torch.inference_mode():
        other = large("qwen2")
    with pytest.raises(NotImplementedError, match=r"made in inference mode: load the model outside"):
        pasa.to_fp16(other, sample)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_around_the_conversion(dtype):
    """Story: the trace then ran in FP16, in which nothing was measured, and the model stayed infinite."""
    model = large("qwen2")
    truth = model(IDS).logits.detach()
    with torch.autocast("cpu", dtype):
        pasa.to_fp16(model, {"input_ids": IDS})
    torch.testing.assert_close(model(IDS).logits, truth, rtol=0, atol=5e-3 * truth.abs().max().item())
