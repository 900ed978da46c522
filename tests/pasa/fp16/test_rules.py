"""Exponents of operators: each rule is compared with what the operator does to scaled operands."""

import pytest
import torch
from torch import nn

from pasa.fp16.tracing import Tracer

X = torch.linspace(-2, 3, 24).reshape(4, 6).bfloat16()


class Model(nn.Module):
    """A model of one weight and one function."""

    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(X.clone())
        self.function = function

    def forward(self):
        return (self.function(self.weight),)


def exponents(function):
    """Return the exponents of the weight and of a result, as multiples of the weight's; 0 where it cannot be scaled."""
    model = Model(function)
    tracer = Tracer({"": model}, {})
    tracer.pin = lambda track, why: None if why.startswith("returns") else Tracer.pin(tracer, track, why)
    with tracer.running():
        out = model()[0]
        form = tracer.single(tracer.track(out))
    return [tracer.equations.resolve(each).get(0, 0) for each in ({0: 1}, form)]


def zeros_then_written(weight):
    memory = torch.zeros(4, 12, dtype=weight.dtype)
    memory[:, :6] = weight
    return memory


def written_then_filled(weight):
    memory = torch.empty(4, 6, dtype=weight.dtype)
    view = memory[:2]
    memory.fill_(1.0)
    return view.add_(weight[:2])


def multiplied_in_place(weight):
    memory = weight.clone()
    view = memory[:2]
    memory.mul_(weight)
    return view * 1


HOMOGENEOUS = {
    "sum of products": (lambda w: w @ w.T, 2),
    "square": (lambda w: w**2, 2),
    "root": (lambda w: (w * w).sqrt(), 1),
    "quotient": (lambda w: w / w.abs().sum(), 0),
    "relu": (torch.relu, 1),
    "concatenation": (lambda w: torch.cat([w, 3 * w]), 1),
    "variance": (lambda w: w.var(-1), 2),
    "memory that was zero": (zeros_then_written, 1),
    "product in place": (multiplied_in_place, 2),
    "maximum with 0": (lambda w: w.clamp(min=0), 1),
    "mask by infinity": (lambda w: w.masked_fill(w > 0, float("-inf")), 1),
    "rotation of pairs": (lambda w: torch.view_as_real(torch.view_as_complex(w.float().reshape(4, 3, 2))), 1),
    "sorting": (lambda w: w.sort().values, 1),
    "a fixed affine map": (lambda w: nn.functional.batch_norm(w, torch.zeros(6), torch.ones(6) * 3, eps=0), 1),
    "the weight of a direction": (lambda w: torch._weight_norm(w, torch.ones(4, 1, dtype=w.dtype)), 0),
    "an empty tensor joined": (lambda w: torch.cat([torch.zeros(0, 6, dtype=w.dtype) + 1, w]), 1),
    "a where with zeros": (lambda w: torch.where(w > 0, w, 0.0), 1),
}


def product_in_place(weight):
    """Story: a view of a product kept its exponent where the product's memory was written."""
    product = nn.functional.linear(weight, weight)
    view = product.t()
    product.mul_(weight @ weight.t())
    return view * 1


PINNED = {
    "a product in place, through a view": product_in_place,
    "exponential": torch.exp,
    "a number added": lambda w: w * 1 + 1.0,
    "a sum with its square": lambda w: w + w**2,
    "gelu": nn.functional.gelu,
    "a bound": lambda w: w.clamp(max=1.0),
    "comparison with a number": lambda w: w * (w > 1.0),
    "whole numbers": lambda w: w + w.to(torch.int32),
    "memory filled through a view": written_then_filled,
    "a running mean": lambda w: nn.functional.batch_norm(w, torch.ones(6), torch.ones(6)),
    "running statistics that are written": lambda w: nn.functional.batch_norm(
        w, torch.zeros(6), torch.ones(6), training=True
    ),
    "a where with a number": lambda w: torch.where(w > 0, w, 5.0),
    "a rounded quotient": lambda w: torch.div(w, 3.0, rounding_mode="floor"),
    "an operator without a rule": lambda w: torch.erfinv(w / 4),
    "a third root": lambda w: (w * w) ** (1 / 3),
    "a norm that counts": lambda w: torch.linalg.vector_norm(w, ord=0) * 1,
    "padding by a number": lambda w: nn.functional.pad(w, (1, 1), value=2.0),
}


