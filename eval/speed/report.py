"""Tables of a result: short ones for the terminal, all of it in Markdown."""

from __future__ import annotations

from typing import Any

from pasa.eval.kit.tables import Table, number, percent, short
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
BIASES = "; ".join(f"{name}: {what}" for name, what in DATA.items() if name != "randn") + "."


def report(result: Record) -> list[Table | str]:
    """Return what is shown in the terminal; tables without rows are left out."""
    makers = (ratio_table, decode_table, reading_table, bias_table, part_table, target_table)
    tables = [table for table in (make(result) for make in makers) if table.rows]
    return [*tables, METHOD, GATE_TEXT, *absences(result), verdict(result), origin(result)]


def appendix(result: Record) -> list[Table | str]:
    """Return every measurement, and what names stand for."""
    names = [[name, what] for name, what in result["implementations"].items()]
    cases = [[case["name"], case["shape"], DATA[case["data"]]] for case in result["cases"]]
    legends = [Table("Names", ["implementation", "is"], names), Table("Cases", ["case", "shape", "data"], cases)]
    return [every_table(result), *legends]


def ratio_table(result: Record) -> Table:
    """Return how many times as fast as SDPA cuDNN everyone is, on unbiased data and many rows."""
    names = [name for name in ran(result) if name != CUDNN]
    rows = []
    for case, how in places(result, decode=False, biased=False):
        by_name = lines(result, case, how)
        peer = by_name.get(CUDNN, {})
        first = [milliseconds(peer), number(peer.get("tflops"), ".0f")]
        rows.append([label(case, how), *first, *(cell(by_name.get(name), "to_cudnn") for name in names)])
    return Table(f"Times as fast as {CUDNN}", ["case", f"{CUDNN} ms", "TFLOPS", *names], rows, FORMULA + ".")


def decode_table(result: Record) -> Table:
    """Return the time over the time of reading K and V once."""
    names = ran(result)
    rows = [
        [label(case, how), *(cell(lines(result, case, how).get(name), FLOOR_FIELD) for name in names)]
        for case, how in places(result, decode=True, biased=False)
    ]
    bandwidth = f"{result['copy_bandwidth'] * 1e-12:.2f} TB/s read + write"
    note = f"Bytes of K and V over the measured copy bandwidth, {bandwidth}."
    return Table("Decoding: time over that of reading K and V once", ["case", *names], rows, note)


def bias_table(result: Record) -> Table:
    """Return what biased keys cost: time over that on unbiased data of the same shape, and the error."""
    names = ran(result)
    rows = []
    for case in (each["name"] for each in result["cases"] if each["data"] != "randn"):
        plain, by_name = lines(result, base(case), "eager"), lines(result, case, "eager")
        slower = [_slower(by_name.get(name, {}), plain.get(name, {})) for name in names]
        errors = [short(by_name[name]["rmse"]) if "rmse" in by_name.get(name, {}) else "-" for name in names]
        rows.append([f"{case}: x cuDNN", *(cell(by_name.get(name), "to_cudnn") for name in names)])
        rows += [["time / unbiased", *slower], ["RMSE", *errors]]
    return Table("Biased keys, where a shift is active", ["case", *names], rows, BIASES)


def _slower(biased: Record, plain: Record) -> str:
    if biased.get("median_ms") is None or plain.get("median_ms") is None:
        return "-"
    return f"{biased['median_ms'] / plain['median_ms']:.2f}"


def part_table(result: Record) -> Table:
    """Return the times of the pass over the keys and of the main loop, and the memory that a call needs."""
    rows = []
    for part in (each for each in result["parts"] if "pre-pass" in each):
        share = lines(result, part["case"], "eager").get("pasa", {}).get("workspace_share")
        whole, before = part["whole"], part["pre-pass"]
        cells = [part["case"], "graph" if part["in_graph"] else "eager"]
        cells += [number(part[name], ".4g") for name in ("whole", "pre-pass", "main loop")]
        cells += ["-" if before is None or not whole else percent(before / whole)]
        rows.append([*cells, "-" if share is None else percent(share), part["why"]])
    header = ["case", "timed", "whole ms", "pre-pass ms", "main loop ms", "pre-pass", "workspace", "not timed"]
    note = "Workspace: peak memory of a call over what was held before, output excluded, as a share of Q + K + V."
    return Table("pasa by its parts", header, rows, note)


def reading_table(result: Record) -> Table:
    """Return decoding beside a kernel that reads K and V and does nothing else."""
    rows = []
    for part in (each for each in result["parts"] if "reading" in each):
        whole, alone = part["whole"], part["reading"]
        times = [number(1e3 * x if x else x, ".1f") for x in (whole, alone)]
        rows.append([part["case"], *times, f"{whole / alone:.2f}" if whole and alone else "-", part["why"]])
    note = "In CUDA graphs with a cold L2. Launch and ramp-up count for both; at a large copy's bandwidth they do not."
    return Table("Decoding beside reading alone", ["case", "pasa us", "reading us", "ratio", "not timed"], rows, note)


