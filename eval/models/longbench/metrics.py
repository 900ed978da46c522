"""Scores answers by the definitions of LongBench v1: one answer against one reference, an item, a data set.

The scores equal those of the published scorer to 1e-6, its oddities included, so that they can be compared with
published ones. Each oddity is named where it is.
"""

from __future__ import annotations

import difflib
import logging
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np

from pasa.eval.models.longbench.tasks import BUCKETS, Task

Score = Callable[[str, str, Sequence[str]], float]
"""(answer, reference, classes of the item) -> 0 to 1."""

ARTICLES = re.compile(r"\b(a|an|the)\b")
NUMBER = re.compile(r"\d+")
ENGLISH = set(string.punctuation)
CHINESE = (
    {chr(ord(char) + 0xFEE0) for char in string.punctuation if char != "."}  # their full-width forms
    | set("｡。｟｠｢｣､、〃》")
    | {chr(code) for code in (*range(0x300C, 0x3012), *range(0x3014, 0x3020), 0x3030, 0x303E, 0x303F, 0xFE4F)}
    | {chr(code) for code in (0x2013, 0x2014, 0x2018, 0x2019, *range(0x201B, 0x2020), 0x2026, 0x2027)}
)
"""Characters that the published scorer strips from Chinese: not all punctuation ("《" and "．" stay)."""


