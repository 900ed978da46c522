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


def test_a_watch_may_be_used_again(model):
    """Story: the second use named the module of the first."""
    watch = NonFiniteWatch({"": model})
    with watch:
        model(torch.full((1, 2), torch.nan))
    with watch:
        model(-torch.ones(1, 2) * 9)
    assert watch.first is None


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (torch.nn.Linear(2, 2), "Linear is no map of models by name: for one model pass {'': model}"),
        (None, "NoneType is no map"),
        ({"a": torch.nn.Linear(2, 2), "b": 3}, "'b' is a int, not a torch.nn.Module"),
    ],
)
def test_what_cannot_be_watched_is_named(models, message):
    """Story: a model without a name was "not iterable"; beside a number, the hooks of the model before it stayed."""
    with pytest.raises(TypeError, match=message):
        NonFiniteWatch(models)


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.to(torch.float8_e4m3fn),
        lambda x: x.to(torch.complex64),
        lambda x: x.to(torch.complex64).conj(),
        torch.Tensor.to_sparse,
        torch.Tensor.to_sparse_csr,
        lambda x: torch.nested.nested_tensor([x, x[:1]]),
    ],
    ids=["fp8", "complex", "conj", "sparse", "csr", "nested"],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_of_every_kind(make, bad):
    """Story: a model with FP8, sparse or nested tensors ended with an error of the watch; complex NaN was finite."""
    assert is_finite(make(torch.tensor([[1.0, torch.nan if bad else 2.0]]))) is not bad
    assert is_finite(torch.empty(3, device="meta"))


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
