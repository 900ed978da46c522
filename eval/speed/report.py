"""Tables and the figure of a speed result, and the parts of README.md that are made of stored ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pasa.eval.kit.device import origin
from pasa.eval.kit.experiment import verdict
from pasa.eval.kit.stored import stored
from pasa.eval.kit.tables import Column, Table, number, percent, short
from pasa.eval.speed.cases import DATA, FORMULA
from pasa.eval.speed.implementations import CUDNN, DEFAULT, FLASH, GUARDED, OWN, PAGES, UNGUARDED

Record = dict[str, Any]
METHOD = (
    "Times are medians over rounds in which all implementations take turns. x cuDNN, x flash: time of that SDPA kernel "
    "over the implementation's time, median of the rounds; above 1 the implementation is faster. Calls under 2 ms "
    "start with a cold L2. All passes over K are included."
)


def report(result: Record) -> list[Table | str]:
    """Return what is shown in the terminal; tables without rows are left out."""
    makers = (ratio_table, decode_table, reading_table, bias_table, part_table)
    tables = [table for table in (make(result) for make in makers) if table.rows]
    gate = verdict(result, "All of ours that ran pass the accuracy gate.", "Ours FAIL the accuracy gate")
    return [gate, *tables, METHOD, "Gate: eval/speed/README.md.", *absences(result), source(result)]


def appendix(result: Record) -> list[Table]:
    """Return every measurement, and what names stand for."""
    names = Table("Names", ["implementation", "is"], [[*each] for each in result["implementations"].items()])
    columns: dict[str, Column] = {"case": "name", "shape": "shape", "data": lambda case: DATA[case["data"]]}
    return [every_table(result), names, Table.of("Cases", result["cases"], columns)]


def ratio_table(result: Record) -> Table:
    """Return how many times as fast as SDPA cuDNN everyone is, on unbiased data and many rows."""
    columns: dict[str, Column] = {
        "case": "case",
        f"{CUDNN} ms": field(CUDNN, "median_ms", ".4g"),
        "TFLOPS": field(CUDNN, "tflops", ".0f"),
        **{name: field(name, "to_cudnn") for name in ran(result) if name != CUDNN},
    }
    return Table.of(f"Times as fast as {CUDNN}", places(result, decode=False, biased=False), columns, f"{FORMULA}.")


def decode_table(result: Record, names: tuple[str, ...] = ()) -> Table:
    """Return the time over the time of reading K and V once, of the implementations named, or of all that ran."""
    columns: dict[str, Column] = {name: field(name, "to_floor") for name in ran(result) if name in names or not names}
    note = (
        f"Bytes of K and V over the measured copy bandwidth, {result['copy_bandwidth'] * 1e-12:.2f} TB/s read + write."
    )
    title = "Decoding: time over that of reading K and V once"
    return Table.of(title, places(result, decode=True, biased=False), {"case": "case"} | columns, note)


def bias_table(result: Record) -> Table:
    """Return what biased keys cost: time over that on unbiased data of the same shape, and the error."""
    names = ran(result)
    rows = []
    for case in (each["name"] for each in result["cases"] if each["data"] != "randn"):
        biased, plain = (lines(result, name, "eager") for name in (case, case.partition("+")[0]))
        times = ([each.get(name, {}).get("median_ms") for name in names] for each in (biased, plain))
        slower = [f"{x / y:.2f}" if x and y else "-" for x, y in zip(*times, strict=True)]
        rows.append([f"{case}: x cuDNN", *(cell(biased.get(name), "to_cudnn") for name in names)])
        rows += [["time / unbiased", *slower], ["RMSE", *(rmse(biased.get(name)) for name in names)]]
    return Table("Biased keys, where a shift is active", ["case", *names], rows, f"{biases(result)}.")


def biases(result: Record) -> str:
    """Return what the names of a result's kinds of data stand for."""
    kinds = dict.fromkeys(case["data"] for case in result["cases"] if case["data"] != "randn")
    return "; ".join(f"+{name}: {DATA[name]}" for name in kinds)


def part_table(result: Record) -> Table:
    """Return the times of the pass over the keys and of the main loop."""
    columns: dict[str, Column] = {
        "case": "case",
        "whole ms": ("whole", ".4g"),
        "pre-pass ms": ("pre-pass", ".4g"),
        "main loop ms": ("main loop", ".4g"),
        "pre-pass": lambda part: percent(part["pre-pass"] / part["whole"]) if part["whole"] else "-",
        "not timed": "why",
    }
    parts = [each for each in result["parts"] if "pre-pass" in each]
    return Table.of("pasa by its parts", parts, columns, "In CUDA graphs.")


