"""Bounds on residual streams and MLPs from the weights: no run passes them, and some model comes near."""

from __future__ import annotations

import json
import math

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from pasa.eval.models.diagnose.streams import StreamPeaks
from pasa.eval.models.video.tiny import tiny_unet
from pasa.prediction import branches, predict_overflow
from pasa.prediction.families import FAMILIES
from pasa.prediction.streams import WRITERS
from pasa.projections import Norm
from tests.pasa.prediction.conftest import CONFIGS, IDS, SIZES

TOWER = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
CLIP_TEXT = {**TOWER, "vocab_size": 97, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS = {
    **{name: lambda name=name: hf.AutoModelForCausalLM.from_config(CONFIGS[name]()) for name in CONFIGS},
    "llama with biases": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SIZES, **EXPERTS)),
    "qwen3_moe, weights not normed": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=False, mlp_only_layers=[1])
    ),
    "clip_text_model": lambda: hf.CLIPTextModel(hf.CLIPTextConfig(**CLIP_TEXT)),
    "clip_vision_model": lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**TOWER, image_size=28, patch_size=14)),
}


def build(name, seed=0, scale=0.5):
    """A model with random weights, biases and norms."""
    torch.manual_seed(seed)
    model, generator = MODELS[name]().eval(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


@torch.no_grad()
def measure(model, inputs=None):
    """Return the peaks of each layer in a run on all token ids, or on an image."""
    if inputs is None:
        image = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(1))
        inputs = {"pixel_values": image * 100} if model.main_input_name == "pixel_values" else {"input_ids": IDS}
    with StreamPeaks({"": model}) as streams:
        model(**inputs)
    return streams.layers


def worst_shares(model, measured):
    """Return the largest shares of the bounds that a run used: of the residual streams, and of the MLPs."""
    rows = {row.layer: row for row in predict_overflow(model, streams=True).streams}
    assert rows.keys() == measured.keys()
    return tuple(max(measured[name][part] / getattr(rows[name], part) for name in rows) for part in ("residual", "mlp"))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("scale", [0.05, 0.5, 4.0])
@pytest.mark.parametrize("name", MODELS)
def test_no_run_passes_its_bounds(name, scale, seed):
    model = build(name, seed, scale)
    for share in worst_shares(model, measure(model)):
        assert 0.01 < share <= 1.0


@pytest.mark.parametrize("name", MODELS)
def test_no_run_in_fp16_passes_its_bounds(name):
    model = build(name, scale=0.2).half()
    peaks = measure(model, None if "vision" not in name else {"pixel_values": torch.ones(1, 3, 28, 28).half()})
    assert max(worst_shares(model, peaks)) <= 1.0


def test_every_family_has_writers():
    assert WRITERS.keys() == FAMILIES.keys()


def aligned(name):
    """A model in which the largest embedding, attention, gate and up all point the same way, so that bounds are met.

    A token's norm is the direction e. Values, gates and ups read e alone, and write to the stream's largest element.
    """
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config.num_hidden_layers = config.n_layer = 1
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    direction = torch.where(torch.arange(64) % 2 == 0, 1.0, -1.0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.fill_(1.0 if parameter.ndim == 1 and "weight" in key else 0.0)
        model.get_input_embeddings().weight[:] = 50.0 * direction
        state = dict(model.named_parameters())
        for key, parameter in state.items():
            weight = parameter[-1] if parameter.ndim == 3 else parameter
            weight = weight.T if name == "gpt2" and "wte" not in key else weight
            if key.endswith(("v_proj.weight", "gate_proj.weight", "up_proj.weight", "gate_up_proj", "c_fc.weight")):
                weight[:: max(len(weight) // 2, 1)] = 0.5 * direction
            if key.endswith("c_attn.weight"):
                weight[128] = 0.5 * direction
            if key.endswith(("o_proj.weight", "down_proj.weight", "down_proj", "c_proj.weight")):
                weight[0, 0] = 1.0
        if "mixtral" in name:
            model.model.layers[0].mlp.gate.weight[-1] = direction
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "gpt2"])
def test_bounds_are_met_by_an_adversary(name, dtype):
    """Only roundings to FP16 and the excess of attention weights stand between the bounds and what this model does."""
    model = aligned(name).to(dtype)
    shares = worst_shares(model, measure(model))
    assert all(0.97 < share <= 1.0 for share in shares), shares


def test_each_head_reads_its_own_values():
    """Query heads 2 and 3 attend to values of the second key head, whose weights alone are large here."""
    model = build("qwen2", scale=0.01)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight[16:].mul_(1e4)
    assert worst_shares(model, measure(model))[0] <= 1.0
    row = predict_overflow(model, streams=True).streams[-1]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[:, 32:] = 0.0
    assert predict_overflow(model, streams=True).streams[-1].residual < 0.01 * row.residual


@pytest.mark.parametrize("large", ["v_proj", "input_layernorm"])
def test_values_beyond_fp16_are_not_proven_safe(large):
    """Story: values passed 65504, an output projection made them small again, and all was called safe."""
    model = build("llama", scale=0.05)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if large in name:
                parameter.mul_(1e8)
            if "o_proj" in name or (large == "input_layernorm" and ("v_proj" in name or "q_proj" in name)):
                parameter.mul_(1e-8)
    assert {row.verdict for row in predict_overflow(model, streams=True).streams} == {"not proven"}
    with torch.no_grad():
        assert not model.half()(IDS).logits.isfinite().all()


def test_roundings_of_subnormal_numbers_are_in_the_bounds():
    """Story: roundings were taken as relative; an FP16 number of 0.51 steps of 2^-24 is stored as one step."""
    step = 2.0**-24
    rows = branches.stored(torch.tensor([0.51 * step, 65504.0], dtype=torch.float64))
    assert rows[0] >= step
    assert rows[1] >= 65504.0 * (1 + 2.0**-11)
    norm = Norm(8.0, torch.full((64,), 0.51 * step))  # n of ones has length 8, and h is stored as steps
    assert branches.normed(norm).min() >= 8 * 0.51 * step
    assert branches.affine(torch.full((1, 64), 1000.0), None, norm).rows.item() >= 64 * 1000.0 * step


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_says_what_the_model_in_memory_says(name, tmp_path):
    """Experts are one tensor in memory, and one for each expert in a checkpoint."""
    model = build(name)
    model.save_pretrained(tmp_path)
    assert predict_overflow(tmp_path, streams=True).streams == predict_overflow(model, streams=True).streams


def test_bounds_are_made_on_request_alone():
    model = build("llama")
    assert predict_overflow(model).streams == ()
    assert "residual" not in str(predict_overflow(model))


def test_progress_counts_streams_too():
    seen = []
    predict_overflow(build("llama"), streams=True, progress=lambda *call: seen.append(call))
    assert [call[:2] for call in seen] == [(done, 6) for done in range(6)]
    assert [call[2] for call in seen[2:4]] == ["model.layers.2.self_attn", "model.layers.0"]


def test_the_text_names_the_first_layer_that_is_not_proven():
    model = build("qwen2", scale=0.05)
    assert str(predict_overflow(model, streams=True)).splitlines()[-2].endswith(": safe")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1e8)
    prediction = predict_overflow(model, streams=True)
    residual, mlp = str(prediction).splitlines()[-2:]
    assert "from model.layers.1 on beyond 65504: not proven; measure it with pasa diagnose" in residual
    assert mlp.endswith(": safe")
    assert [row.verdict for row in prediction.streams] == ["safe", "not proven", "not proven"]
    assert json.loads(json.dumps(prediction.as_dict()))["streams"][0]["layer"] == "model.layers.0"


