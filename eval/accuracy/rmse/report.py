"""Tables of the RMSE experiments, and what their gates say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pasa.eval.accuracy.rmse.cases import COMPETITOR, GATED, NAIVE, SDPA
from pasa.eval.accuracy.rmse.gates import L1, NAIVE_FACTOR, Record
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


def rmse(result: dict[str, Any]) -> list[Table | str]:
    """Return errors by overflow mode, gates, table 4 where it was measured, and the legend."""
    records = result["records"]
    names, modes = _names(records, "arithmetic"), _names(records, "overflow")
    shown: list[Table | str] = [rmse_table(records, names, mode) for mode in modes]
    damage = [damage_table(result)] if "saturate" in modes and "paper_nan_share" in result["cases"][0] else []
    legend = "\n".join(f"- {name}: {what}" for name, what in result["arithmetics"].items())
    return [*shown, gate_table(records), *damage, GATES_TEXT, verdict(result), legend, origin(result)]


def large_bias(result: dict[str, Any]) -> list[Table | str]:
    """Return errors under large shared biases."""
    return [bias_table(result), verdict(result), origin(result)]


def sides(result: dict[str, Any]) -> list[Table | str]:
    """Return errors by the side that is shifted."""
    said = "Shifted keys leave no score beyond FP16, but under a bias of Q alone; pasa's output is finite there, too."
    return [sides_table(result), experiment.verdict(result, said, "FAILED"), origin(result)]


def rmse_table(records: Sequence[Record], names: Sequence[str], mode: str = "inf", gates: bool = True) -> Table:
    """Return the worst RMSE over the seeds by case; with `gates`, the letters of those that any seed failed."""
    selected = pick(records, overflow=mode)
    rows = []
    for case in _names(selected, "case"):
        cells = [pick(selected, case=case, arithmetic=name) for name in names]
        rows.append([case, *(_rmse_cell(cell, gates) for cell in cells)])
    seeds = len(_names(records, "seed"))
    title = f"RMSE against FP64 (Eq. 19), overflow={mode}, worst of {seeds} seed{'s' * (seeds > 1)}"
    note = "Letters: gates that failed. " if gates else ""
    return Table(title, ["case (x0,Am)", *names], rows, f"{note}NaN: share of the output.")


def _names(records: Sequence[Record], field: str) -> list[str]:
    return list(dict.fromkeys(each[field] for each in records))


def _rmse_cell(records: Sequence[Record], gates: bool) -> str:
    nonfinite = max(each["nonfinite_share"] for each in records)
    failed = "".join(letter for letter in "abc" if any(letter in each["failed_gates"] for each in records))
    value = f"NaN {percent(nonfinite)}" if nonfinite else short(max(each["rmse"] for each in records))
    return f"{value} {failed}".rstrip() if gates else value


def gate_table(records: Sequence[Record]) -> Table:
    """Return per arithmetic how many runs pass each gate, and the worst ratios."""
    rows = []
    for name in _names(records, "arithmetic"):
        selected = pick(records, arithmetic=name)
        passed = [sum(letter not in each["failed_gates"] for each in selected) for letter in "abc"]
        verdicts = [
            f"{'pass' if count == len(selected) else 'FAIL'}, {count} of {len(selected)} pass" for count in passed
        ]
        ratios = [_worst(selected, f"{field}_ratio") for field in ("max_error", *L1)]
        rows.append([name, *verdicts, *ratios, percent(_mean(selected, "scores_rescued_share"))])
    header = ["arithmetic", "(a)", "(b)", "(c)", "max error", "MARE", "MERE", "RMSE", "small", "tiles in FP32"]
    limits = ", ".join(f"{limit:g}" for limit in (NAIVE_FACTOR, *L1.values()))
    note = f"Worst ratios, their limits {limits}. Tiles: mean."
    return Table("Gates, over all cases, seeds and overflow modes", header, rows, note)


def _worst(records: Sequence[Record], field: str) -> str:
    values = [each[field] for each in records]
    return "-" if any(value is None or math.isnan(value) for value in values) else f"{max(values):.3g}"


def _mean(records: Sequence[Record], field: str) -> float:
    return float(sum(each[field] for each in records) / len(records))


def damage_table(result: dict[str, Any]) -> Table:
    """Return table 4 of the paper, and what saturation makes of the same cases: no NaN, and a wrong answer."""
    rows = []
    for case in result["cases"]:
        if case["paper_nan_share"] is None:
            continue
        selected = pick(result["records"], case=case["name"])
        saturated = pick(selected, overflow="saturate", arithmetic=NAIVE)
        others = [pick(selected, overflow="saturate", arithmetic=other) for other in (COMPETITOR, GATED)]
        shares = ("nonfinite_share", "scores_saturated_share", "scores_touched_rows")
        rows.append(
            [
                case["name"],
                percent(case["paper_nan_share"]),
                percent(_mean(pick(selected, overflow="inf", arithmetic=NAIVE), "nonfinite_share")),
                *(percent(_mean(saturated, share)) for share in shares),
                *(short(max(each["rmse"] for each in group)) for group in (saturated, *others)),
            ]
        )
    header = ["case", "NaN, paper", "NaN, inf", "NaN, saturate", "scores at 65504", "rows touched"]
    header += [f"RMSE {name}, saturate" for name in (NAIVE, COMPETITOR, GATED)]
    note = f"Columns 3 to 6: {NAIVE}, mean over seeds. A saturating device reports no NaN, and is wrong nevertheless."
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
        f"Errors pooled over {len(result['seeds'])} seeds (root mean square: many seeds give one-hot rows, without any "
        "error). sdpa-fp32 keeps P and its output in FP32; all others round P and the output to FP16."
    )
    return Table("Q and K share a large bias: RMSE against FP64", header, rows, note)


def sides_table(result: dict[str, Any]) -> Table:
    """Return a row per bias, a column per shift and kind of sum: the error, and the share of scores beyond FP16."""
    records = result["records"]
    batch, heads, positions, _ = result["shape"]
    arms = list(dict.fromkeys((each["shift"], each["sums"]) for each in records))
    rows = []
    for name, (q, k) in result["biases"].items():
        cells = []
        for shift, sums in arms:
            selected = pick(records, case=name, shift=shift, sums=sums)
            beyond, rmse = (max(each[field] for each in selected) for field in ("overflowed", "rmse"))
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
    """Return what the exit status says of the gated arithmetic, and a line for each run in which it failed a gate."""
    gate = result["gate"]
    lines = [f"{each['case']}, seed {each['seed']}, {each['overflow']}: {each['why']}" for each in gate["failures"]]
    if not lines:
        return f"{gate['arithmetic']} passes every gate."
    head = "passes gates (a) and (b) everywhere, but fails on" if gate["passed"] else "FAILS on"
    return "\n  ".join([f"{gate['arithmetic']} {head} {len(lines)} of its runs:", *lines])
