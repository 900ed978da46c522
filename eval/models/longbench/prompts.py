"""Turns an item into the ids of a prompt: template, truncation in the middle, chat template."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pasa.eval.models.longbench.data import Item
from pasa.eval.models.longbench.tasks import Task
from pasa.eval.models.longbench.templates import templates

PUBLISHED_LENGTHS = {4096: 3500, 8192: 7500, 16384: 15500, 32768: 31500}
"""Context window -> longest prompt, in tokens before the chat template (LongBench/config/model2maxlen.json)."""


def default_max_length(window: float) -> int:
    """Return the longest prompt of the largest published window within `window`; ValueError below all of them."""
    fitting = [length for size, length in PUBLISHED_LENGTHS.items() if size <= window]
    if not fitting:
        raise ValueError(f"LongBench has no prompt length for a context window of {window} tokens: give max_length")
    return max(fitting)


def check_max_length(length: int, window: float, tasks: Iterable[Task]) -> None:
    """Raise ValueError for prompts that are too short to be cut, or leave no room for the answer in the window."""
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

    A prompt of more than `max_length` tokens loses its middle. As published, its first and its last half of that many
    tokens are decoded, joined and tokenized again, so the count may then differ by a few. The chat template of the
    tokenizer, where `chat` and the task ask for it, is added after the truncation.
    """
    prompt = templates()[task.name].format(context=item.context, input=item.input)
    ids: list[int] = tokenizer(prompt).input_ids
    if len(ids) > max_length:
        half = max_length // 2
        prompt = "".join(tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:]))
        ids = tokenizer(prompt).input_ids
    if not (chat and task.chat and getattr(tokenizer, "chat_template", None)):
        return ids
    message = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    templated: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return templated
