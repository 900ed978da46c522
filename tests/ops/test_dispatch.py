"""The shortcut past torch's dispatcher: calls that must not take it, whichever argument is the reason."""

import pytest
import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch.autograd import forward_ad

import pasa
from pasa.ops import dispatch
from tests.inputs import normal_qkv
from tests.operators import OPERATORS, all_arguments

PLACES = [
    (operator, name) for operator in OPERATORS for name, x in all_arguments(operator).items() if isinstance(x, Tensor)
]


class Subclass(Tensor):
    """A tensor subclass, whose every use torch shows to the class."""


def test_every_operator_has_a_valid_call():
    """Every operator has a valid call that contains every tensor of its schema; `tensors_of` picks exactly these."""
    registered = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("pasa::")}
    assert {name for name in registered if not name.startswith("npu_")} == set(OPERATORS)
    for operator, op in OPERATORS.items():
        arguments = all_arguments(operator)
        assert list(arguments) == [argument.name for argument in op._opoverload._schema.arguments]
        tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
        picked = dispatch.tensors_of(op)(tuple(arguments.values()))
        assert len(tensors) == len(picked)
        assert all(x is y for x, y in zip(tensors, picked, strict=True))
        op(**arguments)


@pytest.mark.parametrize(("operator", "name"), PLACES)
@pytest.mark.parametrize("kind", ["plain", "subclass", "meta", "negative view", "zero tensor", "requires_grad"])
def test_the_dispatcher_sees_whatever_needs_it(monkeypatch, operator, name, kind):
    """A call takes the shortcut only if all its tensors are plain, whichever argument differs.

    Story: only the first five arguments were checked, but four of the seven operators have tensors
    behind them: a mask, anchors, lengths. The memory of a mask on meta was read, and a mask that
    requires a gradient silently got none.
    """
    arguments = all_arguments(operator)
    x = arguments[name]
    made = {
        "plain": lambda: x,
        "subclass": lambda: x.as_subclass(Subclass),
        "meta": lambda: x.to("meta"),
        "negative view": lambda: torch._neg_view(x),
        "zero tensor": lambda: torch._efficientzerotensor(x.shape, dtype=x.dtype),
        "requires_grad": lambda: x.clone().requires_grad_(),
    }
    if kind == "requires_grad" and not x.is_floating_point():
        kind = "plain"  # integer tensors cannot require a gradient
    arguments[name] = made[kind]()
    op = OPERATORS[operator]
    monkeypatch.setattr(dispatch, "_functions", {})
    monkeypatch.setattr(CustomOpDef, "__call__", lambda *_: "dispatcher")
    monkeypatch.setattr(op, "_init_fn", lambda *_: "at once")
    assert dispatch.call(op, *arguments.values()) == ("at once" if kind == "plain" else "dispatcher")


@pytest.mark.parametrize(
    ("operator", "name"), [(o, n) for o, n in PLACES if all_arguments(o)[n].is_floating_point() and o != "watch_scores"]
)
def test_a_tangent_is_refused_in_every_place(operator, name):
    arguments = all_arguments(operator)
    with forward_ad.dual_level():
        arguments[name] = forward_ad.make_dual(arguments[name], torch.ones_like(arguments[name]))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            dispatch.call(OPERATORS[operator], *arguments.values())


def test_the_second_derivative_by_a_mask_is_refused():
    """The second derivative is refused even if the mask alone requires a gradient.

    Story: it was not refused. The mask is the sixth argument of the backward operator, and the
    result did not require a gradient, as if it were constant.
    """
    q, k, v = normal_qkv((2, 1), (6, 9), 16)
    mask = torch.zeros(6, 9, requires_grad=True)
    out = pasa.attention(q, k, v, attn_mask=mask)
    (first,) = torch.autograd.grad(out.float().square().sum(), mask, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        first.square().sum().backward()
