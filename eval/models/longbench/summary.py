"""Sums stored answers up: scores, agreement with FP32, speed, memory, overflow by layer, and the gate."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from pasa.eval.kit import output
from pasa.eval.kit.gate import gate
from pasa.eval.models.longbench import metrics
from pasa.eval.models.longbench.store import Line
from pasa.eval.models.longbench.tasks import CATEGORIES, SUFFIX, Task, find_task
from pasa.eval.models.precisions import REFERENCE

Answers = dict[str, dict[str, list[Line]]]
"""precision -> data set -> lines in the order of the data"""
AGREEMENT = 0.98
"""Share of PASA's answers that must equal FP32's in all that is scored of them: the bound of the task."""


def summarise(
    answers: Answers, counts: Sequence[Line], *, injected: bool, progress: output.Report = output.silent
) -> dict[str, Any]:
    """Return all numbers of a run, from answers and lines with overflow counts.

    `injected` says that the model is the overflow fixture, on which FP16 with stored scores must collapse.
    """
    datasets = {}
    for done, name in enumerate(answers[REFERENCE]):
        progress(done, len(answers[REFERENCE]), f"scoring {name}")
        datasets[name] = _dataset(name, {precision: lines[name] for precision, lines in answers.items()})
    precisions = {name: _precision(answers, name) for name in answers}
    return {
        "gate": judge(precisions, injected=injected),
        "datasets": datasets,
        "categories": _categories(datasets, list(answers)),
        "precisions": precisions,
        "layers": _layers(counts),
    }


def _dataset(name: str, answers: dict[str, list[Line]]) -> dict[str, Any]:
    """Return score, agreement with the reference and zeros of ROUGE by precision; by length too for LongBench-E."""
    task, reference = find_task(name), answers[REFERENCE]
    lengths = [line["prompt_tokens"] for line in reference]
    scores = {
        precision: [metrics.score_item(task, line["pred"], line["answers"], line["all_classes"]) for line in lines]
        for precision, lines in answers.items()
    }
    entry = {
        "category": task.category,
        "metric": task.metric,
        "items": len(reference),
        "prompt_tokens": [min(lengths), max(lengths)],
        "score": {precision: metrics.score_dataset(each) for precision, each in scores.items()},
        "agreement": {
            precision: fmean(agrees(task, *pair) for pair in zip(lines, reference, strict=True))
            for precision, lines in answers.items()
        },
        "rouge_out_of_stack": {
            precision: sum(metrics.ran_out_of_stack(task, line["pred"], line["answers"]) for line in lines)
            for precision, lines in answers.items()
        },
    }
    if name.endswith(SUFFIX):
        words = [line["length"] for line in reference]
        entry["buckets"] = {precision: metrics.score_buckets(each, words) for precision, each in scores.items()}
    return entry


def agrees(task: Task, line: Line, reference: Line) -> bool:
    """Return whether an answer is whole and equals the reference's, to the character, in the part that is scored.

    Where nothing of an answer is scored, all of it is compared.
    """
    ours, theirs = (metrics.scored_part(task, each["pred"]) or each["pred"] for each in (line, reference))
    return not line["broken"] and ours == theirs


def _precision(answers: Answers, name: str) -> dict[str, Any]:
    """Return agreement, speed and memory of a precision over all data sets."""
    pairs = [
        (find_task(dataset), *pair)
        for dataset, lines in answers[name].items()
        for pair in zip(lines, answers[REFERENCE][dataset], strict=True)
    ]
    lines = [line for _, line, _ in pairs]
    prefill, decode = (sum(line[time] for line in lines) for time in ("prefill_s", "decode_s"))
    decoded = sum(max(line["new_tokens"] - 1, 0) for line in lines)  # the first token comes from the prefill
    return {
        "items": len(lines),
        "agreement": fmean(agrees(*pair) for pair in pairs),
        "identical": fmean(not line["broken"] and line["pred"] == other["pred"] for _, line, other in pairs),
        "broken": sum(line["broken"] for line in lines),
        "prefill_tokens_per_s": sum(line["prompt_tokens"] for line in lines) / prefill,
        "decode_tokens_per_s": decoded / decode if decoded > 0 and decode > 0 else None,
        "peak_bytes": max((line["peak_bytes"] for line in lines if line["peak_bytes"] is not None), default=None),
    }


def _categories(datasets: dict[str, Any], names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the mean over the data sets of each category, and "all", the mean over the categories."""
    categories: dict[str, dict[str, float]] = {}
    for category in CATEGORIES:
        scores = [entry["score"] for entry in datasets.values() if entry["category"] == category]
        if scores:
            categories[category] = {name: fmean(score[name] for score in scores) for name in names}
    categories["all"] = {name: fmean(each[name] for each in categories.values()) for name in names}
    return categories


def _layers(counts: Sequence[Line]) -> list[dict[str, Any]]:
    """Return each layer's counts over all prompts."""
    return [
        {
            "max_score": max(layer["max_score"] for layer in same),
            **{name: sum(layer[name] for layer in same) for name in ("overflows", "scores")},
        }
        for same in zip(*(line["layers"] for line in counts), strict=True)
    ]


def judge(precisions: dict[str, Any], *, injected: bool) -> dict[str, Any]:
    """Return what must hold, as named booleans.

    Of any model: with FP32 and with PASA no answer is broken. Of the overflow fixture besides: PASA's answers are
    FP32's to `AGREEMENT`, and those of FP16 with stored scores are all broken. If FP16 was run with FP32 scores too,
    its losses are those of the other layers, and PASA must reach `AGREEMENT` of what it keeps.
    """
    checks = {"reference_finite": precisions[REFERENCE]["broken"] == 0}
    if ours := precisions.get("pasa"):
        checks["pasa_finite"] = ours["broken"] == 0
        if injected:
            kept = precisions.get("fp16-sdpa", precisions[REFERENCE])["agreement"]
            checks["pasa_agrees"] = ours["agreement"] >= AGREEMENT * kept
    if injected and (stored := precisions.get("fp16-eager")):
        checks["fp16_collapses"] = stored["broken"] == stored["items"]
    return gate(checks)
