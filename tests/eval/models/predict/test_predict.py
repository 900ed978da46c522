"""`pasa predict`: its tables, a small model from a folder, a calibration, and what it refuses."""

from __future__ import annotations

import json
import math
import re
from io import StringIO
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from rich.console import Console

from pasa.eval.kit.output import to_json
from pasa.eval.kit.stored import stored
from pasa.eval.models.predict import run, soundness
from pasa.prediction import predict_overflow

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 97}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    return tmp_path


def test_paper_tables_say_where_the_print_differs():
    result = run.run_paper_tables()
    differ = {model["name"]: model["differ"] for model in result["models"]}
    assert differ == {
        "GPT-2 XL": ["gamma", "alpha_min"],  # 2.9853 and 0.0735: printed 2.98 and 0.074
        "Mistral-7B": [],
        "Llama-2-13B": ["gamma"],  # 2.270: printed 2.28
        "Llama-2-70B": ["gamma"],  # 2.302: printed 2.32
    }
    cells = run.paper_table(result).rows[0][4:]
    assert cells == ["2.98", "2.9853", "8", "8.4", "0.074", "0.0735", "gamma, alpha_min"]


@pytest.mark.parametrize("observed", [None, 123456.0])
def test_a_folder_needs_no_forward_pass_and_its_table_fits_80_columns(observed, folder):
    """It came in two pieces, of which the second named no module; long names wrap now."""
    result = run.EXPERIMENT.measure(model=str(folder))
    assert (result["gate"]["passed"], result["calibration"]) == (True, None)
    assert "2 attention modules, each by its worst head: 2 safe" in run.verdict(result)
    for each in result["records"]:
        each |= {"module": "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1", "observed": observed}
        each |= {"probable": 131072.0, "proven": 1310720.0, "verdict_fp8": "unlikely"}
    shown = StringIO()
    run.head_table({**result, "calibration": observed}).show(Console(file=shown, width=80))
    lines = shown.getvalue().splitlines()
    assert ("observed" in shown.getvalue()) == (observed is not None)
    assert sum(line.startswith("┏") for line in lines) == 1
    assert max(map(len, lines)) <= 80
    assert sum("131,072" in line and "1,310,720" in line and "unlikely" in line for line in lines) == 8


