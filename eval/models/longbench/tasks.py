"""The 21 data sets of LongBench v1 (Bai et al., arXiv:2308.14508) as one table, and how their answers are scored.

Names, generation lengths and metrics are facts of the benchmark (THUDM/LongBench at 2e00731, folder LongBench). The
scores equal those of the published scorer to 1e-6, its oddities included; each oddity is named where it is.
"""

from __future__ import annotations

import difflib
import logging
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

Score = Callable[[str, str, Sequence[str]], float]  # (answer, reference, classes of the item) -> 0 to 1
CATEGORIES = ("Single-doc QA", "Multi-doc QA", "Summarization", "Few-shot", "Synthetic", "Code")
SUFFIX = "_e"  # ends the names of LongBench-E's data sets
RECURSIONS = 1000  # Python's default, and that of the published scorer

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
    return list(jieba.lcut(text, cut_all=False))


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
    from rouge import Rouge

    # A thread and a limit of its own, because the stack that is left for the recursion must not depend on the caller.
    limit = sys.getrecursionlimit()

    def score() -> Any:
        sys.setrecursionlimit(RECURSIONS)
        return Rouge(metrics=["rouge-l"]).get_scores([answer], [reference], avg=True)

    with ThreadPoolExecutor(1) as pool:
        try:
            scores = pool.submit(score).result()
        except (ValueError, RecursionError):
            return 0.0
        finally:
            sys.setrecursionlimit(limit)
    return float(scores["rouge-l"]["f"])


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


def retrieval(answer: str, reference: str, classes: Sequence[str] = (), prefix: str = "Paragraph ") -> float:
    """Return :func:`count` of the number in a reference like "Paragraph 7"; ValueError if the reference has none."""
    match = re.search(rf"{prefix}(\d+)", reference)
    if match is None:
        raise ValueError(f"answer {reference!r} holds no {prefix!r} with a number")
    return count(answer, match[1])


def retrieval_zh(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return :func:`retrieval` for a reference like "段落7"."""
    return retrieval(answer, reference, prefix="段落")


def code_sim(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Return the similarity of the first line that is neither comment nor Markdown: difflib's ratio, in per cents.

    That is fuzzywuzzy 0.18's `ratio` without its optional C extension, which counts otherwise.
    """
    return round(100 * difflib.SequenceMatcher(None, code_line(answer), reference).ratio()) / 100


def code_line(answer: str) -> str:
    """Return the first line that is neither comment nor Markdown; "" if there is none."""
    lines = answer.lstrip("\n").split("\n")
    return next((each for each in lines if not any(mark in each for mark in ("`", "#", "//"))), "")


@dataclass(frozen=True)
class Task:
    """One data set: its answers are cut off after `max_new_tokens` and scored by `metric`."""

    name: str
    category: str
    metric: Score
    max_new_tokens: int
    extended: bool = False  # LongBench-E has this data set too, as "<name>_e"


_TABLE = (
    Task("narrativeqa", "Single-doc QA", qa_f1, 128),
    Task("qasper", "Single-doc QA", qa_f1, 128, extended=True),
    Task("multifieldqa_en", "Single-doc QA", qa_f1, 64, extended=True),
    Task("multifieldqa_zh", "Single-doc QA", qa_f1_zh, 64),
    Task("hotpotqa", "Multi-doc QA", qa_f1, 32, extended=True),
    Task("2wikimqa", "Multi-doc QA", qa_f1, 32, extended=True),
    Task("musique", "Multi-doc QA", qa_f1, 32),
    Task("dureader", "Multi-doc QA", rouge_zh, 128),
    Task("gov_report", "Summarization", rouge, 512, extended=True),
    Task("qmsum", "Summarization", rouge, 512),
    Task("multi_news", "Summarization", rouge, 512, extended=True),
    Task("vcsum", "Summarization", rouge_zh, 512),
    Task("trec", "Few-shot", classification, 64, extended=True),
    Task("triviaqa", "Few-shot", qa_f1, 32, extended=True),
    Task("samsum", "Few-shot", rouge, 128, extended=True),
    Task("lsht", "Few-shot", classification, 64),
    Task("passage_count", "Synthetic", count, 32, extended=True),
    Task("passage_retrieval_en", "Synthetic", retrieval, 32, extended=True),
    Task("passage_retrieval_zh", "Synthetic", retrieval_zh, 32),
    Task("lcc", "Code", code_sim, 64, extended=True),
    Task("repobench-p", "Code", code_sim, 64, extended=True),
)
TASKS = {task.name: task for task in _TABLE}


def find_task(dataset: str) -> Task:
    """Return the task of a data set of LongBench ("trec") or of LongBench-E ("trec_e"); ValueError if there is none."""
    name = dataset.removesuffix(SUFFIX)
    task = TASKS.get(name)
    if task is None or (dataset != name and not task.extended):
        raise ValueError(f"unknown dataset {dataset!r}; LongBench has {', '.join(TASKS)}")
    return task


def score_item(task: Task, answer: str, references: Sequence[str], classes: Sequence[str] | None) -> float:
    """Return the best score over the references, 0 to 1; 0 without any."""
    part = scored_part(task, answer)
    return max((task.metric(part, reference, classes or ()) for reference in references), default=0.0)


def scored_part(task: Task, answer: str) -> str:
    """Return the part of an answer that is scored: all, the first line, or the line of code."""
    if task.metric is code_sim:
        return code_line(answer)
    return answer.lstrip("\n").split("\n")[0] if task.category == "Few-shot" else answer
