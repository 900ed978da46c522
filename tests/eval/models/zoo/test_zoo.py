"""The architecture zoo: forty classes built and judged, the judge and the builder alone, and the stored run."""

import os
import signal

import pytest
import torch

import pasa
from pasa.eval.kit.stored import pick, stored
from pasa.eval.models.zoo import judging, language, pipelines, run

LEAST_RIGHT = {"causal": 166, "base": 425, "encoder-decoder": 43, "diffusers model": 83, "diffusers pipeline": 99}
"""Classes of each kind that the stored run must have right, with transformers 5.24 and diffusers 0.42."""
RIGHT = (  # each way of attending and masking: grouped queries, windows, values of another width
    "Qwen2ForCausalLM LlamaForCausalLM MistralForCausalLM GemmaForCausalLM Gemma3ForCausalLM GPT2LMHeadModel",
    "GPTNeoXForCausalLM OPTForCausalLM MixtralForCausalLM DeepseekV3ForCausalLM Phi3ForCausalLM",
    # These five were wrong once: decoders saw later tokens, or the mask had a form that was misread.
    "BigBirdPegasusModel NllbMoeModel PegasusXModel InformerModel BridgeTowerModel",
    "BertModel ModernBertModel CLIPModel SiglipVisionModel ViTModel UniSpeechModel HubertModel",
    "BartForConditionalGeneration MBartForConditionalGeneration M2M100ForConditionalGeneration",
    "WhisperForConditionalGeneration BigBirdPegasusForConditionalGeneration",
    "UNet2DConditionModel AutoencoderKL FluxTransformer2DModel WanTransformer3DModel PixArtTransformer2DModel",
    "QwenImageTransformer2DModel StableDiffusionControlNetImg2ImgPipeline",
    # Soft caps, sinks, position biases, chosen keys, calls of SDPA, and attention that is written out.
    "Gemma2ForCausalLM GptOssForCausalLM T5Model DeepseekV32ForCausalLM SD3Transformer2DModel FalconForCausalLM",
)
REFUSED = {
    "OpenAIGPTLMHeadModel": "computes its attention itself",
    "SwiftFormerModel": "computes its attention itself",
}
VERDICTS = dict.fromkeys(" ".join(RIGHT).split(), "right") | dict.fromkeys(REFUSED, "refused")
VERDICTS |= {"MambaModel": "nothing to patch"}


@pytest.fixture(scope="module")
def result():
    return run.run_zoo(names=list(VERDICTS), jobs=1)


def test_the_subset_is_right_or_refused_by_name(result):
    assert len(result["records"]) >= 40
    assert set(result["counts"]) == set(run.WORK), "classes of all kinds"
    assert result["gate"] == {"passed": True, "findings": []}
    text = run.EXPERIMENT.markdown(result)
    assert "0 wrong" in text
    for each in result["records"]:
        name = each["name"]
        assert each["verdict"] == VERDICTS[name], (name, each["why"])
        assert REFUSED.get(name, "") in each["why"]
        assert (name in text) == (name in REFUSED), "the report names what is not right"
    [qwen] = pick(result["records"], name="Qwen2ForCausalLM")
    assert set(qwen["cases"]) == {"plain", "left padding", "right padding", "generate", "generate, left padding"}
    for errors in qwen["cases"].values():
        assert errors["plumbing"] < judging.PLUMBING < errors.get("planted", 1.0)


@pytest.fixture
def llama():
    model, accepted = language.build("LlamaForCausalLM")
    return model, list(language.cases(language.CAUSAL, model, accepted))


def test_a_mask_that_reaches_attention_wrong_is_wrong(llama, monkeypatch):
    """A decoder that sees the future: finite, plausible, and 400 % off."""
    from pasa.patching import transformers_attention

    monkeypatch.setattr(transformers_attention, "_is_causal", lambda module, queries, is_causal: False)
    record = judging.judge(*llama)
    assert record["verdict"] == "wrong"
    assert "with FP64 attention in PASA's place" in record["why"]


def test_roundings_are_drawn_again_for_models_alone_that_choose(llama, monkeypatch):
    """Story: every model was allowed 16 random roundings, and the largest of their errors excused a wrong result."""
    model, [plain, *_] = llama
    attention, rounded, draws = pasa.attention, judging.rounded_attention, []

    def larger(*tensors, **keywords):
        return attention(*tensors, **keywords) * 1.05

    def counted(*tensors, draw, **keywords):
        draws.append(draw)
        return rounded(*tensors, draw=draw, **keywords)

    monkeypatch.setattr(pasa, "attention", larger)
    monkeypatch.setattr(judging, "rounded_attention", counted)
    record = judging.judge(model, [plain])
    assert record["verdict"] == "wrong"
    assert "rounding alone explains less" in record["why"]
    assert set(draws) == {0}
    monkeypatch.setitem(judging.CHOOSES, "LlamaForCausalLM", "said for this test")
    judging.judge(model, [plain])
    assert set(draws) == set(range(judging.DRAWS))


