"""The demonstration from end to end on a short prompt, one generation, other models and bad input."""

from __future__ import annotations

import io
import json
import math
import warnings
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from rich.console import Console

import pasa
from pasa.eval.kit.stored import stored
from pasa.eval.models.rescue import run

IDS = torch.arange(3, 80)[None]


def reader(end=None):
    return SimpleNamespace(eos_token_id=end, decode=lambda tokens: " ".join(map(str, tokens)))


def test_the_rescue(monkeypatch, base, tokenizer):
    """The built-in model on a tenth of its prompt."""
    monkeypatch.setattr(run, "load_model", lambda: (base, tokenizer))
    monkeypatch.setattr(run, "PROMPT_TOKENS", 110)
    backends, patch = [], pasa.patch_pipeline
    monkeypatch.setattr(pasa, "patch_pipeline", lambda *a, **b: backends.append(b["backend"]) or patch(*a, **b))
    lines = []
    result = run.run_rescue(new_tokens=4, progress=lambda *each: lines.append(each))
    json.dumps(result, allow_nan=False)
    assert backends == ["reference"], "every step is emulated, not the prompt alone"
    proof = result["proof"]
    assert proof["layers_that_overflow"] == proof["layers"] == 30
    assert proof["max_score_before"] > 131072 > proof["fp16_max"] > 10 * proof["max_score_after"]
    assert (proof["fp16_nonfinite_logits"], proof["perplexity_fp16"]) == (1.0, None)
    assert proof["pasa_nonfinite_logits"] == 0
    assert abs(proof["perplexity_change_percent"]) < 1
    assert result["runs"]["fp16"]["stopped"] == "logits not finite"
    assert result["fixture"]["offset"][0] == 131072
    assert list(result["runs"]) == ["fp32_base", "fp32", "fp16", "fp16_pasa"]
    assert len(lines) == 5
    assert result["gate"]["checks"]["perplexity_near_fp32"] == (abs(proof["perplexity_change_percent"]) <= 0.5)
    text = run.EXPERIMENT.markdown(result)
    assert "30 of 30 layers" in text
    assert "in FP16 100 % of the logits are not finite" in text
    assert f"| FP16, PASA (emulated) | {' '.join(result['runs']['fp16_pasa']['text'].split())} | length |" in text


def test_the_demonstration_fits_one_screen():
    """Story: four copies of a text of 64 tokens pushed off the screen what had failed and what was repaired."""
    screen = Console(file=io.StringIO(), width=80)
    run.EXPERIMENT.show(stored("rescue"), screen)
    text = screen.file.getvalue()
    assert len(text.splitlines()) <= 24
    assert text.startswith("Failed: ")
    assert (
        text.index("\nRepaired: ") < text.index("\nFP16 goes on: <|endoftext|>\nWith pasa:    In") < text.index("Next:")
    )
    assert text.splitlines()[-1].endswith("repair it")
    assert all(command in text for command in ("pasa predict --model", "pasa diagnose --model", "patch_pipeline"))


@pytest.mark.parametrize(
    ("field", "change", "failed"),
    [
        ("text", lambda text: text, set()),
        ("nonfinite_logits", lambda share: 1e-9, {"pasa_finite"}),
        ("tokens", lambda tokens: [*tokens[:-1], -1], {"tokens_as_fp32"}),
        ("tokens", lambda tokens: tokens[:-1], {"tokens_as_fp32"}),
        ("perplexity", lambda x: stored("rescue")["proof"]["perplexity_fp32"] * 1.0049, set()),
        ("perplexity", lambda x: stored("rescue")["proof"]["perplexity_fp32"] * 1.0051, {"perplexity_near_fp32"}),
        ("perplexity", lambda x: stored("rescue")["proof"]["perplexity_fp32"] * 0.9949, {"perplexity_near_fp32"}),
        ("perplexity", lambda x: None, {"perplexity_near_fp32"}),
    ],
)
def test_a_run_of_pasa_that_is_not_as_fp32_fails(field, change, failed):
    """The stored run, with one change of what FP16 with PASA did."""
    result = stored("rescue")
    ours = result["runs"]["fp16_pasa"] | {"scores": result["layers"]}
    runs = {name: each | {"scores": []} for name, each in result["runs"].items()}
    made = run.collect(runs | {"fp16_pasa": ours | {field: change(ours[field])}})
    assert {name for name, passed in made["gate"]["checks"].items() if not passed} == failed
    assert made["gate"]["passed"] == made["proof"]["passed"] == (not failed)


def test_another_model_is_measured_as_it_is(tiny, tmp_path, tokenizer):
    """A folder with a small model: no injection, so nothing overflows, and the report says so."""
    tiny.config.vocab_size = len(tokenizer)
    torch.manual_seed(0)
    hf.Qwen2ForCausalLM(tiny.config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    result = run.run_rescue(str(tmp_path), prompt="What is the capital of France?", new_tokens=3)
    assert (result["fixture"], list(result["runs"])) == (None, ["fp32", "fp16", "fp16_pasa"])
    assert "0 of 2 layers" in run.verdict(result)
    assert "in FP16 0 % of the logits" in run.verdict(result)


@pytest.mark.parametrize("limit", [60, 97, 300, None])
def test_the_prompt_keeps_its_limit_and_its_question(tokenizer, limit):
    ids = run.build_prompt(tokenizer, most=limit)
    assert (limit or 1100) - 3 <= ids.shape[1] <= (limit or 1100)
    assert run.QUESTION in tokenizer.decode(ids[0])


@pytest.mark.parametrize(
    ("first", "second", "equal"), [([1, 2, 3], [1, 2, 3], 3), ([1, 2, 3], [1, 5, 3], 1), ([1], [1, 2], 1), ([], [1], 0)]
)
def test_equal_prefix(first, second, equal):
    assert run.equal_prefix(first, second) == equal


@pytest.mark.parametrize("offset", [float("nan"), -4194305.0])
def test_bad_numbers_are_refused_before_a_model_is_loaded(offset):
    """After the model was loaded a NaN was refused by its conversion to an integer."""
    lines = []
    with pytest.raises(ValueError, match=f"offset={offset} is not in -4194304 to 4194304"):
        run.run_rescue(offset=offset, progress=lambda *each: lines.append(each))
    assert lines == []


def test_tokens_and_perplexity(tiny):
    made = run.generate(tiny, reader(), IDS, 9)
    expected = tiny.generate(IDS, max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert made["tokens"] == expected[0, IDS.shape[1] :].tolist()
    with torch.no_grad():
        assert made["perplexity"] == pytest.approx(math.exp(tiny(IDS, labels=IDS).loss), rel=1e-6)
    assert (made["nonfinite_logits"], made["stopped"], made["scores"]) == (0, "length", [])


def test_it_uses_no_name_that_transformers_gives_up(tiny):
    """Story: with transformers 5.24, `pasa demo` printed a FutureWarning for the old name of the cache."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert len(run.generate(tiny, reader(), IDS, 3)["tokens"]) == 3


def test_it_stops_at_the_end_of_text_and_when_logits_are_no_numbers(tiny):
    first = run.generate(tiny, reader(), IDS, 1)["tokens"][0]
    made = run.generate(tiny, reader(end=first), IDS, 9)
    assert (made["tokens"], made["stopped"]) == ([first], "end of text")
    torch.nn.init.constant_(tiny.model.norm.weight, torch.nan)
    made = run.generate(tiny, reader(), IDS, 9)
    assert (made["perplexity"], made["nonfinite_logits"], made["stopped"]) == (None, 1.0, "logits not finite")
    assert len(made["tokens"]) == 1
