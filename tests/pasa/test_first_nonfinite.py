"""The module that is named when a model breaks."""

from __future__ import annotations

import types

import pytest
import torch

from pasa.first_nonfinite import NonFiniteWatch, is_finite, models_of


class Root(torch.nn.Module):
    """log of what it is given, which is not a module; then a layer."""

    def __init__(self):
        super().__init__()
        self.before, self.after = torch.nn.Identity(), torch.nn.Linear(2, 2)

    def forward(self, x, *, hint=None):
        return {"out": (self.after(self.before(x).log()),)}


@pytest.fixture
def model():
    """Return a model whose log takes negative numbers: the weights of its first layer are -1."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Root())
    torch.nn.init.constant_(model[0].weight, -1)
    return model


def watched(model, *inputs):
    with NonFiniteWatch({"unet": model}) as watch:
        for x in inputs:
            model(x)
    return watch.first


def test_a_finite_run_names_nobody(model):
    assert watched(model, -torch.ones(1, 2) * 9) is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_origin_is_the_innermost_module_with_finite_inputs(model):
    """The layer behind the log sees NaN first, but it was given NaN: its parent made it."""
    first = watched(model, torch.ones(1, 2) * 9)
    assert first == {"module": "unet.1", "kind": "Root", "call": 1, "origin": True}


def test_the_call_is_counted(model):
    good, bad = -torch.ones(1, 2) * 9, torch.ones(1, 2) * 9
    assert watched(model, good, good, bad, bad)["call"] == 3


def test_values_that_come_from_outside_are_no_modules_fault(model):
    """Keywords are inputs too."""
    first = watched(model, torch.full((1, 2), torch.nan))
    assert first == {"module": "unet.0", "kind": "Linear", "call": 1, "origin": False}
    root = Root()
    with NonFiniteWatch({"unet": root}) as watch:
        root(-torch.ones(1, 2), hint=torch.tensor(torch.inf))
    assert watch.first["origin"] is False


def test_a_run_that_has_shown_its_fault_may_be_left(model):
    """All other exceptions are the caller's."""
    ran = []
    with NonFiniteWatch({"": model}, stop=True) as watch:
        model(torch.ones(1, 2) * 9)
        ran.append("on")
    assert not ran
    assert watch.first["module"] == "1"
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(KeyError), NonFiniteWatch({"": model}, stop=True):
        raise KeyError


def test_models_by_name(model):
    assert models_of(model) == {"": model}
    pipeline = types.SimpleNamespace(components={"unet": model, "scheduler": object()})
    assert models_of(pipeline) == {"unet": model}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_is_finite(dtype):
    fine = torch.full((3, 3), 60000.0, dtype=dtype)
    nested = {"ids": torch.ones(2, dtype=torch.int64), "x": [fine, (fine, None)], "none": torch.empty(0)}
    assert is_finite(nested)
    for bad in (torch.nan, torch.inf, -torch.inf):
        broken = fine.clone()
        broken[1, 2] = bad
        assert not is_finite({**nested, "y": ({"z": broken},)})