def reading_table(result: Record) -> Table:
    """Return decoding beside a kernel that reads K and V and does nothing else."""
    columns: dict[str, Column] = {
        "case": "case",
        "pasa us": lambda part: number(part["whole"] and 1e3 * part["whole"], ".1f"),
        "reading us": lambda part: number(part["reading"] and 1e3 * part["reading"], ".1f"),
        "ratio": lambda part: f"{part['whole'] / part['reading']:.2f}" if part["reading"] else "-",
        "not timed": "why",
    }
    note = "In CUDA graphs with a cold L2. Both include launch and ramp-up, which a large copy's bandwidth leaves out."
    parts = [each for each in result["parts"] if "reading" in each]
    return Table.of("Decoding beside reading alone", parts, columns, note)


def every_table(result: Record) -> Table:
    """Return all numbers of all records."""
    columns: dict[str, Column] = {
        **{name: name for name in ("case", "implementation", "how", "status")},
        "median ms": ("median_ms", ".4g"),
        "p20": ("p20_ms", ".4g"),
        "p80": ("p80_ms", ".4g"),
        "TFLOPS": ("tflops", ".0f"),
        "x cuDNN": ("to_cudnn", ".2f"),
        "x flash": ("to_flash", ".2f"),
        "RMSE / limit": lambda each: f"{rmse(each)} / {short(each['rmse_limit'])}" if "rmse" in each else "-",
        "LSE error": lambda each: "-" if each.get("lse_error") is None else short(each["lse_error"]),
        "host us": ("host_us", ".0f"),
        "workspace": lambda each: percent(each["workspace_share"]) if "workspace_share" in each else "-",
        "variant": "variant",
    }
    note = (
        "host us: what the host takes to enqueue a call. Workspace: peak memory of an eager call over what was held "
        "before, output excluded, as a share of Q + K + V."
    )
    return Table.of("Every measurement", result["records"], columns, note)


def ran(result: Record) -> list[str]:
    """Return the implementations with a time or a verdict on some case."""
    seen = {each["implementation"] for each in result["records"] if each["status"] in ("ok", "failed gate")}
    return [name for name in result["implementations"] if name in seen]


def lines(result: Record, case: str, how: str) -> dict[str, Record]:
    """Return the records of one case by implementation."""
    return {e["implementation"]: e for e in result["records"] if e["case"] == case and e["how"] == how}


def places(result: Record, *, decode: bool, biased: bool | None = None) -> list[Record]:
    """Return a line of tables for each such case and way of running it: its records, by implementation."""
    return [
        {"case": case["name"] if how == "eager" else f"{case['name']}, {how}", "shape": case["shape"], **records}
        for case in result["cases"]
        for how in ("eager", "graph")
        if case["decode"] == decode and biased in (None, case["data"] != "randn")
        if (records := lines(result, case["name"], how))
    ]


def field(name: str, key: str, form: str = ".2f") -> Callable[[Mapping[str, Any]], str]:
    """Return the column that shows a number of an implementation, or why there is none."""
    return lambda place: cell(place.get(name), key, form)


def cell(record: Record | None, key: str, form: str = ".2f") -> str:
    """Return a number of a record, or why there is none."""
    if record is None:
        return "-"
    if record["status"] == "failed gate":
        return f"failed gate, {short(record['rmse'])}"
    return number(record.get(key), form) if record["status"] == "ok" else record["status"]


def rmse(record: Mapping[str, Any] | None) -> str:
    """Return the error, or "-" where nothing ran."""
    return short(record["rmse"]) if record and "rmse" in record else "-"


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


def source(result: Record) -> str:
    """Return the number of rounds, and where the numbers come from."""
    return f"{result['rounds']} rounds. {origin(result)}"


def draw(result: Record, folder: Path) -> list[Path]:
    """Draw a group for each case with many rows, a bar for each implementation."""
    from matplotlib.figure import Figure

    groups = places(result, decode=False, biased=False)
    bars = {name: [each.get(name, {}).get("to_cudnn") or 0.0 for each in groups] for name in ran(result)}
    bars = {name: heights for name, heights in bars.items() if any(heights)}
    if not bars:
        return []
    figure = Figure(figsize=(max(7.0, 1.5 * len(groups)), 4.6), layout="constrained")
    axis = figure.subplots()
    width = 0.84 / len(bars)
    for index, (name, heights) in enumerate(bars.items()):
        left = (index - len(bars) / 2) * width
        shade = None if name in OWN else f"{0.3 + 0.12 * index:.2f}"  # peers in grey
        axis.bar([x + left for x in range(len(groups))], heights, width, align="edge", label=name, color=shade)
    axis.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    axis.set_xticks(range(len(groups)), [each["case"].replace(", ", "\n") for each in groups], fontsize=8)
    axis.set_ylabel(f"times as fast as SDPA cuDNN, {result['environment']['device']}")
    figure.legend(loc="outside lower center", ncols=len(bars), fontsize=8)
    path = folder / "speed_ratios.png"
    figure.savefig(path, dpi=110)
    return [path]


