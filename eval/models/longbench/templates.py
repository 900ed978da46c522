"""The prompt templates of LongBench v1, from the distribution ``lm-eval``, which carries them as data.

A score can be compared with published ones only if every character of the prompt is the same. lm-eval's copies differ
from the benchmark's own (THUDM/LongBench at 2e00731, LongBench/config/dataset2prompt.json) in the names of the fields
and, for six of them, in white space. The result is checked against the digest of the originals.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import metadata
from typing import Any

from pasa.eval.models.longbench.tasks import TASKS

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