def qa_f1(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return the F1 of the bags of words, in lower case, without punctuation and articles."""

    def words(text: str) -> list[str]:
        return ARTICLES.sub(" ", "".join(char for char in text.lower() if char not in ENGLISH)).split()

    return f1(words(answer), words(reference))


def qa_f1_zh(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return the F1 of the bags of words that jieba segments, each in lower case, without punctuation and blanks."""
    dropped = ENGLISH | CHINESE

    def words(text: str) -> list[str]:
        stripped = ("".join("".join(c for c in part.lower() if c not in dropped).split()) for part in segment(text))
        return [part for part in stripped if part]

    return f1(words(answer), words(reference))


def segment(text: str) -> list[str]:
    """Return Chinese words, by jieba's default mode."""
    import jieba

    jieba.setLogLevel(logging.WARNING)  # else jieba reports on stderr how it loads its dictionary
    words: list[str] = jieba.lcut(text, cut_all=False)
    return words


def f1(answer: Sequence[str], reference: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall of two bags; 0 without anything in common."""
    common = (Counter(answer) & Counter(reference)).total()
    if common == 0:
        return 0.0
    precision, recall = common / len(answer), common / len(reference)
    return 2 * precision * recall / (precision + recall)


def rouge(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return ROUGE-L F of the package `rouge` 1.0.1: union LCS over the sentences between full stops; 0 if it fails.

    The package fails on an answer without a word. It also recurses once for every step through the table of two
    sentences: as many steps as both have words, those in common counted once. Beyond about 980 steps it is out of
    stack, and scores 0 even if the sentences are equal. The published scorer has that 0 too.
    """
    outcome = _rouge(answer, reference)
    return outcome if isinstance(outcome, float) else 0.0


def ran_out_of_stack(task: Task, answer: str, references: Sequence[str]) -> bool:
    """Return whether the ROUGE of an item is lower than it might be because the package recursed too deeply."""
    if task.metric == "rouge_zh":
        answer, references = " ".join(segment(answer)), [" ".join(segment(each)) for each in references]
    pairs = [(answer, each) for each in references] if task.metric in ("rouge", "rouge_zh") else []
    return any(isinstance(_rouge(*pair), RecursionError) for pair in pairs)


@cache
def _rouge(answer: str, reference: str) -> float | Exception:
    """Return the score, or why there is none; cached, because it takes long and is read more than once."""
    with ThreadPoolExecutor(1) as pool:  # the stack that is left for the recursion must not depend on the caller
        try:
            return pool.submit(_rouge_l, answer, reference).result()
        except (ValueError, RecursionError) as error:
            return error.with_traceback(None)  # which would keep every frame of the recursion


def _rouge_l(answer: str, reference: str) -> float:
    from rouge import Rouge

    score: float = Rouge(metrics=["rouge-l"]).get_scores([answer], [reference], avg=True)["rouge-l"]["f"]
    return score


def rouge_zh(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return :func:`rouge` of jieba's words. A Chinese full stop does not end a sentence for it."""
    return rouge(" ".join(segment(answer)), " ".join(segment(reference)))


def classification(answer: str, reference: str, classes: Sequence[str]) -> float:
    """Return 1 over the number of classes that the answer names, if the right one is among them.

    Classes that are parts of the right one's name ("NUM" of "NUM:date") do not count. The published scorer removes them
    from the list that it iterates over, and so skips the class after each; so does this function.
    """
    named = [name for name in classes if name in answer]
    position = 0
    while position < len(named):
        if named[position] in reference and named[position] != reference:
            named.remove(named[position])  # the first of that name, as there
        position += 1
    return 1.0 / len(named) if reference in named else 0.0


def count(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return the share of the numbers in the answer that are the right one, digit by digit."""
    numbers = NUMBER.findall(answer)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def retrieval(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return :func:`count` for a reference like "Paragraph 7"."""
    return count(answer, paragraph(reference, "Paragraph "))


def retrieval_zh(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return :func:`count` for a reference like "段落7"."""
    return count(answer, paragraph(reference, "段落"))


def paragraph(reference: str, prefix: str) -> str:
    """Return the number after the first `prefix`; ValueError without one."""
    match = re.search(rf"{prefix}(\d+)", reference)
    if match is None:
        raise ValueError(f"answer {reference!r} holds no {prefix!r} with a number")
    return match[1]


def code_sim(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return the similarity of the first line that is neither comment nor Markdown: difflib's ratio, in per cents.

    That is fuzzywuzzy 0.18's `ratio` without its optional C extension, which counts otherwise.
    """
    return round(100 * difflib.SequenceMatcher(None, code_line(answer), reference).ratio()) / 100


def code_line(answer: str) -> str:
    """Return the first line that is neither comment nor Markdown; "" if there is none."""
    lines = answer.lstrip("\n").split("\n")
    return next((each for each in lines if not any(mark in each for mark in ("`", "#", "//"))), "")


METRICS: dict[str, Score] = {
    each.__name__: each
    for each in (
        *(qa_f1, qa_f1_zh, rouge, rouge_zh),
        *(classification, count, retrieval, retrieval_zh, code_sim),
    )
}
PACKAGES = {"qa_f1_zh": ("jieba",), "rouge": ("rouge",), "rouge_zh": ("rouge", "jieba")}
"""Packages that a metric needs besides numpy."""


def score_item(task: Task, answer: str, references: Sequence[str], classes: Sequence[str] | None) -> float:
    """Return the best score over the references, 0 to 1; 0 without any."""
    answer, metric = scored_part(task, answer), METRICS[task.metric]
    return max((metric(answer, reference, classes or ()) for reference in references), default=0.0)


def scored_part(task: Task, answer: str) -> str:
    """Return the part of an answer that is scored: all, the first line, or the line of code."""
    if task.metric == "code_sim":
        return code_line(answer)
    return answer.lstrip("\n").split("\n")[0] if task.first_line else answer


def score_dataset(scores: Sequence[float]) -> float | None:
    """Return the mean in per cent, to two decimals as published; None without items."""
    return round(100 * sum(scores) / len(scores), 2) if scores else None


def score_buckets(scores: Sequence[float], lengths: Sequence[int]) -> dict[str, float | None]:
    """Return the mean in per cent for each of LongBench-E's lengths."""
    buckets: dict[str, list[float]] = {name: [] for name in BUCKETS}
    for score, length in zip(scores, lengths, strict=True):
        buckets[next(name for name, end in BUCKETS.items() if end is None or length < end)].append(score)
    return {name: round(100 * float(np.mean(each)), 2) if each else None for name, each in buckets.items()}
