"""Shows errors and times of gradients to a person, in the terminal and as Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pasa.eval.accuracy.gradients.run import FACTOR, NAMES
from pasa.eval.kit import output
from pasa.eval.kit.tables import Table, markdown, number
from pasa.eval.speed.implementations import FLASH
from pasa.eval.speed.report import label, origin

Result = dict[str, Any]
TITLES = {"dq": "dQ", "dk": "dK", "dv": "dV"}
EXAMPLE = "scores of 131072"
LONGEST = 8  # kernels of each shape


def tables(result: Result) -> list[Table]:
    """Errors, times, kernels; tables without rows are left out."""
    return [table for table in (error_table(result), time_table(result), kernel_table(result)) if table.rows]


def error_table(result: Result) -> Table:
    """A row for every case and backend: our error, and the plain pass's."""
    rows = []
    for each in result["records"]:
        cells = [f"{short(each[name])} ({short(each[f'plain_{name}'])})" for name in NAMES]
        rows.append([each["case"], each["backend"], *cells, worst(each) + ", not judged" * (not each["judged"])])
    note = (
        "Relative RMSE against FP64; in brackets that of a plain backward pass in FP32 with saved output and "
        f"log-sum-exp. Worst: the largest of the three over the plain pass's; at most {FACTOR:g} where judged."
    )
    return Table("Errors of gradients", ["case", "backend", *TITLES.values(), "worst"], rows, note)


def time_table(result: Result) -> Table:
    """A row for every shape, part and way to call."""
    rows = []
    for own in (each for each in result["times"] if each["implementation"] != FLASH):
        same = ("shape", "part", "how")
        (flash,) = [
            each
            for each in result["times"]
            if each["implementation"] == FLASH and all(each[name] == own[name] for name in same)
        ]
        milliseconds = [number(each["median_ms"], ".4g") for each in (flash, own)]
        host = [number(each.get("host_us"), ".0f") for each in (flash, own)]
        ratios = [number(own["tflops"], ".0f"), number(own["to_flash"], ".2f")]
        rows.append([label(own["shape"], own["how"]), own["part"], *milliseconds, *ratios, *host])
    header = ["causal, FP16", "part", f"{FLASH} ms", "pasa ms", "pasa TFLOPS", f"x {FLASH}", f"{FLASH} host us"]
    note = (
        f"x {FLASH}: its time over ours, above 1 is faster. graph: in a CUDA graph, without the host. host us: what "
        "the host takes to enqueue a call."
    )
    return Table("Forward and backward", [*header, "pasa host us"], rows, note)


def kernel_table(result: Result) -> Table:
    """The longest kernels of a forward and backward pass."""
    rows = []
    for shape in dict.fromkeys(each["shape"] for each in result["kernels"]):
        own = [each for each in result["kernels"] if each["shape"] == shape]
        total = sum(each["ms"] for each in own)
        rows += [
            [shape, each["kernel"], f"{each['launches']:g}", f"{each['ms']:.4f}", f"{100 * each['ms'] / total:.0f} %"]
            for each in own[:LONGEST]
        ]
    note = (
        "By torch's profiler. centre, rows, keys and queries_kernel are the backward pass; torch's own find its units."
    )
    return Table("Kernels of pasa, forward + backward", ["shape", "kernel", "launches", "ms", "share"], rows, note)


def worst(record: dict[str, Any]) -> str:
    """The largest error over the plain pass's."""
    pairs = [(record[name], record[f"plain_{name}"]) for name in NAMES]
    if any(value is None or value != value for pair in pairs for value in pair):
        return "not finite"
    return f"{max(own / plain for own, plain in pairs):.2f}"


def short(value: float | None) -> str:
    """Two digits; JSON has no NaN."""
    return "not finite" if value is None or value != value else f"{value:.1e}"


def verdict(result: Result) -> str:
    """What the exit status says."""
    gate = result["gate"]
    if gate["passed"]:
        backends = " and ".join(result["backends"])
        bound = f"within {FACTOR:g} times a plain backward pass's"
        return f"All {gate['judged']} judged errors ({backends}) are {bound}."
    told = [f"{TITLES[each['of']]} of {each['backend']}: {each['case']}" for each in gate["failures"]]
    return "\n  ".join([f"{len(told)} of {gate['judged']} errors are too large; nothing is timed:", *told])


def example(result: Result) -> str:
    """The first backend's errors on one case, and the plain pass's."""
    found = next(each for each in result["records"] if each["case"] == EXAMPLE)
    own, plain = (", ".join(f"{TITLES[n]} {short(found[how + n])}" for n in NAMES) for how in ("", "plain_"))
    return f"With {EXAMPLE}: {found['backend']} {own}; plain {plain}."


def summary(result: Result) -> str:
    """Verdict, example, times and origin, in Markdown."""
    found = time_table(result)
    times = [found.note, markdown(found.header, found.rows)] if found.rows else []
    return "\n\n".join([f"{verdict(result)} {example(result)}", *times, origin(result)])


def render(result: Result, console: Console) -> None:
    """Print the tables, the verdict and the origin."""
    for table in tables(result):
        table.show(console)
    for line in (verdict(result), origin(result)):
        console.print(Text(line))


def save(result: Result, folder: Path) -> None:
    """Write ``gradients.json`` and ``gradients.md``."""
    stored = output.to_json(result)
    shown = json.loads(stored)  # of the rounded numbers
    parts = ["# Gradients", origin(shown), verdict(shown)]
    for table in tables(shown):
        parts += [f"## {table.title}", markdown(table.header, table.rows), table.note]
    output.write_text(folder / "gradients.json", stored)
    output.write_text(folder / "gradients.md", "\n\n".join(parts) + "\n")
