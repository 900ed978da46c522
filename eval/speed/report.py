"""Shows a result to a person: short tables for the terminal, all of it in Markdown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from pasa.eval.kit import output
from pasa.eval.kit.tables import Table, markdown, number, percent, short
from pasa.eval.speed.cases import DATA, FORMULA
from pasa.eval.speed.implementations import CUDNN, FLASH
from pasa.eval.speed.targets import FLASH_FIELD, FLOOR_FIELD

Record = dict[str, Any]
GATE_TEXT = (
    "Gate: finite; relative RMSE against FP64 at most twice that of the reference emulation of the same arithmetic (at "
    "least 2^-11); log-sum-exp within 1e-3 or twice the emulation's error. Unshifted FP32 scores may err by D/16 units "
    "in their last place more. Details: eval/speed/README.md."
)
METHOD = (
    "Medians over rounds that are interleaved over the implementations. Ratios: the other's time divided by "
    "one's own, median of the rounds: above 1 is faster. Calls under 2 ms start with a cold L2. All passes over K are "
    "included."
)


def tables(result: Record) -> list[Table]:
    """What is shown in the terminal; tables without rows are left out."""
    makers = (ratio_table, decode_table, reading_table, bias_table, part_table, tile_table, target_table)
    return [table for table in (make(result) for make in makers) if table.rows]


def ratio_table(result: Record) -> Table:
    """How many times as fast as SDPA cuDNN, on unbiased data and many rows."""
    cases = [case for case in result["cases"] if case["data"] == "randn" and not case["decode"]]
    names = [name for name in ran(result) if name != CUDNN]
    rows = []
    for case in cases:
        for how in ways(result, case["name"]):
            own = lines(result, case["name"], how)
            peer = own.get(CUDNN, {})
            first = [milliseconds(peer), number(peer.get("tflops"), ".0f")]
            rows.append([label(case["name"], how), *first, *(cell(own.get(name), "to_cudnn") for name in names)])
    header = ["case", f"{CUDNN} ms", "TFLOPS", *names]
    return Table(f"Times as fast as {CUDNN}", header, rows, FORMULA + ".")


def decode_table(result: Record) -> Table:
    """Time over the time of reading K and V once."""
    cases = [case for case in result["cases"] if case["decode"] and case["data"] == "randn"]
    names = ran(result)
    rows = [
        [label(case["name"], how), *(cell(lines(result, case["name"], how).get(name), FLOOR_FIELD) for name in names)]
        for case in cases
        for how in ways(result, case["name"])
    ]
    note = (
        f"Bytes of K and V over the measured copy bandwidth, {result['copy_bandwidth'] * 1e-12:.2f} TB/s read + write."
    )
    return Table("Decoding: time over that of reading K and V once", ["case", *names], rows, note)


def bias_table(result: Record) -> Table:
    """What biased keys cost: time over that on unbiased data of the same shape, and the error."""
    names = ran(result)
    rows = []
    for case in result["cases"]:
        plain = lines(result, case["name"].partition("+")[0], "eager")
        own = lines(result, case["name"], "eager")
        if case["data"] == "randn":
            continue
        cells = [cell(own.get(name), "to_cudnn") for name in names]
        slower = [_slower(own.get(name, {}), plain.get(name, {})) for name in names]
        errors = [short(own[name]["rmse"]) if "rmse" in own.get(name, {}) else "-" for name in names]
        rows += [[f"{case['name']}: x cuDNN", *cells], ["time / unbiased", *slower], ["RMSE", *errors]]
    note = "; ".join(f"{name}: {what}" for name, what in DATA.items() if name != "randn") + "."
    return Table("Biased keys, where a shift is active", ["case", *names], rows, note)


def _slower(own: Record, plain: Record) -> str:
    if own.get("median_ms") is None or plain.get("median_ms") is None:
        return "-"
    return f"{own['median_ms'] / plain['median_ms']:.2f}"


def part_table(result: Record) -> Table:
    """The pass over the keys and the main loop, and the memory that a call needs."""
    rows = []
    for part in (each for each in result["parts"] if "pre-pass" in each):
        own = lines(result, part["case"], "eager").get("pasa", {})
        whole, before = part["whole"], part["pre-pass"]
        rows.append(
            [
                part["case"],
                "graph" if part["in_graph"] else "eager",
                *(number(part[name], ".4g") for name in ("whole", "pre-pass", "main loop")),
                "-" if before is None or not whole else percent(before / whole),
                "-" if own.get("workspace_share") is None else percent(own["workspace_share"]),
                part["why"] or "",
            ]
        )
    header = ["case", "timed", "whole ms", "pre-pass ms", "main loop ms", "pre-pass", "workspace", "not timed"]
    note = "Workspace: peak memory of a call over what was held before, output excluded, as a share of Q + K + V."
    return Table("pasa by its parts", header, rows, note)


def reading_table(result: Record) -> Table:
    """Decoding beside a kernel that reads K and V and does nothing else."""
    rows = []
    for part in (each for each in result["parts"] if "reading" in each):
        whole, alone = part["whole"], part["reading"]
        times = [number(1e3 * x if x else x, ".1f") for x in (whole, alone)]
        rows.append([part["case"], *times, f"{whole / alone:.2f}" if whole and alone else "-", part["why"] or ""])
    note = "In CUDA graphs with a cold L2. Launch and ramp-up count for both; at a large copy's bandwidth they do not."
    return Table("Decoding beside reading alone", ["case", "pasa us", "reading us", "ratio", "not timed"], rows, note)


def tile_table(result: Record) -> Table:
    """The softmax side alone."""
    rows = []
    for each in result["softmax"]:
        size = f"{each['rows']} x {each['keys']}" if "rows" in each else ""
        rate = "-" if each.get("bandwidth") is None else f"{each['bandwidth'] * 1e-12:.2f}"
        times = [number(each.get("median_ms"), ".4g"), number(each.get("to_fp32"), ".2f")]
        moved = "-" if each.get("bytes") is None else f"{each['bytes'] / 1e6:.0f}"
        error = short(each["rmse"]) if "rmse" in each else "-"
        rows.append([f"{each['where']} {size}".strip(), each["arithmetic"], *times, moved, rate, error, each["why"]])
    header = ["tiles in", "arithmetic", "ms", "x FP32 tile", "MB moved", "TB/s", "RMSE", "why not"]
    note = "Online softmax over stored score tiles: read S, write P in FP16 and the maxima."
    return Table("Softmax side: FP16 against FP32 score tiles", header, rows, note)


def target_table(result: Record) -> Table:
    """Targets, and what was reached."""
    against = {FLASH_FIELD: f"x {FLASH}", FLOOR_FIELD: "x reading K and V (at most)"}
    rows = [
        [
            label(each["case"], each["how"]),
            each["kernel"],
            against.get(each["field"], f"x {CUDNN}"),
            number(each["must"], ".2f"),
            number(each["stretch"], ".2f"),
            number(each["value"], ".3f"),
            each["by"] or "-",
            each["verdict"],
        ]
        for each in result["targets"]
    ]
    note = 'Ours: the default, where it passes the gate; on a GPU accumulate="fp16" is the same kernels.'
    header = ["case", "kernel", "measure", "must", "stretch", "measured", "by", "verdict"]
    return Table("Targets", header, rows, note)


def every_table(result: Record) -> Table:
    """All numbers of all records."""
    rows = []
    for each in result["records"]:
        spread = [number(each.get(name), ".4g") for name in ("median_ms", "p20_ms", "p80_ms")]
        ratios = [number(each.get(name), ".2f") for name in ("to_cudnn", "to_flash")]
        error = "-" if "rmse" not in each else f"{short(each['rmse'])} / {short(each['rmse_limit'])}"
        lse = "-" if each.get("lse_error") is None else short(each["lse_error"])
        host = number(each.get("host_us"), ".0f")
        what = [each["case"], each["implementation"], each["how"], each["status"]]
        rows.append([*what, *spread, number(each.get("tflops"), ".0f"), *ratios, error, lse, host, _variant(each)])
    header = ["case", "implementation", "how", "status", "median ms", "p20", "p80", "TFLOPS", "x cuDNN", "x flash"]
    header += ["RMSE / limit", "LSE error", "host us", "variant"]
    return Table("Every measurement", header, rows, "host us: what the host takes to enqueue a call.")


def _variant(record: Record) -> str:
    return str(record.get("variant") or "-")


def ran(result: Record) -> list[str]:
    """Implementations with a time or a verdict on some case."""
    seen = {each["implementation"] for each in result["records"] if each["status"] in ("ok", "failed gate")}
    return [name for name in result["implementations"] if name in seen]


def ways(result: Record, case: str) -> list[str]:
    """ "eager", and "graph" where that was run."""
    return list(dict.fromkeys(each["how"] for each in result["records"] if each["case"] == case))


def lines(result: Record, case: str, how: str) -> dict[str, Record]:
    """Records of one case by implementation."""
    return {e["implementation"]: e for e in result["records"] if e["case"] == case and e["how"] == how}


def label(case: str, how: str) -> str:
    """Name, and whether in a CUDA graph."""
    return case if how == "eager" else f"{case}, graph"


def cell(record: Record | None, field: str) -> str:
    """A ratio, or why there is none."""
    if record is None:
        return "-"
    if record["status"] == "failed gate":
        return f"failed gate, {short(record['rmse'])}"
    return number(record.get(field), ".2f") if record["status"] == "ok" else record["status"]


def milliseconds(record: Record) -> str:
    """Median, or the status."""
    return number(record.get("median_ms"), ".4g") if record.get("status") == "ok" else record.get("status", "-")


def absences(result: Record) -> list[str]:
    """Who did not run or failed its gate, with the cases and the reason; once per reason."""
    told: dict[tuple[str, str, str], list[str]] = {}
    for each in result["records"]:
        if each["status"] != "ok":
            told.setdefault((each["implementation"], each["status"], each["why"]), []).append(each["case"])
    total = len(result["cases"])
    return [
        f"{name}: {status} on {'all cases' if len(set(on)) == total else ', '.join(dict.fromkeys(on))}: {why}"
        for (name, status, why), on in told.items()
    ]


def origin(result: Record) -> str:
    """Where the numbers come from, in one line."""
    found = result["environment"]
    versions = ", ".join(f"{name} {found.get(name) or '-'}" for name in ("torch", "triton", "cuda", "cudnn", "pasa"))
    limit = f", {found['power_limit_w']} W" if found.get("power_limit_w") else ""
    machine = f"{found['device']}{limit}, driver {found.get('driver') or '-'}, host {found['processor']}"
    return (
        f"{machine}; {versions}; commit {found['commit'] or 'unknown'}; {result['rounds']} rounds; "
        f"{result['duration_s']} s. {result['note']}."
    )


def verdict(result: Record) -> str:
    """What the exit status says."""
    failures = result["gate"]["failures"]
    if not failures:
        return "All of ours that ran pass the accuracy gate."
    told = [f"{each['implementation']} on {each['case']}, {each['how']}: {each['why']}" for each in failures]
    return "\n  ".join(["Ours FAIL the accuracy gate:", *told])


def render(result: Record, console: Console) -> None:
    """Print the short tables, who did not run, and the origin."""
    for table in tables(result):
        shown = RichTable(title=table.title, caption=table.note or None, title_justify="left")
        for index, heading in enumerate(table.header):
            shown.add_column(heading, justify="right" if index else "left", overflow="fold")
        for row in table.rows:
            shown.add_row(*(Text(text) for text in row))
        console.print(shown)
    for line in (METHOD, GATE_TEXT, *absences(result), verdict(result), origin(result)):
        console.print(Text(line))


def to_markdown(result: Record) -> str:
    """Everything."""
    missing = "\n".join(f"- {line}" for line in absences(result)) or "Nothing."
    parts = ["# speed", origin(result), METHOD, GATE_TEXT]
    for table in (*tables(result), every_table(result)):
        parts += [f"## {table.title}", markdown(table.header, table.rows), table.note]
    parts += ["## Not run, or failed", missing, verdict(result)]
    parts += ["## Names", "\n".join(f"- `{name}`: {what}" for name, what in result["implementations"].items())]
    parts += ["\n".join(f"- `{case['name']}`: {case['shape']}, {DATA[case['data']]}" for case in result["cases"])]
    return "\n\n".join(part for part in parts if part) + "\n"


def save(result: Record, folder: Path, draw: Callable[[Record, Path], list[Path]]) -> list[Path]:
    """Write JSON, Markdown and the figures that `draw` makes; return their paths."""
    paths = [folder / "speed.json", folder / "speed.md"]
    stored = output.to_json(result)
    for path, text in zip(paths, (stored, to_markdown(json.loads(stored))), strict=True):  # of the rounded numbers
        output.write_text(path, text)
    return paths + draw(result, folder)
