"""A whole model as an Ascend 310P would compute it, emulated: every FP16 result saturates, and NaN becomes 0.

Attention of one layer runs in the kernel for that chip, on the CPU twin of its core, and that of the others in the
reference. Embedded is a Qwen2 whose scores pass FP16's range (pasa.eval.kit.overflow_fixture).
"""

import json
from pathlib import Path

import pytest
import torch

from pasa.eval.kit.experiment import gate
from pasa.eval.kit.overflow_fixture import inject_overflow
from pasa.eval.kit.saturating import Saturating
from pasa.eval.models.saturating import run
from pasa.ops.attention.ascend import backend as npu_backend
from tests.ascend_c.twin_build import build_library

RESULTS = Path(run.__file__).parent / "results"
TOKENS = 6  # of the 64 that the command makes, because each takes seconds on a CPU
PROMPT = 40


@pytest.fixture
def twin_of_310p(shared_folder, monkeypatch):
    monkeypatch.setenv("PASA_ASCEND_LIBRARY", str(build_library(shared_folder / "twin_310p", "Ascend310P3")))
    monkeypatch.setenv("FAKE_SOC", "Ascend310P3")
    npu_backend.library_error.cache_clear()
    assert npu_backend.library_error() is None
    yield
    npu_backend.library_error.cache_clear()


def test_results_beyond_fp16_are_replaced():
    with Saturating() as chip:
        x = torch.tensor([60000.0, -60000.0, 1.0]).half()
        assert (x * 2).tolist() == [65504.0, -65504.0, 2.0]
        assert (x.float() * 2).tolist() == [120000.0, -120000.0, 2.0]
        x *= 2
        assert x.tolist() == [65504.0, -65504.0, 2.0]
        assert (torch.zeros(1).half() / 0).tolist() == [0.0]
    assert chip.replaced == {"mul": 2, "mul_": 2, "div": 1}


def test_a_model_whose_scores_saturate_speaks_as_in_fp32(base, ids, twin_of_310p):
    """Plain FP16 gives other text, without any NaN that would say so."""
    wide, _ = inject_overflow(base)
    result = run.compare(wide, ids[:, :PROMPT], TOKENS, lambda title: None)
    assert result["gate"]["passed"], result
    assert result["runs"]["fp16_pasa"]["divergence"] < 1e-3 < 1 < result["runs"]["fp16"]["divergence"]
    ours = result["runs"]["fp16_pasa"]
    assert ours["calls"] == base.config.num_hidden_layers * (TOKENS + 1)  # and one of the whole text
    assert ours["calls_on_twin"] == TOKENS + 1


def test_the_stored_run_is_of_64_tokens():
    result = json.loads((RESULTS / "qwen2" / "saturating.json").read_text("utf-8"))
    runs = result["runs"]
    assert result["gate"]["passed"]
    assert len(runs["fp32"]["tokens"]) == runs["fp16_pasa"]["equal"] == 64
    assert runs["fp16"]["equal"] < 64
    assert runs["fp16"]["finite"]
    assert runs["fp16_pasa"]["calls_on_twin"] == 64


def test_the_stored_runs_of_gemma_say_that_its_text_proves_nothing():
    """FP16's rounding decides where saturation changes little, with pasa too; the failed run is stored beside."""
    results = [
        json.loads((RESULTS / name / "saturating.json").read_text("utf-8")) for name in ("gemma", "gemma_addiction")
    ]
    for result in results:
        runs = result["runs"]
        assert runs["fp16"]["finite"]
        assert 0 < runs["fp16"]["replaced"] < 100
        assert (runs["fp16_pasa"]["replaced"], runs["fp16_pasa"]["calls_on_twin"]) == (
            0,
            64 + ("divergence" in runs["fp16"]),
        )
        assert (runs["fp16_pasa"]["equal"] == 64) == result["gate"]["passed"]
    runs = results[0]["runs"]
    assert runs["fp16_pasa"]["divergence"] < runs["fp16"]["divergence"] / 100
    assert [result["gate"]["passed"] for result in results] == [True, False]
    assert ("addiction" in run.report(results[1])[0].title, "FAILED" in run.report(results[1])[1]) == (True, True)


@pytest.mark.parametrize("how", [{"model": "llama"}, {"new_tokens": 0}, {"essay": "none"}])
def test_bad_options(how):
    with pytest.raises(ValueError, match=r"=(0|'llama'|'none')"):
        run.run_saturating(**how)


def test_a_failed_run_says_what_failed():
    run_ = {"tokens": [1], "equal": 0, "finite": True, "replaced": 2, "text": "x", "calls": 3, "calls_on_twin": 1}
    failed = {
        "gate": gate({"nothing saturates with pasa": False}),
        "model": "m",
        "prompt": {"tokens": 1, "new_tokens": 1},
    }
    parts = run.report(failed | {"runs": dict.fromkeys(run.TITLES, run_)})
    assert "FAILED: nothing saturates with pasa" in parts[1]
    assert "no NPU ran it" in parts[1]
