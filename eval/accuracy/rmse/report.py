"""Tables and figures of the RMSE experiments, and what their gates say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pasa.eval.accuracy.rmse.cases import ARITHMETICS, COMPETITOR, GATED, NAIVE, PAPER_CASES, SDPA
from pasa.eval.accuracy.rmse.measure import L1, NAIVE_FACTOR, Record
from pasa.eval.kit import experiment
from pasa.eval.kit.device import origin
from pasa.eval.kit.stored import pick
from pasa.eval.kit.tables import Table, percent, short

GATES_TEXT = (
    "Gates: (a) no NaN or infinity in the output, no score stored as infinity, NaN or +/-65504; "
    f"(b) max error <= {NAIVE_FACTOR:g} x that of {NAIVE} where {NAIVE} did not overflow, else of {COMPETITOR}; "
    f"(c) CANN dual benchmark, level L1, against {COMPETITOR}: MARE <= {L1['mare']:g}, MERE <= {L1['mere']:g}, "
    f"RMSE <= {L1['rmse']:g}, errors among small values <= {L1['small']:g}. Definitions: eval/accuracy/rmse/README.md."
)
FIGURES = {"uniform": 9, "hybrid": 10}  # the paper's figure of each distribution
COLOURS = ("#7f7f7f", "#d62728", "#8c1515", "#ff9896", "#ffbb78", "#98df8a", "#2ca02c", "#1f4e9c", "#9ecae1")


def rmse(result: dict[str, Any]) -> list[Table | str]:
    """Return errors by overflow mode, gates, table 4 where it was measured, and the legend."""
    records = result["records"]
    names, modes = _names(records, "arithmetic"), _names(records, "overflow")
    shown: list[Table | str] = [rmse_table(records, names, mode) for mode in modes]
    damage = [damage_table(result)] if "saturate" in modes and "paper_nan_share" in result["cases"][0] else []
    legend = "\n".join(f"- {name}: {what}" for name, what in result["arithmetics"].items())
    return [verdict(result), *shown, gate_table(records), *damage, GATES_TEXT, legend, origin(result)]


def large_bias(result: dict[str, Any]) -> list[Table | str]:
    """Return errors under large shared biases."""
    return [verdict(result), bias_table(result), origin(result)]


def sides(result: dict[str, Any]) -> list[Table | str]:
    """Return errors by the side that is shifted."""
    said = "Shifted keys leave no score beyond FP16, but under a bias of Q alone; pasa's output is finite there, too."
    return [sides_table(result), experiment.verdict(result, said, "FAILED"), origin(result)]


def rmse_table(records: Sequence[Record], names: Sequence[str], mode: str = "inf", gates: bool = True) -> Table:
    """Return the worst RMSE over the seeds by case; with `gates`, the letters of those that any seed failed."""
    selected = pick(records, overflow=mode)
    rows = [
        [case, *(_rmse_cell(pick(selected, case=case, arithmetic=name), gates) for name in names)]
        for case in _names(selected, "case")
    ]
    seeds = len(_names(records, "seed"))
    title = f"RMSE against FP64 (Eq. 19), overflow={mode}, worst of {seeds} seed{'s' * (seeds > 1)}"
    note = "Letters: gates that failed. " if gates else ""
    return Table(title, ["case (x0,Am)", *names], rows, f"{note}NaN: share of the output.")


def _names(records: Sequence[Record], field: str) -> list[str]:
    return list(dict.fromkeys(each[field] for each in records))


def _rmse_cell(records: Sequence[Record], gates: bool) -> str:
    nonfinite = worst(records, "nonfinite_share")
    failed = "".join(letter for letter in "abc" if any(letter in each["failed_gates"] for each in records))
    value = f"NaN {percent(nonfinite)}" if nonfinite else short(worst(records, "rmse"))
    return f"{value} {failed}".rstrip() if gates else value


def worst(records: Sequence[Record], field: str) -> float:
    """Return the largest value of a field, or NaN if one is NaN (stored as None)."""
    values = [math.nan if each[field] is None else each[field] for each in records]
    return math.nan if any(map(math.isnan, values)) else float(max(values))


def gate_table(records: Sequence[Record]) -> Table:
    """Return per arithmetic how many runs pass each gate, and the worst ratios."""
    rows = []
    for name in _names(records, "arithmetic"):
        selected = pick(records, arithmetic=name)
        passed = [sum(letter not in each["failed_gates"] for each in selected) for letter in "abc"]
        of = len(selected)
        verdicts = [f"{'pass' if count == of else 'FAIL'}, {count} of {of} pass" for count in passed]
        ratios = [worst(selected, f"{field}_ratio") for field in ("max_error", *L1)]
        shown = ["-" if math.isnan(ratio) else f"{ratio:.3g}" for ratio in ratios]
        rows.append([name, *verdicts, *shown, percent(_mean(selected, "scores_rescued_share"))])
    header = ["arithmetic", "(a)", "(b)", "(c)", "max error", "MARE", "MERE", "RMSE", "small", "tiles in FP32"]
    limits = ", ".join(f"{limit:g}" for limit in (NAIVE_FACTOR, *L1.values()))
    note = f"Worst ratios, their limits {limits}. Tiles: mean."
    return Table("Gates, over all cases, seeds and overflow modes", header, rows, note)


def _mean(records: Sequence[Record], field: str) -> float:
    return float(sum(each[field] for each in records) / len(records))


def damage_table(result: dict[str, Any]) -> Table:
    """Return table 4 of the paper, and what saturation makes of the same cases: no NaN, and a wrong answer."""
    rows = []
    for case in result["cases"]:
        if case["paper_nan_share"] is None:
            continue
        infinite = pick(result["records"], case=case["name"], overflow="inf", arithmetic=NAIVE)
        saturated = pick(result["records"], case=case["name"], overflow="saturate")
        naive, *others = (pick(saturated, arithmetic=name) for name in (NAIVE, COMPETITOR, GATED))
        fields = ("nonfinite_share", "scores_saturated_share", "scores_touched_rows")
        shares = [case["paper_nan_share"], _mean(infinite, "nonfinite_share"), *(_mean(naive, each) for each in fields)]
        errors = [worst(group, "rmse") for group in (naive, *others)]
        rows.append([case["name"], *map(percent, shares), *map(short, errors)])
    header = ["case", "NaN, paper", "NaN, inf", "NaN, saturate", "scores at 65504", "rows touched"]
    header += [f"RMSE {name}, saturate" for name in (NAIVE, COMPETITOR, GATED)]
    note = (
        f"NaN, paper: as printed there. The next four columns are means over seeds of {NAIVE}; inf and saturate: what "
        "the device makes of a score beyond FP16. Rows touched: query rows with such a score. RMSE: worst seed. A "
        "saturating device reports no NaN, and is wrong nevertheless."
    )
    return Table("Overflow, and its silent form (paper table 4)", header, rows, note)


def bias_table(result: dict[str, Any]) -> Table:
    """Return pooled errors by bias, and the ratios to both FP32 attentions."""
    names = (SDPA.name, COMPETITOR, NAIVE, "pasa-paper", GATED)
    ratios = (f"pooled_to_{COMPETITOR}", f"worst_to_{COMPETITOR}", f"pooled_to_{SDPA.name}")
    rows = [
        [row["case"], *(short(row[name]) for name in names), *(f"{row[name]:.3g}" for name in ratios)]
        for row in result["ratios"]
    ]
    header = ["bias on 16 of 128 dims", *names, "exact / fp32", "worst seed", "exact / sdpa"]
    note = (
        f"Errors are root mean squares over {len(result['seeds'])} seeds, because many seeds give one-hot rows without "
        "any error. Worst seed: its exact / fp32. sdpa-fp32 keeps P and its output in FP32; all others round both to "
        "FP16."
    )
    return Table("Q and K share a large bias: RMSE against FP64", header, rows, note)


def sides_table(result: dict[str, Any]) -> Table:
    """Return a row per bias, a column per shift and kind of sum: the error, and the share of scores beyond FP16."""
    batch, heads, positions, _ = result["shape"]
    arms = list(dict.fromkeys((each["shift"], each["sums"]) for each in result["records"]))
    rows = []
    for name, (q, k) in result["biases"].items():
        cells = [f"{name}: Q {q:g}, K {k:g}"]
        for shift, sums in arms:
            selected = pick(result["records"], case=name, shift=shift, sums=sums)
            share = worst(selected, "overflowed") / (batch * heads * positions**2)
            cells.append(short(worst(selected, "rmse")) + (f" ({percent(share)})" if share else ""))
        rows.append(cells)
    note = (
        "Biases: constants added to N(0, 1). Columns: whose mean is subtracted; pasa: the operator as it is. Cells: "
        "RMSE where scores saturate, and in brackets the share of scores beyond FP16. Those of pasa are clipped far "
        f"below their row's maximum, where their weight is zero. Worst of {len(result['seeds'])} seeds. fp16 sums: "
        "rounded at every 16 channels, as FlashInfer's use_fp16_qk_reduction accumulates. Softmax in FP64; pasa rounds "
        "weights and output."
    )
    header = ["bias in", *(", ".join(arm).removesuffix(", stored") for arm in arms)]
    return Table("Which side to shift", header, rows, note)


def verdict(result: dict[str, Any]) -> str:
    """Return what the exit status says of the gated arithmetic, and a line for each run in which it failed a gate."""
    gate = result["gate"]
    lines = [f"{each['case']}, seed {each['seed']}, {each['overflow']}: {each['why']}" for each in gate["failures"]]
    if not lines:
        return f"{gate['arithmetic']} passes every gate."
    name, runs = gate["arithmetic"], f"{len(lines)} of its runs"
    required = f"{name} passes in all runs: nothing overflows (a), and errors are at most twice those of FP16 (b)."
    comparison = f"Its comparison with FP32 scores (c), which does not decide, fails on {runs}:"
    head = f"{required} {comparison}" if gate["passed"] else f"{name} FAILS on {runs}:"
    return "\n  ".join([head, *lines])


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Draw the bars of the paper's figures 9 and 10 as PNG; return their paths."""
    from matplotlib.figure import Figure

    paths = [folder / f"rmse_{distribution}.png" for distribution in FIGURES]
    for (distribution, number), path in zip(FIGURES.items(), paths, strict=True):
        figure = Figure(figsize=(13, 4.6), layout="constrained")
        for axis, (varies, names) in zip(figure.subplots(1, 2, sharey=True), panels(distribution).items(), strict=True):
            _draw_panel(axis, names, pick(result["records"], overflow="inf"))
            axis.set_xlabel(f"case (x0, Am); {varies} varies")
        figure.axes[0].set_ylabel("RMSE (Eq. 19)")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
        title = f"{distribution} data (paper figure {number}), worst of seeds {result['seeds']}, overflow=inf"
        figure.suptitle(f"{title}\n{result['note']}", fontsize=10)
        figure.savefig(path, dpi=110)
    return paths


