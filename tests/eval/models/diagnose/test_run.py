"""A diagnosis from end to end, of both kinds of models."""

from __future__ import annotations

import json
import re

import pytest
import torch

from pasa.eval.models.diagnose import run, subjects
from pasa.eval.models.diagnose.run import look, run_diagnose
from pasa.eval.models.video.tiny import tiny_pipeline


def test_a_language_model_names_its_layer(text_diagnosis):
    """All four heads of layer 1, in opposition; layer 0 is healthy."""
    result, maps = text_diagnosis
    summary = result["summary"]
    assert (summary["heads"], summary["heads_beyond"], summary["modules_beyond"]) == (8, 4, 1)
    assert summary["worst"]["module"] == "model.layers.1.self_attn"
    assert 131_000 < summary["worst"]["max_score"] < 131_200
    assert summary["stored"] < 1000
    assert result["runs"]["own"]["first_nonfinite"] is result["runs"]["pasa"]["first_nonfinite"] is None
    broken = result["runs"]["fp16"]["first_nonfinite"]
    assert (broken["module"], broken["kind"], broken["origin"]) == ("model.layers.1.self_attn", "Qwen2Attention", True)
    worst = result["records"][0]
    assert (worst["phase"], worst["overflow_share"]) == (180, 1.0)
    assert worst["resonance"] < -0.9
    assert worst["scores"][0] < -131_000
    assert max(map(abs, worst["shifted_keys"])) < 0.1 * max(map(abs, worst["keys"]))
    assert [each.module for each in maps] == ["model.layers.1.self_attn", "model.layers.0.self_attn"]


def test_a_pipeline_names_its_layers_and_its_step(video_diagnosis):
    result, maps = video_diagnosis
    beyond = {each["module"] for each in result["records"] if each["max_score"] > 65504}
    assert len(beyond) == result["summary"]["modules_beyond"] == result["fixture"]["modules"] == 4
    assert all(".transformer_blocks.0.attn1" in name for name in beyond)
    assert {each["call"] for each in result["records"] if each["module"] in beyond} <= {1, 2}
    assert result["runs"]["fp16"]["first_nonfinite"]["module"] in beyond
    assert result["gate"]["passed"]
    assert {each.module for each in maps} < beyond
    assert not result["modules"]["uncalled"]


def test_files_of_a_model_in_half_precision(folder, tmp_path):
    result = run_diagnose(str(folder), prompt="one two three", dtype="float16", folder=tmp_path / "deep")
    assert result["settings"]["dtype"] == "float16"
    assert result["summary"]["heads_beyond"] == 4
    run.EXPERIMENT.save(result, tmp_path / "deep")
    files = {path.suffix[1:]: path.read_text(encoding="utf-8") for path in (tmp_path / "deep").iterdir()}
    assert files.keys() == {"html", "json", "md", "svg"}
    assert files["svg"] in files["html"], "one drawing"
    stored = json.loads(files["json"])
    assert "emulated" in stored["note"]
    scores = [each["max_score"] for each in stored["records"]]
    assert scores == sorted(scores, reverse=True)
    assert "| model.layers.1.self_attn | " in files["md"]


@pytest.mark.parametrize(("offset", "beyond"), [(None, 8), (0.0, 0), (-81920.0, 8)])
def test_the_built_in_model_gets_the_offset_asked_for(folder, language_model, monkeypatch, offset, beyond):
    """A small model in the place of the built-in one, whose weights take half a minute to read."""
    _, tokenizer = subjects.load_folder(str(folder))
    monkeypatch.setattr(subjects, "load_model", lambda: (language_model, tokenizer))
    result, _ = look("embedded", prompt="one two three", offset=offset)
    assert result["model"].startswith("SmolLM2")
    assert result["summary"]["heads_beyond"] == beyond
    assert (result["fixture"] is None) == (offset == 0)


