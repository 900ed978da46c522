"""Perplexity with a sliding window, by precision and offset."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import transformers as hf

from pasa.eval.models import precisions
from pasa.eval.models.perplexity import run

TOKENS = list(range(1, 97)) * 3


def read(text):
    """Tokenize numbers between blanks."""
    return SimpleNamespace(input_ids=[int(word) for word in text.split()])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1, "rope_theta": 1e5}
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**sizes)).eval()


@pytest.fixture
def text(tmp_path, model, monkeypatch):
    """A text of numbers; every folder holds `model` and its reader."""
    monkeypatch.setattr(run, "check_language_model", lambda path: None)
    monkeypatch.setattr(precisions, "load_folder", lambda path, dtype: (copy.deepcopy(model).to(dtype), read))
    (tmp_path / "text.txt").write_text(" ".join(map(str, TOKENS)))
    return str(tmp_path / "text.txt")


@pytest.mark.parametrize(
    ("total", "window", "stride"), [(200, 128, 64), (200, 64, 64), (129, 128, 1), (5, 8, 3), (2, 2, 1)]
)
def test_every_token_is_predicted_once(total, window, stride):
    spans = list(run.windows(total, window, stride))
    assert [token for begin, end, first in spans for token in range(first, end)] == list(range(1, total))
    for begin, end, first in spans:
        assert end - begin <= window
        assert first - begin >= min(first, window - stride), "so much is read before what is predicted"


def test_windows_are_weighted_by_their_tokens(model):
    """The definition, token by token: the loss of each from the window that predicts it."""
    ids, losses = torch.tensor(TOKENS[:150]), []
    with torch.no_grad():
        for begin, end, first in run.windows(150, 64, 40):
            rows = model(ids[None, begin:end]).logits[0].log_softmax(-1)
            losses += [-float(rows[token - begin - 1, ids[token]]) for token in range(first, end)]
    measured = run.measure(model, ids, 64, 40)
    assert measured["loss"] == pytest.approx(sum(losses) / 149, rel=1e-5)
    assert measured["perplexity"] == pytest.approx(math.exp(measured["loss"]))
    assert measured["nonfinite_logits"] == 0


def test_a_loss_whose_exponential_overflows_is_not_finite():
    """Logits that are sure of the wrong token: each costs 2,000 nats, and e^2000 is no double."""
    logits = torch.zeros(1, 8, 50)
    logits[..., 0] = 2000.0

    class Sure:
        device = torch.device("cpu")

        def __call__(self, input_ids, use_cache):
            return SimpleNamespace(logits=logits[:, : input_ids.shape[1]])

    measured = run.measure(Sure(), torch.arange(1, 11), 8, 4)
    assert (measured["perplexity"], measured["loss"]) == (None, pytest.approx(2000))


def test_who_overflows_and_who_loses_accuracy(text, tmp_path):
    """The claim: beyond 65504 FP16 scores break, BF16 scores are off, PASA is where FP32 is."""
    lines = []
    sizes = {"tokens": 200, "window": 128, "stride": 64, "offsets": [0, 131072]}
    result = run.run_perplexity(str(tmp_path), text, **sizes, progress=lambda *each: lines.append(each))
    measured = {(each["precision"], each["offset"]): each for each in result["perplexities"]}
    base = measured["fp32", 0]["perplexity"]
    assert result["gate"]["passed"]
    assert list(result["gate"]["checks"]) == ["reference_finite", "pasa_finite", "pasa_near_fp32", "fp16_breaks"]
    assert measured["fp16-eager", 131072]["nonfinite_logits"] == 1
    assert measured["fp16-eager", 0]["perplexity"] == pytest.approx(base, rel=5e-3)
    errors = {name: abs(measured[name, 131072]["perplexity"] - base) for name in ("bf16", "bf16-eager", "pasa")}
    assert errors["pasa"] < errors["bf16-eager"] / 5
    text = run.EXPERIMENT.markdown(result)
    assert all(part in text for part in ("not finite", "offset 131,072", "emulated", "All checks hold"))
    result["perplexities"][0]["perplexity"] = None
    assert run.table(result).rows[0][1:3] == ["not finite", "-"]
    assert run.table(result).rows[1][2] == "-", "there is nothing to compare with"
    assert [each[:2] for each in lines] == [(i, 12) for i in range(12)]


@pytest.mark.parametrize(
    ("reference", "pasa", "eager", "failed"),
    [
        (10.0, 10.04, None, []),
        (10.0, None, None, ["pasa_finite", "pasa_near_fp32"]),
        (10.0, 10.06, None, ["pasa_near_fp32"]),
        (10.0, 10.0, 12.0, ["fp16_breaks"]),
        (None, 10.0, None, ["reference_finite", "pasa_near_fp32"]),
    ],
)
def test_every_check_can_fail(reference, pasa, eager, failed):
    values = {"fp32": reference, "pasa": pasa, "fp16-eager": eager}
    records = [{"offset": 131072, "precision": name, "perplexity": value} for name, value in values.items()]
    assert [check for check, passed in run.judge(records)["checks"].items() if not passed] == failed


def test_a_text_that_is_too_short_is_named(text, tmp_path):
    with pytest.raises(ValueError, match="has 288 tokens, fewer than tokens=1000"):
        run.run_perplexity(str(tmp_path), text, tokens=1000)


def test_a_text_that_is_not_utf8_is_named(text, tmp_path):
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 text \(byte 3\)"):
        run.run_perplexity(str(tmp_path), str(tmp_path / "latin.txt"), tokens=4, window=4, stride=2)
