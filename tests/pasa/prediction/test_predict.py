"""Tests of predictions against real scores of models in memory and on disk; unreadable models are refused by name."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from pasa.eval.models.predict.run import observe
from pasa.prediction import predict_overflow
from pasa.prediction.checkpoint import Checkpoint
from pasa.prediction.predict import judge
from tests.pasa.prediction.conftest import CONFIGS, IDS


@pytest.mark.parametrize("name", CONFIGS)
def test_no_score_exceeds_its_proven_bound(name, tiny):
    model = tiny(name)
    prediction = predict_overflow(model)
    with torch.no_grad():
        observed = observe(model, lambda: model(input_ids=IDS))
    rows = {(row.module, row.head): row for row in prediction.rows}
    assert rows.keys() == observed.keys()
    assert len(rows) == 12
    for where, score in observed.items():
        assert score <= rows[where].proven
        assert score >= 1e-2 * rows[where].proven, "the bound says something"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_says_what_the_model_in_memory_says(name, tiny, tmp_path):
    model = tiny(name)
    model.save_pretrained(tmp_path)
    assert predict_overflow(tmp_path).rows == predict_overflow(model).rows
    assert predict_overflow(str(tmp_path)).model == str(tmp_path)


def test_only_attention_is_read(tiny, tmp_path, monkeypatch):
    """Only the q and k projections and the norm of each layer are read, one tensor at a time.

    So a model of 7 billion parameters fits in memory.
    """
    tiny("qwen2").save_pretrained(tmp_path)
    read = []
    get = Checkpoint.get
    monkeypatch.setattr(Checkpoint, "get", lambda self, name: read.append(name) or get(self, name))
    predict_overflow(tmp_path)
    kinds = {name.rpartition("layers.")[2].partition(".")[2] for name in read}
    parts = [f"self_attn.{side}_proj.{kind}" for side in "qk" for kind in ("weight", "bias")]
    assert kinds == {"input_layernorm.weight", *parts}
    assert len(read) == 3 * 5


def test_shards_and_half_precision(tiny, tmp_path):
    model = tiny("llama").bfloat16()
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert predict_overflow(tmp_path).rows == predict_overflow(model).rows


def test_fused_projections_are_split(tiny, tmp_path):
    """q and k are read from one matrix with v, in which exports for serving store them for a Llama."""
    model = tiny("llama with biases")
    expected = predict_overflow(model).rows
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(3):
        prefix = f"model.layers.{layer}.self_attn."
        for kind in ("weight", "bias"):
            tensors[f"{prefix}qkv_proj.{kind}"] = torch.cat([tensors.pop(f"{prefix}{s}_proj.{kind}") for s in "qkv"])
    save_file(tensors, tmp_path / "model.safetensors")
    assert predict_overflow(tmp_path).rows == expected


def test_gpt2_without_the_prefix_of_a_language_model(tiny, tmp_path):
    """GPT-2's layers are found as h.0, as in published checkpoints, and as transformer.h.0, as in the class."""
    model = tiny("gpt2")
    model.transformer.save_pretrained(tmp_path)
    rows = predict_overflow(tmp_path).rows
    assert rows[0].module.startswith("h.")
    assert [row.proven for row in rows] == [row.proven for row in predict_overflow(model).rows]


def test_injected_bias_is_ranked_first(tiny):
    model = tiny("qwen2")
    with torch.no_grad():
        for side in ("q_proj", "k_proj"):
            projection = getattr(model.model.layers[1].self_attn, side)
            projection.weight.mul_(0.1)
            projection.bias[:16].fill_(1000.0)
    prediction = predict_overflow(model)
    assert (prediction.rows[0].module, prediction.rows[0].head) == ("model.layers.1.self_attn", 0)
    assert prediction.rows[0].verdict == "certain"
    assert prediction.modules("certain") == ("model.layers.1.self_attn",)
    assert prediction.rows[0].constant == pytest.approx(16 * 1000.0**2, rel=0.2)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        *[
            ((100, 10, 0), "safe"),
            ((101, 100, 0), "unlikely"),
            ((300, 101, 0), "at risk"),
            ((300, 200, 101), "certain"),
        ],
        *[((math.nan, math.nan, 0), "at risk"), ((math.inf, math.inf, 0), "at risk")],
    ],
)
def test_verdicts(values, verdict):
    assert judge(*values, 100.0) == verdict


