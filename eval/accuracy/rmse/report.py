"""Shows results to a person: tables for the terminal and for Markdown, made of the same rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pasa.eval.accuracy.rmse.cases import COMPETITOR, GATED, NAIVE
from pasa.eval.accuracy.rmse.metrics import L1, NAIVE_FACTOR
from pasa.eval.kit import output
from pasa.eval.kit.tables import Table, percent, short

Record = dict[str, Any]
UNJUDGED = ("large-bias", "sides")  # experiments whose tables show no gates
GATES_TEXT = (
    "Gates: (a) no NaN or infinity in the output, no score stored as infinity, NaN or +/-65504; "
    f"(b) max error <= {NAIVE_FACTOR:g} x that of {NAIVE} where {NAIVE} did not overflow, else of {COMPETITOR}; "
    f"(c) CANN dual benchmark, level L1, against {COMPETITOR}: MARE <= {L1['mare']:g}, MERE <= {L1['mere']:g}, "
    f"RMSE <= {L1['rmse']:g}, errors among small values <= {L1['small']:g}. Definitions: eval/accuracy/rmse/README.md."
)


def tables(result: dict[str, Any]) -> list[Table]:
    """What a result has to show."""
    if result["experiment"] == "large-bias":
        return [_bias_table(result)]
    if result["experiment"] == "sides":
        return [_sides_table(result)]
    records = result["records"]
    modes = list(dict.fromkeys(each["overflow"] for each in records))
    shown = [_rmse_table(records, mode) for mode in modes if mode == "inf" or len(modes) == 1]
    shown += [_gate_table(records)]
    if result["experiment"] == "rmse" and "saturate" in modes:
        shown += [_damage_table(result)]
    if result["experiment"] == "resonance":
        shown += [_rmse_table(records, "saturate")] if modes == ["inf", "saturate"] else []
        shown += [_range_table(result)]
    return shown


def _names(records: Sequence[Record], field: str) -> list[str]:
    return list(dict.fromkeys(each[field] for each in records))


def _pick(records: Sequence[Record], **wanted: str) -> list[Record]:
    return [each for each in records if all(each[field] == value for field, value in wanted.items())]


def _rmse_table(records: Sequence[Record], mode: str) -> Table:
    """Worst RMSE over the seeds, with the letters of the gates that failed on any of them."""
    names = _names(records, "arithmetic")
    rows = []
    for case in _names(_pick(records, overflow=mode), "case"):
        cells = [_pick(records, case=case, overflow=mode, arithmetic=name) for name in names]
        rows.append([case, *(_rmse_cell(cell) for cell in cells)])
    seeds = len(_names(records, "seed"))
    title = f"RMSE against FP64, overflow={mode}, worst of {seeds} seed{'s' * (seeds > 1)}"
    return Table(title, ["case (x0,Am)", *names], rows, "Letters: gates that failed. NaN: share of the output.")


def _rmse_cell(records: Sequence[Record]) -> str:
    nonfinite = max(each["nonfinite_share"] for each in records)
    failed = "".join(letter for letter in "abc" if any(letter in each["failed_gates"] for each in records))
    value = f"NaN {percent(nonfinite)}" if nonfinite else short(max(each["rmse"] for each in records))
    return f"{value} {failed}".rstrip()


def _gate_table(records: Sequence[Record]) -> Table:
    """Per arithmetic: how many runs pass each gate, and the worst ratios."""
    rows = []
    for name in _names(records, "arithmetic"):
        own = _pick(records, arithmetic=name)
        passed = [sum(letter not in each["failed_gates"] for each in own) for letter in "abc"]
        verdicts = [f"{'pass' if count == len(own) else 'FAIL'}, {count} of {len(own)} pass" for count in passed]
        ratios = [_worst(own, f"{field}_ratio") for field in ("max_error", *L1)]
        rescued = sum(each["scores_rescued_share"] for each in own) / len(own)
        rows.append([name, *verdicts, *ratios, percent(rescued)])
    header = ["arithmetic", "(a)", "(b)", "(c)", "max error", "MARE", "MERE", "RMSE", "small", "tiles in FP32"]
    limits = ", ".join(f"{limit:g}" for limit in (NAIVE_FACTOR, *L1.values()))
    note = f"Worst ratios, their limits {limits}. Tiles: mean."
    return Table("Gates, over all cases, seeds and overflow modes", header, rows, note)


def _worst(records: Sequence[Record], field: str) -> str:
    values = [each[field] for each in records]
    return "-" if any(value is None or math.isnan(value) for value in values) else f"{max(values):.3g}"


def _damage_table(result: dict[str, Any]) -> Table:
    """Table 4 of the paper, and what saturation makes of the same cases: no NaN, and a wrong answer."""
    rows = []
    for case in result["cases"]:
        if case["paper_nan_share"] is None:
            continue
        name, records = case["name"], result["records"]
        inf = _pick(records, case=name, overflow="inf", arithmetic=NAIVE)
        saturated = _pick(records, case=name, overflow="saturate", arithmetic=NAIVE)
        others = [_pick(records, case=name, overflow="saturate", arithmetic=other) for other in (COMPETITOR, GATED)]
        rows.append(
            [
                name,
                percent(case["paper_nan_share"]),
                percent(_mean(inf, "nonfinite_share")) if inf else "-",
                percent(_mean(saturated, "nonfinite_share")),
                percent(_mean(saturated, "scores_saturated_share")),
                percent(_mean(saturated, "scores_touched_rows")),
                *(short(max(each["rmse"] for each in group)) for group in (saturated, *others)),
            ]
        )
    header = ["case", "NaN, paper", "NaN, inf", "NaN, saturate", "scores at 65504", "rows touched"]
    header += [f"RMSE {name}, saturate" for name in (NAIVE, COMPETITOR, GATED)]
    note = f"Columns 3 to 6: {NAIVE}, mean over seeds. A saturating device reports no NaN, and is wrong all the same."
    return Table("Overflow, and its silent form (paper table 4)", header, rows, note)


def _mean(records: Sequence[Record], field: str) -> float:
    return float(sum(each[field] for each in records) / len(records))


def _range_table(result: dict[str, Any]) -> Table:
    rows = [
        [case, name, f"[{low:.6g}, {high:.6g}]"]
        for case, ranges in result["ranges"].items()
        for name, (low, high) in ranges.items()
    ]
    note = "S and S' (exact) are unscaled, S' (paper) carries 1/sqrt(d); FP16 ends at 65504."
    return Table("Ranges before and after the shift, first head", ["case", "matrix", "range"], rows, note)


def _bias_table(result: dict[str, Any]) -> Table:
    names = ("sdpa-fp32", "fp32", "partial", "pasa-paper", "pasa-exact")
    ratios = ("pooled_to_fp32", "worst_to_fp32", "pooled_to_sdpa-fp32")
    rows = [
        [row["case"], *(short(row[name]) for name in names), *(f"{row[name]:.3g}" for name in ratios)]
        for row in result["ratios"]
    ]
    header = ["bias on 16 of 128 dims", *names]
    header += ["exact / fp32", "worst seed", "exact / sdpa"]
    note = (
        f"Errors pooled over {len(result['seeds'])} seeds (root mean square: many seeds give one-hot rows, without any "
        "error). sdpa-fp32 keeps P and its output in FP32; all others round P and the output to FP16."
    )
    return Table("Q and K share a large bias: RMSE against FP64", header, rows, note)


def _sides_table(result: dict[str, Any]) -> Table:
    """A row per bias, a column per shift and kind of sum: the error, and the share of scores beyond FP16 if any."""
    records = result["records"]
    batch, heads, positions, _ = result["shape"]
    arms = list(dict.fromkeys((each["shift"], each["sums"]) for each in records))
    rows = []
    for name, (q, k) in result["biases"].items():
        cells = []
        for shift, sums in arms:
            own = _pick(records, case=name, shift=shift, sums=sums)
            beyond, rmse = (max(each[field] for each in own) for field in ("overflowed", "rmse"))
            share = beyond / (batch * heads * positions**2)
            cells.append(f"{short(rmse)} ({percent(share)})" if beyond else short(rmse))
        rows.append([f"{name}: Q {q:g}, K {k:g}", *cells])
    note = (
        "Biases: constants added to N(0, 1). Columns: what is shifted by its mean; pasa: the operator as it is. RMSE "
        "where scores saturate, and in brackets the share of scores beyond FP16; pasa's lie so far below their row's "
        f"maximum that they weigh nothing. Worst of {len(result['seeds'])} seeds. fp16 sums: rounded at every 16 "
        "channels, as FlashInfer's use_fp16_qk_reduction accumulates. Softmax in FP64; pasa rounds weights and output."
    )
    header = ["bias in", *(", ".join(arm).removesuffix(", stored") for arm in arms)]
    return Table("Which side to shift", header, rows, note)


def verdict(result: dict[str, Any]) -> str:
    """What the exit status says of the default arithmetic, and one line per run in which it failed a gate."""
    gate = result["gate"]
    if result["experiment"] == "sides":
        said = (
            "Shifted keys leave no score beyond FP16, but under a bias of Q alone; pasa's output is finite there, too."
        )
        return "\n  ".join(gate["failures"]) or said
    lines = [f"{each['case']}, seed {each['seed']}, {each['overflow']}: {each['why']}" for each in gate["failures"]]
    if not lines:
        return f"{gate['arithmetic']} passes every gate."
    head = "passes gates (a) and (b) everywhere, but fails on" if gate["passed"] else "FAILS on"
    return "\n  ".join([f"{gate['arithmetic']} {head} {len(lines)} of its runs:", *lines])


def origin(result: dict[str, Any]) -> str:
    """Where the numbers come from, in one line."""
    machine = result["environment"]
    return (
        f"{result['note']}. {machine['processor']}, {machine['threads']} threads; torch {machine['torch']}, "
        f"pasa {machine['pasa']}, commit {machine['commit'] or 'unknown'}; seeds {result['seeds']}; "
        f"{result['duration_s']} s."
    )


def render(result: dict[str, Any], console: Console) -> None:
    """Print every table, the verdict and the origin."""
    for table in tables(result):
        table.show(console)
    if result["experiment"] not in UNJUDGED:
        console.print(Text(GATES_TEXT))
    console.print(Text(verdict(result)))
    console.print(Text(origin(result)))


def to_markdown(result: dict[str, Any]) -> str:
    """The same as `render`, as Markdown, with the legend of the arithmetics."""
    parts = [f"# {result['experiment']}", origin(result)]
    for table in tables(result):
        lines = [table.header, ["---", *["---:"] * (len(table.header) - 1)], *table.rows]
        parts += [f"## {table.title}", "\n".join(f"| {' | '.join(line)} |" for line in lines), table.note]
    if result["experiment"] == "rmse" and len(result["seeds"]) > 1:
        parts += ["## Per seed", _per_seed(result)]
    parts += [GATES_TEXT, verdict(result)] if "arithmetics" in result else [verdict(result)]
    parts += ["\n".join(f"- `{name}`: {what}" for name, what in result.get("arithmetics", {}).items())]
    return "\n\n".join(part for part in parts if part) + "\n"


def _per_seed(result: dict[str, Any]) -> str:
    names, records = (COMPETITOR, NAIVE, "pasa-paper", GATED), _pick(result["records"], overflow="inf")
    lines = [["case", *names], ["---", *["---:"] * len(names)]]
    for case in _names(records, "case"):
        cells = [[_rmse_cell([each]) for each in _pick(records, case=case, arithmetic=name)] for name in names]
        lines.append([case, *(", ".join(cell) for cell in cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def save(result: dict[str, Any], folder: Path, draw: Callable[[dict[str, Any], Path], list[Path]]) -> list[Path]:
    """Write JSON, CSV, Markdown and the figures that `draw` makes; return their paths."""
    stem = result["experiment"].replace("-", "_")
    paths = [folder / f"{stem}.{kind}" for kind in ("json", "csv", "md")]
    texts = (output.to_json(result), output.to_csv(result["records"]), to_markdown(result))
    for path, text in zip(paths, texts, strict=True):
        output.write_text(path, text)
    return paths + draw(result, folder)