def target_table(result: Record) -> Table:
    """Return the targets, and what was reached."""
    against = {FLASH_FIELD: f"x {FLASH}", FLOOR_FIELD: "x reading K and V (at most)"}
    rows = []
    for each in result["targets"]:
        figures = [number(each["must"], ".2f"), number(each["stretch"], ".2f"), number(each["value"], ".3f")]
        measure = against.get(each["field"], f"x {CUDNN}")
        case = label(each["case"], each["how"])
        rows.append([case, each["kernel"], measure, *figures, each["by"] or "-", each["verdict"]])
    note = 'Ours: the default, where it passes the gate; on a GPU accumulate="fp16" is the same kernels.'
    header = ["case", "kernel", "measure", "must", "stretch", "measured", "by", "verdict"]
    return Table("Targets", header, rows, note)


def every_table(result: Record) -> Table:
    """Return all numbers of all records."""
    rows = []
    for each in result["records"]:
        spread = [number(each.get(name), ".4g") for name in ("median_ms", "p20_ms", "p80_ms")]
        ratios = [number(each.get(name), ".2f") for name in ("to_cudnn", "to_flash")]
        error = "-" if "rmse" not in each else f"{short(each['rmse'])} / {short(each['rmse_limit'])}"
        lse = "-" if each.get("lse_error") is None else short(each["lse_error"])
        what = [each["case"], each["implementation"], each["how"], each["status"]]
        end = [error, lse, number(each.get("host_us"), ".0f"), each.get("variant") or "-"]
        rows.append([*what, *spread, number(each.get("tflops"), ".0f"), *ratios, *end])
    header = ["case", "implementation", "how", "status", "median ms", "p20", "p80", "TFLOPS", "x cuDNN", "x flash"]
    header += ["RMSE / limit", "LSE error", "host us", "variant"]
    return Table("Every measurement", header, rows, "host us: what the host takes to enqueue a call.")


def ran(result: Record) -> list[str]:
    """Return the implementations with a time or a verdict on some case."""
    seen = {each["implementation"] for each in result["records"] if each["status"] in ("ok", "failed gate")}
    return [name for name in result["implementations"] if name in seen]


def places(result: Record, *, decode: bool, biased: bool | None = None) -> list[tuple[str, str]]:
    """Return such cases, each with the ways in which it was run: "eager", and "graph"."""
    names = [c["name"] for c in result["cases"] if c["decode"] == decode and biased in (None, c["data"] != "randn")]
    run = dict.fromkeys((each["case"], each["how"]) for each in result["records"])
    return [place for name in names for place in run if place[0] == name]


def lines(result: Record, case: str, how: str) -> dict[str, Record]:
    """Return the records of one case by implementation."""
    return {e["implementation"]: e for e in result["records"] if e["case"] == case and e["how"] == how}


def base(case: str) -> str:
    """Return the name of the case of the same shape with unbiased data."""
    return case.partition("+")[0]


def label(case: str, how: str) -> str:
    """Return the name, and whether in a CUDA graph."""
    return case if how == "eager" else f"{case}, graph"


def cell(record: Record | None, field: str) -> str:
    """Return a ratio, or why there is none."""
    if record is None:
        return "-"
    if record["status"] == "failed gate":
        return f"failed gate, {short(record['rmse'])}"
    return number(record.get(field), ".2f") if record["status"] == "ok" else record["status"]


def milliseconds(record: Record) -> str:
    """Return the median, or the status."""
    return number(record.get("median_ms"), ".4g") if record.get("status") == "ok" else record.get("status", "-")


def absences(result: Record) -> list[str]:
    """Return who did not run or failed its gate, with the cases and the reason; once per reason."""
    cases: dict[tuple[str, str, str], list[str]] = {}
    for each in result["records"]:
        if each["status"] != "ok":
            cases.setdefault((each["implementation"], each["status"], each["why"]), []).append(each["case"])
    total = len(result["cases"])
    return [
        f"{name}: {status} on {'all cases' if len(set(on)) == total else ', '.join(dict.fromkeys(on))}: {why}"
        for (name, status, why), on in cases.items()
    ]


def origin(result: Record) -> str:
    """Return where the numbers come from, in one line."""
    machine = result["environment"]
    versions = ", ".join(f"{name} {machine.get(name) or '-'}" for name in ("torch", "triton", "cuda", "cudnn", "pasa"))
    limit = f", {machine['power_limit_w']} W" if machine.get("power_limit_w") else ""
    host = f"driver {machine.get('driver') or '-'}, host {machine['processor']}"
    return (
        f"{machine['device']}{limit}, {host}; {versions}; commit {machine['commit'] or 'unknown'}; "
        f"{result['rounds']} rounds; {result['duration_s']:g} s. {result['note']}."
    )


def verdict(result: Record) -> str:
    """Return what the exit status says."""
    failures = result["gate"]["failures"]
    if not failures:
        return "All of ours that ran pass the accuracy gate."
    reasons = [f"{each['implementation']} on {each['case']}, {each['how']}: {each['why']}" for each in failures]
    return "\n  ".join(["Ours FAIL the accuracy gate:", *reasons])
