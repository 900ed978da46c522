"""Models with PASA in transformers' continuous batching give the tokens that they give alone.

The engine is transformers' own, with its paged cache: prompts that share a prefix, are longer than a step, and end at
different times. Its background thread reports an error with the request, so every request is checked to have none.
"""

from __future__ import annotations

import contextlib
import functools
import inspect

import pytest
import torch
import transformers as hf

import pasa
from pasa.patching import transformers_packed, transformers_serving
from pasa.patching.callbacks import Callbacks, patched_modules
from tests.versions import INSTALLED, since

hf.logging.set_verbosity_error()
pytestmark = since("5.24", "modules do not update the paged cache")
MODELS = {"qwen2": "sdpa", "gemma3": "sdpa", "gemma2": "eager", "gpt_oss": "eager", "qwen3_moe": "sdpa"}
"""Maps each architecture to its attention before; they have windows, soft caps and sinks among them."""

TOKENS = 10
PROMPTS = [[5, 6, 7, 8, 9], [11, 12], [*range(20, 60)], [*range(20, 52), 7, 3], [31]]
GREEDY = hf.GenerationConfig(max_new_tokens=TOKENS, do_sample=False, eos_token_id=[], pad_token_id=0)


@pytest.fixture
def small(tiny):
    """A function from an architecture to its FP16 model, with weights so large that attention changes tokens.

    Embeddings and head are not tied, because such a model repeats its last token whatever the attention is.
    """

    def build(name, attention=None, **overrides):
        limits = {"sliding_window": 8} if name in ("gemma2", "gpt_oss") else {}
        limits |= {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 1} if name == "gemma2" else {}
        overrides = {"initializer_range": 0.2, "tie_word_embeddings": False} | limits | overrides
        return tiny(name, attention or MODELS[name], **overrides).half()

    return build


def settings(**others):
    """Return the engine's settings: 16 tokens a step, so that long prompts take several steps, in pages of 4."""
    return hf.ContinuousBatchingConfig(num_blocks=128, page_size=4, max_batch_tokens=16, **others)


def batched(model, **others):
    """Return the tokens of every prompt from one continuous batch, and its calls of `attention_varlen`."""
    calls, attention = [], pasa.attention_varlen
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pasa, "attention_varlen", lambda *args, **how: calls.append(args) or attention(*args, **how))
        outputs = model.generate_batch(PROMPTS, GREEDY, settings(), warmup=False, **others)
    outputs = [outputs[f"req_{n}"] for n in range(len(PROMPTS))]
    assert [each.error for each in outputs] == [None] * len(PROMPTS)
    return [list(each.generated_tokens) for each in outputs], calls


def alone(model):
    """Return the tokens of every prompt from `generate`, one prompt after another."""
    return [model.generate(torch.tensor([each]), GREEDY)[0, len(each) :].tolist() for each in PROMPTS]


@pytest.mark.parametrize("how", ["patched", "by name"])
@pytest.mark.parametrize("name", MODELS)
def test_a_batch_has_the_tokens_of_its_prompts_alone(small, name, how):
    model = small(name)
    if how == "patched":
        with pasa.patch_pipeline(model):
            expected, (tokens, calls) = alone(model), batched(model)
    else:
        pasa.register("transformers")
        model.set_attn_implementation("pasa")
        expected, (tokens, calls) = alone(model), batched(model)
    assert tokens == expected
    assert sum(len(set(each)) > 1 for each in tokens) > len(tokens) / 2  # most do not just repeat a token
    assert {each[0].dtype for each in calls} == {torch.float16}
    packed = max(len(each[3]) - 1 for each in calls)
    assert packed > 1, "no step had several sequences"


def test_scores_beyond_fp16_do_not_change_tokens(small):
    """Eager attention in FP16 stores infinite scores of this model; its tokens in FP32 are the reference."""
    model = small("qwen2", "eager").float()
    with torch.no_grad():
        for layer in model.model.layers:
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                part.bias.add_(100)  # q.k near 160,000 in a head dimension of 16
    expected = alone(model)
    with pasa.patch_pipeline(model.half()):
        ours, _ = batched(model)
    outputs = model.generate_batch(PROMPTS, GREEDY, settings(), warmup=False)
    eager = [list(outputs[f"req_{n}"].generated_tokens) for n in range(len(PROMPTS))]
    assert ours == expected
    assert eager != expected


def test_a_batch_invariant_model_has_the_same_tokens_in_every_batch(small):
    model = small("qwen2")
    with pasa.patch_pipeline(model, config=pasa.PasaConfig(batch_invariant=True)):
        tokens, _ = batched(model)
        single = model.generate_batch(PROMPTS[:1], GREEDY, settings(), warmup=False)["req_0"]
    assert list(single.generated_tokens) == tokens[0]


def test_callbacks_see_each_sequence_with_its_keys(small):
    """The queries of a sequence are the last of its keys, and no sequence is longer than prompt and answer."""
    model, seen = small("gemma3"), []
    with pasa.patch_pipeline(model):
        for _, _, callbacks in patched_modules({"": model}):
            callbacks.functions = (lambda *args: seen.append(args),)
        batched(model)
    longest = max(map(len, PROMPTS)) + TOKENS
    assert all(q.shape[:2] == (1, 4) and k.shape[:2] == (1, 2) for q, k, *_ in seen)
    assert all(q.shape[2] <= k.shape[2] <= longest for q, k, *_ in seen)
    assert {(mask, causal) for _, _, mask, causal, *_ in seen} == {(None, True)}
    assert {window for *_, window, _ in seen} == {(-1, -1), (7, -1)}


