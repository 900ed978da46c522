"""Shows a LongBench run: tables by precision, data set, length and layer, and a sentence about the gate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pasa.eval.kit.device import origin
from pasa.eval.kit.gate import outcome
from pasa.eval.kit.tables import Table, number, percent
from pasa.eval.models.longbench.tasks import BUCKETS

MIB = 2**20


def report(result: dict[str, Any]) -> list[Table | str]:
    """Return the tables that the result has rows for, verdict and origin."""
    tables = [layer_table(result), bucket_table(result), score_table(result), precision_table(result)]
    return [*(table for table in tables if table.rows), f"{verdict(result)} {origin(result)}"]


def precision_table(result: dict[str, Any]) -> Table:
    """Return a row for every precision: answers and speed."""
    rows = [
        [
            result["titles"][name],
            f"{result['categories']['all'][name]:.2f}",
            percent(each["agreement"]),
            percent(each["identical"]),
            f"{each['broken']}/{each['items']}",
            number(each["prefill_tokens_per_s"], ",.0f"),
            number(each["decode_tokens_per_s"], ",.1f"),
            number(each["peak_bytes"] and each["peak_bytes"] / MIB, ",.0f"),
        ]
        for name, each in result["precisions"].items()
    ]
    answers = ["precision", "score", "equal to FP32", "identical", "broken"]
    lengths = [length for entry in result["datasets"].values() for length in entry["prompt_tokens"]]
    sets = len(result["datasets"])
    title = (
        f"{result['model']}: {sets} data set{'' if sets == 1 else 's'} of {result['data']}, "
        f"{_range(lengths, ' to ')} prompt tokens"
    )
    lost = sum(sum(entry["rouge_out_of_stack"].values()) for entry in result["datasets"].values())
    note = (
        "Score: mean over the categories of LongBench, 0 to 100. Equal to FP32: share of the answers of which all that "
        "is scored (few-shot and code: a line) is FP32's, to the character; identical: all that is generated. Broken: "
        "answers that end because logits are NaN."
        + (f" ROUGE is 0 for {lost} answers because the package ran out of stack, as published." if lost else "")
    )
    return Table(title, [*answers, "prefill tokens/s", "decode tokens/s", "peak MiB"], rows, note)


def _range(values: Sequence[int], to: str) -> str:
    return to.join(f"{value:,}" for value in sorted({min(values), max(values)}))


def score_table(result: dict[str, Any]) -> Table:
    """Return a row for every data set, then one for every category."""
    names = list(result["precisions"])
    rows = []
    for dataset, entry in result["datasets"].items():
        cells = [f"{number(entry['score'][name], '.2f')} ({percent(entry['agreement'][name])})" for name in names]
        rows.append([dataset, entry["metric"], str(entry["items"]), _range(entry["prompt_tokens"], "-"), *cells])
    for category, score in result["categories"].items():
        rows.append([category, "", "", "", *(f"{score[name]:.2f}" for name in names)])
    header = ["data set", "metric", "items", "prompt tokens", *(result["titles"][name] for name in names)]
    note = "In brackets: share of the answers equal to FP32's."
    return Table("Scores by data set and by category", header, rows, note)


def bucket_table(result: dict[str, Any]) -> Table:
    """Return a row for every data set of LongBench-E and precision."""
    rows = [
        [dataset, result["titles"][name], *(number(values[each], ".2f") for each in BUCKETS)]
        for dataset, entry in result["datasets"].items()
        for name, values in entry.get("buckets", {}).items()
    ]
    note = "Lengths in words, of Chinese in characters."
    return Table("LongBench-E by length", ["data set", "precision", *BUCKETS], rows, note)


def layer_table(result: dict[str, Any]) -> Table:
    """Return a row for every layer: scores that FP16 cannot store."""
    rows = [
        [
            str(index),
            f"{layer['max_score']:,.0f}",
            f"{layer['overflows']:,}",
            percent(layer["overflows"] / layer["scores"]),
        ]
        for index, layer in enumerate(result["layers"])
    ]
    note = "Over the prompts whose scores were counted, with PASA's activations; all heads, visible pairs."
    return Table("Scores q.k that FP16 stores as infinity", ["layer", "max |q.k|", "count", "share"], rows, note)


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
