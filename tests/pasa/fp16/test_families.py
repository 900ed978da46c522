"""Every family of language models and encoders: the same function after scaling, and no overflow in FP16."""

import copy

import pytest
import torch

import pasa
from pasa.fp16.containers import shared_path
from tests.pasa.fp16.models import FAMILIES, large, outputs
from tests.pasa.fp16.planned import largest_distance, planned, scale


@pytest.mark.parametrize("family", FAMILIES)
def test_scaling_changes_nothing_in_fp64(family):
    """Powers of two are exact; where a model casts to FP32 by itself, 1e-6 remains."""
    model = large(family)
    plan = planned(model, lambda each: outputs(each, family))
    assert plan.scales
    islands = {name for name in plan.islands if family != "olmo" or "norm" not in name}  # norms that undo a factor
    assert islands <= {"model.multi_modal_projector"}, "LLaVA's reads a stream without a norm, through GELU"
    model = model.double()
    truth = outputs(model, family)
    scale(model, plan)
    scaled = outputs(model, family)
    restored = {name: value * 2.0 ** plan.outputs[""].get(shared_path(name), 0) for name, value in scaled.items()}
    assert largest_distance(restored, truth) < FAMILIES[family].tolerance


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_overflows_runs_in_fp16(family):
    model = large(family)
    truth = outputs(model, family)
    # T5 clamps infinities in FP16: its outputs are then finite, and wrong.
    assert not largest_distance(outputs(copy.deepcopy(model).half(), family), truth) < 0.05, "nothing overflows here"
    pasa.to_fp16(model, lambda each: outputs(each, family))
    result = outputs(model, family)
    assert all(tensor.isfinite().all() for tensor in result.values())
    assert largest_distance(result, truth) < 5e-3
    assert {parameter.dtype for parameter in model.parameters()} <= {torch.float16, torch.float32}
