"""Tables and sentences of `pasa bench whole-model`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pasa.eval.kit.device import origin
from pasa.eval.kit.experiment import gate, outcome
from pasa.eval.kit.tables import Column, Table, number, percent, short
from pasa.eval.models.whole_model_speed.arms import ARMS, CONVERTED
from pasa.eval.models.whole_model_speed.subjects import Record
from pasa.fp16.counting import EVERY

Result = dict[str, Any]
GIB = 2**30


def table(result: Result) -> Table:
    """Return a row for each model and way to run it."""
    columns: dict[str, Column] = {
        "model": "title",
        "run": lambda row: ARMS[row["arm"]].title,
        "non-finite": lambda row: "-" if row["nonfinite"] is None else percent(row["nonfinite"]),
        "relative error": lambda row: "-" if row["error"] is None else short(row["error"]) if row["error"] else "0",
        "top-1 / PSNR": _agreement,
        "GiB": lambda row: number(None if row["bytes"] is None else row["bytes"] / GIB, ".1f"),
        "ms": lambda row: " + ".join(f"{each['wall_ms']:.1f}" for each in row["phases"]) or "-",
        "ms by events": lambda row: " + ".join(number(each["device_ms"], ".1f") for each in row["phases"]) or "-",
        "beside FP16": lambda row: " + ".join(f"{each['to_fp16']:.3f}" for each in row["phases"]) or "-",
    }
    settings = result["settings"]
    note = (
        f"Language models: a prompt of {settings['tokens']:,} tokens + {settings['steps']} steps of decoding. ms: wall "
        f"time of host and device, and time between CUDA events, medians of {settings['turns']} interleaved turns. "
        "Smaller weights: the same model before its weights were enlarged, in plain FP16. Beside FP16: median of the "
        "turns' ratios to its wall time. GiB: weights and what a run allocates. Errors are against FP32 without TF32; "
        "convolutions in FP32 are timed with TF32, torch's default. PSNR: worst frame, in dB of the range of FP32's "
        "frames."
    )
    return Table.of("Whole models", list(_rows(result)), columns, note)


def _rows(result: Result) -> Iterator[Record]:
    for record in result["records"]:
        for arm in record["arms"]:
            yield {"title": record["title"], **arm}


def _agreement(row: Any) -> str:
    if row.get("psnr") is not None:
        return f"{row['psnr']:.1f} dB"
    return f"{100 * row['top1']:.1f} %" if row.get("top1") is not None else "-"


def cost_table(result: Result) -> Table:
    """Return a row for each model and phase: the time of the hooks of `to_fp16`."""
    rows = [{"title": record["title"], **each} for record in result["records"] for each in record["overheads"]]
    names = {"still": "not counting", "counting": "counting", "amortised": f"1 pass in {EVERY} counting"}
    columns: dict[str, Column] = {"model": "title", "phase": "phase"}
    for field, heading in names.items():
        columns[heading] = lambda row, field=field: (  # type: ignore[misc]
            f"{row[field]['median']:.3f} ({row[field]['p20']:.3f} to {row[field]['p80']:.3f})"
        )
    note = "Time over that of plain FP16 with the same patched attention: median and p20 to p80 of the turns' ratios."
    return Table.of("What the hooks cost", rows, columns, note)


def fixture_table(result: Result) -> Table:
    """Return a row for each model: its residual stream, and what `to_fp16` did."""
    columns: dict[str, Column] = {
        "model": "title",
        "parameters": lambda row: f"{row['parameters'] / 1e9:.2f} G",
        "largest residual": lambda row: f"{max(row['fixture']['peaks']):,.0f}",
        "blocks beyond 4 x 65,504": lambda row: f"{row['fixture']['blocks_beyond']} of {len(row['fixture']['peaks'])}",
        "scaled parameters": lambda row: str(row["conversion"]["parameters"]),
        "largest power": lambda row: f"2^-{row['conversion']['largest_power']}",
        "in FP32": lambda row: str(len(row["conversion"]["fp32"])),
        "conversion s": lambda row: f"{row['conversion']['seconds']:.1f}",
    }
    note = "Weights are random. Those that write to the residual stream were multiplied by a power of two."
    return Table.of("Models", result["records"], columns, note)


def verdict(result: Result) -> str:
    """Return what `to_fp16` costs in time and memory, and which checks fail."""
    ratios = [each["amortised"]["median"] for record in result["records"] for each in record["overheads"]]
    errors = [
        f"{each['error']:.1e} ({record['title']})"
        for record in result["records"]
        for each in record["arms"]
        if each["arm"] == CONVERTED and each["error"] is not None
    ]
    return (
        f"After pasa.to_fp16 a run takes {min(ratios):.3f} to {max(ratios):.3f} times as long as in plain FP16 with "
        f"the same attention; relative errors from FP32: {', '.join(errors)}. {outcome(result)}"
    )


def combine(results: Sequence[Result]) -> str:
    """Return the tables and the verdict of runs of one model each, for a page."""
    checks = {name: passed for result in results for name, passed in result["gate"]["checks"].items()}
    every = {**results[0], "records": [each for result in results for each in result["records"]], "gate": gate(checks)}
    tables = [make(every).captioned() for make in (table, cost_table, fixture_table)]
    return "\n\n".join([*tables, verdict(every), *dict.fromkeys(map(origin, results))])


def report(result: Result) -> list[Table | str]:
    """Return the verdict, the tables, and where the numbers come from."""
    return [verdict(result), table(result), cost_table(result), fixture_table(result), origin(result)]
