"""From an item to the ids that a model is given: template, truncation in the middle, chat template."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pasa.eval.models.longbench.data import Item
from pasa.eval.models.longbench.tasks import Task

PUBLISHED_LENGTHS = {4096: 3500, 8192: 7500, 16384: 15500, 32768: 31500}
"""Context window -> longest prompt, in tokens before the chat template (LongBench/config/model2maxlen.json)."""


def default_max_length(window: float) -> int:
    """Longest prompt for a context window: as published for the largest published window within it.

    Raises
    ------
    ValueError
        A window below the published ones: any choice would be arbitrary.
    """
    fitting = [length for size, length in PUBLISHED_LENGTHS.items() if size <= window]
    if not fitting:
        raise ValueError(f"LongBench has no prompt length for a context window of {window} tokens: give max_length")
    return max(fitting)


def check_max_length(length: int, window: float, tasks: Iterable[Task]) -> None:
    """Refuse prompts that are too short to be cut, or leave no room in the window for what is generated.

    Raises
    ------
    ValueError
    """
    if length < 2:
        raise ValueError(f"max_length={length} is below 2")
    task = max(tasks, key=lambda each: each.max_new_tokens)
    if length + task.max_new_tokens > window:
        raise ValueError(
            f"max_length={length} and the {task.max_new_tokens} new tokens of {task.name} exceed the model's window "
            f"of {window} tokens"
        )


def build_prompt(tokenizer: Any, task: Task, item: Item, max_length: int, *, chat: bool = True) -> list[int]:
    """Return the ids of a prompt.

    Parameters
    ----------
    tokenizer
        Of transformers.
    max_length : int
        Prompts of more tokens lose their middle: the first and the last half of that many tokens are decoded, put
        together and tokenized anew, as published; so the count may then differ by a few.
    chat : bool
        Put the prompt into the tokenizer's chat template, where the task and the tokenizer have it so. This comes after
        the truncation, which the template's own text is not subject to.
    """
    prompt = task.prompt.format(context=item.context, input=item.input)
    ids: list[int] = tokenizer(prompt).input_ids
    if len(ids) > max_length:
        half = max_length // 2
        ends = (ids[:half], ids[-half:])
        prompt = "".join(tokenizer.decode(part, skip_special_tokens=True) for part in ends)
        ids = tokenizer(prompt).input_ids
    if not (chat and task.chat and getattr(tokenizer, "chat_template", None)):
        return ids
    message = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    templated: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return templated
