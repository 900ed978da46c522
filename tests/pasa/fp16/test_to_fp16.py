"""A whole model in FP16: the same function, no overflow, and the way back."""

import copy

import pytest
import torch

import pasa
from pasa.fp16 import editing
from pasa.fp16.conversion import Conversion
from tests.pasa.fp16.models import FAMILIES, large

IDS = torch.arange(20)[None]


def outputs(model):
    """Return logits and hidden states of a model."""
    with torch.no_grad():
        out = model(IDS, output_hidden_states=True, use_cache=False)
    return [out.logits, *out.hidden_states]


def error(result, truth):
    """Return the largest difference of each tensor, relative to its largest value."""
    return max(
        ((one.double() - other.double()).abs().max() / other.double().abs().max()).item()
        for one, other in zip(result, truth, strict=True)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_overflows_runs_in_fp16(family):
    model = large(family)
    truth = outputs(model)
    plain = outputs(copy.deepcopy(model).half())
    assert not all(tensor.isfinite().all() for tensor in plain), "nothing overflows here"
    pasa.to_fp16(model, {"input_ids": IDS, "output_hidden_states": True, "use_cache": False})
    result = outputs(model)
    assert all(tensor.isfinite().all() for tensor in result)
    assert error(result, truth) < 5e-3
    assert {parameter.dtype for parameter in model.parameters()} <= {torch.float16, torch.float32}


@pytest.mark.parametrize("family", FAMILIES)
def test_scaling_changes_nothing_in_fp64(family):
    """Powers of two are exact; where a model casts to FP32 by itself, 1e-6 remains."""
    model = large(family)
    conversion = Conversion({"": model}, lambda: outputs(model), 4.0)
    conversion.plan_and_convert()
    plan = conversion.plan
    conversion.restore()
    assert plan.scales, "something is scaled"
    model = model.double()
    truth = outputs(model)
    editing.scale_in_place({"": model}, plan)
    scaled = outputs(model)
    powers = [plan.outputs[""].get(f"['hidden_states'][{index}]", 0) for index in range(len(truth) - 1)]
    assert max(powers) > 0
    restored = [scaled[0], *(state * 2.0**power for state, power in zip(scaled[1:], powers, strict=True))]
    assert error(restored, truth) < (1e-6 if family == "gemma3" else 1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_undo_restores_every_bit(family):
    model = large(family)
    before, truth = copy.deepcopy(model.state_dict()), outputs(model)
    with pasa.to_fp16(model, IDS, keep_original="cpu") as handle:
        assert handle.report().modules
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(one, other) for one, other in zip(outputs(model), truth, strict=True))
