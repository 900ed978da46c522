"""Greedy answers: batches, ends, logits that are NaN; and counts of the scores that FP16 cannot store."""

from itertools import count

import pytest
import torch
import transformers as hf

import pasa
from pasa.eval.kit.overflow_fixture import inject_overflow
from pasa.eval.models.longbench import generation


@pytest.fixture(scope="module")
def model(steady):
    return hf.Qwen2ForCausalLM.from_pretrained(steady).eval()


@pytest.fixture
def rigged(steady):
    """A function that returns the model with its logits changed in place, by step."""

    def rig(change):
        model, steps = hf.Qwen2ForCausalLM.from_pretrained(steady).eval(), count()
        model.lm_head.register_forward_hook(lambda module, args, logits: [logits, change(next(steps), logits)][0])
        return model

    return rig


def fields(answers, name):
    return [each[name] for each in answers]


def ids(tokenizer, *texts):
    return [tokenizer(text).input_ids for text in texts]


def test_greedy_is_the_models_own(model, tokenizer):
    prompt = ids(tokenizer, "Once upon a time")[0]
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(12):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    [answers] = generation.answer(model, tokenizer, [prompt], 12)
    assert answers["pred"] == tokenizer.decode(tokens[len(prompt) :], skip_special_tokens=True)
    assert (answers["new_tokens"], answers["prompt_tokens"], answers["broken"]) == (12, len(prompt), False)
    assert min(answers["prefill_s"], answers["decode_s"]) > 0


def test_a_batch_answers_as_its_members_do(model, tokenizer):
    prompts = ids(tokenizer, "Once upon a time", "A", "In the beginning was the word")
    alone = [fields(generation.answer(model, tokenizer, [prompt], 8), "pred")[0] for prompt in prompts]
    assert fields(generation.answer(model, tokenizer, prompts, 8), "pred") == alone
    assert len(set(alone)) > 1


def test_ends_are_kept_out_of_the_text_and_stop(model, tokenizer, monkeypatch):
    prompt = ids(tokenizer, "Once upon a time")[0]
    [free] = generation.answer(model, tokenizer, [prompt], 8)
    third = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, len(prompt) + 2].item()
    monkeypatch.setattr(model.generation_config, "eos_token_id", [256, third])
    [cut, _] = generation.answer(model, tokenizer, [prompt, prompt[:-1]], 8)
    assert cut["new_tokens"] <= 3
    assert free["pred"].startswith(cut["pred"])


def test_samsum_begins_with_a_word_and_ends_with_its_line(rigged, tokenizer):
    """The line break is the likeliest token at every step: it is forbidden at the first, and ends the answer at the
    second."""
    line_break = tokenizer.encode("\n")[-1]
    model = rigged(lambda step, logits: logits[..., line_break].fill_(1e4))
    assert generation.answer(model, tokenizer, ids(tokenizer, "text"), 8)[0]["new_tokens"] == 8
    [answers] = generation.answer(model, tokenizer, ids(tokenizer, "text"), 8, ends_at_newline=True)
    assert answers["new_tokens"] == 2
    assert not answers["pred"].startswith("\n")
    assert generation._ends(model, tokenizer, True) == [256, line_break]
    model.generation_config.eos_token_id = [256, 7]
    assert generation._ends(model, tokenizer, True) == [256, line_break], "the tokenizer's, as published"
    assert generation._ends(model, tokenizer, False) == [256, 7]


def test_nan_ends_its_own_answer_only(rigged, tokenizer):
    """The second of two prompts breaks at its third step."""

    def change(step, logits):
        if step == 2:
            logits[1] = float("nan")

    answers = generation.answer(rigged(change), tokenizer, ids(tokenizer, "one", "two"), 6)
    assert fields(answers, "broken") == [False, True]
    assert fields(answers, "new_tokens") == [6, 2], "the token that NaN gives is none"


def test_nan_of_padding_breaks_no_answer(rigged, tokenizer):
    """The first of two answers ends at its second step; from the fourth on its row is NaN."""

    def change(step, logits):
        logits.fill_(0)[..., 65] = 1
        if step == 1:
            logits[0, ..., 256] = 2
        if step >= 3:
            logits[0] = float("nan")

    answers = generation.answer(rigged(change), tokenizer, ids(tokenizer, "one", "two"), 6)
    assert fields(answers, "broken") == [False, False]
    assert fields(answers, "new_tokens") == [2, 6]
    assert fields(answers, "pred") == [tokenizer.decode([65]), tokenizer.decode([65] * 6)]


def test_a_prefill_of_nan_is_not_continued(rigged, tokenizer):
    calls = []
    model = rigged(lambda step, logits: calls.append(step) or logits.fill_(float("nan")))
    [answer] = generation.answer(model, tokenizer, ids(tokenizer, "one"), 50)
    assert (answer["broken"], answer["pred"], answer["new_tokens"]) == (True, "", 0)
    assert len(calls) <= 2


def test_scores_are_counted_by_hand(monkeypatch):
    """65,520 is the first score to overflow; the first query does not see the second key. Chunks change nothing."""
    q, k = torch.tensor([[[[256.0], [256.0]]]]), torch.tensor([[[[255.9375], [256.0]]]])
    assert generation.count_scores(q, k) == {"max_score": 65536.0, "overflows": 1 + 2, "scores": 3}
    assert generation.BEYOND_FP16 == 65520
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 37, 8) * 100, torch.randn(2, 2, 37, 8) * 100
    whole = generation.count_scores(q, k)
    monkeypatch.setattr(generation, "ROWS", 10)
    assert generation.count_scores(q, k) == whole
    scores = (q @ k.repeat_interleave(2, 1).mT).abs()[..., torch.ones(37, 37).tril().bool()]
    assert (whole["overflows"], whole["scores"]) == (int((scores >= 65520).sum()), scores.numel())
    assert whole["overflows"] > 0


@pytest.mark.parametrize("offset", [0, 131072])
def test_scores_of_a_model_are_counted_by_layer(steady, offset):
    """Every score of every layer overflows in the fixture, none before the injection."""
    model = hf.Qwen2ForCausalLM.from_pretrained(steady).eval()
    if offset:
        model, _ = inject_overflow(model, offset)
    with pasa.patch_pipeline(model):
        layers = generation.count_overflow(model, torch.arange(20)[None])
    assert [layer["scores"] for layer in layers] == [4 * 210] * 2
    assert [layer["overflows"] for layer in layers] == ([4 * 210] * 2 if offset else [0, 0])
    assert all((layer["max_score"] > 65520) == bool(offset) for layer in layers)
