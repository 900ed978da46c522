"""Shows predictions, their test and the paper's tables to a person."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pasa.eval.kit import output
from pasa.eval.kit.tables import Table, markdown, number, percent
from pasa.prediction.table import MEANINGS, VERDICTS

SHOWN = 20  # heads
NAMES = {"gamma": "gamma", "gain": "d/(gamma d_h)", "alpha": "alpha_min"}


def tables(result: dict[str, Any]) -> list[Table]:
    """What a result has to show."""
    makers: dict[str, Callable[[dict[str, Any]], list[Table]]] = {
        "predict": lambda found: [head_table(found)],
        "paper-tables": lambda found: [paper_table(found)],
        "soundness": lambda found: [soundness_table(found)],
        "auto": lambda found: [auto_table(found)],
    }
    return makers[result["experiment"]](result)


def head_table(result: dict[str, Any], shown: int = SHOWN) -> Table:
    """The worst heads."""
    observed = result["calibration"] is not None
    rows = [
        [
            each["verdict"],
            each["module"],
            number(each["head"], "d"),
            *(number(each[name], ",.0f") for name in ("probable", "proven", "constant", *["observed"] * observed)),
            each["verdict_fp8"],
            number(each["fp8_scale"], ",.3g"),
        ]
        for each in result["records"][:shown]
    ]
    title = f"{result['model']}: the {len(rows)} worst of {len(result['records'])} heads, from the weights alone"
    header = ["verdict", "module", "head", "probable", "proven", "constant", *["observed"] * observed]
    meanings = "; ".join(f"{name}: {meaning}" for name, meaning in MEANINGS.items())
    note = (
        f"FP16 ends at 65,504 on the unscaled q.k, E4M3 at 448 on q.k/sqrt(d_h). {meanings}. Probable: with "
        f"probability 1 - {result['settings']['delta']:g} for inputs of uniform direction, which is an assumption."
    )
    return Table(title, [*header, "FP8", "FP8 scale"], rows, note)


def short_table(result: dict[str, Any]) -> Table:
    """The worst heads in as few columns as 80 characters hold; module names may wrap."""
    full = head_table(result)
    kept = [index for index, name in enumerate(full.header) if name not in ("constant", "FP8 scale")]
    header, *rows = ([row[index] for index in kept] for row in [full.header, *full.rows])
    note = f"{full.note} The constant part and the FP8 scale of every head: --json FILE, --output-dir DIR."
    return Table(full.title, header, rows, note, wraps="module")


def paper_table(result: dict[str, Any]) -> Table:
    """Tables 2 and 3, printed and solved."""
    rows = []
    for model in result["models"]:
        solved, printed = model["solved"], model["printed"]
        cells = [
            cell
            for name, digits in (("gamma", ".4f"), ("gain", ".1f"), ("alpha", ".4f"))
            for cell in (printed[name], format(solved[name], digits))
        ]
        shape = [str(model[name]) for name in ("hidden", "head_dim", "heads")]
        differ = ", ".join(NAMES[name] for name in model["differ"]) or "none"
        rows.append([model["name"], *shape, *cells, differ])
    columns = [text for name in NAMES.values() for text in (f"{name}, printed", "solved")]
    note = (
        f"delta = {result['delta']:g}, L = {result['seq_len']}. Solved: equations (12) and (13) exactly. Differ: "
        "fields whose solution, rounded to the printed digits, is not what is printed."
    )
    return Table("Tables 2 and 3 of the paper", ["model", "d", "d_h", "N", *columns, "differ"], rows, note)


def soundness_table(result: dict[str, Any]) -> Table:
    """What models formed, over what was predicted."""
    rows = [
        [
            each["model"],
            str(each["heads"]),
            ", ".join(f"{each['verdicts'][name]} {name}" for name in VERDICTS if each["verdicts"][name]),
            f"{each['largest_score']:,.0f}",
            *(f"{each[name]:.3g}" for name in ("largest_of_proven", "median_of_proven", "largest_of_probable")),
            str(each["beyond_probable"]),
            f"{each['auto_alpha']:.3g}",
        ]
        for each in result["records"]
    ]
    header = ["model", "heads", "modules", "largest score", "observed / proven, largest", "median"]
    note = (
        "Largest score of each head in one run over its bounds. Above 1 a proven bound would be refuted, and a "
        "probable one by inputs that are not of uniform direction. Auto-alpha: P99.99 of observed over interaction "
        "bound. Random weights (shapes, SVD in small) test that the bounds hold, not what trained models do."
    )
    header += ["observed / probable, largest", "heads beyond probable", "auto-alpha"]
    return Table("Bounds and reality", header, rows, note)


def auto_table(result: dict[str, Any]) -> Table:
    """What each policy patched, and what came of it."""
    rows = [
        [
            each["run"],
            str(len(each["patched"])),
            percent(each["nonfinite_logits"]),
            f"{each['tokens_equal_to_fp32']} of {each['tokens']}",
        ]
        for each in result["records"]
    ]
    fixture, unbiased = result["fixture"], result["unbiased"]
    biased = [str(layer) for layer, offset in enumerate(fixture["offset"]) if offset]
    note = (
        f"SmolLM2-135M-Instruct, FP32, its layers {', '.join(biased)} biased beyond FP16; attention in FP16, emulated; "
        f"{result['prompt']['tokens']} tokens. Without the bias policy auto patches {len(unbiased['patched'])} layers, "
        f"and logits are {'' if unbiased['bit_identical'] else 'NOT '}bit-identical."
    )
    return Table('policy="auto"', ["run", "layers patched", "logits not finite", "tokens equal to FP32"], rows, note)


def verdict(result: dict[str, Any]) -> str:
    """The outcome in a sentence or two."""
    if result["experiment"] == "paper-tables":
        return ""
    if result["experiment"] == "auto":
        return "All checks hold." if result["gate"]["passed"] else f"FAILED: {result['gate']['checks']}."
    if result["experiment"] == "soundness":
        cost, beyond = result["cost"], sum(each["beyond_proven"] for each in result["records"])
        return (
            f"{beyond} of {sum(each['heads'] for each in result['records'])} heads exceeded their proven bound. "
            f"Qwen2-7B's {cost['layers']} attention layers (random, BF16) were predicted in {cost['seconds']:.1f} s "
            f"with {cost['threads']} threads, peak {cost['peak_mib']:,.0f} MiB ({cost['before_mib']:,.0f} before)."
        )
    counts = result["summary"]["modules"]
    parts = ", ".join(f"{counts[name]} {name}" for name in VERDICTS if counts[name])
    lines = [f"{sum(counts.values())} attention modules, each by its worst head: {parts}."]
    if found := result["calibration"]:
        lines.append(
            f"Calibration over {found['heads']} heads: {found['beyond_proven']} beyond the proven bound, "
            f"{found['beyond_probable']} beyond the probable one; used of the proven bound: at most "
            f"{found['largest_of_proven']:.3g}, median {found['median_of_proven']:.3g}; auto-alpha "
            f"{found['auto_alpha']:.3g} (kappa {found['kappa']:g})."
        )
    lines += [f"Not predicted: {name}: {reason}." for name, reason in result["skipped"]]
    return " ".join(lines)


def origin(result: dict[str, Any]) -> str:
    """Where a run was made."""
    if "environment" not in result:
        return ""
    machine = result["environment"]
    return f"({machine['processor']}; torch {machine['torch']}, pasa {machine['pasa']}, commit {machine['commit']}.)"


def render(result: dict[str, Any], console: Console) -> None:
    """Print the tables and what follows from them."""
    for table in [short_table(result)] if result["experiment"] == "predict" else tables(result):
        table.show(console)
    for text in (verdict(result), origin(result)):
        if text:
            console.print(Text(text))


def save(result: dict[str, Any], folder: Path) -> None:
    """Write the result as JSON and Markdown, by the name of the experiment."""
    stem = result["experiment"].replace("-", "_")
    output.write_text(folder / f"{stem}.json", output.to_json(result))
    parts = [text for found in tables(result) for text in (f"# {found.title}", markdown(found.header, found.rows))]
    parts += [found.note for found in tables(result)] + [verdict(result), origin(result)]
    output.write_text(folder / f"{stem}.md", "\n\n".join(filter(None, parts)) + "\n")
