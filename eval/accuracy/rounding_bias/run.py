"""Measures the bias of every arm on every case, and judges it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from statistics import NormalDist
from typing import Annotated, Any

import torch

from pasa.eval.accuracy.rounding_bias.arithmetic import ARMS, PLACES, Z_95, measure
from pasa.eval.accuracy.rounding_bias.arithmetic import output as attend
from pasa.eval.accuracy.rounding_bias.cases import BELOW, BLOCK_K, CASES, CONTROLS, KEYS, Case, make_rows
from pasa.eval.kit import experiment, output
from pasa.eval.kit.device import origin
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.options import at_least
from pasa.eval.kit.stored import pick
from pasa.eval.kit.tables import Table
from pasa.ops.numerics.formats import round_to

DIM = 64
LEAST_ROWS = 1024  # with 512 the noise of a mean may fail a check: a fifth of the smallest gated bias is 0.003
FEWER, RMS_LIMIT, STOCHASTIC_FACTOR = 5.0, 1.05, 2.0
CONFIDENCE = 0.95  # of all gates together
FORMATS_16 = ("bf16", "fp16")
GATED_FORMAT = "bf16"
TITLES = {"nearest": "nearest", "published": "published rule", "ours": "ours", "stochastic": "stochastic"}
Record = dict[str, Any]


def run_bias(
    rows: Annotated[int, "Independent rows of each case."] = 2048,
    seed: Annotated[int, "Seed of the inputs and of stochastic rounding."] = 0,
    progress: output.Report = output.silent,
) -> Record:
    """Signed errors where rows repeat their maximum, by rule; exit 1 if ours keeps a bias or adds an error.

    ``records``: bias of O and delta in two formats and two places of rounding; ``examples``: the
    worked ones.
    """
    at_least(LEAST_ROWS, rows=rows)
    at_least(0, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    records: list[Record] = []
    jobs = list(product(FORMATS_16, CASES))
    for done, (fmt, case) in enumerate(jobs):
        progress(done, len(jobs), f"{fmt}: {case.name}")
        records += measure_case(fmt, case, rows, generator)
    examples = worked_examples()
    return {
        "note": output.NOTE,
        "settings": {"rows": rows, "seed": seed, "dim": DIM, "keys": KEYS, "block_k": BLOCK_K, "below": BELOW},
        "cases": [{"name": case.name} | asdict(case) for case in CASES],
        "places": PLACES,
        "examples": examples,
        "gate": judge(records, examples),
        "records": records,
    }


def measure_case(fmt: str, case: Case, rows: int, generator: torch.Generator) -> list[Record]:
    """Measure all arms, in both places, on the same rows; intervals are 95 % each."""
    data = make_rows(case, fmt, rows, DIM, generator)
    exact = data.exact()
    return [
        {"format": fmt, "case": case.name, "place": place, "arm": arm}
        | measure(attend(data, fmt, place, arm, generator), exact, data.grad, fmt)
        for place in PLACES
        for arm in ARMS
    ]


def worked_examples() -> Record:
    """Return the published sum of two numbers in BF16, and the blog's: with and without a third that is small."""
    total = torch.tensor(-2.4071154594421387) + torch.tensor(-2.296875)
    rounded = round_to(total, "bf16")
    large = torch.tensor(1 + 1 / 128) + torch.tensor(1 + 4 / 128)
    two, three = (float(round_to(x, "bf16")) for x in (large, large + 2.0**-10))
    sums = {
        "published": {"sum": float(total), "bf16": float(rounded), "error": float(rounded - total)},
        "blog": {"two large": two, "two large, one small": three},
    }
    expected = {
        "published": {"sum": -4.703990459442139, "bf16": -4.71875, "error": -0.014759540557861328},
        "blog": {"two large": 2 + 2 / 64, "two large, one small": 2 + 3 / 64},
    }
    return {**sums, "exact": sums == expected}


def judge(records: Sequence[Record], examples: Mapping[str, Any], cases: Sequence[Case] = CASES) -> Record:
    """Return the checks, with the numbers of those that fail."""
    repeated = [(GATED_FORMAT, case, place) for case in cases for place in case.gated]
    controls = [
        (fmt, case, place) for fmt in FORMATS_16 for case in cases if case.maxima in CONTROLS for place in PLACES
    ]
    z = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2 / (len(repeated) + len(controls)))
    checks: dict[str, dict[str, Any]] = {"worked examples": {"passed": examples["exact"]}}
    failures = [] if examples["exact"] else ["worked examples"]
    for job in (*repeated, *controls):
        fmt, case, place = job
        name = f"{fmt}, {place}, {case.name}"
        arms = {each["arm"]: each for each in pick(records, format=fmt, place=place, case=case.name)}
        all_flagged = case.maxima != "near" or place == "product"
        checks[name] = judge_repeated(arms, z, all_flagged) if job in repeated else judge_control(arms, z)
        if not checks[name]["passed"]:
            failures.append(f"{name}: {describe_failure(checks[name], arms)}")
    return {"z": z, "passed": not failures, "checks": checks, "failures": failures}