@pytest.mark.parametrize("name", HOMOGENEOUS)
def test_homogeneous_operators_have_their_degree(name):
    function, degree = HOMOGENEOUS[name]
    assert exponents(function) == [1, degree]
    weight = X.float()
    assert torch.equal(function(4 * weight), function(weight) * 4.0**degree), "the operator itself"


@pytest.mark.parametrize("name", PINNED)
def test_what_is_not_homogeneous_keeps_its_operands_unscaled(name):
    assert exponents(PINNED[name]) == [0, 0]


def parts(view):
    """Return the exponents of a view of a weight that was cut in two: two if it still has these parts, or one."""
    model = Model(view)
    tracer = Tracer({"": model}, {"weight": (-1, ((0, 3, 1), (3, 6, 1)))})
    with tracer.running():
        out = model()[0]
        return len(tracer.track(out).forms)


@pytest.mark.parametrize(
    ("view", "count"),
    [
        (lambda w: w.t().t(), 2),
        (lambda w: w[None, 1:3], 2),
        (lambda w: w[torch.tensor([3, 0])], 2),
        (lambda w: w.index_select(0, torch.tensor([3, 0])), 2),
        (lambda w: w[w[:, 0] > 0], 2),
        (lambda w: w.expand(3, 4, 6)[0], 2),
        (lambda w: w[:, torch.tensor([5, 4, 3, 2, 1, 0])], 1),
        (lambda w: w.index_select(1, torch.tensor([5, 4, 3, 2, 1, 0])), 1),
        (lambda w: w[w > -9], 1),
        (lambda w: w.view(2, 12)[:, :6], 1),
        (lambda w: w.as_strided((4, 6), (1, 4)), 1),
        (lambda w: torch.cat([w, w], -1), 1),
    ],
)
def test_a_view_has_the_parts_of_a_fused_tensor_only_where_they_stay_in_their_places(view, count):
    """Story: an index that reordered the columns of a gate and an up projection kept the exponents of the places."""
    assert parts(view) == count


@pytest.mark.parametrize(("width", "shown"), [(2, {(0, 2, 1), (2, 4, 1), (4, 6, 1)}), (4, {(0, 4, 1), (4, 6, 1)})])
def test_the_last_part_of_a_split_may_be_smaller(width, shown):
    model = Model(lambda w: (w @ w.t() @ w).split(width, -1)[0])
    tracer = Tracer({"": model}, {})
    with tracer.running():
        model()
    assert tracer.shown["weight"][1] == shown


def both_ways(weight):
    return (1.0 + weight) * weight.mean()


def with_two_numbers(weight):
    return (1.0 + weight) * (2.0 + weight)


@pytest.mark.parametrize("function", [both_ways, with_two_numbers, lambda w: w * (1.0 + w)])
def test_a_parameter_with_a_number_added_and_without_stays(function):
    """Story: the parameter was rewritten for the sum with the number, and read as it then was elsewhere."""
    model = Model(function)
    tracer = Tracer({"": model}, {})
    with tracer.running():
        model()
    form, _ = tracer.offsets["weight"]
    assert not tracer.equations.resolve(form)


def test_parts_of_a_fused_product_are_measured_where_they_are():
    """Story: behind a transposition the parts were cut from the last dimension, which may be too short for them."""
    model = Model(lambda w: (X.flip(0) @ w.T).T.clone())
    tracer = Tracer({"": model}, {"weight": (-2, ((0, 1, 1), (1, 4, 1)))})
    with tracer.running():
        model()
    peaks = [each for each in tracer.operations if each.name == "clone"][-1].peaks
    product = (X.flip(0) @ X.T).T
    assert peaks.tolist() == [product[:1].abs().max(), product[1:].abs().max()]
