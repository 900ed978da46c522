"""Golden attention is the definition. Everything else is judged by it, so it has tests of its own."""

import pytest
import torch

import pasa
from tests.inputs import normal_qkv


def test_two_keys_by_hand():
    q, k = torch.tensor([[[[2.0]]]]), torch.tensor([[[[0.0], [1.0]]]])
    v = torch.tensor([[[[0.0], [1.0]]]])
    out, lse = pasa.golden_attention(q, k, v, scale=0.5)
    assert out.item() == pytest.approx(torch.e / (1 + torch.e), abs=1e-15)
    assert lse.item() == pytest.approx(torch.tensor(1 + torch.e).log().item(), abs=1e-6)


def test_agrees_with_torch_in_fp64():
    q, k, v = (x.double() for x in normal_qkv((4, 2), (33, 70), 32))
    mask = torch.ones(33, 70).bool().tril(37)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    for how in ({"is_causal": True}, {"attn_mask": mask}):
        assert (pasa.golden_attention(q, k, v, **how)[0] - theirs).abs().max() < 1e-14


def test_a_common_bias_of_any_size_changes_no_weight():
    """A common bias of any size changes no weight.

    exp(scores - lse) once gave weights that summed to the number of keys, because lse had no digit left to count
    them.
    """
    q, k, v = normal_qkv((1, 1), (2, 9), 16)
    mask = torch.full((2, 9), torch.finfo(torch.float32).min)
    ones = torch.ones_like(v)
    assert (pasa.golden_attention(q, k, ones, attn_mask=mask)[0] - 1).abs().max() < 1e-14
    assert torch.equal(pasa.attention(q, k, ones, attn_mask=mask), torch.ones(1, 1, 2, 16).half())


def test_row_without_a_key():
    q, k, v = normal_qkv((1, 1), (2, 9), 16)
    out, lse = pasa.golden_attention(q, k, v, attn_mask=torch.tensor([[True], [False]]).expand(2, 9))
    assert torch.all(out[0, 0, 1] == 0)
    assert lse[0, 0, 1] == -torch.inf
