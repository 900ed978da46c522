"""Modules that write attention out as product, softmax and product run PASA when patched.

CodeGen and GPT-J write it out before transformers 5.24, and take it from the registry since.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers as hf

import pasa
from pasa.patching.callbacks import Callbacks
from pasa.patching.scores import Scores
from pasa.patching.sdpa_calls import make_attention
from pasa.patching.written_out import Follower, follow_module
from tests.versions import since

pytestmark = since("5.0", "these architectures are written differently")

SIZES = {"hidden_size": 64, "vocab_size": 97, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": 1}
DEEP = {"num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = {
    "bloom": lambda: hf.BloomConfig(**SIZES, n_layer=2, n_head=4),
    "codegen": lambda: hf.CodeGenConfig(
        n_embd=64, n_layer=2, n_head=4, vocab_size=97, rotary_dim=8, n_positions=64, eos_token_id=None, bos_token_id=1
    ),
    "falcon": lambda: hf.FalconConfig(**SIZES, **DEEP, alibi=False),
    "gptj": lambda: hf.GPTJConfig(
        n_embd=64, n_layer=2, n_head=4, vocab_size=97, rotary_dim=8, n_positions=64, eos_token_id=None, bos_token_id=1
    ),
    "gpt_neo": lambda: hf.GPTNeoConfig(
        **SIZES,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
        max_position_embeddings=64,
    ),
    "mpt": lambda: hf.MptConfig(d_model=64, n_layers=2, n_heads=4, vocab_size=97, max_seq_len=64, eos_token_id=None),
}


def build(name):
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").eval()
    for each in model.parameters():
        if each.ndim > 1:
            each.data.normal_(std=(each.numel() / each.shape[0]) ** -0.5)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_an_fp16_model_is_as_exact_patched_as_unpatched(batch, name):
    ids, mask = batch
    model = build(name)
    call = lambda model: model(ids, attention_mask=mask).logits[mask.bool()].float()  # noqa: E731
    with torch.no_grad():
        truth, half = call(model), copy.deepcopy(model).half()
        before = call(half)
        with pasa.patch_pipeline(half) as handle:
            assert len(handle.report().patched) == 2
            assert not handle.report().skipped
            patched = call(half)
            with pytest.raises(NotImplementedError, match="output_attentions"):
                half(ids, output_attentions=True)
        assert torch.equal(call(half), before)
    assert not torch.equal(patched, before)
    assert (patched - truth).abs().max() <= 1.5 * (before - truth).abs().max()


@pytest.mark.parametrize("name", CONFIGS)
def test_generated_tokens(batch, name):
    model, options = build(name), {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(batch[0], attention_mask=batch[1], **options)
    with pasa.patch_pipeline(model, config=pasa.PasaConfig(precision="fp32")):
        assert torch.equal(model.generate(batch[0], attention_mask=batch[1], **options), expected)


def test_gradients(batch):
    model = build("bloom")

    def gradient():
        model.zero_grad()
        model(batch[0], attention_mask=batch[1]).logits[batch[1].bool()].square().mean().backward()
        return model.transformer.h[0].self_attention.query_key_value.weight.grad.clone()

    expected = gradient()
    with pasa.patch_pipeline(model, config=pasa.PasaConfig(precision="fp32")):
        ours = gradient()
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-2 * float(expected.abs().max()))
    assert not torch.equal(ours, expected)


def test_a_copy_is_unpatched_and_classes_come_back(batch):
    model = build("bloom")
    attention = model.transformer.h[0].self_attention
    kind = type(attention)
    handle = pasa.patch_pipeline(model)
    assert pasa.patch_pipeline(model) is handle
    assert type(attention) is not kind
    assert isinstance(attention, kind)
    assert type(copy.deepcopy(model).transformer.h[0].self_attention) is kind
    assert type(pickle.loads(pickle.dumps(attention))) is kind
    handle.unpatch()
    assert type(attention) is kind


def test_a_compiled_model_agrees(batch):
    model = build("gptj")
    with torch.no_grad(), pasa.patch_pipeline(model):
        expected = model(batch[0]).logits
        assert torch.equal(torch.compile(model, backend="eager")(batch[0]).logits, expected)


def test_a_policy_may_decline_a_module(batch):
    with pasa.patch_pipeline(build("bloom"), policy=lambda name, module: ".0." not in name) as handle:
        assert handle.report().patched == ("transformer.h.1.self_attention",)
        assert handle.report().skipped == (("transformer.h.0.self_attention", "declined by the policy"),)


# ---- single modules


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


Q, K, V = (randn(2, 4, 6, 8, seed=seed) for seed in range(3))
CAUSAL = torch.ones(6, 6, dtype=torch.bool).tril()
LOWEST = torch.finfo(torch.float).min


class Host(torch.nn.Module):
    """A module whose forward is a function of q, k and v."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, q, k, v):
        return self.function(q, k, v)


def flat(x):
    return x.reshape(8, *x.shape[-2:])


