"""Renders the paper's table 3, and the same table for the shifting matrix that attention really uses."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pasa.ops.numerics.shifting import TABLE_3_STARTS, BetaRow, beta_table

HEAD_DIMS = (64, 80, 128)
START_NAMES = ("0.9", "1-2^-4", "1-2^-5", "1-2^-6", "0.99", "0.999")


def run_beta(block: int = 128) -> dict[str, Any]:
    """Table 3 as printed (the matrix without 1/sqrt(d)), then with 1/sqrt(d) folded in, as Algorithm 1 uses it.

    Parameters
    ----------
    block : int
        Keys per block, n; the paper's is 128.

    Returns
    -------
    dict
        JSON-able: ``tables``, each with ``scale``, ``head_dim`` (None for the paper's) and ``rows``.

    Raises
    ------
    ValueError
        If `block` is not positive.
    """
    scales: dict[int | None, float] = {None: 1.0} | {dim: dim**-0.5 for dim in HEAD_DIMS}
    tables = [
        {"head_dim": dim, "scale": scale, "rows": [dataclasses.asdict(row) for row in beta_table(block, scale=scale)]}
        for dim, scale in scales.items()
    ]
    return {"block": block, "format": "fp16", "starts": list(TABLE_3_STARTS), "tables": tables}


def printed_row(name: str, row: BetaRow) -> list[str]:
    """Cells with the digits of the paper's print.

    The paper took the relative error from Inva_1 cut to four digits (3.23 % at 0.99; unrounded it is 3.24 %).
    """
    practical = four_digits(row.practical_invariance)
    shown = math.nan if math.isnan(row.practical_invariance) else float(practical)
    error = abs(row.invariance - shown) / row.invariance
    optimised = [f"{row.optimised:.6f}", four_digits(row.optimised_practical_invariance)]
    if math.isnan(row.optimised):
        optimised = ["no fixed point", "-"]
    return [name, four_digits(row.invariance), practical, f"{100 * error:.2f} %", *optimised]


def four_digits(value: float) -> str:
    """Four significant digits with their zeros: 9.000, 63.50, 1031."""
    if not math.isfinite(value):
        return "-"
    digits = 4 - len(str(int(abs(value))))
    return f"{value:.{max(digits, 0)}f}"


def render(result: dict[str, Any], console: Console) -> None:
    """Print one table per scale."""
    for each in result["tables"]:
        dim = each["head_dim"]
        what = "M without 1/sqrt(d): paper, table 3" if dim is None else f"M / sqrt({dim}), as attention uses it"
        table = Table(title=f"n = {result['block']}, FP16, {what}", title_justify="left")
        for heading in ("initial", "Inva", "Inva_1", "rel. err.", "optimised", "Inva = Inva_1"):
            table.add_column(heading, justify="left" if heading == "initial" else "right")
        for name, row in zip(START_NAMES, each["rows"], strict=True):
            table.add_row(*printed_row(name, BetaRow(**row)))
        console.print(table)
    console.print(
        Text("Inva = beta / (1 - beta); Inva_1: the factor that recovers the mean behind the rounded matrix.")
    )
