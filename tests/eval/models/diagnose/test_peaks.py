"""A model whose residual stream leaves FP16, not its scores: the diagnosis names the module and `pasa to-fp16`."""

import pytest
import torch

from pasa.eval.models.diagnose import report
from pasa.eval.models.diagnose.peaks import advice, beyond_fp16, module_peaks
from pasa.eval.models.diagnose.run import look
from pasa.eval.models.predict.run import run_predict, verdict
from tests.pasa.fp16.checkpoints import save


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama") / "model"
    save("llama", path)
    return str(path)


def test_the_diagnosis_names_the_first_module_and_the_remedy(folder, monkeypatch):
    monkeypatch.setattr("pasa.eval.models.diagnose.subjects.build_prompt", lambda *args: torch.arange(3, 40)[None])
    result, _ = look(folder, prompt="a", dtype="float32")
    beyond = result["runs"]["own"]["beyond_fp16"]
    assert beyond["module"] == "model.layers.0.mlp.down_proj"
    assert beyond["peak"] > 65504
    assert "`pasa to-fp16 FOLDER OUT`" in report.verdict(result)
    assert "model.layers.0.mlp.down_proj" in report.verdict(result)
    monkeypatch.setattr("pasa.eval.models.diagnose.subjects.build_prompt", lambda *args: torch.arange(3, 40)[None])
    predicted = run_predict(folder, calibrate=True)
    assert "`pasa to-fp16 FOLDER OUT`" in verdict(predicted)


def test_a_model_in_range_gets_no_advice():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    with module_peaks({"": model}) as peaks:
        model(torch.ones(2, 4))
    assert list(peaks) == ["0", "1", "Sequential"]
    assert beyond_fp16(peaks) is None
    assert advice(None) == ""
    assert not model[0]._forward_hooks
