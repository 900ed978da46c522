"""Shows the model to a person. Every figure is a model's, not a measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from pasa.eval.kit import output
from pasa.eval.kit.tables import Table, markdown, percent
from pasa.eval.npu.model import PIPES, SHARED, bound

Record = dict[str, Any]
MODEL = "Model, not measured."
PLAIN = ("fp32", "partial", "paper", "paper-fp16", "exact 0 %")


def tables(result: Record) -> list[Table]:
    """What is shown in the terminal."""
    return [range_table(result), tile_table(result, 128), share_table(result), case_table(result, "as written")]


def range_table(result: Record) -> Table:
    """Ratio to the flow with FP32 scores and the highest rate, over all cases, by scenario."""
    rows = []
    for name in shown(result):
        rows.append([name, *(_range(result, scenario, name) for scenario in result["scenarios"])])
    what = "; ".join(f"{name}: {text}" for name, text in result["scenarios"].items())
    note = (
        f"{MODEL} Time of fp32 over that of the allocation with perfect overlap, lowest to highest of "
        f"{len(result['cases'])} cases; in brackets the most TFLOPS of a case (the cube's peak is "
        f"{result['peak_tflops']:.0f}). {what}."
    )
    return Table("Against FP32 scores", ["allocation", *result["scenarios"]], rows, note)


def _range(result: Record, scenario: str, name: str) -> str:
    own = select(result, scenario=scenario, allocation=name)
    low, high = (pick(each["ratio_overlap"] for each in own) for pick in (min, max))
    return f"{low:.2f} to {high:.2f} ({max(each['tflops'] for each in own):.0f})"


def shown(result: Record) -> list[str]:
    """The allocations, the exact one without rescued tiles and with the share of a language model's shape."""
    return [*PLAIN, share_name(result["shares"]["qwen-like, 180 deg"])]


def share_name(share: float) -> str:
    """The exact allocation with that share of its tiles in FP32."""
    return f"exact {100 * share:.3g} %"


def select(result: Record, **wanted: str) -> list[Record]:
    """Predictions that agree with what is wanted."""
    return [each for each in result["records"] if all(each[key] == value for key, value in wanted.items())]


def case_table(result: Record, scenario: str) -> Table:
    """Ratio and rate of each case."""
    rows = []
    for case in result["cases"]:
        own = {each["allocation"]: each for each in select(result, case=case["name"], scenario=scenario)}
        cells = [
            f"{own[n]['ratio_overlap']:.2f} / {own[n]['ratio_none']:.2f} ({own[n]['tflops']:.0f})"
            for n in shown(result)
        ]
        rows.append([case["name"], case["shape"], f"{own['fp32']['overlap_ms']:.3g}", *cells])
    note = (
        f"{MODEL} Times as fast as fp32 with perfect overlap / with none (TFLOPS with perfect overlap). "
        "The pass over K is included."
    )
    return Table(f"Cases, {scenario}", ["case", "shape", "fp32 ms", *shown(result)], rows, note)


def tile_table(result: Record, dim: int) -> Table:
    """Time of each engine per score tile."""
    engines = [name for name in (*PIPES, *SHARED) if name != "HBM"]
    rows = []
    for each in result["tiles"]:
        if each["dim"] != dim or each["allocation"] not in shown(result):
            continue
        slowest, longest = bound(each["ns"])
        pipes = sum(each["ns"][name] for name in PIPES)
        rows.append(
            [
                each["allocation"],
                *(f"{each['ns'][e]:.0f}" for e in engines),
                *(f"{each['vector_ns'][part]:.0f}" for part in ("row reductions", "barriers")),
                slowest,
                f"{longest:.0f}",
                f"{pipes:.0f}",
            ]
        )
    note = (
        f"{MODEL} ns for 128 queries against 128 keys on one cube core and its two vector cores, D = {dim}, kernels as "
        "written. Row reductions and the gaps after barriers are parts of vector."
    )
    return Table(
        f"Engines per tile, D = {dim}",
        ["allocation", *engines, "row reductions", "barriers", "bound by", "overlap", "none"],
        rows,
        note,
    )


def share_table(result: Record) -> Table:
    """What the tiles in FP32 cost the exact recovery, on the paper's shape."""
    rows = []
    for data, share in [*result["shares"].items(), ("every tile", 1.0)]:
        cells = []
        for scenario in result["scenarios"]:
            [own] = select(result, case="paper", scenario=scenario, allocation=share_name(share))
            cells.append(f"{own['ratio_overlap']:.2f} ({own['tflops']:.0f})")
        rows.append([data, percent(share), *cells])
    note = f"{MODEL} Times as fast as fp32 on (1, 16, 1280, 128), and TFLOPS. Shares: stored RMSE runs."
    return Table("Exact recovery by its tiles in FP32", ["data", "tiles in FP32", *result["scenarios"]], rows, note)


