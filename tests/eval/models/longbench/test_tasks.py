"""The table of data sets: complete, and as published."""

from collections import Counter

import pytest

from pasa.eval.models.longbench import tasks
from pasa.eval.models.longbench.metrics import METRICS


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
        assert (tasks.TASKS[name].metric, tasks.TASKS[name].max_new_tokens) == (metric, new_tokens)


def test_the_21_datasets_and_13_of_the_extended_set():
    assert len(tasks.TASKS) == 21
    assert sum(task.extended for task in tasks.TASKS.values()) == 13
    languages = Counter(task.language for task in tasks.TASKS.values())
    assert languages == {"en": 14, "zh": 5, "code": 2}
    assert {task.category for task in tasks.TASKS.values()} == set(tasks.CATEGORIES)
    assert {task.metric for task in tasks.TASKS.values()} == set(METRICS)


def test_few_shot_and_code_prompts_take_no_chat_template():
    plain = {name for name, task in tasks.TASKS.items() if not task.chat}
    assert plain == {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
    assert {name for name, task in tasks.TASKS.items() if task.first_line} == plain - {"lcc", "repobench-p"}


def test_unknown_datasets_are_named():
    assert tasks.find_task("trec_e").name == "trec"
    for name in ("squad", "lsht_e", "trec_e_e"):
        with pytest.raises(ValueError, match=f"unknown dataset '{name}'"):
            tasks.find_task(name)
