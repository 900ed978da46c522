"""The table of datasets: complete, and as published."""

from collections import Counter

import pytest

from pasa.eval.longbench import tasks
from pasa.eval.longbench.metrics import METRICS


def test_the_21_datasets_and_4750_items():
    assert len(tasks.TASKS) == 21
    assert sum(task.items for task in tasks.TASKS.values()) == 4750
    assert len(tasks.dataset_names(extended=True)) == 13
    languages = Counter(task.language for task in tasks.TASKS.values())
    assert languages == {"en": 14, "zh": 5, "code": 2}
    assert {task.category for task in tasks.TASKS.values()} == set(tasks.CATEGORIES)
    assert {task.metric for task in tasks.TASKS.values()} == set(METRICS)


def test_every_prompt_takes_context_and_input_and_nothing_else():
    inputs = [name for name, task in tasks.TASKS.items() if "{input}" in task.prompt]
    for task in tasks.TASKS.values():
        text = task.prompt.format(context="CONTEXT", input="INPUT")
        assert text.count("CONTEXT") == 1
    assert set(tasks.TASKS) - set(inputs) == {"gov_report", "multi_news", "vcsum", "passage_count", "lcc"}


def test_few_shot_and_code_prompts_take_no_chat_template():
    plain = {name for name, task in tasks.TASKS.items() if not task.chat}
    assert plain == {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
    assert {name for name, task in tasks.TASKS.items() if task.first_line} == plain - {"lcc", "repobench-p"}


def test_unknown_datasets_are_named():
    assert tasks.find_task("trec_e").name == "trec"
    for name in ("squad", "lsht_e", "trec_e_e"):
        with pytest.raises(ValueError, match=f"unknown dataset '{name}'"):
            tasks.find_task(name)
