"""Half a step of power iteration: the Triton kernel and torch's products are compared with FP64."""

from __future__ import annotations

import pytest
import torch

from pasa.ops.spectral import half_step_launch
from pasa.ops.spectral.half_step import FUSED_DIMS, fused, half_step
from pasa.ops.spectral.half_step_launch import launch
from pasa.power_iteration import PowerIteration
from tests.inputs import DEVICE

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter multiplies BF16 as integers
UNIT = {torch.float16: 2**-11, torch.bfloat16: 2**-8}[DTYPE]
SHAPES = [(2, 1, 64, 200), (1, 3, 32, 130), (3, 8, 128, 257), (1, 17, 64, 64), (2, 1, 256, 31)]


def inputs(heads, group, dim, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(heads, dim, columns, generator=generator).to(DEVICE, DTYPE)
    return weight, (9 * torch.randn(heads, group, dim, generator=generator)).to(DEVICE)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_is_as_near_as_torch(shape):
    """The kernel is as accurate as torch.

    Bound: y and t are rounded to 16 bits, each by at most a unit of the norm of W; sums are in
    FP32.
    """
    weight, y = inputs(*shape)
    exact = weight.cpu().double()
    unit = y.cpu().double() / y.cpu().double().norm(dim=-1, keepdim=True)
    t, norm = unit @ exact, torch.linalg.matrix_norm(exact, 2)[:, None]
    for way in (launch, lambda w, y: half_step(w, None, y)):
        out, square = (part.cpu().double() for part in way(weight, y))
        assert ((out - t @ exact.mT).norm(dim=-1) <= 3 * UNIT * norm**2).all()
        assert ((square.sqrt() - t.norm(dim=-1)).abs() <= 3 * UNIT * norm).all()


def test_programs_of_several_pieces(monkeypatch):
    """Programs add up all their tiles; here each has five, so a sum or square of the last tile alone would show."""
    monkeypatch.setattr(half_step_launch, "PROGRAMS", 2)
    test_kernel_is_as_near_as_torch((2, 1, 64, 600))


def test_zero_weights_and_vectors_give_zeros():
    weight, y = inputs(2, 1, 64, 100)
    for result in (launch(0 * weight, y), launch(weight, 0 * y), half_step(0 * weight, None, y)):
        assert all(not part.any() for part in result)


def test_what_the_kernel_does_not_serve_goes_to_torch():
    weight, _ = inputs(1, 1, 64, 40)
    assert fused(weight, None) == (DEVICE == "cuda")
    assert not fused(weight, weight[:, :, 0])
    assert not fused(weight.float(), None)
    assert not fused(weight[:, :, ::2], None)
    assert 80 not in FUSED_DIMS
    assert not fused(weight[:, :40], None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (8, 1)])
def test_power_iteration_on_a_gpu(heads, kv_heads):
    generator = torch.Generator("cuda").manual_seed(0)
    parts = [torch.randn(n, 64, 300, generator=generator, device="cuda", dtype=DTYPE) for n in (heads, kv_heads)]
    for part in parts:
        part[:, 0] *= 4
    q, k = (part.flatten(0, 1) for part in parts)
    keys = parts[1].double().repeat_interleave(heads // kv_heads, 0)
    exact = torch.linalg.matrix_norm(parts[0].double().mT @ keys, 2)
    result = PowerIteration(heads, kv_heads, generator=generator).update(q, k, steps=30)
    torch.testing.assert_close(result.double(), exact, rtol=4 * UNIT, atol=0)
