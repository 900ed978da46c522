"""The table of data sets, as published, and scores: against those of the published scorer (parity.json)."""

import json
import sys
from pathlib import Path

import pytest

from pasa.eval.models.longbench import tasks
from pasa.eval.models.longbench.tasks import TASKS, find_task, score_item

PARITY = json.loads((Path(__file__).parent / "parity.json").read_text(encoding="utf-8"))
METRICS = {task.metric.__name__: task.metric for task in TASKS.values()}


@pytest.mark.parametrize(
    ("names", "metric", "new_tokens"),
    [
        ("narrativeqa qasper", "qa_f1", 128),
        ("multifieldqa_en", "qa_f1", 64),
        ("multifieldqa_zh", "qa_f1_zh", 64),
        ("hotpotqa 2wikimqa musique triviaqa", "qa_f1", 32),
        ("dureader", "rouge_zh", 128),
        ("gov_report qmsum multi_news", "rouge", 512),
        ("vcsum", "rouge_zh", 512),
        ("samsum", "rouge", 128),
        ("trec lsht", "classification", 64),
        ("passage_count", "count", 32),
        ("passage_retrieval_en", "retrieval", 32),
        ("passage_retrieval_zh", "retrieval_zh", 32),
        ("lcc repobench-p", "code_sim", 64),
    ],
)
def test_metric_and_length_are_the_published_ones(names, metric, new_tokens):
    """LongBench/eval.py and LongBench/config/dataset2maxlen.json at 2e00731."""
    for name in names.split():
        assert (TASKS[name].metric.__name__, TASKS[name].max_new_tokens) == (metric, new_tokens)


def test_the_21_datasets_and_13_of_the_extended_set():
    assert len(TASKS) == 21
    assert sum(task.extended for task in TASKS.values()) == 13
    assert {task.category for task in TASKS.values()} == set(tasks.CATEGORIES)


def test_few_shot_is_scored_by_its_first_line():
    first = {name for name, task in TASKS.items() if tasks.scored_part(task, "\n\nfirst\nsecond") == "first"}
    assert first == {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}


def test_unknown_datasets_are_named():
    assert find_task("trec_e").name == "trec"
    for name in ("squad", "lsht_e", "trec_e_e"):
        with pytest.raises(ValueError, match=f"unknown dataset '{name}'"):
            find_task(name)


@pytest.mark.parametrize("name", METRICS)
def test_parity_with_the_published_scorer(name):
    """Sixty pairs per metric, or more, scored by THUDM/LongBench at 2e00731 with rouge 1.0.1, jieba 0.42.1, fuzzywuzzy
    0.18.0 without python-Levenshtein; they show every oddity of the published scorer but the depth of its stack."""
    pairs = PARITY[name]
    assert len(pairs) >= 60
    assert len({score for *_, score in pairs}) >= 3, "pairs that all score the same would show nothing"
    for answer, reference, score in pairs:
        assert METRICS[name](answer, reference, PARITY["classes"]) == pytest.approx(score, abs=1e-6), answer


def test_rouge_of_two_long_sentences_is_zero():
    """The package recurses: 700 equal words without a full stop are fine, 1,100 are not, however deep the caller is.

    Story: a program that had raised its limit of recursions got 1 for the 1,100.
    """

    def deep(levels, action):
        return action() if levels == 0 else deep(levels - 1, action)

    words = [" ".join(f"w{i}" for i in range(size)) for size in (700, 1100)]
    assert deep(400, lambda: tasks.rouge(words[0], words[0])) == pytest.approx(1, abs=1e-6)
    assert tasks.rouge(words[1], words[1]) == 0.0
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(limit + 3000)
        assert tasks.rouge(words[1], words[1]) == 0.0
        assert sys.getrecursionlimit() == limit + 3000
    finally:
        sys.setrecursionlimit(limit)


def test_the_best_reference_counts_and_none_is_zero():
    assert score_item(TASKS["hotpotqa"], "Paris", ["London", "paris."], None) == 1.0
    assert score_item(TASKS["hotpotqa"], "Paris", [], None) == 0.0
