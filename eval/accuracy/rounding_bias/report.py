"""Shows the bias of rounding to a person, in the terminal and as Markdown, from the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pasa.eval.accuracy.rounding_bias.arithmetic import ARMS, PLACES
from pasa.eval.accuracy.rounding_bias.run import failures
from pasa.eval.kit import output
from pasa.eval.kit.tables import Table, markdown

Result = dict[str, Any]
TITLES = {"nearest": "nearest", "published": "published rule", "ours": "ours", "stochastic": "stochastic"}


def tables(result: Result) -> list[Table]:
    """Bias of O and of delta by format and place, errors, triggers, worked examples."""
    formats = list(dict.fromkeys(each["format"] for each in result["records"]))
    places = [(fmt, place) for fmt in formats for place in PLACES]
    bias = [bias_table(result, fmt, place) for fmt, place in places]
    delta = [bias_table(result, fmt, place, of="delta") for fmt, place in places]
    return [*bias, *delta, *(trigger_table(result, fmt) for fmt in formats), example_table(result)]


def bias_table(result: Result, fmt: str, place: str, of: str = "O", cases: Sequence[str] | None = None) -> Table:
    """A row for every case, a column for every arm; for O the errors of nearest and ours as well."""
    prefix = "" if of == "O" else "delta_"
    rows = []
    for case in cases or [each["name"] for each in result["cases"]]:
        own = {arm: find(result, format=fmt, case=case, place=place, arm=arm) for arm in ARMS}
        row = [case, *(signed(own[arm][f"{prefix}bias"], own[arm][f"{prefix}interval"]) for arm in ARMS)]
        rows.append(row if prefix else [*row, *(f"{own[arm]['rms']:.3f}" for arm in ("nearest", "ours"))])
    errors = [] if prefix else ["RMS, nearest", "RMS, ours"]
    settings = result["settings"]
    note = (
        f"{result['places'][place]}. Mean signed error in spacings of {fmt.upper()}, away from zero positive, +/- 95 % "
        f"of {settings['rows']:,} independent rows, D = {settings['dim']}."
    )
    if prefix:
        note += " delta = rowsum(dO * O), over rowsum(|dO| * spacing)."
    return Table(f"Bias of {of}, {fmt.upper()}, {place}", ["case", *TITLES.values(), *errors], rows, note)


def find(result: Result, **wanted: str) -> dict[str, Any]:
    """The one record that has these values."""
    found: dict[str, Any]
    (found,) = [each for each in result["records"] if all(each[key] == value for key, value in wanted.items())]
    return found


def signed(value: float | None, interval: float | None) -> str:
    """+0.1234 ± 0.0012; a stored result has None in place of NaN."""
    return "NaN" if value is None or interval is None else f"{value:+.4f} ± {interval:.4f}"


def trigger_table(result: Result, fmt: str) -> Table:
    """A row for every trigger; for every case the bias that is left, and the rows that are drawn."""
    own = [each for each in result["detection"] if each["format"] == fmt]
    cases = list(dict.fromkeys(each["case"] for each in own))
    rows = []
    for trigger in dict.fromkeys(each["trigger"] for each in own):
        line = {each["case"]: each for each in own if each["trigger"] == trigger}
        cells = [
            f"{line[case]['bias']:+.4f} ({100 * line[case]['drawn']:.1f} %, {line[case]['rms']:.3f})" for case in cases
        ]
        rows.append([trigger, *cells])
    note = "Bias of O that is left (rows that are drawn, RMS of the error), D = 128, O / l rounded once."
    return Table(f"Which rows to draw, {fmt.upper()}", ["trigger", *cases], rows, note)


def example_table(result: Result) -> Table:
    """What was published, and what this arithmetic gives."""
    rows = [
        [f"{name}: {what}", repr(value)]
        for name, found in result["examples"].items()
        if name != "exact"
        for what, value in found.items()
    ]
    note = "Equal to what was published, bit for bit." if result["examples"]["exact"] else "NOT what was published."
    return Table("Worked examples in BF16", ["example", "result"], rows, note)


def verdict(result: Result) -> str:
    """What the exit status says."""
    gate, failed = result["gate"], failures(result["gate"])
    head = f"{len(gate['checks']) - len(failed)} of {len(gate['checks'])} checks pass"
    return (
        f"{head}." if gate["passed"] else "\n  ".join([f"{head}; FAILED:", *(failure(result, name) for name in failed)])
    )


def failure(result: Result, name: str) -> str:
    """A check that failed, and what it judged."""
    if name == "worked examples":
        return name
    fmt, place, case = name.split(", ", 2)
    own = {arm: find(result, format=fmt, case=case, place=place, arm=arm) for arm in ("nearest", "ours", "stochastic")}
    missed = [what for what, held in result["gate"]["checks"][name].items() if what != "passed" and not held]
    biases = ", ".join(f"{arm} {signed(each['bias'], each['interval'])}" for arm, each in own.items())
    errors = f"RMS {own['nearest']['rms']:.3f}, ours {own['ours']['rms']:.3f}"
    return f"{name}: not {' and not '.join(missed)}; {biases}; {errors}"


def origin(result: Result) -> str:
    """Where the numbers come from."""
    machine, settings = result["environment"], result["settings"]
    return (
        f"{result['note']}. {machine['processor']}; torch {machine['torch']}, pasa {machine['pasa']}, "
        f"commit {machine['commit'] or 'unknown'}; seed {settings['seed']}, {settings['rows']:,} rows; "
        f"{result['duration_s']} s."
    )


def render(result: Result, console: Console) -> None:
    """Print the tables, the verdict and the origin."""
    for table in tables(result):
        table.show(console)
    console.print(Text(verdict(result)))
    console.print(Text(origin(result)))


def save(result: Result, folder: Path) -> None:
    """Write ``bias.json`` and ``bias.md``."""
    parts = ["# Bias of rounding", origin(result), verdict(result)]
    for table in tables(result):
        parts += [f"## {table.title}", markdown(table.header, table.rows), table.note]
    output.write_text(folder / "bias.json", output.to_json(result))
    output.write_text(folder / "bias.md", "\n\n".join(parts) + "\n")
