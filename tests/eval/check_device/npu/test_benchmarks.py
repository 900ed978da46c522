"""Benchmarks that take an NPU: their calls of the Ascend C kernels and of torch_npu, on the twin and a fake."""

import sys
import types

import pytest
import torch

from pasa.eval.accuracy.rmse import run as rmse
from pasa.eval.kit.output import silent
from pasa.eval.random_calls.run import run_soak
from pasa.eval.speed.cases import SpeedCase
from pasa.eval.speed.implementations import IMPLEMENTATIONS, select_implementations

CASE = SpeedCase("tiny", 1, 4, 2, 40, 40, 64, causal=True)


def test_soak_calls_the_kernels(npu):
    """Story: it drew masks that the kernels refuse, and needed Triton's package."""
    result = run_soak(6, backend="npu", small=True, device="cpu")
    assert result["gate"] == {"passed": True, "failed": 0, "run": 6, "stopped": False, "absent": 0}
    assert {"error", "lse", "range"} <= set(result["worst"])


def test_rmse_measures_the_kernels_beside_the_emulation(npu):
    result = rmse.measure_kernels(torch.device("cpu"), "npu", 1, 130, (0,), silent)
    assert result["gate"]["passed"], result["gate"]
    assert {"npu-exact", "npu-paper", "pasa-exact"} <= set(result["arithmetics"])
    assert not [name for name in result["arithmetics"] if name.startswith("triton")]
    assert "Ascend C kernels on" in result["note"]


def test_what_runs_on_an_npu_is_chosen_there_alone():
    names = [each.name for each in select_implementations(None, "npu")]
    assert names == ["pasa-npu", "pasa-npu-paper", "npu-fusion", "npu-infer-precise", "npu-infer-fast"]
    assert not set(names) & {each.name for each in select_implementations(None)}
    assert len(IMPLEMENTATIONS) == len(names) + len(select_implementations(None))


@pytest.mark.parametrize("implementation", select_implementations(None, "npu"), ids=lambda each: each.name)
def test_implementations_give_the_attention_that_they_are_named_for(npu, deviate, monkeypatch, implementation):
    deviate("")
    infer = sys.modules["torch_npu"].npu_fused_infer_attention_score

    def fusion(q, k, v, heads, layout, **how):
        out, _ = infer(q, k, v, num_heads=heads, num_key_value_heads=k.shape[1], input_layout=layout, **how)
        return out, None, None, None, 0, 0, 0

    fake = types.SimpleNamespace(npu_fused_infer_attention_score=infer, npu_fusion_attention=fusion)
    monkeypatch.setitem(sys.modules, "torch_npu", fake)
    inputs = CASE.inputs(torch.device("cpu"))
    (call,) = implementation.prepare(inputs).values()
    q, k, v = (x.float() for x in inputs.tensors)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert float((call.output().float() - expected).abs().max()) <= 2.0**-6