@pytest.mark.parametrize(
    ("options", "offset"), [({}, 0), ({"offset": 131072}, 131072), ({"model": "tiny"}, None), ({"model": "x"}, None)]
)
def test_the_built_in_language_model_is_the_published_one_unless_it_is_biased(options, offset, monkeypatch):
    asked = {}
    monkeypatch.setattr(run, "look", lambda model, progress, **given: (asked.update(given), None))
    run_diagnose(**options)
    assert asked["offset"] == offset


def test_a_pipeline_of_a_folder_breaks_nowhere(tmp_path):
    """Its models take turns on the device."""
    tiny_pipeline(seed=3).save_pretrained(tmp_path / "svd")
    result, _ = look(str(tmp_path / "svd"), height=32, width=32, frames=2, steps=1, offload=True)
    assert result["fixture"] is None
    assert (result["summary"]["modules"], result["summary"]["heads_beyond"]) == (20, 0)
    assert not result["modules"]["uncalled"], "offload wraps the forward of whole models"
    assert result["runs"]["fp16"]["first_nonfinite"] is None


def test_a_model_that_is_broken_by_itself_is_not_laid_at_pasas_door(folder, monkeypatch):
    original = subjects.load_folder

    def damaged(path, dtype):
        model, tokenizer = original(path, dtype)
        torch.nn.init.constant_(model.model.layers[0].mlp.down_proj.weight, torch.inf)
        return model, tokenizer

    monkeypatch.setattr(subjects, "load_folder", damaged)
    result, _ = look(str(folder), prompt="one two three")
    assert result["runs"]["own"]["first_nonfinite"]["module"] == "model.layers.0.mlp.down_proj"
    assert result["gate"]["passed"]
    assert result["modules"]["broken"] == {"model.layers.1.self_attn": 1}
    assert result["summary"]["modules"] == 1


def test_the_gate_fails_if_pasa_breaks_a_healthy_model(text_diagnosis):
    runs = text_diagnosis[0]["runs"]
    assert run.judge(runs)["passed"]
    assert not run.judge(runs | {"pasa": runs["fp16"]})["passed"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"offset": 5.0}, "offset=5.0 does not apply"),
        ({"offload": True}, "offload=True does not apply: .* is a language model"),
        ({"prompt": ""}, "prompt='' has no tokens"),
    ],
)
def test_an_option_of_another_model_is_named_before_anything_runs(options, reason, folder):
    with pytest.raises(ValueError, match=reason):
        look(str(folder), **options)


def test_the_page_has_its_parts_and_asks_for_nothing(text_diagnosis):
    """The map comes first, the table below it. No address but data, and a policy that would forbid others."""
    page = run.render_page(*text_diagnosis)
    parts = ('class="verdict', 'id="layers"', "<svg", 'id="heads"', "<table", 'id="matrices"', 'id="method"')
    assert (order := [page.index(part) for part in parts]) == sorted(order)
    assert page.count("<figure>") == page.count('<img src="data:image/png;base64,') == 10, "five matrices of two layers"
    alt = r'alt="Heat map of .+ of model\.layers\.\d\.self_attn, head \d: values from .+ to .+\."'
    assert len(re.findall(alt, page)) == 10
    assert all(address.startswith("data:") for address in re.findall(r'(?:src|href)="(.*?)"', page))
    assert "default-src 'none'" in page
    assert not re.search(r"url\(|@import|https?:| on\w+=", page.replace('xmlns="http://www.w3.org/2000/svg"', ""))


def test_names_of_models_are_text(text_diagnosis):
    """A folder may be called anything, and so may a module."""
    result, maps = text_diagnosis
    evil = "<script>alert(1)</script>\"'&.x"
    modules = {**result["modules"], "skipped": [[evil, evil]], "calls": {evil: 1} | result["modules"]["calls"]}
    records = [*result["records"], result["records"][-1] | {"module": evil}]
    page = run.render_page(result | {"model": evil, "modules": modules, "records": records}, maps)
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 5, "title, heading, map, table, list"
