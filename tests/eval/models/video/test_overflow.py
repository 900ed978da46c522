"""The bias that makes scores overflow leaves the function alone."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from pasa.eval.models.video import overflow
from pasa.eval.models.video.tiny import tiny_unet


@pytest.fixture
def unet():
    torch.manual_seed(0)
    return tiny_unet()


@torch.no_grad()
def scores_and_output(unet, monkeypatch):
    """Largest |Q K^T| of every attention of one step in FP64, in order, and the step's result."""
    seen, own = [], functional.scaled_dot_product_attention

    def spy(query, key, value, **options):
        seen.append(float((query @ key.mT).abs().max()))
        return own(query, key, value, **options)

    draw = torch.Generator().manual_seed(1)
    latents, image = (torch.randn(*shape, generator=draw).double() for shape in ((1, 2, 8, 8, 8), (1, 1, 32)))
    with monkeypatch.context() as patch:
        patch.setattr(functional, "scaled_dot_product_attention", spy)
        time, ids = torch.tensor([3.0]).double(), torch.tensor([[6.0, 127.0, 0.02]]).double()
        return seen, unet.double()(latents, time, image, ids).sample


def test_scores_grow_and_the_function_stays(unet, monkeypatch):
    """FP64 outputs are the same to 1e-11, which is the spacing of scores of 131,072, although scores do grow."""
    info = overflow.bias_scores(unet, offset=0)
    assert info == {"bias": 0, "offset": 0, "modules": 4}
    before, expected = scores_and_output(unet, monkeypatch)
    torch.manual_seed(0)
    biased = tiny_unet()
    assert overflow.bias_scores(biased) == {"bias": 362, "offset": 131_044, "modules": 4}
    after, result = scores_and_output(biased, monkeypatch)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-8 * float(expected.abs().max()))
    grown = [b > 65504 for b in after]
    assert max(before) < 1000
    assert sum(grown) == 4, "spatial self-attention alone"


def test_the_bias_is_exact_in_half_precision(unet):
    overflow.bias_scores(unet)
    for attention in overflow.spatial_attention(unet).values():
        assert torch.equal(attention.to_k.bias, attention.to_k.bias.half().float())
        assert attention.to_k.bias.count_nonzero() == attention.heads
        assert not attention.to_k.weight[attention.to_k.bias != 0].any()


@pytest.mark.parametrize("offset", [-1.0, 2048.0**2 + 1, float("nan")])
def test_offsets_that_fp16_cannot_carry_are_refused(unet, offset):
    with pytest.raises(ValueError, match="offset="):
        overflow.bias_scores(unet, offset)


def test_a_model_that_has_biases_is_refused(unet):
    overflow.bias_scores(unet)
    with pytest.raises(ValueError, match="biases of its own"):
        overflow.bias_scores(unet)
