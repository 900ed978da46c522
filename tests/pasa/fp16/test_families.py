"""Every family of language models and encoders: the same function after scaling, and no overflow in FP16."""

import copy

import pytest
import torch

import pasa
from pasa.fp16 import editing
from pasa.fp16.conversion import Conversion
from tests.pasa.fp16.models import FAMILIES, large, outputs


def error(results, truths):
    """Return the largest difference of each tensor, relative to its largest value; infinite where not a number."""
    assert results.keys() == truths.keys()
    errors = [
        ((results[name].double() - truth.double()).abs().max() / truth.double().abs().max()).item()
        for name, truth in truths.items()
    ]
    return max(each if each == each else float("inf") for each in errors)


def plan_of(model, family):
    """Return the powers of two for a model, which is unchanged."""
    conversion = Conversion({"": model}, lambda: outputs(model, family), 4.0)
    conversion.plan_and_convert()
    conversion.restore()
    return conversion.plan


@pytest.mark.parametrize("family", FAMILIES)
def test_scaling_changes_nothing_in_fp64(family):
    """Powers of two are exact; where a model casts to FP32 by itself, 1e-6 remains."""
    model = large(family)
    plan = plan_of(model, family)
    assert plan.scales
    assert set(plan.islands) <= {"model.multi_modal_projector"}, "LLaVA's reads a stream without a norm, through GELU"
    model = model.double()
    truth = outputs(model, family)
    editing.scale_in_place({"": model}, plan)
    scaled = outputs(model, family)
    restored = {name: value * 2.0 ** plan.outputs[""].get(name, 0) for name, value in scaled.items()}
    assert error(restored, truth) < FAMILIES[family].tolerance


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_overflows_runs_in_fp16(family):
    model = large(family)
    truth = outputs(model, family)
    # T5 clamps infinities in FP16: its outputs are then finite, and wrong.
    assert not error(outputs(copy.deepcopy(model).half(), family), truth) < 0.05, "nothing overflows here"
    pasa.to_fp16(model, lambda each: outputs(each, family))
    result = outputs(model, family)
    assert all(tensor.isfinite().all() for tensor in result.values())
    assert error(result, truth) < 5e-3
    assert {parameter.dtype for parameter in model.parameters()} <= {torch.float16, torch.float32}
