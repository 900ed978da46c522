"""From stored lines to the numbers of a run: scores, agreement with FP32, speed, memory, overflow by layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any

from pasa.eval.accuracy.precisions import REFERENCE
from pasa.eval.kit import output
from pasa.eval.models.longbench import metrics
from pasa.eval.models.longbench.store import Line
from pasa.eval.models.longbench.tasks import CATEGORIES, SUFFIX, find_task

Answers = dict[str, dict[str, dict[int, Line]]]
"""precision -> data set -> index -> line"""
AGREEMENT = 0.98
"""Share of PASA's answers that must equal FP32's in all that is scored of them: the bound of the task."""


def summarise(
    answers: Answers, counted: dict[str, dict[int, Line]], *, injected: bool, report: output.Report
) -> dict[str, Any]:
    """All numbers of a run.

    Parameters
    ----------
    answers : dict
        Of all precisions, the reference among them.
    counted : dict
        Data set -> index -> line of overflow counts.
    injected : bool
        Whether the model is the overflow fixture, on which FP16 with stored scores must collapse.
    report : callable
        Called with (data sets done, data sets, what comes next): ROUGE takes its time.

    Returns
    -------
    dict
        ``datasets`` (by name: category, items, score by precision, buckets for LongBench-E), ``categories``,
        ``precisions`` (agreement, broken answers, tokens/s, memory), ``layers``, ``gate``.
    """
    names = list(answers)
    datasets = {}
    for done, dataset in enumerate(answers[REFERENCE]):
        report(done, len(answers[REFERENCE]), f"scoring {dataset}")
        task = find_task(dataset)
        scores = {name: [_score(dataset, line) for line in _rows(answers[name][dataset])] for name in names}
        rows = _rows(answers[REFERENCE][dataset])
        datasets[dataset] = {
            "category": task.category,
            "metric": task.metric,
            "items": len(rows),
            "prompt_tokens": [min(r["prompt_tokens"] for r in rows), max(r["prompt_tokens"] for r in rows)],
            "score": {name: metrics.score_dataset(own) for name, own in scores.items()},
            "agreement": {name: _agreement(answers, name, [dataset]) for name in names},
            "identical": {name: _identical(answers, name, [dataset]) for name in names},
            "rouge_out_of_stack": {name: _out_of_stack(dataset, _rows(answers[name][dataset])) for name in names},
        }
        if dataset.endswith(SUFFIX):
            lengths = [line["length"] for line in rows]
            datasets[dataset]["buckets"] = {name: metrics.score_buckets(own, lengths) for name, own in scores.items()}
    result: dict[str, Any] = {
        "datasets": datasets,
        "categories": _categories(datasets, names),
        "precisions": {name: _precision(answers, name) for name in names},
        "layers": _layers(counted),
    }
    return {"gate": judge(result, injected=injected), **result}


def _rows(lines: dict[int, Line]) -> list[Line]:
    return [lines[index] for index in sorted(lines)]


def _score(dataset: str, line: Line) -> float:
    return metrics.score_item(find_task(dataset), line["pred"], line["answers"], line["all_classes"])


def _out_of_stack(dataset: str, rows: Sequence[Line]) -> int:
    task = find_task(dataset)
    return sum(metrics.ran_out_of_stack(task, row["pred"], row["answers"]) for row in rows)


def _agreement(answers: Answers, name: str, datasets: Iterable[str]) -> float:
    """Share of the answers that are whole and the reference's, to the character, in the part that is scored.

    Where nothing of an answer is scored, all of it is compared.
    """

    def scored(dataset: str, line: Line) -> str:
        return metrics.scored_part(find_task(dataset), line["pred"]) or line["pred"]

    return fmean(
        not line["broken"] and scored(dataset, line) == scored(dataset, other)
        for dataset, line, other in _pairs(answers, name, datasets)
    )


def _identical(answers: Answers, name: str, datasets: Iterable[str]) -> float:
    """As :func:`_agreement`, of all that was generated."""
    return fmean(
        not line["broken"] and line["pred"] == other["pred"] for _, line, other in _pairs(answers, name, datasets)
    )


def _pairs(answers: Answers, name: str, datasets: Iterable[str]) -> Iterator[tuple[str, Line, Line]]:
    """(data set, line, the reference's line) of every item."""
    for dataset in datasets:
        for index, line in answers[name][dataset].items():
            yield dataset, line, answers[REFERENCE][dataset][index]


def _categories(datasets: dict[str, Any], names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Mean over the data sets of each category, and "all", the mean over the categories."""
    found: dict[str, dict[str, float]] = {}
    for category in CATEGORIES:
        own = [entry["score"] for entry in datasets.values() if entry["category"] == category]
        if own:
            found[category] = {name: fmean(score[name] for score in own) for name in names}
    found["all"] = {name: fmean(each[name] for each in found.values()) for name in names}
    return found


def _precision(answers: Answers, name: str) -> dict[str, Any]:
    lines = [line for own in answers[name].values() for line in own.values()]
    prefill, decode = sum(line["prefill_s"] for line in lines), sum(line["decode_s"] for line in lines)
    decoded = sum(max(line["new_tokens"] - 1, 0) for line in lines)  # the first token comes from the prefill
    peaks = [line["peak_bytes"] for line in lines if line["peak_bytes"] is not None]
    return {
        "items": len(lines),
        "agreement": _agreement(answers, name, answers[name]),
        "identical": _identical(answers, name, answers[name]),
        "broken": sum(line["broken"] for line in lines),
        "prefill_tokens_per_s": sum(line["prompt_tokens"] for line in lines) / prefill,
        "decode_tokens_per_s": decoded / decode if decoded > 0 and decode > 0 else None,
        "peak_bytes": max(peaks, default=None),
    }


def _layers(counted: dict[str, dict[int, Line]]) -> list[dict[str, Any]]:
    """Each layer's counts over all prompts that were looked at."""
    prompts = [line["layers"] for own in counted.values() for line in own.values()]
    return [
        {
            "max_score": max(layer["max_score"] for layer in same),
            **{name: sum(layer[name] for layer in same) for name in ("overflows", "scores")},
        }
        for same in zip(*prompts, strict=True)
    ]


def judge(result: dict[str, Any], *, injected: bool) -> dict[str, Any]:
    """What must hold, as named booleans.

    Of any model: with FP32 and with PASA no answer is broken. Of the overflow fixture besides: PASA's answers are
    FP32's to `AGREEMENT`, and those of FP16 with stored scores are all broken. Where FP16 was run with FP32 scores as
    well, what it loses is the rest of the model's doing, and PASA is asked for `AGREEMENT` of what it keeps.
    """
    found = result["precisions"]
    checks = {"reference_finite": found[REFERENCE]["broken"] == 0}
    if "pasa" in found:
        checks["pasa_finite"] = found["pasa"]["broken"] == 0
        if injected:
            kept = found.get("fp16-sdpa", found[REFERENCE])["agreement"]
            checks["pasa_agrees"] = found["pasa"]["agreement"] >= AGREEMENT * kept
    if injected and "fp16-eager" in found:
        checks["fp16_collapses"] = found["fp16-eager"]["broken"] == found["fp16-eager"]["items"]
    return {"passed": all(checks.values()), "checks": checks}