def test_a_unet_has_no_bound():
    (row,) = predict_overflow(tiny_unet(), streams=True).streams
    assert (row.residual, row.mlp, row.verdict) == (math.inf, math.inf, "not proven")
    assert "no bound: convolutions" in str(predict_overflow(tiny_unet(), streams=True))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: setattr(model.config, "hidden_act", "exp"), "activation 'exp' is not understood"),
        (
            lambda model: model.model.layers[1].register_module("adapter", torch.nn.Linear(64, 64)),
            r"model.layers.1.adapter.bias is not understood",
        ),
    ],
)
def test_what_is_not_understood_has_no_bound(change, reason):
    """A module beside attention and MLP may write to the stream, so a bound without it would prove nothing."""
    model = build("llama")
    change(model)
    (row,) = predict_overflow(model, streams=True).streams
    assert reason in row.note
    assert row.verdict == "not proven"


def test_an_epsilon_of_zero_proves_nothing():
    """A constant row divided by a deviation of 0 is infinite."""
    model = build("gpt2")
    model.config.layer_norm_epsilon = 0.0
    assert {row.verdict for row in predict_overflow(model, streams=True).streams} == {"not proven"}


def test_heads_that_do_not_fit_the_values_are_refused():
    model = build("qwen3")
    attention = model.model.layers[1].self_attn
    attention.v_proj = torch.nn.Linear(64, 48, bias=False)
    with pytest.raises(ValueError, match=r"layers.1.self_attn has values and an output that its heads do not fit"):
        predict_overflow(model, streams=True)


def test_two_embeddings_of_one_name_are_refused(tmp_path):
    build("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["other.embed_tokens.weight"] = torch.ones(97, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"2 tensors are called embed_tokens.weight, not one"):
        predict_overflow(tmp_path, streams=True)


NORM = "model.layers.1.post_attention_layernorm.weight"
DOWN, EXPERT = "model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.experts.3."


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama", lambda kept: {DOWN: torch.ones(64, 95)}, r"down_proj.weight is \(64, 95\), and 96 inputs come to it"),
        ("llama", lambda kept: {DOWN: kept[DOWN] * math.nan}, "down_proj.weight or its bias holds NaN or infinity"),
        ("llama", lambda kept: {"model.embed_tokens.weight": torch.ones(97, 3)}, r"is \(97, 3\), and 64 inputs"),
        ("llama", lambda kept: {DOWN: kept[DOWN][:1].clone()}, "layers.1.mlp adds 1 elements to a stream of 64"),
        ("llama", lambda kept: {NORM: kept[NORM] * math.inf}, "layernorm.weight or its bias holds NaN or infinity"),
        ("llama", lambda kept: {DOWN: None}, "layers.1.mlp.down_proj.weight is missing"),
        ("qwen3_moe", lambda kept: {each: None for each in kept if EXPERT in each}, "3 experts, and its router knows"),
    ],
)
def test_weights_of_another_model_are_refused(name, change, message, tmp_path):
    """A missing expert, for example, would make a bound too small."""
    build(name).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    changed = {key: each for key, each in (tensors | change(tensors)).items() if each is not None}
    save_file(changed, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        predict_overflow(tmp_path, streams=True)


def test_values_in_one_matrix_with_queries_and_keys(tmp_path):
    model = build("llama with biases")
    expected = predict_overflow(model, streams=True).streams
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(3):
        prefix = f"model.layers.{layer}.self_attn."
        for kind in ("weight", "bias"):
            tensors[f"{prefix}qkv_proj.{kind}"] = torch.cat([tensors.pop(f"{prefix}{s}_proj.{kind}") for s in "qkv"])
    save_file(tensors, tmp_path / "model.safetensors")
    assert predict_overflow(tmp_path, streams=True).streams == expected
