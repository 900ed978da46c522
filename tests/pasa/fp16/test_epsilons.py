"""Epsilons of norms, and what a scaled model is checked for: it must compute what the original does."""

import copy

import pytest
import torch
from torch import nn

import pasa


class Norm(nn.Module):
    """RMSNorm as models write it, with its epsilon in an attribute."""

    def __init__(self, epsilon=1e-2):
        super().__init__()
        self.eps = epsilon
        self.weight = nn.Parameter(torch.ones(8))

    def epsilon(self):
        return self.eps

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon())
        return wide.to(x.dtype) * self.weight


class Frozen(Norm):
    """Reads its epsilon when it is built."""

    def __init__(self):
        super().__init__()
        self.constant = self.eps

    def epsilon(self):
        return self.constant


class Twice(Norm):
    """Has two epsilons of one value."""

    def __init__(self):
        super().__init__()
        self.other_eps = self.eps

    def epsilon(self):
        return self.other_eps


class Squared(Norm):
    """Reads the square root of its operand."""

    def forward(self, x):
        return super().forward(x.abs().sqrt())


def build(norm, factor=1e6):
    """Return a model that overflows in its first row, and inputs whose other rows are near the norm's epsilon."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), norm, nn.Linear(8, 8)).eval()
    with torch.no_grad():
        model[0].weight.mul_(factor)
    x = torch.randn(16, 8)
    x[1:] *= 2.0**-17
    return model, x


def difference(model, x, truth):
    return (model(x.half()) - truth).abs().max().item()


@torch.no_grad()
def test_rows_near_the_epsilon_are_those_of_the_original():
    model, x = build(Norm())
    truth = model(x)
    handle = pasa.to_fp16(model, x)
    assert handle.report().parameters
    assert difference(model, x, truth) < 2e-2, "inputs near 2**-17 are subnormal in FP16"


@torch.no_grad()
def test_an_epsilon_that_is_not_read_anew_is_refused():
    """Story: the attribute was scaled, the norm added the old number, and small rows were wrong by 30 %."""
    model, x = build(Frozen())
    before = model[0].weight.clone()
    with pytest.raises(RuntimeError, match="1 does not read its eps anew"):
        pasa.to_fp16(model, x)
    assert torch.equal(model[0].weight, before)
    assert model[1].eps == 1e-2


@torch.no_grad()
def test_of_two_epsilons_of_one_value_none_is_scaled():
    """Story: the first was scaled, whichever the norm reads."""
    model, x = build(Twice())
    truth = model(x)
    handle = pasa.to_fp16(model, x)
    assert model[1].eps == model[1].other_eps == 1e-2
    assert "add with the number 0.01" in dict(handle.report().fp32)["1"]
    assert difference(model, x, truth) < 2e-2


@torch.no_grad()
@pytest.mark.parametrize("factor", [1e6, 2e6])
def test_what_a_square_root_reads_takes_an_even_power(factor):
    """Story: an odd one ended in an ArithmeticError."""
    model, x = build(Squared(), factor)
    truth = model(x)
    handle = pasa.to_fp16(model, x)
    assert {each.power % 2 for each in handle.report().modules} == {0}
    assert difference(model, x, truth) < 5e-2


class Clipped(nn.Module):
    """Halves its operand as long as that is large; NumPy hides the comparison from a trace."""

    def forward(self, x):
        while x.abs().max().float().numpy() > 1e5:
            x = x / 2
        return x


@torch.no_grad()
def test_a_model_that_branches_on_its_values_does_not_follow_the_powers_of_two():
    model, x = build(nn.Sequential(Clipped(), Norm()))
    before = model[0].weight.clone()
    with pytest.raises(RuntimeError, match=r"does not follow the powers of two: .* instead of"):
        pasa.to_fp16(model, x)
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("other", ["input", "constant"])
def test_an_epsilon_is_one_number_for_all_that_reads_it(other):
    """Story: a module with two norms and one epsilon scaled it for one of them, and the other became another norm."""

    class Pair(Norm):
        def forward(self, x):
            side = torch.tanh(x) * 1e-2 if other == "input" else torch.full_like(x, 1e-2)
            return super().forward(x) + super().forward(side)

    model, x = build(Pair())
    with torch.no_grad():
        truth = model(x)
    with pytest.raises(NotImplementedError, match="cannot be scaled because of 1"):
        pasa.to_fp16(model, x)
    assert torch.equal(model(x), truth)


class Written(Norm):
    """Has its epsilon in its code."""

    def __init__(self):
        super().__init__()
        del self.eps

    def epsilon(self):
        return 1e-2


def test_a_norm_whose_epsilon_is_in_its_code_reads_the_stream_as_it_was():
    """Story: OLMo was refused, because nothing can change the epsilon of its norms."""
    model, x = build(Written())
    with torch.no_grad():
        truth = model(x)
        handle = pasa.to_fp16(model, x, keep_original="cpu")
        assert difference(model, x, truth) < 2e-2
        ((name, why),) = handle.report().fp32
        assert name == "1"
        assert "its input reaches" in why
        with pytest.raises(RuntimeError, match="1 is scaled by powers of two inside of Sequential"):
            model[1](x.half())
        handle.undo()
        assert torch.equal(model(x), truth)


class Started(nn.Module):
    """Begins a stream with an activation, as audio encoders do, and adds layers to it."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.write = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x, mask=None):
            return x + self.write(torch.tanh(self.norm(x)))

    def __init__(self):
        super().__init__()
        self.start, self.layers = nn.Linear(8, 8), nn.ModuleList(self.Layer() for _ in range(3))
        self.last = nn.LayerNorm(8)
        with torch.no_grad():
            self.layers[1].write.weight.mul_(1e6)

    def forward(self, x, by_name=True):
        stream = nn.functional.gelu(self.start(x))
        for layer in self.layers:
            stream = layer(x=stream, mask=None) if by_name else layer(stream)
        return self.last(stream)


def test_a_stream_that_an_activation_begins_is_scaled_where_its_layers_begin():
    """Story: Whisper was refused, because no parameter writes the first sum of its encoder."""
    torch.manual_seed(0)
    model, x = Started().eval(), torch.randn(5, 8)
    with torch.no_grad():
        truth = model(x)
        assert not copy.deepcopy(model).half()(x.half()).isfinite().all()
        handle = pasa.to_fp16(model, x)
        assert (model(x.half()) - truth).abs().max() < 2e-2
        with pytest.raises(RuntimeError, match=r"layers\.0 is called in another way than on the sample"):
            model(x.half(), by_name=False)
    assert not handle.report().fp32
    assert not handle.report().beyond
