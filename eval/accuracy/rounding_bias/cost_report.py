"""Shows what unbiased rounding costs, in the terminal, as Markdown and in READMEs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pasa.eval.accuracy.rounding_bias.cost_cases import DATA
from pasa.eval.kit import output
from pasa.eval.kit.tables import Table, markdown, number
from pasa.eval.speed.report import origin

Result = dict[str, Any]
COMMAND = "`pasa bench unbiased`"


def cost_table(result: Result) -> Table:
    """A row for every case, format and data."""
    rows = []
    for each in result["records"]:
        ms = [number(each.get(name), ".4g") for name in ("safe_ms", "unbiased_ms")]
        spread = f"{each['p20']:.3f} to {each['p80']:.3f}" if "ratio" in each else "-"
        bias = [number(each.get(name), "+.4f") for name in ("bias_safe", "bias")]
        head = [f"{each['case']}, {each['data']}", each["shape"], each["format"].upper()]
        ratio = [number(each.get("ratio"), ".3f"), spread, verdict_of(each)]
        rows.append([*head, "-" if each["drawn"] is None else f"{each['drawn']:.2%}", *ms, *ratio, *bias])
    header = ["case", "shape", "format", "rows drawn", "safe ms", "unbiased ms", "ratio", "p20 to p80", "target"]
    note = (
        "In CUDA graphs; calls under 2 ms start with a cold L2. Ratio: unbiased over safe, median of rounds in turns. "
        "Bias: mean signed error of tied rows against FP64, in spacings of the format."
    )
    return Table('Cost of softmax="unbiased"', [*header, "bias, safe", "bias, unbiased"], rows, note)


def verdict_of(record: Result) -> str:
    """The target, and whether it is met."""
    if record["why"]:
        return "WRONG, not timed"
    return f"{record['target']}: {'met' if record['met'] else 'missed'}"


def verdict(result: Result) -> str:
    """What the exit status says, and how many targets are met."""
    gate, timed = result["gate"], [each for each in result["records"] if not each["why"]]
    if not gate["passed"]:
        return "\n  ".join(["Wrong outputs, which are not timed:", *gate["failures"]])
    count = f"{sum(each['met'] for each in timed)} of {len(timed)}"
    return f"All outputs are right. {count} targets are met."


def summary(result: Result) -> str:
    """A line for README.md: the range of the ratios by data."""
    told = []
    for data in DATA:
        found = [each["ratio"] for each in result["records"] if each["data"] == data and "ratio" in each]
        span = f"{min(found):.3f} to {max(found):.3f}" if found else "not timed"
        told.append(f"{data} rows {span} (target {result['targets'][data]})")
    return f'Time over that of `softmax="safe"` ({COMMAND}): {", ".join(told)}. {verdict(result)}\n\n{origin(result)}'


def section(result: Result) -> str:
    """The table, for the experiment's README."""
    table = cost_table(result)
    return "\n\n".join([table.note, markdown(table.header, table.rows), f"{verdict(result)} {origin(result)}"])


def render(result: Result, console: Console) -> None:
    """Print the table, the verdict and the origin."""
    cost_table(result).show(console)
    for line in (verdict(result), origin(result)):
        console.print(Text(line))


def save(result: Result, folder: Path) -> None:
    """Write ``cost.json`` and ``cost.md``."""
    stored = output.to_json(result)
    text = f"# {cost_table(result).title}\n\n{section(json.loads(stored))}\n"  # of the rounded numbers
    output.write_text(folder / "cost.json", stored)
    output.write_text(folder / "cost.md", text)