def test_flash_attention_does_not_replace_pasa(small, monkeypatch):
    """Transformers switches other models to flash attention where that is installed."""
    from transformers.generation.continuous_batching import continuous_api

    for version in (2, 3):
        monkeypatch.setattr(continuous_api, f"is_flash_attn_{version}_available", lambda **_: True)
    model = small("qwen2")
    with pasa.patch_pipeline(model):
        name = model.config._attn_implementation
        _, calls = batched(model)
        assert model.config._attn_implementation == name
        assert calls
    with pytest.raises((ImportError, ValueError), match=r"[Ff]lash"):
        model.init_continuous_batching(GREEDY, settings())


def test_other_models_are_treated_as_before(small):
    pasa.register("transformers")
    model = small("qwen2", "eager")
    manager = model.init_continuous_batching(GREEDY, settings())
    assert model.config._attn_implementation == "paged|eager"
    manager.stop()
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="flex_attention is not supported for continuous batching"):
        model.init_continuous_batching(GREEDY, settings())


def test_a_partly_patched_model_is_refused(small):
    model = small("qwen2")
    left_out = pytest.raises(NotImplementedError, match=r"model\.layers\.1\.self_attn keeps its own attention")
    with pasa.patch_pipeline(model, policy=lambda name, module: "layers.0" in name), left_out:
        model.init_continuous_batching(GREEDY, settings())


@pytest.mark.parametrize("how", ["patched", "by name"])
def test_modules_that_leave_the_cache_to_the_attention_are_refused_at_the_start(small, monkeypatch, how):
    """Before 5.24 all modules do, and a model's own code may still."""
    model = small("qwen2")
    kind = type(model.model.layers[1].self_attn)

    @functools.wraps(kind.forward)
    def forward(self, *args, past_key_values=None, **kwargs):
        return forward.__wrapped__(self, *args, **kwargs)

    forward.__signature__ = inspect.signature(lambda self, hidden_states, past_key_values=None, **kwargs: None)
    monkeypatch.setattr(kind, "forward", forward)
    if how == "by name":
        pasa.register("transformers")
        model.set_attn_implementation("pasa")
    patch = pasa.patch_pipeline(model) if how == "patched" else contextlib.nullcontext()
    expected = r"model\.layers\.0\.self_attn \(Qwen2Attention\) leaves its paged cache .* transformers 5\.24"
    with patch, pytest.raises(NotImplementedError, match=expected):
        model.init_continuous_batching(GREEDY, settings())


@pytest.mark.parametrize("before", ["patched", "unpatched"])
def test_a_manager_that_was_kept_is_refused_after_a_patch_or_its_end(small, before):
    """Its batches have a mask or lack one, as the attention needed when the manager was made."""
    model = small("qwen2")
    handle = pasa.patch_pipeline(model)
    if before == "unpatched":
        handle.unpatch()
    model.generate_batch(PROMPTS, GREEDY, settings(), warmup=False, persistent_manager=True)
    handle = handle.unpatch() if before == "patched" else pasa.patch_pipeline(model)
    with pytest.raises(ValueError, match=r"call model\.destroy_cached_continuous_batching_manager"):
        model.generate_batch(PROMPTS, GREEDY, settings(), warmup=False)
    model.destroy_cached_continuous_batching_manager()
    model.generate_batch(PROMPTS, GREEDY, settings(), warmup=False)
    if handle is not None:
        handle.unpatch()


@pytest.mark.parametrize(
    ("field", "value"),
    [("use_cuda_graph", (True, False)), ("varlen_compile_config", object()), ("use_cuda_graph", True)],
)
def test_padded_batches_are_refused_at_the_start(small, monkeypatch, field, value):
    """Transformers turns graphs off itself on a machine without a GPU, so the resolved settings are replaced."""
    from transformers.generation.continuous_batching import continuous_api

    resolve = continuous_api.resolve_continuous_batching_config

    def resolved(**arguments):
        config = resolve(**arguments)
        setattr(config, field, value)
        return config

    monkeypatch.setattr(continuous_api, "resolve_continuous_batching_config", resolved)
    model = small("qwen2")
    with pasa.patch_pipeline(model), pytest.raises(NotImplementedError, match=r"use_cuda_graph=False"):
        model.init_continuous_batching(GREEDY, settings())


@pytest.mark.parametrize("name", ["position_bias", "indices", "attention_mask"])
def test_arguments_beyond_packed_sequences_are_refused(name):
    q = torch.zeros(1, 2, 3, 16).half()
    ends = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=f"{name} is not supported in continuous batching"):
        transformers_packed.attend_packed(
            Callbacks(), q, q, q, (ends, ends), (3, 3), None, {name: q}, scale=1.0, softcap=None, sinks=None
        )


def test_transformers_still_decides_where_pasa_replaces_the_decision():
    """Transformers has moved its interface if this fails, and then refuses PASA or replaces it by flash attention."""
    from transformers.generation.continuous_batching import ContinuousBatchingManager, PagedAttentionCache

    assert [*inspect.signature(PagedAttentionCache.update).parameters] == transformers_serving.UPDATE
    pasa.register("transformers")
    decide = ContinuousBatchingManager.switch_to_cb_friendly_attn
    assert decide.__wrapped__.__module__.startswith("transformers.")
    assert "not supported for continuous batching" in inspect.getsource(decide.__wrapped__)
    assert INSTALLED >= (5, 24)
