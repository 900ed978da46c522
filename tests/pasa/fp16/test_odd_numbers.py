"""Numbers in odd places: parameters and buffers that FP16 does not hold, and roots of scaled tensors."""

import pytest
import torch
from torch import nn

import pasa
from tests.pasa.fp16.test_bad_input import refused
from tests.pasa.fp16.test_odd_models import Stream, X, close, run
from tests.pasa.fp16.test_stories import convert


class Divided(nn.Module):
    """Reads a number that FP16 does not hold."""

    def __init__(self, shape) -> None:
        super().__init__()
        self.register_buffer("sigma", torch.full(shape, 1e6))

    def forward(self, x):
        return torch.tanh(x) / (1 + self.sigma * 1e-6)


class Large(Stream):
    def __init__(self, shape=(), inside=True) -> None:
        super().__init__()
        self.divided = Divided(shape)
        if not inside:
            self.register_buffer("limit", torch.full(shape, 1e6))

    def forward(self, x):
        normed = self.norm(self.stream(x))
        return self.head(normed + 10 * self.divided(normed)) / getattr(self, "limit", torch.ones(())).mean()


@pytest.mark.parametrize("shape", [(), (1,), (8,)])
def test_numbers_that_fp16_does_not_hold(shape):
    """Story: a buffer of 1e6 became infinite, and a quotient by it 0; nothing showed it."""
    model = Large(shape)
    truth = run(model, X)
    handle = pasa.to_fp16(model, X)
    close(run(model, X), truth)
    assert ("divided", "divided.sigma reaches 1e+06 and cannot be scaled") in handle.report().fp32 or shape == ()
    assert model.divided.sigma.dtype == torch.float32
    if shape == (1,):
        refused(NotImplementedError, "limit reaches 1e.06, which FP16 cannot hold", Large(shape, inside=False), X)


def test_a_mask_of_large_negative_numbers_may_become_infinite():
    class Masking(Stream):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.full((6, 6), -1e9).triu(1))

        def forward(self, x):
            x = super().forward(x)
            return (x @ x.transpose(-1, -2) + self.mask).softmax(-1) @ x

    model = Masking()
    truth = run(model, X)
    convert(model, lambda: run(model, X))
    close(run(model, X), truth)


@pytest.mark.parametrize("exponent", [0.5, 1.5, -0.5])
def test_roots_of_scaled_tensors(exponent):
    """Story: an exponent that is odd has no half, and an ArithmeticError was raised."""

    class Root(Stream):
        def forward(self, x):
            return torch.sigmoid(self.head((self.stream(x).abs() + self.embed(x).abs()) ** exponent))

    for factor in (1.0, 2.0):
        model = Root()
        with torch.no_grad():
            model.write.weight.mul_(factor)
            model.head.weight.mul_(1e-3 if exponent > 0 else 1.0)
            model.head.weight.mul_(1e-3 if exponent > 1 else 1.0)
        truth = run(model, X)
        pasa.to_fp16(model, X)
        close(run(model, X), truth)