def judge_repeated(arms: Mapping[str, Record], z: float, all_flagged: bool) -> dict[str, bool]:
    """Check for 5 times less bias than nearest's, and for none that the interval shows or twice the stochastic arm's.

    The second is not asked where not all rows are flagged: in the quotient some with unequal maxima are missed.
    """
    ours, nearest, stochastic = (abs(arms[name]["bias"]) for name in ("ours", "nearest", "stochastic"))
    fewer = ours <= nearest / FEWER
    unbiased = includes(arms["ours"], 0, z) or ours <= STOCHASTIC_FACTOR * stochastic
    return {"passed": fewer and (unbiased or not all_flagged), "fewer": fewer, "unbiased": unbiased}


def judge_control(arms: Mapping[str, Record], z: float) -> dict[str, bool]:
    """Check that the error is within 5 % of nearest's, and the interval of the bias includes zero or nearest's."""
    ours, nearest = arms["ours"], arms["nearest"]
    near = ours["rms"] <= RMS_LIMIT * nearest["rms"]
    unbiased = includes(ours, 0, z) or includes(ours, nearest["bias"], z)
    return {"passed": near and unbiased, "rms": near, "unbiased": unbiased}


def includes(record: Record, bias: float, z: float) -> bool:
    """Return whether the confidence interval of `z` standard errors includes this bias."""
    return bool(abs(record["bias"] - bias) <= record["interval"] * z / Z_95)


def describe_failure(check: Mapping[str, bool], arms: Mapping[str, Record]) -> str:
    """Return what a check missed, and what it judged."""
    missed = [what for what, held in check.items() if what != "passed" and not held]
    biases = ", ".join(f"{arm} {signed(arms[arm])}" for arm in ("nearest", "ours", "stochastic"))
    errors = f"RMS {arms['nearest']['rms']:.3f}, ours {arms['ours']['rms']:.3f}"
    return f"not {' and not '.join(missed)}; {biases}; {errors}"


def report(result: Record) -> list[Table | str]:
    """Return bias of O and of delta by format and place, and worked examples."""
    places = [(fmt, place) for fmt in FORMATS_16 for place in PLACES]
    bias = [bias_table(result, fmt, place, of) for of in ("O", "delta") for fmt, place in places]
    return [verdict(result), *bias, example_table(result), origin(result)]


def bias_table(result: Record, fmt: str, place: str, of: str = "O", cases: Sequence[str] | None = None) -> Table:
    """Return a row for every case, a column for every arm; for O the errors of nearest and ours as well."""
    prefix, settings = "" if of == "O" else "delta_", result["settings"]
    rows = []
    for case in cases or [each["name"] for each in result["cases"]]:
        arms = {each["arm"]: each for each in pick(result["records"], format=fmt, place=place, case=case)}
        rms = [] if prefix else [f"{arms[arm]['rms']:.3f}" for arm in ("nearest", "ours")]
        rows.append([case, *(signed(arms[arm], prefix) for arm in ARMS), *rms])
    errors = [] if prefix else ["RMS, nearest", "RMS, ours"]
    note = (
        f"{result['places'][place]}. Mean signed error in spacings of {fmt.upper()} (positive: away from zero), with "
        f"its 95 % interval over {settings['rows']:,} independent rows, D = {settings['dim']}."
    )
    if prefix:
        note += " delta = rowsum(dO * O), over rowsum(|dO| * spacing)."
    return Table(f"Bias of {of}, {fmt.upper()}, {place}", ["case", *TITLES.values(), *errors], rows, note)


def signed(record: Record, prefix: str = "") -> str:
    """Return +0.1234 ± 0.0012; a stored result has None in place of NaN."""
    value, interval = record[f"{prefix}bias"], record[f"{prefix}interval"]
    return "NaN" if value is None or interval is None else f"{value:+.4f} ± {interval:.4f}"


def example_table(result: Record) -> Table:
    """Return what was published, and what this arithmetic gives."""
    examples = result["examples"]
    rows = [
        [f"{name}: {what}", repr(value)] for name in ("published", "blog") for what, value in examples[name].items()
    ]
    note = "Equal to what was published, bit for bit." if examples["exact"] else "NOT what was published."
    return Table("Worked examples in BF16", ["example", "result"], rows, note)


def verdict(result: Record) -> str:
    """Return what the exit status says."""
    checks = result["gate"]["checks"]
    head = f"{sum(each['passed'] for each in checks.values())} of {len(checks)} checks pass"
    return experiment.verdict(result, f"{head}.", f"{head}; FAILED")


EXPERIMENT = Experiment("bias", run_bias, report, "Bias of rounding")
