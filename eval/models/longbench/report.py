"""Sum the answers of a LongBench run up: scores, agreement with FP32, speed, the gate, and tables of them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from pasa.eval.kit.device import origin
from pasa.eval.kit.experiment import gate, outcome
from pasa.eval.kit.stored import pick
from pasa.eval.kit.tables import Table, number, percent
from pasa.eval.models.longbench.tasks import CATEGORIES, Task, find_task, score_item, scored_part
from pasa.eval.models.precisions import REFERENCE

Line = dict[str, Any]
AGREEMENT = 0.98  # share of PASA's answers that must equal FP32's in all that is scored of them: the bound of the task


def summarise(answers: Sequence[Line], counts: Sequence[Sequence[Line]], *, injected: bool) -> dict[str, Any]:
    """Return all numbers of a run, from its answers and from the overflowing scores of some prompts, layer by layer.

    All precisions have the same questions in the same order. `injected` says that the model is the overflow fixture, on
    which FP16 with stored scores must collapse.
    """
    names, reference = list(dict.fromkeys(line["precision"] for line in answers)), pick(answers, precision=REFERENCE)
    judged = {
        name: [_judged(*pair) for pair in zip(pick(answers, precision=name), reference, strict=True)] for name in names
    }
    precisions = {name: _precision(lines) for name, lines in judged.items()}
    datasets = {
        dataset: _dataset(find_task(dataset), {name: pick(judged[name], dataset=dataset) for name in names})
        for dataset in dict.fromkeys(line["dataset"] for line in reference)
    }
    return {
        "gate": judge(precisions, injected=injected),
        "datasets": datasets,
        "categories": _categories(datasets, names),
        "precisions": precisions,
        "layers": [
            {
                "max_score": max(layer["max_score"] for layer in same),
                **{name: sum(layer[name] for layer in same) for name in ("overflows", "scores")},
            }
            for same in zip(*counts, strict=True)
        ],
    }


def _judged(line: Line, reference: Line) -> Line:
    task = find_task(line["dataset"])
    return {
        **line,
        "score": score_item(task, line["pred"], line["answers"], line["all_classes"]),
        "agrees": agrees(task, line, reference),
        "identical": not line["broken"] and line["pred"] == reference["pred"],
    }


def agrees(task: Task, line: Line, reference: Line) -> bool:
    """Return whether an answer is whole and equals the reference's, to the character, in the part that is scored.

    Where nothing of an answer is scored, all of it is compared.
    """
    ours, theirs = (scored_part(task, each["pred"]) or each["pred"] for each in (line, reference))
    return not line["broken"] and ours == theirs


def _dataset(task: Task, answers: dict[str, list[Line]]) -> dict[str, Any]:
    """Return score, rounded as published, and agreement with the reference by precision."""
    lengths = [line["prompt_tokens"] for line in answers[REFERENCE]]
    return {
        "category": task.category,
        "metric": task.metric.__name__,
        "items": len(lengths),
        "prompt_tokens": [min(lengths), max(lengths)],
        "score": {
            name: round(100 * sum(each["score"] for each in answers[name]) / len(lengths), 2) for name in answers
        },
        "agreement": {name: fmean(each["agrees"] for each in answers[name]) for name in answers},
    }


def _precision(lines: Sequence[Line]) -> dict[str, Any]:
    prefill, decode = (sum(line[time] for line in lines) for time in ("prefill_s", "decode_s"))
    decoded = sum(max(line["new_tokens"] - 1, 0) for line in lines)  # the first token comes from the prefill
    return {
        "items": len(lines),
        "agreement": fmean(line["agrees"] for line in lines),
        "identical": fmean(line["identical"] for line in lines),
        "broken": sum(line["broken"] for line in lines),
        "prefill_tokens_per_s": sum(line["prompt_tokens"] for line in lines) / prefill,
        "decode_tokens_per_s": decoded / decode if decoded > 0 else None,
        "peak_bytes": max((line["peak_bytes"] for line in lines if line["peak_bytes"] is not None), default=None),
    }


def _categories(datasets: dict[str, Any], names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the mean over the data sets of each category, and "all", the mean over the categories."""
    categories: dict[str, dict[str, float]] = {}
    for category in CATEGORIES:
        if scores := [entry["score"] for entry in datasets.values() if entry["category"] == category]:
            categories[category] = {name: fmean(score[name] for score in scores) for name in names}
    categories["all"] = {name: fmean(each[name] for each in categories.values()) for name in names}
    return categories


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


def report(result: dict[str, Any]) -> list[Table | str]:
    """Return both tables, verdict and origin."""
    return [verdict(result), score_table(result), precision_table(result), origin(result)]


def precision_table(result: dict[str, Any]) -> Table:
    """Return a row for every precision: answers and speed."""
    titles, scores = result["titles"], result["categories"]["all"]
    records = [{**each, "title": titles[name], "score": scores[name]} for name, each in result["precisions"].items()]
    lengths = [length for entry in result["datasets"].values() for length in entry["prompt_tokens"]]
    title = f"{result['model']}: {len(result['datasets'])} data sets of {result['data']}, "
    return Table.of(
        f"{title}{_range(lengths, ' to ')} prompt tokens",
        records,
        {
            "precision": "title",
            "score": ("score", ".2f"),
            "equal to FP32": lambda each: percent(each["agreement"]),
            "identical": lambda each: percent(each["identical"]),
            "broken": lambda each: f"{each['broken']}/{each['items']}",
            "prefill tokens/s": ("prefill_tokens_per_s", ",.0f"),
            "decode tokens/s": ("decode_tokens_per_s", ",.1f"),
            "peak MiB": lambda each: number(each["peak_bytes"] and each["peak_bytes"] / 2**20, ",.0f"),
        },
        "Score: mean over the categories of LongBench, 0 to 100. Equal to FP32: share of the answers whose scored part "
        "is FP32's to the character (in few-shot and code tasks one line is scored). Identical: share whose whole text "
        "is. Broken: answers that end because logits are NaN.",
    )


def _range(values: Sequence[int], to: str) -> str:
    return to.join(f"{value:,}" for value in sorted({min(values), max(values)}))


def score_table(result: dict[str, Any]) -> Table:
    """Return a row for every data set, then one for every category."""
    titles = result["titles"]
    rows = []
    for dataset, entry in result["datasets"].items():
        cells = [f"{entry['score'][name]:.2f} ({percent(entry['agreement'][name])})" for name in titles]
        rows.append([dataset, entry["metric"], str(entry["items"]), _range(entry["prompt_tokens"], "-"), *cells])
    for category, score in result["categories"].items():
        rows.append([category, "", "", "", *(f"{score[name]:.2f}" for name in titles)])
    header = ["data set", "metric", "items", "prompt tokens", *titles.values()]
    note = "In brackets: share of the answers equal to FP32's."
    return Table("Scores by data set and by category", header, rows, note)


def verdict(result: dict[str, Any]) -> str:
    """Return what the exit status says, with the numbers."""
    parts = []
    if layers := result["layers"]:
        beyond = sum(layer["overflows"] > 0 for layer in layers)
        largest = max(layer["max_score"] for layer in layers)
        parts.append(f"Scores reach {largest:,.0f}; {beyond} of {len(layers)} layers overflow FP16.")
    for name in ("fp16-eager", "pasa"):
        if each := result["precisions"].get(name):
            parts.append(
                f"{result['titles'][name]}: {each['broken']} of {each['items']} answers broken, "
                f"{round(each['agreement'] * each['items'])} of {each['items']} equal to FP32's."
            )
    return " ".join([*parts, outcome(result)])
