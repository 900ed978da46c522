"""Generation in FP16 gives the same tokens with `attn_implementation="pasa"` as with transformers' own attention.

The cases are those of transformers' tests of generation, which its source distribution lacks: left padding, caches of a
fixed size, beams, assisted decoding, and a second call that continues from a cache. The reference is SDPA, or eager
attention in models that do not support SDPA.
"""

from __future__ import annotations

import pytest
import torch
import transformers as hf

import pasa
from tests.versions import INSTALLED, since

hf.logging.set_verbosity_error()
MODELS = {
    "qwen2": "sdpa",
    "llama": "sdpa",
    "gemma2": "eager",
    "gemma3": "sdpa",
    "qwen3_moe": "sdpa",
    "gpt_oss": "eager",
}
"""Maps each architecture to the attention that is the reference."""

CLOSE = 2.0**-7  # of the largest logit: eight roundings of FP16
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": 96}
GREEDY |= {"return_dict_in_generate": True, "output_logits": True}


@pytest.fixture(autouse=True)
def registered():
    pasa.register("transformers")


@pytest.fixture
def small(tiny):
    """A function from an architecture to its model in FP16, and the attention that is its reference.

    The weights are ten times as large as usual, so that attention changes the logits. Windows hold 8 tokens.
    """

    def build(name, **overrides):
        windows = {"sliding_window": 8} if name in ("gemma2", "gpt_oss") else {}
        return tiny(name, MODELS[name], initializer_range=0.2, **windows, **overrides).half(), MODELS[name]

    return build


def both(model, reference, run):
    """Return what `run` returns with the reference, and with PASA, which must have served."""
    model.set_attn_implementation(reference)
    expected = run()
    model.set_attn_implementation("pasa")
    calls, attention = [], pasa.attention
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pasa, "attention", lambda *args, **how: calls.append(args[0].dtype) or attention(*args, **how))
        ours = run()
    assert set(calls) == {torch.float16}
    return expected, ours


def check_same(expected, ours):
    """Check that two generations have the same tokens, and logits within the roundings of FP16."""
    assert torch.equal(ours.sequences, expected.sequences)
    for one, other in zip(along_beams(ours), along_beams(expected), strict=True):
        assert (one - other).abs().max() <= CLOSE * other.abs().max()


def along_beams(generated):
    """Return the logits of each step in the beams that became the sequences; beams near a tie change places."""
    if generated.get("beam_indices") is None:
        return generated.logits
    return [
        logits[beams[beams >= 0]] for logits, beams in zip(generated.logits, generated.beam_indices.T, strict=False)
    ]


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_left_padding_changes_no_logit(small, batch, name):
    """The last logits of a padded sequence are those of the sequence alone, and those of the reference."""
    (ids, _), (model, reference) = batch, small(name)
    ids, padding = ids[:1], 11  # more than a window
    padded = torch.cat([ids.flip(1)[:, :padding], ids], 1)  # tokens that would be seen; that of padding embeds as 0
    mask = (torch.arange(padded.shape[1]) >= padding)[None].long()
    places = (mask.cumsum(-1) - 1).clamp(min=0)

    def run():
        alone = model(ids).logits[:, -1]
        hidden = model(padded, attention_mask=mask, position_ids=places).logits[:, -1]
        return alone, hidden, model(padded, position_ids=places).logits[:, -1]

    (alone, _, _), (ours, hidden, seen) = both(model, reference, run)
    largest = alone.abs().max()
    assert (ours - alone).abs().max() <= CLOSE * largest
    assert (hidden - ours).abs().max() <= CLOSE * largest
    assert (seen - ours).abs().max() > 4 * CLOSE * largest, "the test must be able to see the padding"


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_caches(small, batch, name, cache):
    """A padded batch is generated with each cache; a static one has room for more keys than are written."""
    (ids, mask), (model, reference) = batch, small(name)
    if cache == "static" and INSTALLED < (5, 0) and not model._can_compile_fullgraph:
        pytest.skip(f"{name} has no static cache in this version of transformers")
    options = GREEDY | {"attention_mask": mask, "cache_implementation": cache}
    check_same(*both(model, reference, lambda: model.generate(ids, **options)))


@pytest.mark.parametrize("name", MODELS)
def test_beams(small, batch, name):
    (ids, mask), (model, reference) = batch, small(name)
    options = GREEDY | {"attention_mask": mask, "num_beams": 3, "num_return_sequences": 2, "output_scores": True}
    check_same(*both(model, reference, lambda: model.generate(ids, **options)))


@pytest.mark.parametrize("by", ["model", "prompt"])
@pytest.mark.parametrize("name", MODELS)
def test_assisted_decoding(small, batch, name, by):
    """A smaller model, or the prompt itself, proposes tokens, which the model checks several at a time."""
    (ids, _), (model, reference) = batch, small(name)
    assistant = {"prompt_lookup_num_tokens": 3}
    if by == "model":
        assistant = {"assistant_model": small(name, num_hidden_layers=1, layer_types=["full_attention"])[0]}
    options = GREEDY | assistant
    check_same(*both(model, reference, lambda: model.generate(ids[1:], **options)))


@since("4.56", "the cache of an earlier call cannot be passed in")
@pytest.mark.parametrize("name", MODELS)
def test_a_second_call_continues_from_the_cache(small, batch, name):
    (ids, _), (model, reference) = batch, small(name)

    def run():
        first = model.generate(ids[1:], **GREEDY | {"max_new_tokens": 4, "eos_token_id": None})
        return model.generate(first.sequences, past_key_values=first.past_key_values, **GREEDY)

    check_same(*both(model, reference, run))