def rounding_table(result: Record) -> Table:
    """What unbiased rounding adds to the vector work of a task."""
    first = result["roundings"][0]["vector_us"]
    rows = []
    for each in result["roundings"]:
        base = each["vector_us"]["to nearest"]
        cells = [
            f"{us:.1f} ({percent(us / base - 1)})" if us != base else f"{us:.1f}" for us in each["vector_us"].values()
        ]
        rows.append([each["kernel"], str(each["dim"]), str(each["keys"]), *cells])
    note = f"{MODEL} us of a vector core for two query tiles of a head, and what they are longer."
    return Table("Unbiased rounding", ["kernel", "D", "keys", *first], rows, note)


def rate_table(result: Record) -> Table:
    """The rates and where they come from."""
    rows = [
        [name, f"{rate['value']:.6g}", rate["unit"], rate["source"], rate["inferred"] or "-"]
        for name, rate in result["rates"].items()
    ]
    cycles = result["cycles_per_repeat"]
    calls = "; ".join(f"{name} {fp32:g}, {fp16:g}" for name, (fp32, fp16) in cycles["fp32, fp16"].items())
    note = f"Cycles of a repeat of 256 bytes in FP32, FP16: {calls}. From {cycles['source']}."
    return Table("Rates", ["rate", "value", "unit", "source", "inferred"], rows, note)


def line_table(result: Record) -> Table:
    """The substitutions, a line each."""
    rows = [
        [name, line["what"], ", ".join(f"{key} {value:+g}" for key, value in line["change"].items())]
        for name, lines in result["substitutions"].items()
        for line in lines
    ]
    note = "Per score tile and group, D = 128: repeats of vector calls, bytes of queues, barriers."
    return Table("Substitutions", ["allocation", "what", "change"], rows, note)


def fit_table(result: Record) -> Table:
    """How well a line fits the counts."""
    rows = [[name, percent(value)] for name, value in result["fit_residuals"].items()]
    return Table(
        "Fits", ["kernel", "largest residual"], rows, "Of any engine's count at any number of tiles, over that count."
    )


def claim(result: Record) -> str:
    """The published figures beside the model's."""
    claims = result["claims"]
    low, high = claims["speedup"]
    parts = [f"{scenario} {_range(result, scenario, 'paper-fp16')}" for scenario in result["scenarios"]]
    return (
        f"{MODEL} Published for PASA: {low} to {high} times a vendor attention, up to {claims['tflops']:.0f} TFLOPS "
        f"({claims['source']}; its chip and its baseline's precision are not named). The model's paper-fp16 over fp32: "
        f"{'; '.join(parts)}."
    )


def origin(result: Record) -> str:
    """Where the numbers come from, in one line."""
    found = result["environment"]
    return (
        f"Counts of the CPU twin, {found['processor']}; pasa {found['pasa']}, commit {found['commit'] or 'unknown'}; "
        f"{result['duration_s']} s. {result['note']}."
    )


def render(result: Record, console: Console) -> None:
    """Print the tables, the claims and the origin."""
    for table in tables(result):
        shown_table = RichTable(title=table.title, caption=table.note or None, title_justify="left")
        for heading in table.header:
            shown_table.add_column(heading, overflow="fold")
        for row in table.rows:
            shown_table.add_row(*(Text(text) for text in row))
        console.print(shown_table)
    for line in (claim(result), origin(result)):
        console.print(Text(line))


def to_markdown(result: Record) -> str:
    """Everything."""
    cases = [case_table(result, scenario) for scenario in result["scenarios"]]
    found = [range_table(result), tile_table(result, 128), tile_table(result, 64), share_table(result), *cases]
    parts = ["# npu_model", origin(result), claim(result)]
    for table in (*found, rounding_table(result), fit_table(result), line_table(result), rate_table(result)):
        parts += [f"## {table.title}", markdown(table.header, table.rows), table.note]
    return "\n\n".join(part for part in parts if part) + "\n"


def save(result: Record, folder: Path, draw: Callable[[Record, Path], Sequence[Path]]) -> list[Path]:
    """Write JSON, Markdown and the figure; return their paths."""
    paths = [folder / "npu_model.json", folder / "npu_model.md"]
    for path, text in zip(paths, (output.to_json(result), to_markdown(result)), strict=True):
        output.write_text(path, text)
    return [*paths, *draw(result, folder)]