def readme_speed() -> str:
    """Return our default and portable kernels beside torch's attention, on many rows, for README.md."""
    result = stored("speed")
    columns: dict[str, Column] = {
        "case": "case",
        "shape": "shape",
        "cuDNN ms": field(CUDNN, "median_ms", ".4g"),
        "ours ms": field("pasa", "median_ms", ".4g"),
        "TFLOPS": field("pasa", "tflops", ".0f"),
        "x cuDNN": field("pasa", "to_cudnn"),
        "x flash": field("pasa", "to_flash"),
        "portable x cuDNN": field("pasa-portable", "to_cudnn"),
        "RMSE cuDNN": lambda place: rmse(place.get(CUDNN)),
        "RMSE ours": lambda place: rmse(place.get("pasa")),
    }
    table = Table.of("", places(result, decode=False), columns)
    names = f"{biases(result)}; portable: our kernels without the one for Hopper"
    return f"{METHOD} {names}.\n\n{table.markdown()}\n\n{source(result)}"


def readme_decode() -> str:
    """Return decoding over the time of reading K and V once, beside reading alone, and with a bias, for README.md."""
    result = stored("speed")
    table, beside = decode_table(result, (CUDNN, FLASH, "pasa")), reading_table(result)
    floor = f"1 is the floor: {table.note[0].lower()}{table.note[1:]}"
    title = f"{table.title}. {floor} decode-16x32k has 16 query rows of one sequence, and 32,768 keys."
    ratios = ", ".join(f"{row[0]} {row[2]} µs ({row[3]})" for row in beside.rows)
    alone = f"Time of a kernel that only reads K and V, and in brackets pasa's time over it: {ratios}. {beside.note}"
    slower = []
    for case in (each["name"] for each in result["cases"] if each["decode"] and each["data"] != "randn"):
        biased, plain = (lines(result, name, "graph")["pasa"]["median_ms"] for name in (case, case.partition("+")[0]))
        slower.append(f"{case} {biased / plain:.1f}")
    added = f"pasa's time with a bias over its time without, in a CUDA graph: {', '.join(slower)}. {biases(result)}."
    return "\n\n".join([title, table.markdown(), alone, added, source(result)])


def readme_paged() -> str:
    """Return decoding from pages beside that of contiguous keys, in microseconds, for README.md."""
    result = stored("paged")
    names = {"pasa": "contiguous", **{f"pasa-paged-{n}": f"pages of {n}" for n in PAGES}, CUDNN: "cuDNN, contiguous"}
    rows = []
    for case in result["cases"]:
        by_name = lines(result, case["name"], "graph")
        rows.append([case["name"], case["shape"], *(f"{1e3 * by_name[name]['median_ms']:.1f}" for name in names)])
    table = Table("", ["case", "shape", *names.values()], rows)
    method = f"Microseconds of a call in a CUDA graph. Pages are in random order, with anchors. {biases(result)}."
    return f"{method}\n\n{table.markdown()}\n\n{source(result)}"


def readme_guards() -> str:
    """Return what the guards of the backend sdpa cost on a GPU, for docs/devices.md."""
    result = stored("guards")
    rows = []
    for case in (each["name"] for each in result["cases"]):
        graph, eager = (lines(result, case, how) for how in ("graph", "eager"))
        plain, guarded = ((graph or eager)[name]["median_ms"] for name in (UNGUARDED, GUARDED))
        host = [f"{eager[name]['host_us']:.0f}" for name in (UNGUARDED, GUARDED)]
        errors = [rmse(eager[name]) for name in (UNGUARDED, GUARDED)]
        rows.append([case, f"{plain:.4g}", f"{guarded:.4g}", f"{guarded / plain:.3f}", *host, *errors])
    header = ["case", "without ms", "guarded ms", "ratio", "host µs without", "host µs", "RMSE without", "RMSE"]
    method = f"Backend `sdpa` beside the kernel that it guards; decoding and short cases in a CUDA graph. {METHOD}"
    return f"{method} {biases(result)}.\n\n{Table('', header, rows).markdown()}\n\n{source(result)}"


def readme_data() -> str:
    """Return how fast prefill and decoding are beside cuDNN for each kind of data, for docs/evidence-speed.md."""
    result = stored("data")
    rows = []
    for case in (each["name"] for each in result["cases"] if "+" not in each["name"]):
        ratios = {}
        for each in (each for each in result["cases"] if each["name"].partition("+")[0] == case):
            graph, eager = (lines(result, each["name"], how) for how in ("graph", "eager"))
            ratios[each["data"]] = (graph or eager)[DEFAULT.name]["to_cudnn"]
        worst = min(ratios, key=ratios.__getitem__)
        rows.append(
            [
                case,
                *(f"{ratios[data]:.2f}" for data in ("randn", "recorded", worst)),
                worst,
                f"{max(ratios.values()):.2f}",
            ]
        )
    kinds = len({each["data"] for each in result["cases"]})
    header = ["case", "N(0, 1)", "recorded", "slowest data", "which", "fastest"]
    method = f"Speed of pasa as times that of cuDNN, for {kinds} kinds of data; short calls in a CUDA graph. {METHOD}"
    return f"{method}\n\n{Table('', header, rows).markdown()}\n\n{source(result)}"
