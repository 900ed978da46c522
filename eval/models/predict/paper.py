"""Tables 2 and 3 of the paper that the bounds come from, and where its digits are not those of its equations."""

from __future__ import annotations

from typing import Any

from pasa import concentration
from pasa.eval.kit import output
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.tables import Table

DELTA, SEQ_LEN = 1e-6, 1024
PRINTED = (
    ("GPT-2 XL", 1600, 64, 1200, "2.98", "8", "0.074"),
    ("Mistral-7B", 4096, 128, 1024, "2.26", "14", "0.035"),
    ("Llama-2-13B", 5120, 128, 1600, "2.28", "18", "0.028"),
    ("Llama-2-70B", 8192, 128, 5120, "2.32", "28", "0.018"),
)
"""Rows as printed: model, d, d_h, N = layers x heads; gamma and improvement (table 2); alpha_min (table 3)."""
COLUMNS = {"gamma": ("gamma", ".4f"), "gain": ("d/(gamma d_h)", ".1f"), "alpha": ("alpha_min", ".4f")}


def run_paper_tables(progress: output.Report = output.silent) -> dict[str, Any]:
    """Solve equations (12) and (13) for the paper's models, and name the fields whose printed digits differ."""
    models = []
    for name, hidden, head_dim, heads, *values in PRINTED:
        gamma = concentration.typicality(head_dim, heads, SEQ_LEN, DELTA)
        solved = {
            "gamma": gamma,
            "gain": concentration.concentration_gain(hidden, head_dim, gamma),
            "alpha": concentration.minimum_alpha(hidden, head_dim, heads, SEQ_LEN, DELTA),
        }
        printed = dict(zip(COLUMNS, values, strict=True))
        differ = [each for each, text in printed.items() if _rounded(solved[each], text) != text]
        shape = {"name": name, "hidden": hidden, "head_dim": head_dim, "heads": heads}
        models.append({**shape, "printed": printed, "solved": solved, "differ": differ})
    return {"delta": DELTA, "seq_len": SEQ_LEN, "models": models}


def _rounded(value: float, printed: str) -> str:
    """Return the value with as many decimals as the printed one."""
    return f"{value:.{len(printed.partition('.')[2])}f}"


def paper_table(result: dict[str, Any]) -> Table:
    """Return tables 2 and 3, printed and solved."""
    rows = []
    for model in result["models"]:
        row = [str(model[name]) for name in ("name", "hidden", "head_dim", "heads")]
        for name, (_, digits) in COLUMNS.items():
            row += [model["printed"][name], format(model["solved"][name], digits)]
        rows.append([*row, ", ".join(COLUMNS[name][0] for name in model["differ"]) or "none"])
    header = [text for title, _ in COLUMNS.values() for text in (f"{title}, printed", "solved")]
    note = (
        f"delta = {result['delta']:g}, L = {result['seq_len']}. Solved: equations (12) and (13) exactly. Differ: "
        "fields whose solution, rounded to the printed digits, is not what is printed."
    )
    return Table("Tables 2 and 3 of the paper", ["model", "d", "d_h", "N", *header, "differ"], rows, note)


EXPERIMENT = Experiment(
    name="paper_tables",
    run=run_paper_tables,
    report=lambda result: [paper_table(result)],
    title="Tables 2 and 3 of the paper",
)
