"""The bias that makes scores overflow leaves the function alone."""

import copy

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
    """Return the largest |Q K^T| of every attention of one step in FP64, in order, and the step's result."""
    scores, attend = [], functional.scaled_dot_product_attention

    def spy(query, key, value, **options):
        scores.append(float((query @ key.mT).abs().max()))
        return attend(query, key, value, **options)

    draw = torch.Generator().manual_seed(1)
    latents, image = (torch.randn(*shape, generator=draw).double() for shape in ((1, 2, 8, 8, 8), (1, 1, 32)))
    with monkeypatch.context() as patch:
        patch.setattr(functional, "scaled_dot_product_attention", spy)
        time, ids = torch.tensor([3.0]).double(), torch.tensor([[6.0, 127.0, 0.02]]).double()
        return scores, unet.double()(latents, time, image, ids).sample


def test_scores_grow_and_the_function_stays(unet, monkeypatch):
    """FP64 outputs are the same to 1e-11, which is the spacing of scores of 131,072, although scores do grow."""
    biased = copy.deepcopy(unet)
    assert overflow.bias_scores(unet, offset=0) == {"bias": 0, "offset": 0, "modules": 4}
    before, expected = scores_and_output(unet, monkeypatch)
    assert overflow.bias_scores(biased) == {"bias": 362, "offset": 131_044, "modules": 4}
    after, result = scores_and_output(biased, monkeypatch)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-8 * float(expected.abs().max()))
    assert max(before) < 1000
    assert sum(score > 65504 for score in after) == 4, "spatial self-attention alone"


def test_the_bias_is_exact_in_half_precision(unet):
    overflow.bias_scores(unet)
    for attention in overflow.spatial_attention(unet).values():
        assert torch.equal(attention.to_k.bias, attention.to_k.bias.half().float())
        assert attention.to_k.bias.count_nonzero() == attention.heads
        assert not attention.to_k.weight[attention.to_k.bias != 0].any()


def test_offsets_that_fp16_cannot_carry_and_models_with_biases_are_refused(unet):
    for offset in (-1.0, 2048.0**2 + 1, float("nan")):
        with pytest.raises(ValueError, match="offset="):
            overflow.bias_scores(unet, offset)
    overflow.bias_scores(unet)
    with pytest.raises(ValueError, match="biases of its own"):
        overflow.bias_scores(unet)
