"""Templates, truncation in the middle, chat template."""

import copy
import math

import pytest
from tokenizers import processors

from pasa.eval.models.longbench import prompts
from pasa.eval.models.longbench.data import Item
from pasa.eval.models.longbench.prompts import build_prompt, choose_length, templates
from pasa.eval.models.longbench.tasks import TASKS

ITEM = Item("CONTEXT", "INPUT", [], 1, None)


def test_the_template_is_filled_and_wrapped(tokenizer):
    text = tokenizer.decode(build_prompt(tokenizer, TASKS["hotpotqa"], ITEM, 10_000))
    assert text == f"<user>{templates()['hotpotqa'].format(context='CONTEXT', input='INPUT')}<answer>"
    assert not tokenizer.decode(build_prompt(tokenizer, TASKS["hotpotqa"], ITEM, 10_000, chat=False)).startswith("<")


def test_few_shot_and_code_are_not_wrapped(tokenizer):
    text = tokenizer.decode(build_prompt(tokenizer, TASKS["lcc"], ITEM, 10_000))
    assert text == "Please complete the code given below. \nCONTEXTNext line of code:\n"
    plain = {name for name, task in TASKS.items() if task.category in prompts.WITHOUT_CHAT}
    assert plain == {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}


@pytest.mark.parametrize("length", [100, 101])
def test_the_middle_is_cut_out_before_the_template_comes(tokenizer, length):
    """The first and the last half, rounded down, then the template around what is left."""
    whole = templates()["hotpotqa"].format(context="CONTEXT", input="INPUT")
    text = tokenizer.decode(build_prompt(tokenizer, TASKS["hotpotqa"], ITEM, length))
    assert text == f"<user>{whole[:50]}{whole[-50:]}<answer>"


def test_a_prompt_of_just_the_length_is_left_alone(tokenizer):
    whole = build_prompt(tokenizer, TASKS["lcc"], ITEM, 10_000)
    assert build_prompt(tokenizer, TASKS["lcc"], ITEM, len(whole)) == whole
    assert len(build_prompt(tokenizer, TASKS["lcc"], ITEM, len(whole) - 3)) == len(whole) - 3


@pytest.fixture
def starting(tokenizer):
    """A tokenizer that sets a beginning-of-text token before every text, and whose chat template has one too."""
    with_start = copy.deepcopy(tokenizer)
    with_start.add_special_tokens({"bos_token": "<|start|>"})
    with_start.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", with_start.bos_token_id)]
    )
    with_start.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    return with_start


def test_special_tokens_of_the_tokenizer_count_and_are_dropped_in_the_cut(starting):
    """The beginning is set before the whole prompt, as the model wants it, and not twice by the cut."""
    ids = build_prompt(starting, TASKS["hotpotqa"], ITEM, 100, chat=False)
    assert ids.count(starting.bos_token_id) == 1
    assert len(ids) == 100, "one of the first half was the start, which comes back"


@pytest.mark.parametrize("length", [100, 10_000])
def test_a_chat_template_that_has_the_beginning_gets_no_second_one(starting, length):
    ids = build_prompt(starting, TASKS["hotpotqa"], ITEM, length)
    assert [place for place, token in enumerate(ids) if token == starting.bos_token_id] == [0]
    assert starting.decode(ids[1:]).startswith("<user>Answer")


@pytest.mark.parametrize(("window", "length"), [(4096, 3500), (8192, 7500), (32768, 31500), (131072, 31500)])
def test_published_lengths(window, length):
    assert choose_length(None, window, TASKS.values()) == length


@pytest.mark.parametrize(("length", "window"), [(3585, 4096), (1, 4096), (None, 2048)])
def test_prompt_and_answer_must_fit_the_window(length, window):
    assert choose_length(3584, 4096, [TASKS["hotpotqa"], TASKS["gov_report"]]) == 3584
    assert choose_length(3585, math.inf, [TASKS["gov_report"]]) == 3585
    with pytest.raises(ValueError, match=f"max_length={length or 0} and 512 new tokens do not fit .* of {window}"):
        choose_length(length, window, [TASKS["hotpotqa"], TASKS["gov_report"]])


def test_prompts_are_the_originals_and_take_context_and_input():
    """The digest of the originals is checked when they are read."""
    for text in templates().values():
        assert text.format(context="CONTEXT", input="INPUT").count("CONTEXT") == 1


def test_other_templates_are_refused(monkeypatch):
    monkeypatch.setitem(prompts.WHITE_SPACE, "lcc", ("", ""))
    with pytest.raises(ValueError, match=r"lm-eval's templates are not LongBench's; run: pip install --no-deps"):
        templates.__wrapped__()
