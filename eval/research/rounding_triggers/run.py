"""Compares triggers for stochastic rounding: which rows to draw, and the bias that is left."""

from __future__ import annotations

from itertools import product
from typing import Annotated, Any

import torch

from pasa.eval.accuracy.rounding_bias.arithmetic import measure, quotient
from pasa.eval.accuracy.rounding_bias.cases import Case, make_rows
from pasa.eval.accuracy.rounding_bias.run import FORMATS_16, LEAST_ROWS
from pasa.eval.kit import output
from pasa.eval.kit.device import origin
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.options import at_least
from pasa.eval.kit.stored import pick
from pasa.eval.kit.tables import Table
from pasa.ops.attention.spec.repeated_maxima import repeats
from pasa.ops.numerics.dither import is_structured, round_stochastic
from pasa.ops.numerics.formats import round_to

TRIGGER_DIM = 128  # twice the columns that the operator looks at
COLUMNS = (32, 64, TRIGGER_DIM)  # that a trigger looks at
TRIGGER_CASES = (
    *(Case(maxima, "smaller") for maxima in ("two", "near", "blocks", "three", "four", "one")),
    *(Case(maxima, "smaller", "one binade") for maxima in ("three", "six")),
    Case("random", "same"),
)
Record = dict[str, Any]


def run_triggers(
    rows: Annotated[int, "Independent rows of each case."] = 2048,
    seed: Annotated[int, "Seed of the inputs and of stochastic rounding."] = 0,
    progress: output.Report = output.silent,
) -> Record:
    """Compare triggers of stochastic rounding: the bias that each one leaves, and the rows that it draws."""
    at_least(LEAST_ROWS, rows=rows)
    at_least(0, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    records: list[Record] = []
    jobs = list(product(FORMATS_16, TRIGGER_CASES))
    for done, (fmt, case) in enumerate(jobs):
        progress(done, len(jobs), f"{fmt}: {case.name}")
        records += compare_triggers(fmt, case, rows, generator)
    return {"note": output.NOTE, "settings": {"rows": rows, "seed": seed, "dim": TRIGGER_DIM}, "records": records}


def compare_triggers(fmt: str, case: Case, rows: int, generator: torch.Generator) -> list[Record]:
    """Return the bias that each trigger for stochastic rounding leaves, and the share of rows that it draws."""
    data = make_rows(case, fmt, rows, TRIGGER_DIM, generator)
    exact, out = data.exact(), quotient(data, "fp32", "safe")
    nearest, drawn = round_to(out, fmt), round_stochastic(out, fmt)
    none = torch.zeros(rows, 1, dtype=torch.bool)
    flags = {"never": none, "always": ~none}
    flags["two scores within 1e-3"] = repeats(data.scores, data.scores.amax(-1, keepdim=True))
    flags |= {f"leaning, {columns} columns": is_structured(out, fmt, columns) for columns in COLUMNS}
    records = []
    for name, flagged in flags.items():
        errors = measure(torch.where(flagged, drawn, nearest), exact, data.grad, fmt)
        head = {"case": case.name, "format": fmt, "trigger": name, "drawn": float(flagged.double().mean())}
        records.append(head | {field: errors[field] for field in ("bias", "interval", "rms")})
    return records


def report(result: Record) -> list[Table | str]:
    """Return a table for each format."""
    return [*(trigger_table(result, fmt) for fmt in FORMATS_16), origin(result)]


def trigger_table(result: Record, fmt: str) -> Table:
    """Return a row for every trigger; for every case the bias that is left, and the rows that are drawn."""
    studied = pick(result["records"], format=fmt)
    cases = list(dict.fromkeys(each["case"] for each in studied))
    rows = []
    for trigger in dict.fromkeys(each["trigger"] for each in studied):
        line = {each["case"]: each for each in pick(studied, trigger=trigger)}
        found = [line[case] for case in cases]
        rows.append([trigger, *(f"{x['bias']:+.4f} ({100 * x['drawn']:.1f} %, {x['rms']:.3f})" for x in found)])
    note = "Bias of O that is left (rows that are drawn, RMS of the error), D = 128, O / l rounded once."
    return Table(f"Which rows to draw, {fmt.upper()}", ["trigger", *cases], rows, note)


EXPERIMENT = Experiment("triggers", run_triggers, report, "Triggers for stochastic rounding")