def test_text_and_json(tiny):
    prediction = predict_overflow(tiny("llama"), delta=1e-3, seq_len=16)
    assert "Llama" in str(prediction)
    assert "3 attention modules" in str(prediction)
    assert json.loads(json.dumps(prediction.as_dict()))["settings"]["parts"][""]["seq_len"] == 16
    wider = predict_overflow(tiny("llama"), delta=1e-9, seq_len=16)
    assert all(a.probable <= b.probable for a, b in zip(prediction.rows, wider.rows, strict=True))


def saved(tiny, folder, name="qwen2", config=None, drop=(), change=None):
    """Save a model in a folder, with a changed config and with tensors dropped or changed, to test refusals."""
    tiny(name).save_pretrained(folder)
    if config:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    tensors = load_file(folder / "model.safetensors")
    kept = {key: value for key, value in tensors.items() if not any(part in key for part in drop)}
    save_file({**kept, **(change(kept) if change else {})}, folder / "model.safetensors")


Q = "model.layers.1.self_attn.q_proj.weight"
BIAS = "model.layers.1.self_attn.q_proj.bias"  # a bias of one number a head used to be broadcast
NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        ({"config": {"model_type": "rwkv"}}, NotImplementedError, "architecture 'rwkv' is not supported; known: llama"),
        ({"drop": (Q,)}, ValueError, "layers.1.self_attn.q_proj.weight is missing; found .*q_proj.bias"),
        ({"drop": ("layers.1.self_attn",)}, ValueError, "attention layer 1 of 3 is missing"),
        ({"drop": ("layers.2.input_layernorm",)}, ValueError, "layers.2.input_layernorm.weight is missing"),
        (
            {"config": {"quantization_config": {"quant_method": "awq"}}},
            NotImplementedError,
            r"quantised weights \(awq\)",
        ),
        ({"change": lambda t: {Q: t[Q].to(torch.int8)}}, NotImplementedError, "q_proj.weight is torch.int8"),
        ({"change": lambda t: {Q: t[Q].to(torch.float8_e4m3fn)}}, NotImplementedError, "float8_e4m3fn"),
        ({"change": lambda t: {Q: t[Q] / 0}}, ValueError, "q_proj.weight, its bias .* holds NaN or infinity"),
        ({"config": {"num_attention_heads": 7}}, ValueError, "7 heads do not fit"),
        ({"config": {"num_attention_heads": 8}}, ValueError, "query heads of 8 and key heads of 16"),
        ({"config": {"num_attention_heads": None}}, ValueError, "num_attention_heads=None"),
        ({"config": {"rope_parameters": {"rope_type": "yarn"}}}, NotImplementedError, "rope_type='yarn'"),
        ({"config": {"rope_parameters": "linear"}}, ValueError, "rope_parameters='linear'"),
        ({"config": {"partial_rotary_factor": 0.2, "rope_parameters": None}}, ValueError, "pairs, not 3 of"),
        ({"config": {"num_attention_heads": 64, "num_key_value_heads": 32}}, ValueError, "query heads of 1 and key"),
        ({"config": {"model_type": ["llama"]}}, NotImplementedError, r"architecture \['llama'\] is not supported"),
        ({"config": {"num_hidden_layers": 2}}, ValueError, "attention layer 2 is there, and its config says 2"),
        ({"change": lambda t: {BIAS: t[BIAS][:4]}}, ValueError, r"q_proj.bias is \(4,\) in place of \(64,\)"),
        ({"change": lambda t: {BIAS: t[BIAS][:7]}}, ValueError, r"q_proj.bias is \(7,\) in place of \(64,\)"),
        ({"change": lambda t: {Q: t[Q].flatten()}}, ValueError, r"q_proj.weight is \(4096,\), which is no matrix"),
        (
            {"change": lambda t: {NORM: t[NORM].diag()}},
            ValueError,
            r"layernorm.weight is \(64, 64\) in place of \(d,\)",
        ),
    ],
)
def test_spoiled_checkpoints_are_refused_by_name(spoil, error, message, tiny, tmp_path):
    saved(tiny, tmp_path, **spoil)
    with pytest.raises(error, match=message):
        predict_overflow(tmp_path)


