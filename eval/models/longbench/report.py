"""Shows a LongBench run to a person, in the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pasa.eval.kit import output
from pasa.eval.kit.tables import Table, markdown, number, percent
from pasa.eval.models.longbench.tasks import BUCKETS, PER_LANGUAGE

MIB = 2**20


def tables(result: dict[str, Any]) -> list[Table]:
    """What a result has to show."""
    shown = [precision_table(result), score_table(result)]
    if any("buckets" in entry for entry in result["datasets"].values()):
        shown.append(bucket_table(result))
    return [*shown, layer_table(result)] if result["layers"] else shown


def precision_table(result: dict[str, Any]) -> Table:
    """A row for every precision: what it answered, and how fast."""
    rows = []
    for name, found in result["precisions"].items():
        peak = found["peak_bytes"]
        rows.append(
            [
                result["titles"][name],
                f"{result['categories']['all'][name]:.2f}",
                percent(found["agreement"]),
                percent(found["identical"]),
                f"{found['broken']}/{found['items']}",
                number(found["prefill_tokens_per_s"], ",.0f"),
                number(found["decode_tokens_per_s"], ",.1f"),
                "-" if peak is None else f"{peak / MIB:,.0f}",
            ]
        )
    header = [
        "precision",
        "score",
        "equal to FP32",
        "identical",
        "broken",
        "prefill tokens/s",
        "decode tokens/s",
        "peak MiB",
    ]
    lengths = [length for entry in result["datasets"].values() for length in entry["prompt_tokens"]]
    title = (
        f"{result['model']}: {counted(len(result['datasets']), 'data set')} of {result['data']}, "
        f"{_range(lengths, ' to ')} prompt tokens"
    )
    return Table(title, header, rows, _note(result))


def counted(number: int, noun: str) -> str:
    """Number and noun, in the plural where it must be."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _range(values: Sequence[int], to: str) -> str:
    return to.join(f"{value:,}" for value in sorted({min(values), max(values)}))


def _note(result: dict[str, Any]) -> str:
    """How to read the table."""
    lost = sum(sum(entry["rouge_out_of_stack"].values()) for entry in result["datasets"].values())
    sentences = [
        "Score: mean over the categories of LongBench, 0 to 100. Equal to FP32: share of the answers of which "
        "all that is scored (few-shot and code: a line) is FP32's, to the character; identical: all that is "
        "generated. Broken: answers that end because logits are no numbers",
        *([f"ROUGE is 0 for {lost} answers because the package ran out of stack, as published"] if lost else []),
        result["note"],
    ]
    return ". ".join(sentences) + "."


def score_table(result: dict[str, Any]) -> Table:
    """A row for every data set, then one for every category."""
    names = list(result["precisions"])
    rows = []
    for dataset, entry in result["datasets"].items():
        values = [_cell(entry["score"][name], entry["agreement"][name]) for name in names]
        rows.append([dataset, entry["metric"], str(entry["items"]), _range(entry["prompt_tokens"], "-"), *values])
    for category, score in result["categories"].items():
        rows.append([category, "", "", "", *(f"{score[name]:.2f}" for name in names)])
    header = ["data set", "metric", "items", "prompt tokens", *(result["titles"][name] for name in names)]
    return Table(
        "Scores by data set and by category", header, rows, "In brackets: share of the answers equal to FP32's."
    )


def _cell(score: float | None, agreement: float) -> str:
    return f"{number(score, '.2f')} ({percent(agreement)})"


def bucket_table(result: dict[str, Any]) -> Table:
    """LongBench-E: a row for every data set and precision."""
    rows = [
        [dataset, result["titles"][name], *(number(values[each], ".2f") for each in BUCKETS)]
        for dataset, entry in result["datasets"].items()
        for name, values in entry.get("buckets", {}).items()
    ]
    unit = f"{PER_LANGUAGE['en']}, of Chinese {PER_LANGUAGE['zh']}"
    return Table("LongBench-E by length", ["data set", "precision", *BUCKETS], rows, f"Lengths in {unit}.")


def layer_table(result: dict[str, Any]) -> Table:
    """Scores that FP16 cannot store, layer by layer."""
    rows = [
        [
            str(index),
            f"{layer['max_score']:,.0f}",
            f"{layer['overflows']:,}",
            percent(layer["overflows"] / layer["scores"]),
        ]
        for index, layer in enumerate(result["layers"])
    ]
    note = "Over the prompts that were looked at, with PASA's activations; all heads, visible pairs."
    return Table("Scores q.k that FP16 stores as infinity", ["layer", "max |q.k|", "count", "share"], rows, note)


def verdict(result: dict[str, Any]) -> str:
    """What the exit status says, with the numbers."""
    parts = []
    if layers := result["layers"]:
        beyond = sum(layer["overflows"] > 0 for layer in layers)
        parts.append(
            f"Scores reach {max(layer['max_score'] for layer in layers):,.0f}; {beyond} of {len(layers)} layers "
            "overflow FP16."
        )
    for name in ("fp16-eager", "pasa"):
        if name in result["precisions"]:
            found = result["precisions"][name]
            parts.append(
                f"{result['titles'][name]}: {found['broken']} of {found['items']} answers broken, "
                f"{round(found['agreement'] * found['items'])} of {found['items']} equal to FP32's."
            )
    return " ".join([*parts, conclusion(result["gate"])])


def conclusion(gate: dict[str, Any]) -> str:
    """Whether the checks hold, and whether there were any."""
    failed = [name for name, passed in gate["checks"].items() if not passed]
    if failed:
        return f"FAILED: {', '.join(failed)}."
    return (
        "All checks hold."
        if gate["checks"].keys() - {"reference_finite"}
        else "FP32 is finite; no other check applies."
    )


def origin(result: dict[str, Any]) -> str:
    """Where and with what it was run."""
    machine = result["environment"]
    return (
        f"({machine['device']}, {machine['processor']}; torch {machine['torch']}, transformers "
        f"{machine['transformers']}, pasa {machine['pasa']}, commit {machine['commit'] or 'unknown'}.)"
    )


def render(result: dict[str, Any], console: Console | None = None) -> None:
    """Print all tables and the verdict."""
    console = console or Console()
    for found in tables(result):
        found.show(console)
    console.print(Text(verdict(result)))


def save(result: dict[str, Any], folder: Path) -> None:
    """Write ``longbench.json``, ``longbench.md`` and ``longbench.png``."""
    from pasa.eval.models.longbench import plots

    output.write_text(folder / "longbench.json", output.to_json(result))
    parts = ["# LongBench", verdict(result), origin(result)]
    for found in tables(result):
        parts += [f"## {found.title}", markdown(found.header, found.rows), found.note]
    output.write_text(folder / "longbench.md", "\n\n".join([*parts, "![Scores](longbench.png)"]) + "\n")
    plots.draw(result, folder / "longbench.png")