def panels(distribution: str) -> dict[str, list[str]]:
    """Return the names of the cases in each panel of a figure, by what varies there."""
    cases = [case for case in PAPER_CASES if case.distribution == distribution]
    return {
        "x0": [case.name for case in cases if case.amplitude == cases[0].amplitude],
        "Am": [case.name for case in cases if case.mean == 20],
    }


def _draw_panel(axis: Any, cases: Sequence[str], records: Sequence[Record]) -> None:
    """Draw a bar for each case and arithmetic on a log axis; "NaN" stands where the bar would, for an overflow."""
    width, floor = 0.8 / len(ARITHMETICS), min(each["rmse"] for each in records if each["rmse"]) / 2
    for index, (arithmetic, colour) in enumerate(zip(ARITHMETICS, COLOURS, strict=True)):
        places = [position + (index - (len(ARITHMETICS) - 1) / 2) * width for position in range(len(cases))]
        heights = [worst(pick(records, case=case, arithmetic=arithmetic.name), "rmse") for case in cases]
        axis.bar(places, heights, width, label=arithmetic.name, color=colour)
        for place in (place for place, height in zip(places, heights, strict=True) if math.isnan(height)):
            axis.text(place, floor * 1.15, "NaN", color=colour, rotation=90, ha="center", va="bottom", fontsize=7)
    axis.set_yscale("log")
    axis.set_ylim(bottom=floor)
    axis.set_xticks(range(len(cases)), [case.partition("(")[2].strip(")").replace(",", ", ") for case in cases])
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