def test_masks_of_a_model_that_is_not_named_are_judged_strictly():
    errors = {"plain": {"plumbing": 2e-4, "error": 1e-3, "rounded": 0.9, "planted": 1.0}}
    assert judging._verdict(errors, 0.0)[0] == "wrong"
    assert judging._verdict(errors, judging.RELAXED)[0] == "right"
    right = pick(stored("zoo")["records"], verdict="right")
    coarse = {each["name"] for each in right for x in each["cases"].values() if x["plumbing"] > judging.PLUMBING}
    assert coarse == set(judging.AMPLIFIES)


def test_a_call_that_is_refused_is_a_finding(llama, monkeypatch):
    def refuse(*tensors, **keywords):
        raise NotImplementedError("no: softcap")

    monkeypatch.setattr(pasa, "attention", refuse)
    record = judging.judge(*llama)
    assert record["verdict"] == "refused at call"
    assert "no: softcap" in record["why"]
    gate = run.collect([{"kind": "causal", "name": "x", **record}], 1)["gate"]
    assert gate == {"passed": False, "findings": ["causal: x"]}


def test_a_model_whose_attention_does_not_show_is_not_judged(llama):
    model, cases = llama
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    record = judging.judge(model, cases)
    assert record["verdict"] == "not judged"
    assert "planted fault" in record["why"]


def test_tokens_that_two_close_logits_decide_are_not_wrong():
    """Steps after the first differing token have other inputs, so only the steps up to it are compared."""
    expected, logits = judging.Generated(torch.tensor([[5, 6, 7]]), torch.ones(1, 3, 9)), torch.ones(1, 3, 9)
    logits[0, 1], logits[0, 2] = 1.001, 40
    other = judging.Generated(torch.tensor([[5, 8, 7]]), logits)
    assert judging.distance(expected, other) == pytest.approx(0.001, rel=1e-3)
    assert judging.distance(expected, judging.Generated(expected.tokens, logits)) == 39


def test_outputs_at_padding_are_not_judged_and_a_nan_is_not_a_number():
    expected, other, real = torch.ones(2, 3, 4), torch.ones(2, 3, 4), torch.ones(2, 3, dtype=torch.bool)
    other[0, 0] = 9
    assert judging.distance({"logits": expected}, {"logits": other}, real) == 8
    real[0, 0] = False
    assert judging.distance({"logits": expected}, {"logits": other}, real) == 0
    other[1, 1, 1] = float("nan")
    assert judging.distance([expected], [other], real) == judging.distance([other], [other, other]) == float("inf")


def test_exact_attention_takes_both_layouts():
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    out = judging.exact_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, tensor_layout="NHD")
    assert torch.equal(judging.exact_attention(q, k, v, is_causal=True), out.transpose(1, 2))


def test_a_child_that_dies_or_hangs_stops_nothing():
    def work(item):
        if item == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        while item == "hangs":
            signal.pause()
        return {"verdict": "right", "why": ""}

    records = dict(run.run_all(["dies", "hangs", "works"], work, jobs=2, seconds=2))
    assert records["works"]["verdict"] == "right"
    assert records["dies"] == {"verdict": "crashed", "why": f"its process ended with -{int(signal.SIGKILL)}"}
    assert records["hangs"] == {"verdict": "crashed", "why": "not done after 2 s"}


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"kinds": ["causl"]}, "'causl'"),
        ({"names": ["Qwen9"]}, "'Qwen9'"),
        ({"jobs": 0}, "jobs=0"),
        ({"kinds": ["base"], "names": ["Qwen2ForCausalLM"]}, "no class is selected by 'Qwen2ForCausalLM', 'base'"),
        ({"kinds": ["base"], "names": ["BertModel", "Qwen2ForCausalLM"]}, "by 'Qwen2ForCausalLM';"),
    ],
)
def test_what_is_asked_for_must_exist(options, value):
    """Story: a class of another kind selected nothing, and the run passed with 0 classes."""
    with pytest.raises(ValueError, match=value):
        run.run_zoo(**options)


def test_the_stored_run_has_everything_and_nothing_wrong():
    result = stored("zoo")
    assert result["gate"]["passed"]
    assert set(result["counts"]) == set(run.WORK)
    for kind, counts in result["counts"].items():
        assert counts["right"] >= LEAST_RIGHT[kind]
        assert sum(counts.values()) == len(run.WORK[kind][0]())


def test_one_layer_of_each_type_is_kept():
    from transformers import Gemma3TextConfig, Qwen2Config

    small = language.small_config(Gemma3TextConfig)
    assert small.num_hidden_layers == 2
    assert set(small.layer_types) == {"sliding_attention", "full_attention"}
    assert small.sliding_window < language.LENGTH
    assert language.small_config(Qwen2Config).hidden_size == 64


def test_components_of_pipelines_are_named_by_texts_and_by_base_classes_too():
    """An annotation may be a class, its name as text, or a base class that cannot be built itself."""
    import diffusers
    import transformers

    t5, vae = transformers.T5EncoderModel, diffusers.AutoencoderKL
    annotations = {t5: t5, "T5EncoderModel": t5, "AutoencoderKL": vae}
    annotations |= {transformers.Gemma2PreTrainedModel: transformers.Gemma2Model}
    assert {each: pipelines.resolved(each) for each in annotations} == annotations
    with pytest.raises(NotImplementedError, match="no small Qwen2VLProcessor is known"):
        pipelines.component(transformers.Qwen2VLProcessor, "QwenImageEditPipeline")
