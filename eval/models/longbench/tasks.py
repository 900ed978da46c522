"""The 21 data sets of LongBench v1 (Bai et al., arXiv:2308.14508) as one table.

Names, generation lengths and metrics are facts of the benchmark (THUDM/LongBench at 2e00731, folder LongBench).
"""

from __future__ import annotations

from dataclasses import dataclass

CATEGORIES = ("Single-doc QA", "Multi-doc QA", "Summarization", "Few-shot", "Synthetic", "Code")
BUCKETS = {"0-4k": 4000, "4-8k": 8000, "8k+": None}
"""Lengths of LongBench-E, in words (English, code) or characters (Chinese): name -> first length beyond it."""
SUFFIX = "_e"
"""Ends the names of LongBench-E's data sets."""


@dataclass(frozen=True)
class Task:
    """One data set; `metric` is a name in :data:`pasa.eval.models.longbench.metrics.METRICS`."""

    name: str
    category: str
    metric: str
    max_new_tokens: int
    language: str = "en"
    chat: bool = True  # the prompt goes through the chat template; few-shot and code prompts do not
    first_line: bool = False  # only the first line of an answer is scored
    extended: bool = False  # LongBench-E has this data set too, as "<name>_e"


_TABLE = (
    Task("narrativeqa", "Single-doc QA", "qa_f1", 128),
    Task("qasper", "Single-doc QA", "qa_f1", 128, extended=True),
    Task("multifieldqa_en", "Single-doc QA", "qa_f1", 64, extended=True),
    Task("multifieldqa_zh", "Single-doc QA", "qa_f1_zh", 64, "zh"),
    Task("hotpotqa", "Multi-doc QA", "qa_f1", 32, extended=True),
    Task("2wikimqa", "Multi-doc QA", "qa_f1", 32, extended=True),
    Task("musique", "Multi-doc QA", "qa_f1", 32),
    Task("dureader", "Multi-doc QA", "rouge_zh", 128, "zh"),
    Task("gov_report", "Summarization", "rouge", 512, extended=True),
    Task("qmsum", "Summarization", "rouge", 512),
    Task("multi_news", "Summarization", "rouge", 512, extended=True),
    Task("vcsum", "Summarization", "rouge_zh", 512, "zh"),
    Task("trec", "Few-shot", "classification", 64, chat=False, first_line=True, extended=True),
    Task("triviaqa", "Few-shot", "qa_f1", 32, chat=False, first_line=True, extended=True),
    Task("samsum", "Few-shot", "rouge", 128, chat=False, first_line=True, extended=True),
    Task("lsht", "Few-shot", "classification", 64, "zh", chat=False, first_line=True),
    Task("passage_count", "Synthetic", "count", 32, extended=True),
    Task("passage_retrieval_en", "Synthetic", "retrieval", 32, extended=True),
    Task("passage_retrieval_zh", "Synthetic", "retrieval_zh", 32, "zh"),
    Task("lcc", "Code", "code_sim", 64, "code", chat=False, extended=True),
    Task("repobench-p", "Code", "code_sim", 64, "code", chat=False, extended=True),
)
TASKS = {task.name: task for task in _TABLE}


def find_task(dataset: str) -> Task:
    """Return the task of a data set of LongBench ("trec") or of LongBench-E ("trec_e"); ValueError if there is none."""
    name = dataset.removesuffix(SUFFIX)
    task = TASKS.get(name)
    if task is None or (dataset != name and not task.extended):
        raise ValueError(f"unknown dataset {dataset!r}; LongBench has {', '.join(TASKS)}")
    return task
