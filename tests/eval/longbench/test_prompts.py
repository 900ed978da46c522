"""Templates, truncation in the middle, chat template."""

import pytest

from pasa.eval.longbench.data import Item
from pasa.eval.longbench.prompts import build_prompt, default_max_length
from pasa.eval.longbench.tasks import TASKS

ITEM = Item(0, "CONTEXT", "INPUT", [], 1, None)


def test_the_template_is_filled_and_wrapped(tokenizer):
    text = tokenizer.decode(build_prompt(tokenizer, TASKS["hotpotqa"], ITEM, 10_000))
    assert text == f"<user>{TASKS['hotpotqa'].prompt.format(context='CONTEXT', input='INPUT')}<answer>"
    assert not tokenizer.decode(build_prompt(tokenizer, TASKS["hotpotqa"], ITEM, 10_000, chat=False)).startswith("<")


def test_few_shot_and_code_are_not_wrapped(tokenizer):
    text = tokenizer.decode(build_prompt(tokenizer, TASKS["lcc"], ITEM, 10_000))
    assert text == "Please complete the code given below. \nCONTEXTNext line of code:\n"


@pytest.mark.parametrize("length", [100, 101])
def test_the_middle_is_cut_out_before_the_template_comes(tokenizer, length):
    """The first and the last half, rounded down, then the template around what is left."""
    whole = TASKS["hotpotqa"].prompt.format(context="CONTEXT", input="INPUT")
    text = tokenizer.decode(build_prompt(tokenizer, TASKS["hotpotqa"], ITEM, length))
    assert text == f"<user>{whole[:50]}{whole[-50:]}<answer>"


def test_a_prompt_of_just_the_length_is_left_alone(tokenizer):
    whole = build_prompt(tokenizer, TASKS["lcc"], ITEM, 10_000)
    assert build_prompt(tokenizer, TASKS["lcc"], ITEM, len(whole)) == whole
    assert len(build_prompt(tokenizer, TASKS["lcc"], ITEM, len(whole) - 3)) == len(whole) - 3


def test_special_tokens_of_the_tokenizer_count_and_are_dropped_in_the_cut(tokenizer):
    """A beginning-of-text token is set before the whole prompt, as the model wants it, and not twice by the cut."""

    class WithStart:
        chat_template = None

        def __call__(self, text):
            return type("Ids", (), {"input_ids": [256, *tokenizer(text).input_ids]})

        def decode(self, ids, skip_special_tokens):
            return tokenizer.decode([i for i in ids if i != 256])

    ids = build_prompt(WithStart(), TASKS["hotpotqa"], ITEM, 100)
    assert ids.count(256) == 1
    assert len(ids) == 100, "one of the first half was the start, which comes back"


def test_published_lengths():
    assert [default_max_length(window) for window in (4096, 8192, 32768, 131072)] == [3500, 7500, 31500, 31500]
    with pytest.raises(ValueError, match="window of 2048 tokens"):
        default_max_length(2048)