def test_missing_files_are_named(tiny, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere' is not a folder"):
        predict_overflow(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        predict_overflow(tmp_path)
    tiny("llama").save_pretrained(tmp_path, max_shard_size="60KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[-1]
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=f"{shard.name}', which is not there"):
        predict_overflow(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no model\.safetensors or"):
        predict_overflow(tmp_path)


def test_without_safetensors_the_next_step_is_named(tiny, tmp_path, monkeypatch):
    """Story: after a bare install, the error was that of Python's import."""
    tiny("llama").save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        predict_overflow(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", "[1]", "config.json' holds no object of JSON, but list"),
        ("config.json", "{", "config.json' is not JSON"),
        ("model.safetensors.index.json", "{}", "index.json has no weight_map"),
        ("model.safetensors.index.json", '{"weight_map": [1]}', "index.json has no weight_map"),
        ("model.safetensors", "", "not a whole safetensors file"),
        ("model.safetensors", "\x01" * 8 + "{}", "not a whole safetensors file"),  # claims a header of 2^56 bytes
    ],
)
def test_files_that_are_not_what_they_are_called(name, text, message, tiny, tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        predict_overflow(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf", "model.fp16.safetensors"])
def test_weights_that_are_not_read_are_named(name, tiny, tmp_path):
    """Weight files that are not read are named in the error; a pickle is not opened, because it can run code."""
    tiny("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=f"{name} is not read: save it"):
        predict_overflow(tmp_path)


def test_normed_heads_are_bounded_by_their_gains(tiny):
    """Heads of Qwen3, with norms of q and k, are bounded by D max|gain_q| max|gain_k| for any projections."""
    model = tiny("qwen3")
    before = {(row.module, row.head): row.naive for row in predict_overflow(model).rows}
    attention = model.model.layers[1].self_attn
    expected = 16 * attention.q_norm.weight.abs().max() * attention.k_norm.weight.abs().max()
    assert before["model.layers.1.self_attn", 0] == pytest.approx(expected.item(), rel=1e-6)
    with torch.no_grad():
        attention.q_proj.weight.mul_(1e6)
    assert {(row.module, row.head): row.naive for row in predict_overflow(model).rows} == before


def test_models_beside_a_known_one_are_named():
    """Models of unknown architecture beside a known one are named in the prediction.

    Story: of a vision-language model, the vision tower was predicted, and the rest silently left out.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = hf.Phi3Config(**sizes, vocab_size=97, pad_token_id=0)
    model = hf.LlavaModel(
        hf.LlavaConfig(vision_config=hf.CLIPVisionConfig(**sizes, image_size=28, patch_size=14), text_config=text)
    )
    prediction = predict_overflow(model)
    assert {row.module for row in prediction.rows} == {"vision_tower.encoder.layers.0.self_attn"}
    assert prediction.skipped == (("language_model", "architecture 'phi3' is not supported"),)


def test_a_file_cut_short_is_named(tiny, tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        predict_overflow(tmp_path)


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="got int"):
        predict_overflow(3)
    with pytest.raises(TypeError, match="Linear has no config"):
        predict_overflow(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="delta=2"):
        predict_overflow(torch.nn.Linear(2, 2), delta=2)
    with pytest.raises(ValueError, match="seq_len=0 is not between 1 and"):
        predict_overflow(torch.nn.Linear(2, 2), seq_len=0)
