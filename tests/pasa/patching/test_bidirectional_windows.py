"""Tests of bidirectional sliding windows against the masks and models of transformers."""

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.masking_utils import sliding_window_bidirectional_overlay

import pasa
from pasa.patching import transformers_attention as patched_attention


class Bidirectional(torch.nn.Module):
    is_causal = False


@settings(max_examples=60, deadline=None)
@given(length=st.integers(2, 12), window=st.integers(1, 12))
def test_a_missing_mask_means_a_window_that_reaches_both_ways(length, window):
    """A bidirectional window reaches `window` keys to either side.

    A causal window holds `window` keys including the query's own, so it reaches one key less far.
    """
    g = torch.Generator().manual_seed(100 * length + window)
    query, key, value = (torch.randn(2, heads, length, 16, generator=g) for heads in (4, 2, 2))
    visible = torch.empty(length, length, dtype=torch.bool)
    allowed = sliding_window_bidirectional_overlay(window)
    for row in range(length):
        for column in range(length):
            visible[row, column] = bool(allowed(0, 0, torch.tensor(row), torch.tensor(column)))
    binding = patched_attention.Binding(pasa.PasaConfig(precision="fp32"), None, handle=None)
    call = (binding, Bidirectional(), query, key, value)
    out = patched_attention.run_pasa(*call, None, sliding_window=window)[0]
    golden, _ = pasa.golden_attention(query.half(), key.half(), value.half(), attn_mask=visible)
    torch.testing.assert_close(out.double(), golden.transpose(1, 2), rtol=0, atol=2**-9)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("length", [5, 21])  # all keys within a window of 8 to either side, or not
@pytest.mark.parametrize("padded", [False, True])
def test_a_model_with_bidirectional_windows(attention, length, padded):
    """A patched ModernBERT, with bidirectional layers with and without a window, computes what it did before."""
    config = hf.ModernBertConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        global_attn_every_n_layers=2, local_attention=8, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, cls_token_id=1, sep_token_id=2, attn_implementation=attention,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.ModernBertModel(config).eval()
    with torch.no_grad():
        for layer in model.layers:  # scores differ enough to notice one key more or less
            layer.attn.Wqkv.weight.mul_(8)
    ids = torch.randint(3, 97, (2, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, -3:] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask)[0][mask.bool()]
        with pasa.patch_pipeline(model) as handle:
            found = model(ids, attention_mask=mask)[0][mask.bool()]
            assert len(handle.report().patched) == 4
    assert (found - expected).abs().max() < 5e-3 * expected.abs().max()
