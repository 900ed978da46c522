"""The cost of scales, on a tiny size: the gate, what is timed, and what is stored."""

from __future__ import annotations

import json

import pytest
import torch

from pasa.eval.research.fp8_scaling import overhead
from pasa.power_iteration import PowerIteration

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def result():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        return overhead.run_overhead(small=True, turns=2)


def test_a_run_checks_first_and_times_every_case(result):
    json.dumps(result, allow_nan=False)
    assert result["gate"]["passed"], result["gate"]
    assert [(each["part"], each["way"]) for each in result["records"]] == [
        (part, way) for part in overhead.PARTS for way in (overhead.INLINE, overhead.SUM)
    ]
    for each in result["records"]:
        assert min(each["plain_ms"], each["scaled_ms"]) > 0
        assert each["p20_percent"] <= each["cost_percent"] <= each["p80_percent"]


def test_nothing_is_timed_where_a_norm_is_wrong(monkeypatch):
    update = PowerIteration.update
    monkeypatch.setattr(PowerIteration, "update", lambda self, *a, **k: 0.9 * update(self, *a, **k))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = overhead.run_overhead(small=True)
    assert not result["gate"]["passed"]
    assert result["records"] == []
    assert "FAILED: norms_are_those_of_svd" in overhead.verdict(result)


def test_scales_that_stand_still_are_noticed():
    """A CUDA graph whose state is not its input would leave scales as they were."""
    layers = overhead.Layers(overhead.SMALL[0], False, CPU)
    layers.scaled(overhead.INLINE)
    assert not layers.follows(overhead.Call(layers.plain))


def test_scales_are_those_of_the_paper():
    """Equation (15) with the norm of the worst head; and the forward pass is the same with and without."""
    shape = overhead.SMALL[0]
    layers = overhead.Layers(shape, True, CPU)
    run = layers.scaled(overhead.INLINE)
    assert torch.equal(run(), layers.plain())
    for _ in range(50):
        run()
    block = layers.blocks[1]
    q, k = (x.double().unflatten(0, (-1, shape.dim)) for x in (block.query, block.key))
    norms = torch.linalg.matrix_norm(q.mT @ k.repeat_interleave(2, 0), 2)
    expected = shape.alpha * norms.max() * shape.hidden / shape.dim**0.5 / (0.8 * 448)
    torch.testing.assert_close(layers.scales[1].double(), expected, rtol=0.02, atol=0)


def test_shapes_are_the_papers():
    """Heads of all layers, as the tables of alpha have them, and the parameters that their names say."""
    by = {shape.name: shape for shape in overhead.SHAPES}
    assert {name: (s.hidden, s.heads, s.kv_heads, s.batch) for name, s in by.items()} == {
        "GPT-2 XL": (1600, 25, 25, 8),
        "Mistral-7B": (4096, 32, 8, 4),
        "Llama-2-13B": (5120, 40, 40, 4),
        "Llama-2-70B": (8192, 64, 8, 2),
    }
    assert all(shape.heads * shape.dim == shape.hidden for shape in by.values())


def test_files(result, tmp_path):
    overhead.EXPERIMENT.save(result, tmp_path)
    stored = json.loads((tmp_path / "predict.json").read_text())
    text = (tmp_path / "predict.md").read_text()
    assert overhead.EXPERIMENT.markdown(stored) in text
    assert "tiny, 2 x 16, attention and MLP | inline" in text
    assert "All checks hold" in text
