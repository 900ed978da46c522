"""Turns an item into the ids of a prompt: template, truncation in the middle, chat template.

The templates come from the distribution ``lm-eval``, which carries them as data. A score can be compared with published
ones only if every character of the prompt is the same. lm-eval's copies differ from the benchmark's own
(THUDM/LongBench at 2e00731, LongBench/config/dataset2prompt.json) in the names of the fields and, for six of them, in
white space. The result is checked against the digest of the originals.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from typing import Any

from pasa.eval.models.longbench.data import Item
from pasa.eval.models.longbench.tasks import TASKS, Task

SOURCE = ("lm-eval", "0.4.13")
WHITE_SPACE = {  # data set: the end of lm-eval's template, and of the benchmark's
    "triviaqa": ("\n{input}", "\n\n{input}"),
    "samsum": ("\n{input}", "\n\n{input}"),
    "passage_count": ("", " "),
    "passage_retrieval_en": ("", " "),
    "lcc": ("", "\n"),
    "repobench-p": ("", "\n"),
}
DIGEST = "d705b7cbd71e0bceb0ba65fc5be6af4ac535772db22600b2ce44b9152aee6c93"
"""SHA-256 of the original templates, joined by line breaks in the order of `TASKS`."""
PUBLISHED_LENGTHS = {4096: 3500, 8192: 7500, 16384: 15500, 32768: 31500}
"""Context window -> longest prompt, in tokens before the chat template (LongBench/config/model2maxlen.json)."""


@cache
def templates() -> dict[str, str]:
    """Return the template of each data set; ``{context}`` and, in most, ``{input}`` are to be filled in.

    Where lm-eval is missing or has other texts, the error holds the command that installs the right version.
    """
    advice = f"run: pip install --no-deps {SOURCE[0]}=={SOURCE[1]}"
    originals = {}
    for name in TASKS:
        try:
            text = _read(name).replace("{{context}}", "{context}").replace("{{question}}", "{input}")
        except (metadata.PackageNotFoundError, FileNotFoundError) as error:
            raise FileNotFoundError(f"LongBench's prompts are not installed; {advice}") from error
        ending, original = WHITE_SPACE.get(name, ("", ""))
        originals[name] = text.removesuffix(ending) + original
    if hashlib.sha256("\n".join(originals.values()).encode()).hexdigest() != DIGEST:
        raise ValueError(f"the templates in {SOURCE[0]} are not LongBench's; {advice}")
    return originals


def _read(dataset: str) -> str:
    """Return the prompt in lm-eval's configuration of the data set."""
    import yaml

    loader: Any = type("Loader", (yaml.SafeLoader,), {})
    loader.add_multi_constructor("!", lambda *_: None)  # tags that name functions
    path = metadata.distribution(SOURCE[0]).locate_file(f"lm_eval/tasks/longbench/{dataset}.yaml")
    with open(str(path), encoding="utf-8") as file:
        text: str = yaml.load(file, loader)["doc_to_text"]
    return text


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
