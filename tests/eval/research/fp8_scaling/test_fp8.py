"""Scale factors: what each method knows, the transients on a small model, and FP8 score tiles."""

from __future__ import annotations

import json

import pytest
import torch
import transformers as hf

import pasa
from pasa.eval import cli
from pasa.eval.models.predict.run import observe
from pasa.eval.research.fp8_scaling import run, tile
from pasa.eval.research.fp8_scaling.scaling import AutoAlpha, Current, Delayed, Geometry, LayerWeights
from pasa.eval.research.fp8_scaling.training import layer_weights, recorded_logits
from pasa.prediction import predict_overflow

SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


@pytest.fixture
def weights():
    generator = torch.Generator().manual_seed(0)
    return LayerWeights(*(torch.randn(rows, 64, generator=generator) for rows in (32, 16)), heads=4, kv_heads=2)


@pytest.fixture
def llama():
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)).eval()


def test_delayed_remembers_sixteen_steps(weights):
    method = Delayed()
    assert method.scale(weights, 50.0) == pytest.approx(1.0 / (448 * 0.9))
    method.observe(50.0)
    for _ in range(15):
        method.observe(2.0)
    assert method.scale(weights, 2.0) == pytest.approx(50.0 / (448 * 0.9))
    method.observe(2.0)
    assert method.scale(weights, 2.0) == pytest.approx(2.0 / (448 * 0.9))
    method.reset()
    assert method.scale(weights, 2.0) == pytest.approx(1.0 / (448 * 0.9))


def test_current_knows_the_step(weights):
    assert 50.0 / Current().scale(weights, 50.0) == pytest.approx(448)
    assert Current().scale(weights, 0.0) > 0


def test_geometry_answers_in_the_same_step(weights):
    """Weights x 4 at once: the scale is 16 times as large at once, and does not depend on what was observed."""
    method = Geometry(0.1)
    for _ in range(100):
        before = method.scale(weights, 1.0)
    spiked = LayerWeights(4 * weights.query, 4 * weights.key, 4, 2)
    assert method.scale(spiked, 1e9) == pytest.approx(16 * before, rel=1e-5)
    q, k = weights.query.view(4, 8, 64), weights.key.view(2, 8, 64).repeat_interleave(2, 0)
    norm = torch.linalg.matrix_norm(q.mT @ k, 2).max().item()
    assert before == pytest.approx(0.1 * norm * 64 / 8**0.5 / (0.8 * 448), rel=1e-4)


def test_auto_alpha_takes_what_was_used(weights):
    method = AutoAlpha(0.1)
    for largest in (3.0, 5.0):
        method.scale(weights, largest)
        method.observe(largest)
    method.calibrate()
    assert method.alpha == pytest.approx(5.0 / method.bound, rel=0.2)
    method.scale(weights, 5.0)
    assert 5.0 / method.scale(weights, 5.0) < 448


def test_recorded_logits_are_those_of_the_model(llama):
    ids = torch.randint(512, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        own = llama(input_ids=ids).logits
        with recorded_logits(llama) as largest:
            assert torch.equal(llama(input_ids=ids).logits, own)
        assert torch.equal(llama(input_ids=ids).logits, own)
        observed = {}
        for (module, _), score in observe(llama, lambda: llama(input_ids=ids)).items():
            layer = int(module.split(".")[2])
            observed[layer] = max(observed.get(layer, 0.0), score / 32**0.5)
    for layer, most in observed.items():
        assert largest[layer] == pytest.approx(most, rel=2e-3)  # FP16 rounding of q and k there


def test_layer_weights_fold_the_gain(llama):
    with torch.no_grad():
        for layer in llama.model.layers:
            layer.input_layernorm.weight.copy_(torch.linspace(0.5, 2, 128))
    method = Geometry(1.0)
    for _ in range(200):
        method.scale(layer_weights(llama)[0], 0.0)
    rows = [row for row in predict_overflow(llama).rows if row.module == "model.layers.0.self_attn"]
    assert method.bound * 32**0.5 == pytest.approx(max(row.interaction for row in rows), rel=1e-3)


def test_transients_on_a_small_model(llama):
    """Load: delayed scaling starts from 1.0 and overflows in every layer; the weights tell at once."""
    batches = [torch.randint(512, (1, 32), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    records = [each for s in run.SCENARIOS for each in run.simulate(llama, batches, s)]
    by = {(each["scenario"], each["method"]): each for each in records}
    for scenario in run.SCENARIOS:
        assert by[scenario.name, "geometry"]["overflows"] == 0
        assert by[scenario.name, "current"]["overflows"] == 0
    assert by["pretrained load", "delayed"]["overflowing_layers_first_step"] == 2
    assert by["resume without state", "delayed"]["overflowing_layers_first_step"] == 2
    assert by["weights x 4", "delayed"]["largest_scaled"] > 10 * 448
    assert run.judge(records)["passed"]
    broken = [{**each, "overflows": 1} if each["method"] == "geometry" else each for each in records]
    assert not run.judge(broken)["passed"]
    steady = [
        by["resume without state", name]["utilisation"]["median"] for name in ("geometry", "geometry, auto-alpha")
    ]
    assert steady[0] < steady[1] <= 1


def test_tiles_without_rounding_are_attention():
    """Shifted and referenced, unrounded: softmax of the plain scores."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 256, 64, generator=generator).double() + 2 for _ in range(3))
    tiles, references = tile.form_tiles(q, k, True)
    logits = torch.cat([part + r for part, r in zip(tiles, references, strict=True)], -1)
    torch.testing.assert_close(logits, q @ k.mT / 8, rtol=1e-12, atol=1e-12)
    golden, _ = pasa.golden_attention(q, k, v)
    for store, bound in (("fp16", 2**-10), ("e4m3, scale per block", 2**-3)):
        out = tile.attend(q.float(), k.float(), v.float(), store, "pasa")
        assert (out - golden).norm() / golden.norm() < bound


def test_command_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(run, "SYNTHETIC", SIZES)
    monkeypatch.setattr(run, "TOKENS", 16)
    monkeypatch.setattr(tile, "SHAPE", (1, 1, 128, 64))
    with pytest.raises(SystemExit) as caught:
        cli.main(["eval", "fp8", "--quick", "--json", "-", "--output-dir", str(tmp_path)])
    result = json.loads(capsys.readouterr().out)
    assert caught.value.code == 0
    assert len(result["records"]) == 20
    assert len(result["tiles"]) == 15
    assert "Geometry-aware scaling: 0 overflows" in (tmp_path / "fp8.md").read_text()