def test_calibration_is_over_every_call_and_gives_alpha(folder):
    """Decoding: the largest of all calls, not of the last."""
    model = hf.LlamaForCausalLM.from_pretrained(folder).eval()
    ids = torch.randint(97, (1, 32), generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def forward(*lengths):
        for length in lengths:
            model(input_ids=ids[:, :length])

    prediction, observed = predict_overflow(model), run.observe(model, lambda: forward(32, 1))
    assert observed == run.observe(model, lambda: forward(32))
    compared = run.calibration(prediction, observed)
    assert (compared["heads"], compared["beyond_proven"]) == (8, 0)
    assert compared["largest_score"] == max(observed.values())
    interaction = {(row.module, row.head): row.interaction for row in prediction.rows}
    largest = max(score / interaction[where] for where, score in observed.items())
    assert compared["auto_alpha"] == pytest.approx(largest, rel=1e-3)


@pytest.mark.parametrize(("share", "passed"), [(1.0, True), (1 + 1e-9, False)])
def test_one_head_beyond_its_proven_bound_fails_a_calibration(share, passed, folder, monkeypatch):
    observed = {(row.module, row.head): row.proven for row in predict_overflow(folder).rows}
    observed[list(observed)[-1]] *= share
    subject = SimpleNamespace(model=folder, run=None, name="small", fixture=None)
    monkeypatch.setattr(run.subjects, "load", lambda *_, **options: subject)
    monkeypatch.setattr(run, "observe", lambda *_: observed)
    monkeypatch.setattr(run, "models_of", lambda model: {})
    result = run.run_predict("small", calibrate=True)
    assert result["gate"] == {"passed": passed}
    assert result["calibration"]["beyond_proven"] == (not passed)


@pytest.mark.parametrize("beyond", [None, 0, 7])
def test_one_head_of_any_model_beyond_its_proven_bound_fails_the_gate(beyond, monkeypatch):
    counts = iter([int(model == beyond) for model in range(8)])
    for maker in ("built_in", "shaped", "coarse"):
        monkeypatch.setattr(soundness, maker, lambda *_: ())
    monkeypatch.setattr(soundness, "measure", lambda: {"beyond_proven": next(counts)})
    monkeypatch.setattr(soundness, "cost", dict)
    result = soundness.run_soundness()
    assert len(result["records"]) == 8
    assert result["gate"] == {"passed": beyond is None}


def test_the_cost_of_a_prediction_is_measured_in_a_fresh_process(monkeypatch):
    monkeypatch.setattr(soundness, "LAYERS", 1)
    cost = soundness.cost()
    assert 0 < cost["seconds"] < 60
    assert 0 < cost["before_mib"] <= cost["peak_mib"]


def test_policy_auto_is_judged_by_what_it_patches():
    """The gate of the stored run, and of that run if a layer without a bias were patched or the text were another."""
    result = stored("auto")
    records, unbiased = result["records"], result["unbiased"]
    assert soundness.judge(records, unbiased) == result["gate"]
    for name, value in (("patched", ["model.layers.0.self_attn"]), ("text", "x"), ("alarms", [["a", 1]])):
        assert not soundness.judge([*records[:3], {**records[3], name: value}], unbiased)["passed"]


@pytest.mark.parametrize("kind", ["GPT2", "Qwen2", "Llama"])
def test_shaped_models_keep_within_their_bounds(kind):
    """The same makers as the stored table, narrow."""
    sizes = {
        "GPT2": {**soundness.GPT2, "n_embd": 100},
        "Qwen2": {**soundness.SLIM, **soundness.QWEN2, "hidden_size": 56},
        "Llama": {**soundness.SLIM, **soundness.LLAMA, "hidden_size": 64},
    }[kind]
    measured = soundness.measure(*soundness.shaped(kind, sizes))
    assert measured["beyond_proven"] == 0
    assert measured["largest_of_proven"] > 0.01


def test_streams_are_bounded_on_request(folder):
    result = run.run_predict(str(folder))
    assert result["streams"] == []
    assert "add --streams" in run.verdict(result)
    result = run.run_predict(str(folder), streams=True)
    assert [each["layer"] for each in result["streams"]] == ["model.layers.0", "model.layers.1"]
    assert result["streams"][0]["observed_residual"] is None
    assert re.search(r"Residual stream: bounded by [\d,]+: safe\. MLP: bounded by [\d,]+: safe\.", run.verdict(result))
    del result["streams"]
    assert "esidual" not in run.verdict(result), "an older stored result"


@pytest.mark.parametrize(("factor", "passed"), [(1.0, True), (1e3, False)])
def test_a_calibration_compares_streams_with_their_bounds(factor, passed, folder, monkeypatch):
    """The gate fails for weights that were another model's when the bounds were made."""
    model = hf.LlamaForCausalLM.from_pretrained(folder).eval()

    @torch.no_grad()
    def forward():
        model.model.layers[1].mlp.down_proj.weight.mul_(factor)
        model(input_ids=torch.arange(32)[None])

    subject = SimpleNamespace(model=model, run=forward, name="small", fixture=None)
    monkeypatch.setattr(run.subjects, "load", lambda *_, **options: subject)
    result = run.run_predict("small", calibrate=True, streams=True)
    assert result["gate"]["passed"] == passed
    first, last = result["streams"]
    assert 0 < first["observed_residual"] <= first["residual"]
    assert 0 < last["observed_mlp"] <= last["mlp"]
    assert (last["observed_residual"] <= last["residual"]) == passed
    assert ("passed the bounds of 1 layers" in run.verdict(result)) != passed


def test_a_stored_result_has_none_in_place_of_an_infinite_bound(folder):
    result = run.run_predict(str(folder), streams=True)
    for each in result["streams"]:
        each |= {"residual": math.inf, "mlp": math.inf, "verdict": "not proven", "observed_residual": 7.0}
    text = run.verdict(result)
    assert "bounded by inf, from model.layers.0 on beyond 65504: not proven" in text
    assert run.verdict(json.loads(to_json(result))) == text
