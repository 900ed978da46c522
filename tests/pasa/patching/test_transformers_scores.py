"""Models whose scores are more than q.k times a scale: soft caps, attention sinks, position biases, chosen keys."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf

import pasa
from pasa.patching import transformers_attention as patched_attention
from pasa.patching.callbacks import BINDING
from pasa.patching.transformers_masks import chosen_keys, implied_limits, implied_mask, with_bias
from tests.versions import since, skip_unless_known

T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 97}
MODELS = {
    "gemma2": {"attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 1, "sliding_window": 8},
    "gpt_oss": {"sliding_window": 8},
    "deepseek_v32": {},
    "glm_moe_dsa": {},
}
pytestmark = since("5.0", "these architectures do not pass their needs to the attention function")


def large(model, seed=0):
    """Draw the matrices of a model anew, so that attention matters to its output."""
    torch.manual_seed(seed)
    for name, each in model.named_parameters():
        if name.endswith("sinks"):
            each.data.normal_()
        elif each.ndim > 1:
            each.data.normal_(std=(each.numel() / each.shape[0]) ** -0.5)
    return model.eval()


@torch.no_grad()
def errors(model, compute):
    """Return the largest errors against the FP32 model of the FP16 model, unpatched and patched."""
    truth, half = compute(model).float(), copy.deepcopy(model).half()
    before = compute(half)
    with pasa.patch_pipeline(half, backend="reference") as handle:  # the other one is torch's own on a CPU
        assert not handle.report().skipped
        patched = compute(half)
        assert not torch.equal(patched, before)
    assert torch.equal(compute(half), before)
    return float((before.float() - truth).abs().max()), float((patched.float() - truth).abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_an_fp16_model_is_as_exact_patched_as_unpatched(tiny, batch, name):
    """Errors are compared with left padding, and with windows shorter than the sequence."""
    ids, mask = batch
    model = large(tiny(name, **MODELS[name]))
    before, patched = errors(model, lambda model: model(ids, attention_mask=mask).logits[mask.bool()])
    assert patched <= 1.5 * before


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_generated_tokens(tiny, batch, name, cache):
    """Greedy tokens are those of the FP32 model: with left padding, behind the window, and in a static cache."""
    ids, mask = batch
    model = large(tiny(name, **MODELS[name]))
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
    expected = model.generate(ids, attention_mask=mask, **options)
    with pasa.patch_pipeline(model, config=pasa.PasaConfig(precision="fp32")):
        assert torch.equal(model.generate(ids, attention_mask=mask, **options), expected)


@pytest.mark.parametrize(("name", "weight"), [("gemma2", "q_proj.weight"), ("gpt_oss", "sinks")])
def test_gradients(tiny, batch, name, weight):
    """A patched model trains; the sinks of gpt-oss do, too."""
    model = large(tiny(name, **MODELS[name]))

    def gradients():
        model.zero_grad()
        model(batch[0], attention_mask=batch[1]).logits[batch[1].bool()].square().mean().backward()
        return {key: value.grad.clone() for key, value in model.named_parameters() if key.endswith(weight)}

    expected = gradients()
    with pasa.patch_pipeline(model, config=pasa.PasaConfig(precision="fp32")):
        ours = gradients()
    assert len(ours) == 2
    for key, theirs in expected.items():
        torch.testing.assert_close(ours[key], theirs, rtol=0, atol=2e-2 * float(theirs.abs().max()))
        assert not torch.equal(ours[key], theirs)


@pytest.mark.parametrize(("name", "keyword"), [("gemma2", "softcap"), ("gpt_oss", "sinks")])
def test_sinks_and_caps_that_are_left_out_show(tiny, batch, monkeypatch, name, keyword):
    """Without the sink or the cap the output differs by much more than the bound of these tests."""
    model, unchanged = large(tiny(name, **MODELS[name])), pasa.attention
    with torch.no_grad(), pasa.patch_pipeline(model):
        expected = model(batch[0]).logits
        monkeypatch.setattr(pasa, "attention", lambda *args, **kwargs: unchanged(*args, **(kwargs | {keyword: None})))
        without = model(batch[0]).logits
    assert (without - expected).abs().max() > 0.05 * expected.abs().max()


# ---- T5


def t5(kind=hf.T5ForConditionalGeneration):
    return large(kind(hf.T5Config(**T5, pad_token_id=0, decoder_start_token_id=0, eos_token_id=None)))


def test_t5_encoder_decoder_and_cross_attention(batch):
    """T5 adds a position bias to unscaled scores in its encoder and decoder, and zeros in cross-attention."""
    ids, mask = batch
    model = t5()
    with pasa.patch_pipeline(model) as handle:
        names = handle.report().patched
    assert sum("EncDecAttention" in name for name in names) == 2
    assert sum("SelfAttention" in name for name in names) == 4
    call = lambda model: model(ids, attention_mask=mask, decoder_input_ids=ids[:, :9]).logits  # noqa: E731
    before, patched = errors(model, call)
    assert patched <= 1.5 * before


@pytest.mark.parametrize("cache", [None, "static"])
def test_t5_generates(batch, cache):
    model, options = t5(), {"max_new_tokens": 9, "do_sample": False, "cache_implementation": cache}
    expected = model.generate(batch[0], attention_mask=batch[1], **options)
    with pasa.patch_pipeline(model, config=pasa.PasaConfig(precision="fp32")):
        assert torch.equal(model.generate(batch[0], attention_mask=batch[1], **options), expected)


def test_t5_trains_its_position_bias(batch):
    model = t5()

    def gradient():
        model.zero_grad()
        model(batch[0], attention_mask=batch[1], labels=batch[0][:, :5].contiguous()).loss.backward()
        return model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad.clone()

    expected = gradient()
    with pasa.patch_pipeline(model, config=pasa.PasaConfig(precision="fp32")):
        ours = gradient()
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-2 * float(expected.abs().max()))


# ---- single calls


class Causal(torch.nn.Module):
    is_causal = True


def run(query, key, value, mask=None, module=None, **keywords):
    module = module or Causal()
    binding = patched_attention.Binding(pasa.PasaConfig(precision="fp32"), None, None)
    module.__dict__[BINDING] = binding
    return patched_attention.run_pasa(binding, module, query, key, value, mask, **keywords)[0].transpose(1, 2)


def tensors(queries=6, keys=6, heads=4, key_heads=2):
    draw = torch.Generator().manual_seed(7)
    return [
        torch.randn(2, n, s, 16, generator=draw) for n, s in ((heads, queries), (key_heads, keys), (key_heads, keys))
    ]


def golden(q, k, v, **keywords):
    return pasa.golden_attention(*(x.half().float() for x in (q, k, v)), **keywords)[0].float()


def test_each_keyword_reaches_the_scores():
    q, k, v = tensors()
    sinks, bias = torch.randn(4), torch.randn(1, 4, 6, 6)
    close = {"rtol": 0, "atol": 2e-3}
    expected = golden(q, k, v, is_causal=True, softcap=0.7)
    torch.testing.assert_close(run(q, k, v, softcap=0.7), expected, **close)
    expected = golden(q, k, v, is_causal=True, sinks=sinks)
    torch.testing.assert_close(run(q, k, v, s_aux=sinks), expected, **close)
    rows = sinks[None, :, None, None].expand(2, 4, 6, 1)
    torch.testing.assert_close(run(q, k, v, sinks=rows), expected, **close)
    expected = golden(q, k, v, is_causal=True, attn_mask=bias)
    torch.testing.assert_close(run(q, k, v, position_bias=bias), expected, **close)


@pytest.mark.parametrize("explicit", [False, True])
def test_a_bias_and_a_mask_add(explicit):
    """The bias joins a bool mask, and the float mask of eager attention."""
    q, k, v = tensors()
    keep, bias = torch.ones(6, 6, dtype=torch.bool).tril()[None, None], torch.randn(1, 4, 6, 6)
    mask = torch.zeros(1, 1, 6, 6).masked_fill(~keep, torch.finfo(torch.float).min) if explicit else keep
    out = run(q, k, v, mask, position_bias=bias, explicit_masks=explicit)
    torch.testing.assert_close(out, golden(q, k, v, attn_mask=with_bias(keep, bias)), rtol=0, atol=2e-3)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (1, 9), (6, 9), (9, 6)])
@pytest.mark.parametrize("window", [1, 3, 20])
def test_a_window_without_a_mask(window, queries, keys, causal):
    """A window without a mask gives what its mask gives; where `pasa.attention` can align it, no mask is made."""
    q, k, v = tensors(queries, keys)
    limits = implied_limits(queries, keys, window, causal, q.device)
    aligned = queries in (1, keys) and window < max(queries, keys)
    assert (limits[1] is not None) == aligned
    module = Causal()
    module.is_causal = causal
    causal = causal and queries > 1
    seen = min(queries, keys) if causal else keys
    mask = implied_mask(queries, seen, window, causal, q.device)
    expected = golden(q, k[:, :, :seen], v[:, :, :seen], attn_mask=mask)
    torch.testing.assert_close(run(q, k, v, module=module, sliding_window=window), expected, rtol=0, atol=2e-3)


def test_callbacks_get_window_and_soft_cap():
    """Callbacks get both, so that `pasa.watch` counts the scores that attention has."""
    q, k, v = tensors()
    calls = []
    binding = patched_attention.Binding(None, None, None)
    binding.callbacks.functions = (lambda *arguments: calls.append(arguments),)
    patched_attention.run_pasa(binding, Causal(), q, k, v, None, sliding_window=2, softcap=30.0)
    assert calls[0][2:] == (None, True, 0.25, (1, -1), 30.0)


def test_chosen_keys_are_the_only_ones_seen():
    q, k, v = tensors()
    indices = torch.tensor([[0, 1], [0, 1], [1, 2], [0, 3], [2, 4], [3, 5]]).expand(2, 6, 2).int()
    causal = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    keep = causal & torch.zeros(2, 6, 6, dtype=torch.bool).scatter(-1, indices.long(), True)[:, None]
    expected = golden(q, k, v, attn_mask=keep)
    torch.testing.assert_close(run(q, k, v, causal, indices=indices), expected, rtol=0, atol=2e-3)
    lowest = torch.finfo(torch.float).min
    floats = torch.zeros(1, 1, 6, 6).masked_fill(~causal, lowest)
    torch.testing.assert_close(run(q, k, v, floats, indices=indices), expected, rtol=0, atol=2e-3)


def test_chosen_blocks_are_the_only_ones_seen():
    """MiniMax M3 chooses blocks of keys for each group of heads; its indexer makes the mask."""
    skip_unless_known("MiniMaxM3VLConfig")
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLIndexer

    indexer = MiniMaxM3VLIndexer.__new__(MiniMaxM3VLIndexer)
    torch.nn.Module.__init__(indexer)
    indexer.block_size, indexer.config = 2, type("Config", (), {"num_attention_heads": 4})
    module = Causal()
    module.indexer = indexer
    blocks = torch.tensor([0, -1]).expand(2, 2, 6, 2).clone()
    blocks[:, 1, 4:, 1] = 2  # the second group's last rows also see the last block
    mask = chosen_keys(module, None, torch.zeros(2, 2, 6, 16), None, blocks, None)
    assert mask[0, 0, 5].tolist() == [True, True, False, False, False, False]
    assert mask[0, 3, 5].tolist() == [True, True, False, False, True, True]
    assert mask[0, 3, 4].tolist() == [True, True, False, False, True, False]
    q, k, v = tensors()
    out = run(q, k, v, module=module, block_indices=blocks)
    torch.testing.assert_close(out, golden(q, k, v, attn_mask=mask), rtol=0, atol=2e-3)
