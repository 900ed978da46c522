"""A patched transformers model computes what it did before: masks, caches, windows, decoding strategies, keywords."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface

import pasa
from pasa.patching import transformers_attention as patched_attention
from tests.versions import since

MODELS = ("qwen2", "llama", "mistral", "qwen3", "gemma3", "phi3", "gpt2", "gemma4")
PRECISIONS = ("fp32", "pasa")
FACTOR = 2.0
"""The bound of this file: error against FP32 eager <= FACTOR x that of `naive_fp16`, which rounds only what must be."""


@pytest.fixture
def agree(naive):
    """Return an assertion that `compute(model)` of the patched model is within the bound of this file."""

    def check(model, compute, config=None, **patch):
        with torch.no_grad():
            expected = compute(model)
            before = model.config._attn_implementation
            model.set_attn_implementation(naive)
            bound = FACTOR * (compute(model) - expected).abs().max()
            model.set_attn_implementation(before)
            with pasa.patch_pipeline(model, config=config, **patch):
                error = (compute(model) - expected).abs().max()
            assert torch.equal(compute(model), expected), "unpatching must restore the same bits"
        assert 0 < error <= bound, f"error {error:.2e} > {FACTOR} x naive = {bound:.2e}"

    return check


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MODELS)
def test_left_padded_batch(tiny, batch, agree, name, precision):
    """A left-padded batch agrees; its 21 tokens exceed the windows of 8 of mistral, gemma3 and gemma4."""
    ids, mask = batch
    compute = lambda model: model(ids, attention_mask=mask).logits[mask.bool()]  # noqa: E731
    agree(tiny(name), compute, pasa.PasaConfig(precision=precision))


@pytest.mark.parametrize("name", MODELS)
def test_second_chunk_on_a_filled_cache(tiny, batch, agree, name):
    ids, _ = batch

    def compute(model):
        first = model(ids[:, :9], use_cache=True)
        return model(ids[:, 9:], past_key_values=first.past_key_values).logits

    agree(tiny(name), compute)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_tokens(tiny, batch, name, cache):
    """Greedy decoding gives the same tokens with every kind of cache.

    A static cache is longer than the sequence in it. Without a mask, causality is there aligned to the first key.
    """
    ids, mask = batch
    for given_ids, given_mask in ((ids, mask), (ids, None), (ids[:1, :7], None)):
        options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
        model = tiny(name)
        expected = model.generate(given_ids, attention_mask=given_mask, **options)
        with pasa.patch_pipeline(model):
            assert torch.equal(model.generate(given_ids, attention_mask=given_mask, **options), expected)


@pytest.mark.parametrize(
    "strategy",
    [
        {"num_beams": 3, "do_sample": False},
        {"do_sample": True, "top_k": 20},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 4, "num_return_sequences": 2, "do_sample": False},
    ],
    ids=["beams", "sampling", "several sequences", "several beams"],
)
def test_decoding_strategies(tiny, batch, strategy):
    ids, mask = batch
    model = tiny("qwen2", "sdpa")

    def run():
        torch.manual_seed(7)
        return model.generate(ids, attention_mask=mask, max_new_tokens=8, pad_token_id=0, **strategy)

    expected = run()
    with pasa.patch_pipeline(model):
        assert torch.equal(run(), expected)


def test_packed_sequences(tiny, batch, agree):
    """Two sequences in one row, separated only by their position ids, agree."""
    ids, _ = batch
    positions = torch.cat([torch.arange(9), torch.arange(12)])[None]
    compute = lambda model: model(ids[:1], position_ids=positions, use_cache=False).logits  # noqa: E731
    agree(tiny("llama"), compute)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_mask_of_the_callers_own(tiny, batch, kind):
    """A 4-D mask of the caller is used unchanged; sdpa accepts both kinds, so it is the reference."""
    ids, _ = batch
    visible = torch.ones(21, 21, dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1)
    visible[..., 3:7] = torch.eye(21, dtype=torch.bool)[:, 3:7]
    mask = visible if kind == "bool" else torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float).min)
    model = tiny("qwen2", "sdpa")
    with torch.no_grad():
        expected, causal = model(ids, attention_mask=mask).logits, model(ids).logits
        with pasa.patch_pipeline(model):
            error = (model(ids, attention_mask=mask).logits - expected).abs().max()
    assert error < 0.05 * (causal - expected).abs().max()


def test_padded_rows_equal_unpadded_rows(tiny, batch):
    """A row gives the same result with and without padding.

    Story: if only the attention function is registered, transformers passes it no mask, even with padding. The function
    `_preprocess_mask_arguments` returns None for a name that the mask registry does not know, so a left-padded row
    silently attends to its padding. The patch registers both.
    """
    ids, mask = batch
    seen = []

    def spy(module, query, key, value, attention_mask, **kwargs):
        seen.append(attention_mask)
        return query.transpose(1, 2).contiguous(), None

    model = tiny("qwen2")
    AttentionInterface.register("attention_alone", spy)
    try:
        model.set_attn_implementation("attention_alone")
        model(ids, attention_mask=mask)
    finally:
        model.set_attn_implementation("eager")
        del AttentionInterface._global_mapping["attention_alone"]
    assert seen == [None, None]

    with torch.no_grad(), pasa.patch_pipeline(model, config=pasa.PasaConfig(precision="fp32")):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        padded = model(ids, attention_mask=mask, position_ids=positions).logits
        alone = model(ids[:1, 5:]).logits
        unmasked = model(ids, position_ids=positions).logits
    assert torch.isfinite(padded).all(), "fully masked rows must not become NaN"
    difference = (padded[0, 5:] - alone[0]).abs().max()
    assert difference < 1e-3 * (unmasked[0, 5:] - alone[0]).abs().max(), "the test must be able to see padding"


@pytest.mark.parametrize("keep", [1, 3])
def test_queries_that_a_model_drops(tiny, batch, keep):
    """A model that drops all but its last queries in some layers is right, because it gets an explicit mask.

    Story: Gemma 4 keeps only the last queries in its last layers, and handles a missing mask only for the name "sdpa".
    Under any other name the three remaining queries look like the first three.
    """
    ids, _ = batch
    model = tiny("gemma4 with shared keys")
    with torch.no_grad():
        expected = model(ids[:, :7]).logits[:, -keep:]
        with pasa.patch_pipeline(model):
            error = (model(ids[:, :7], logits_to_keep=keep).logits - expected).abs().max()
    assert error < 0.02 * expected.abs().max()


def test_values_narrower_than_keys(tiny, batch, agree):
    """Multi-head latent attention agrees: head dimension 24 in q and k, 16 in v."""
    ids, mask = batch
    agree(tiny("deepseek_v3"), lambda model: model(ids, attention_mask=mask).logits[mask.bool()])


def test_bidirectional_and_cross_attention(batch):
    ids, mask = batch
    sizes = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
    config = hf.BartConfig(
        **sizes, encoder_attention_heads=4, decoder_attention_heads=4, vocab_size=97, max_position_embeddings=64
    )
    torch.manual_seed(0)
    model = hf.BartModel(config).eval()
    with torch.no_grad():
        for padding in (mask, None):
            expected = model(ids, attention_mask=padding, decoder_input_ids=ids[:, :7])[0]
            with pasa.patch_pipeline(model) as handle:
                error = (model(ids, attention_mask=padding, decoder_input_ids=ids[:, :7])[0] - expected).abs().max()
                assert len(handle.report().patched) == 6
            assert error < 1e-3 * expected.abs().max()


@since("5.0", "Qwen2-VL has other configuration keys")
def test_text_of_a_vision_language_model(tiny_vl, batch, agree):
    ids, mask = batch
    agree(tiny_vl("eager"), lambda model: model(ids, attention_mask=mask).logits[mask.bool()])


@since("4.57", "the model does not compile as one graph without a patch either")
def test_a_patched_model_compiles_as_one_graph(tiny, batch):
    model = tiny("qwen2", "sdpa")
    with torch.no_grad(), pasa.patch_pipeline(model):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(batch[0]).logits, model(batch[0]).logits)


def run_binding(module, query, key, value, mask=None, **kwargs):
    binding = patched_attention.Binding(pasa.PasaConfig(precision="fp32"), None, handle=None)
    return patched_attention.run_pasa(binding, module, query, key, value, mask, **kwargs)[0]


class Causal(torch.nn.Module):
    is_causal = True


def tensors(queries, keys):
    generator = torch.Generator().manual_seed(queries * 100 + keys)
    shape = lambda heads, length: torch.randn(2, heads, length, 16, generator=generator)  # noqa: E731
    return shape(4, queries), shape(2, keys), shape(2, keys)


@settings(max_examples=40, deadline=None)
@given(queries=st.integers(1, 9), keys=st.integers(1, 12), window=st.none() | st.integers(1, 12))
def test_a_missing_mask_means_upper_left_causality_within_the_window(queries, keys, window):
    """Without a mask, query i is at the position of key i, and sees the keys of its window.

    A single query is a decoded token, at the position of the last key.
    """
    query, key, value = tensors(queries, keys)
    position = torch.arange(queries)[:, None] + (keys - 1 if queries == 1 else 0)
    distance = position - torch.arange(keys)[None, :]
    visible = (distance >= 0) & (distance < (window or 10**6))
    out = run_binding(Causal(), query, key, value, sliding_window=window)
    explicit = run_binding(Causal(), query, key, value, visible[None, None])
    assert out.is_contiguous()
    assert out.shape == (2, queries, 4, 16)
    torch.testing.assert_close(out, explicit, rtol=0, atol=2**-10)


def test_the_call_may_overrule_the_modules_causality():
    query, key, value = tensors(5, 5)
    full = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    torch.testing.assert_close(
        run_binding(Causal(), query, key, value, is_causal=False),
        run_binding(Causal(), query, key, value, full),
        rtol=0,
        atol=2**-10,
    )


def test_unknown_causality_is_refused():
    with pytest.raises(NotImplementedError, match=r"Linear.*is_causal"):
        run_binding(torch.nn.Linear(1, 1), *tensors(5, 5))


BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k")


@torch.no_grad()
@pytest.mark.parametrize("rest", ["position_ids", "attention_mask", "no position"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_training_keywords_of_packed_sequences(tiny, batch, name, rest):
    """The keywords of packed sequences are honoured: no token attends to another sequence.

    Story: a data collator for packed sequences adds these keywords to every batch, and each was refused. Flash
    attention uses the borders. The mask of transformers knows them only from the position ids, and not at all if the
    caller passes a mask: then each token attended to the sequence before its own. Bound: rounding of two layers.
    """
    ids, _ = batch
    borders = torch.tensor([0, 9, 21], dtype=torch.int32)
    packed = dict.fromkeys(BORDERS, borders) | {"max_length_q": 12, "max_length_k": 12}
    packed |= {"seq_idx": torch.tensor([[0] * 9 + [1] * 12]), "shift_labels": ids[:1], "labels": ids[:1]}
    positions = torch.cat([torch.arange(9), torch.arange(12)])[None]
    packed |= {"position_ids": positions} if rest != "no position" else {}
    packed |= {"attention_mask": torch.ones(1, 21, dtype=torch.long)} if rest == "attention_mask" else {}
    model = tiny(name)
    alone = torch.cat([model(part).logits for part in (ids[:1, :9], ids[:1, 9:])], dim=1)
    one = model(ids[:1]).logits
    with pasa.patch_pipeline(model):
        error = (model(ids[:1], use_cache=False, **packed).logits - alone).abs().max()
    assert error <= 2 * 2**-11 * alone.abs().max()
    assert error < 0.05 * (one - alone).abs().max(), "the test must be able to see the border"


@pytest.mark.parametrize(("given", "queries"), [(BORDERS[:1], 5), (BORDERS[1:], 5), (BORDERS, 1)])
def test_borders_that_cannot_be_honoured_are_refused(given, queries):
    """Borders of queries or keys alone, or of a sequence that continues a cache, are refused."""
    borders = dict.fromkeys(given, torch.tensor([0, 2, 5]))
    with pytest.raises(NotImplementedError, match=f"Causal: {given[0]} is not supported here"):
        run_binding(Causal(), *tensors(queries, 5), **borders)


def test_borders_count_on_over_the_rows_of_a_batch():
    """Borders count tokens across the rows of a batch, with a float mask, a bool mask or none."""
    query, key, value = tensors(5, 5)
    borders = dict.fromkeys(BORDERS, torch.tensor([0, 2, 5, 9, 10]))
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    blocks = [[torch.ones(size, size) for size in sizes] for sizes in ((2, 3), (4, 1))]
    same = torch.stack([torch.block_diag(*row).bool() for row in blocks])
    expected = run_binding(Causal(), query, key, value, (same & causal)[:, None])
    for mask in (None, causal[None, None], torch.zeros(1, 1, 5, 5).masked_fill(~causal, torch.finfo(torch.float).min)):
        torch.testing.assert_close(
            run_binding(Causal(), query, key, value, mask, **borders), expected, rtol=0, atol=2**-10
        )


@pytest.mark.parametrize(
    "keyword",
    [
        *("position_ids", "use_cache", "output_router_logits", "cache_position", "shift_labels", "seq_idx"),
        "input_ids",  # Glm5Next passes them to every layer, for experts that are chosen by token
        "grid_thw",  # Lfm3VL passes image sizes to every layer, for convolutions
        *("max_length_q", "max_length_k"),
    ],
)
def test_informative_keywords_change_nothing(keyword):
    query, key, value = tensors(5, 5)
    out = run_binding(Causal(), query, key, value, **{keyword: torch.arange(5), "softcap": None, "s_aux": None})
    assert torch.equal(out, run_binding(Causal(), query, key, value))


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        *((name, torch.ones(1)) for name in ("head_mask", "cu_seq_lens_q")),
        *(("cache", object()), ("output_attentions", True), ("dropout", 0.1), ("new_idea", 1)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_keywords_that_would_change_the_result_are_refused_by_name(keyword, value):
    with pytest.raises(NotImplementedError, match=rf"Causal: {keyword}"):
        run_binding(Causal(), *tensors(5, 5), **{keyword: value})
