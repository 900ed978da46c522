"""Shows a denoising step to a person, in the terminal and as Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pasa.eval.kit import output
from pasa.eval.kit.tables import Table, markdown, short
from pasa.eval.speed.implementations import CUDNN, FLASH
from pasa.eval.speed.run import OK

GIB = 2**30
FIGURES = (
    "ms, beside flash: time of SDPA flash over one's own. Memory: what the call allocates beyond weights and output."
)


def model_table(result: dict[str, Any]) -> Table:
    """A row for every model, bias and way of attending."""
    rows = []
    for each in result["records"]:
        name = each["model"] + (f", scores + {each['offset']:,}" if each["offset"] else "")
        if each["status"] != OK:
            rows.append([name, each["way"], "-", "-", "-", "-", each["why"][:60]])
            continue
        broken = each["nonfinite_share"]
        errors = ["NaN", "NaN"] if broken else [short(each["rmse"]), short(each["max_error"])]
        rows.append([name, each["way"], f"{each['median_ms']:.1f}", _ratio(each["to_flash"]),
                     f"{each['workspace_bytes'] / GIB:.1f}", *errors])  # fmt: skip
    size = result["sizes"]
    note = (
        f"{size['frames']} frames of {8 * size['width']} x {8 * size['height']}, guided; the VAE "
        f"decodes {size['decoded']} frames. Random weights; errors are those to FP32 without the bias. {FIGURES} "
        + " ".join(f"{name}: {what}." for name, what in result["ways"].items())
    )
    header = ["model", "attention", "ms", "beside flash", "memory GiB", "RMSE", "largest error"]
    return Table("One denoising step of the full-size video UNet", header, rows, note)


def attention_table(result: dict[str, Any]) -> Table:
    """A row for every shape of attention, and what they take together in a step."""
    names = (CUDNN, FLASH, "pasa")
    times: dict[str, dict[str, float]] = {}
    for each in result["attention"]:
        times.setdefault(each["shape"], {})[each["implementation"]] = each.get("median_ms", float("nan"))
    calls = {each["shape"]: each["calls"] for each in result["shapes"]}
    rows = []
    for shape, own in times.items():
        cells = [f"{own[name]:.3f}" if own[name] == own[name] else "-" for name in names]
        rows.append([shape, str(calls[shape]), *cells, _ratio(own[FLASH] / own["pasa"])])
    both = [sum(calls[shape] * own[name] for shape, own in times.items()) for name in names[1:]]
    rows.append(["all of a step", str(sum(calls.values())), "-", *(f"{each:.1f}" for each in both),
                 _ratio(both[0] / both[1])])  # fmt: skip
    note = "Each shape alone, random data, ms of one call; (batch, heads, queries x keys, head dim)."
    return Table("Its attention", ["shape", "calls", *names, "pasa beside flash"], rows, note)


def _ratio(value: float | None) -> str:
    return "-" if value is None or value != value else f"{value:.2f}"


def verdict(result: dict[str, Any]) -> str:
    """What holds and what does not, in a sentence."""
    failed = [name for name, passed in result["gate"]["checks"].items() if not passed]
    return f"FAILED: {', '.join(failed)}." if failed else "All checks hold."


def origin(result: dict[str, Any]) -> str:
    """Where and with what it was measured."""
    machine = result["environment"]
    return (
        f"({machine['device']}; torch {machine['torch']}, triton {machine['triton']}, "
        f"diffusers {machine['diffusers']}, pasa {machine['pasa']}, commit {machine['commit']}; not run on an NPU.)"
    )


def render(result: dict[str, Any], console: Console | None = None) -> None:
    """Print the tables and the verdict."""
    console = console or Console()
    for found in (model_table(result), attention_table(result)):
        found.show(console)
    console.print(Text(verdict(result)))


def save(result: dict[str, Any], folder: Path) -> None:
    """Write ``step.json`` and ``step.md``."""
    stored = output.to_json(result)
    output.write_text(folder / "step.json", stored)
    output.write_text(folder / "step.md", to_markdown(json.loads(stored)))


def to_markdown(result: dict[str, Any]) -> str:
    """Both tables, the verdict, and where it was measured."""
    parts: list[str] = []
    for found in (model_table(result), attention_table(result)):
        parts += [
            f"# {found.title}" if not parts else f"## {found.title}",
            found.note,
            markdown(found.header, found.rows),
        ]
    return "\n\n".join([*parts, verdict(result), origin(result)]) + "\n"