HOSTS = {
    "plain": lambda q, k, v: ((q @ k.mT) / 8**0.5).softmax(-1) @ v,
    "masked": lambda q, k, v: torch.softmax((q @ k.mT).masked_fill(~CAUSAL, LOWEST), dim=-1) @ v,
    "masked in place": lambda q, k, v: in_place(q @ k.mT).softmax(-1) @ v,
    "chosen": lambda q, k, v: torch.where(CAUSAL, torch.matmul(q, k.mT) * 0.3, torch.tensor(-1e9)).softmax(-1) @ v,
    "biased": lambda q, k, v: torch.nn.functional.softmax(0.3 * (q @ k.mT) + Q[..., :6, :6].sum(-1, True), -1) @ v,
    "scaled bias": lambda q, k, v: (((q @ k.mT) + CAUSAL.float()) * 0.5).softmax(-1) @ v,
    "reshaped": lambda q, k, v: torch.bmm(
        (torch.bmm(flat(q), flat(k).mT).view(2, 4, 6, 6) + CAUSAL.float().log()).view(8, 6, 6).softmax(-1), flat(v)
    ).view(2, 4, 6, 8),
    "with a bias first": lambda q, k, v: torch.bmm(
        torch.baddbmm(randn(8, 1, 6), flat(q), flat(k).mT, beta=0.5, alpha=0.2).float().softmax(-1), flat(v)
    ),
    "einsum": lambda q, k, v: torch.einsum(
        "bnij,jbnd->ibnd", torch.einsum("bnid,bnjd->bnij", q, k).softmax(3), v.permute(2, 0, 1, 3)
    ),
    "by head": lambda q, k, v: ((q @ k.mT) * torch.tensor([0.1, 0.2, 0.3, 0.4])[:, None, None]).softmax(-1) @ v,
    "two products": lambda q, k, v: ((q @ k.mT) + (q @ k.mT).flip(-1)).softmax(-1) @ v,
    "windows": lambda q, k, v: ((q[:, None] @ k[:, None].mT) + CAUSAL.float().log()).softmax(-1) @ v[:, None],
    "narrow values": lambda q, k, v: (q @ k.mT).softmax(-1) @ v[..., :3],
    "sdpa": lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),
}


def in_place(scores):
    scores.masked_fill_(~CAUSAL, LOWEST)
    scores /= 2
    return scores


@pytest.mark.parametrize("name", HOSTS)
def test_forms_of_attention(monkeypatch, name):
    """Each form gives its own result, through one call of `pasa.attention` and no product of the host."""
    calls, unchanged = [], pasa.attention
    monkeypatch.setattr(pasa, "attention", lambda *args, **kwargs: calls.append(kwargs) or unchanged(*args, **kwargs))
    host = Host(HOSTS[name])
    expected = host(Q, K, V)
    undo = follow_module(host, make_attention(pasa.PasaConfig(precision="fp32"), None, Callbacks(), "Host"))
    out = host(Q, K, V)
    assert len(calls) == 1
    assert type(out) is torch.Tensor
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected, rtol=0, atol=4e-3)
    undo()
    assert torch.equal(host(Q, K, V), expected)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda q, k, v: q + v, "Host: no attention was recognised"),
        (lambda q, k, v: (q @ k.mT).sigmoid() @ v, "Host: no attention was recognised"),
        (lambda q, k, v: (q @ k.mT).softmax(-1).cumsum(-1) @ v, "weights are used in a way"),
        (lambda q, k, v: shifted(q @ k.mT).softmax(-1) @ v, "scores are used in a way"),
        (lambda q, k, v: lowered(q @ k.mT).softmax(-1) @ v, "scores are used in a way"),
        (lambda q, k, v: torch.dropout((q @ k.mT).softmax(-1), 0.5, True) @ v, r"dropout=0\.5.*model\.eval"),
    ],
)
def test_what_cannot_be_followed_is_refused(function, reason):
    host = Host(function)
    follow_module(host, make_attention(None, None, Callbacks(), "Host"))
    with pytest.raises(NotImplementedError, match=reason):
        host(Q, K, V)


def shifted(scores):
    """Subtract the maximum, which the host computes from scores of its own, and which may have overflowed."""
    return scores - scores.amax(-1, keepdim=True)


def lowered(scores):
    """Do the same by `max`. Story: its keywords were taken for a second tensor, so the host got a TypeError."""
    return scores - scores.max(dim=-1, keepdim=True).values


def test_weights_are_not_returned():
    host = Host(lambda q, k, v: (lambda weights: (weights @ v, weights))((q @ k.mT).softmax(-1)))
    follow_module(host, make_attention(None, None, Callbacks(), "Host"))
    out, weights = host(Q, K, V)
    assert weights is None
    assert out.shape == V.shape


def test_scores_look_like_the_tensor_that_they_stand_for():
    with Follower(lambda *args, **kwargs: None):
        scores = Q @ K.mT
        assert isinstance(scores, Scores)
        assert (scores.shape, scores.size(-1), scores.dtype, scores.device) == ((2, 4, 6, 6), 6, Q.dtype, Q.device)
        torch.testing.assert_close(scores[..., :2], (Q @ K.mT).computed()[..., :2])


def test_a_hook_may_ask_weights_for_what_a_tensor_lacks():
    """Story: a hook on every module asked Bloom's dropout for ``sample``, and the call was refused."""
    host = Host(lambda q, k, v: weights @ v if not hasattr(weights := (q @ k.mT).softmax(-1), "sample") else None)
    follow_module(host, make_attention(None, None, Callbacks(), "Host"))
    assert host(Q, K, V).shape == V.shape
