"""Greedy answers: batches, ends, logits that are NaN."""

import pytest
import torch
import transformers as hf

from pasa.eval.models.longbench import generation


@pytest.fixture(scope="module")
def model(steady):
    return hf.Qwen2ForCausalLM.from_pretrained(steady).eval()


def fields(answers, name):
    return [each[name] for each in answers]


def ids(tokenizer, *texts):
    return [tokenizer(text).input_ids for text in texts]


def test_greedy_is_the_models_own(model, tokenizer):
    prompt = ids(tokenizer, "Once upon a time")[0]
    tokens, cache = list(prompt), []
    with torch.no_grad():
        for _ in range(12):
            cache.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
            tokens.append(cache[-1])
    [answers] = generation.answer(model, tokenizer, [prompt], 12)
    assert answers["pred"] == tokenizer.decode(cache, skip_special_tokens=True)
    assert (answers["new_tokens"], answers["prompt_tokens"], answers["broken"]) == (12, len(prompt), False)
    assert answers["prefill_s"] > 0
    assert answers["decode_s"] > 0


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


def test_samsum_begins_with_a_word_and_ends_with_its_line(tokenizer):
    """The line break is the likeliest token at every step: it is forbidden at the first, and ends the answer at the
    second."""
    line_break = tokenizer.encode("\n")[-1]
    model = rigged(lambda logits: logits[..., line_break].fill_(1e4))
    assert generation.answer(model, tokenizer, ids(tokenizer, "text"), 8)[0]["new_tokens"] == 8
    [answers] = generation.answer(model, tokenizer, ids(tokenizer, "text"), 8, ends_at_newline=True)
    assert answers["new_tokens"] == 2
    assert not answers["pred"].startswith("\n")
    assert generation._ends(model, tokenizer, True) == [256, line_break]
    model.generation_config.eos_token_id = [256, 7]
    assert generation._ends(model, tokenizer, True) == [256, line_break], "the tokenizer's, as published"
    assert generation._ends(model, tokenizer, False) == [256, 7]


def rigged(change):
    """A random model of one layer whose logits are changed in place."""
    torch.manual_seed(0)
    config = hf.Qwen2Config(
        vocab_size=257, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, eos_token_id=256,
    )  # fmt: skip
    model = hf.Qwen2ForCausalLM(config).eval()

    def hook(module, args, output):
        change(output)

    model.lm_head.register_forward_hook(hook)
    return model


def test_nan_ends_its_own_answer_only(tokenizer):
    """The second of two prompts breaks at its third step."""
    steps = []

    def change(logits):
        steps.append(0)
        if len(steps) == 3:
            logits[1] = float("nan")

    answers = generation.answer(rigged(change), tokenizer, ids(tokenizer, "one", "two"), 6)
    assert fields(answers, "broken") == [False, True]
    assert fields(answers, "new_tokens") == [6, 2], "the token that NaN gives is none"


def test_what_padding_gives_breaks_no_answer(tokenizer):
    """The first of two answers ends at its second step; from the fourth on its row is NaN."""
    steps = []

    def change(logits):
        steps.append(0)
        logits.fill_(0)[..., 65] = 1
        if len(steps) == 2:
            logits[0, ..., 256] = 2
        if len(steps) >= 4:
            logits[0] = float("nan")

    answers = generation.answer(rigged(change), tokenizer, ids(tokenizer, "one", "two"), 6)
    assert fields(answers, "broken") == [False, False]
    assert fields(answers, "new_tokens") == [2, 6]
    assert fields(answers, "pred") == [tokenizer.decode([65]), tokenizer.decode([65] * 6)]


def test_a_prefill_of_nan_is_not_continued(tokenizer):
    calls = []
    model = rigged(lambda logits: calls.append(0) or logits.fill_(float("nan")))
    answers = generation.answer(model, tokenizer, ids(tokenizer, "one"), 50)
    assert fields(answers, "broken") == [True]
    assert (fields(answers, "pred"), fields(answers, "new_tokens")) == ([""], [0])
    assert len(calls) <= 2
