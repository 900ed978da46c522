"""Measures the bias of every arm on every case, judges it, and shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Annotated, Any

import torch

from pasa.eval.accuracy.rounding_bias import detection
from pasa.eval.accuracy.rounding_bias.arithmetic import ARMS, PLACES
from pasa.eval.accuracy.rounding_bias.arithmetic import output as attend
from pasa.eval.accuracy.rounding_bias.cases import BELOW, BLOCK_K, CASES, CONTROLS, KEYS, Case, Place, make_rows
from pasa.eval.accuracy.rounding_bias.statistics import Bias, measure
from pasa.eval.kit import experiment, output
from pasa.eval.kit.device import origin
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.options import at_least
from pasa.eval.kit.tables import Table
from pasa.ops.numerics.formats import round_to

DIM = 64
LEAST_ROWS = 1024  # with 512 the noise of a mean may fail a check: a fifth of the smallest gated bias is 0.003
FEWER, RMS_LIMIT, STOCHASTIC_FACTOR = 5.0, 1.05, 2.0
CONFIDENCE = 0.95  # of all gates together
FORMATS_16 = ("bf16", "fp16")
GATED_FORMAT = "bf16"
TITLES = {"nearest": "nearest", "published": "published rule", "ours": "ours", "stochastic": "stochastic"}
Measured = dict[tuple[str, str, Place, str], Bias]
Result = dict[str, Any]


def run_bias(
    rows: Annotated[int, "Independent rows of each case."] = 2048,
    seed: Annotated[int, "Seed of the inputs and of stochastic rounding."] = 0,
    progress: output.Report = output.silent,
) -> Result:
    """Signed errors where rows repeat their maximum, by rule; exit 1 if ours keeps a bias or adds an error.

    ``records``: bias of O and delta in two formats and two places of rounding; ``detection``: the study of triggers;
    ``examples``: the worked ones.
    """
    at_least(LEAST_ROWS, rows=rows)
    at_least(0, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    jobs = [(fmt, case) for fmt in FORMATS_16 for case in CASES]
    studies = [(fmt, case) for fmt in FORMATS_16 for case in detection.CASES]
    measured: Measured = {}
    for index, (fmt, case) in enumerate(jobs):
        progress(index, len(jobs) + len(studies), f"{fmt}: {case.name}")
        measured |= measure_case(fmt, case, rows, generator)
    triggers = []
    for index, (fmt, case) in enumerate(studies):
        progress(len(jobs) + index, len(jobs) + len(studies), f"{fmt}, triggers: {case.name}")
        triggers += detection.compare_triggers(fmt, case, rows, generator)
    examples = worked_examples()
    return {
        "note": output.NOTE,
        "settings": {"rows": rows, "seed": seed, "dim": DIM, "keys": KEYS, "block_k": BLOCK_K, "below": BELOW},
        "cases": [case.describe() for case in CASES],
        "places": PLACES,
        "examples": examples,
        "gate": judge(measured, examples),
        "detection": triggers,
        "records": [record(key, bias) for key, bias in measured.items()],
    }


def measure_case(fmt: str, case: Case, rows: int, generator: torch.Generator) -> Measured:
    """Measure all arms, in both places, on the same rows."""
    data = make_rows(case, fmt, rows, DIM, generator)
    exact = data.exact()
    return {
        (fmt, case.name, place, arm): measure(attend(data, fmt, place, arm, generator), exact, data.grad, fmt)
        for place in PLACES
        for arm in ARMS
    }


def record(key: tuple[str, str, Place, str], bias: Bias) -> dict[str, Any]:
    """Return one measurement; intervals are 95 % each."""
    fmt, case, place, arm = key
    return {
        "format": fmt,
        "case": case,
        "place": place,
        "arm": arm,
        "bias": bias.out.value,
        "interval": bias.out.interval(),
        "rms": bias.rms,
        "delta_bias": bias.delta.value,
        "delta_interval": bias.delta.interval(),
    }


def worked_examples() -> dict[str, Any]:
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


def judge(measured: Measured, examples: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checks, with the numbers of those that fail."""
    repeated = [(GATED_FORMAT, case, place) for case in CASES for place in case.gated]
    controls = [
        (fmt, case, place) for fmt in FORMATS_16 for case in CASES if case.maxima in CONTROLS for place in PLACES
    ]
    z = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2 / (len(repeated) + len(controls)))
    checks: dict[str, dict[str, Any]] = {"worked examples": {"passed": examples["exact"]}}
    failures = [] if examples["exact"] else ["worked examples"]
    for job in (*repeated, *controls):
        fmt, case, place = job
        arms, name = {arm: measured[fmt, case.name, place, arm] for arm in ARMS}, f"{fmt}, {place}, {case.name}"
        all_flagged = case.maxima != "near" or place == "product"
        checks[name] = judge_repeated(arms, z, all_flagged) if job in repeated else judge_control(arms, z)
        if not checks[name]["passed"]:
            failures.append(f"{name}: {describe_failure(checks[name], arms)}")
    return {"z": z, "passed": not failures, "checks": checks, "failures": failures}


def judge_repeated(arms: Mapping[str, Bias], z: float, all_flagged: bool) -> dict[str, Any]:
    """Check for 5 times less bias than nearest's, and for none that the interval shows or twice the stochastic arm's.

    The second is not asked where not all rows are flagged: in the quotient some with unequal maxima are missed.
    """
    ours, nearest, stochastic = (arms[name].out for name in ("ours", "nearest", "stochastic"))
    fewer = abs(ours.value) <= abs(nearest.value) / FEWER
    unbiased = ours.includes(0, z) or abs(ours.value) <= STOCHASTIC_FACTOR * abs(stochastic.value)
    return {"passed": fewer and (unbiased or not all_flagged), "fewer": fewer, "unbiased": unbiased}


def judge_control(arms: Mapping[str, Bias], z: float) -> dict[str, Any]:
    """Check that the error is within 5 % of nearest's, and the interval of the bias includes zero or nearest's."""
    ours, nearest = arms["ours"], arms["nearest"]
    near = ours.rms <= RMS_LIMIT * nearest.rms
    unbiased = ours.out.includes(0, z) or ours.out.includes(nearest.out.value, z)
    return {"passed": near and unbiased, "rms": near, "unbiased": unbiased}


def describe_failure(check: Mapping[str, Any], arms: Mapping[str, Bias]) -> str:
    """Return what a check missed, and what it judged."""
    missed = [what for what, held in check.items() if what != "passed" and not held]
    shown = {arm: arms[arm].out for arm in ("nearest", "ours", "stochastic")}
    biases = ", ".join(f"{arm} {signed(mean.value, mean.interval())}" for arm, mean in shown.items())
    errors = f"RMS {arms['nearest'].rms:.3f}, ours {arms['ours'].rms:.3f}"
    return f"not {' and not '.join(missed)}; {biases}; {errors}"


def report(result: Result) -> list[Table | str]:
    """Return bias of O and of delta by format and place, triggers, worked examples."""
    formats = list(dict.fromkeys(each["format"] for each in result["records"]))
    places = [(fmt, place) for fmt in formats for place in PLACES]
    bias = [bias_table(result, fmt, place) for fmt, place in places]
    delta = [bias_table(result, fmt, place, of="delta") for fmt, place in places]
    triggers = [trigger_table(result, fmt) for fmt in formats]
    return [*bias, *delta, *triggers, example_table(result), verdict(result), origin(result)]


def bias_table(result: Result, fmt: str, place: str, of: str = "O", cases: Sequence[str] | None = None) -> Table:
    """Return a row for every case, a column for every arm; for O the errors of nearest and ours as well."""
    prefix = "" if of == "O" else "delta_"
    records = [each for each in result["records"] if (each["format"], each["place"]) == (fmt, place)]
    rows = []
    for case in cases or [each["name"] for each in result["cases"]]:
        by_arm = {each["arm"]: each for each in records if each["case"] == case}
        row = [case, *(signed(by_arm[arm][f"{prefix}bias"], by_arm[arm][f"{prefix}interval"]) for arm in ARMS)]
        rows.append(row if prefix else [*row, *(f"{by_arm[arm]['rms']:.3f}" for arm in ("nearest", "ours"))])
    errors = [] if prefix else ["RMS, nearest", "RMS, ours"]
    settings = result["settings"]
    note = (
        f"{result['places'][place]}. Mean signed error in spacings of {fmt.upper()}, away from zero positive, +/- 95 % "
        f"of {settings['rows']:,} independent rows, D = {settings['dim']}."
    )
    if prefix:
        note += " delta = rowsum(dO * O), over rowsum(|dO| * spacing)."
    return Table(f"Bias of {of}, {fmt.upper()}, {place}", ["case", *TITLES.values(), *errors], rows, note)


def signed(value: float | None, interval: float | None) -> str:
    """Return +0.1234 ± 0.0012; a stored result has None in place of NaN."""
    return "NaN" if value is None or interval is None else f"{value:+.4f} ± {interval:.4f}"


def trigger_table(result: Result, fmt: str) -> Table:
    """Return a row for every trigger; for every case the bias that is left, and the rows that are drawn."""
    studied = [each for each in result["detection"] if each["format"] == fmt]
    cases = list(dict.fromkeys(each["case"] for each in studied))
    rows = []
    for trigger in dict.fromkeys(each["trigger"] for each in studied):
        line = {each["case"]: each for each in studied if each["trigger"] == trigger}
        cells = [
            f"{line[case]['bias']:+.4f} ({100 * line[case]['drawn']:.1f} %, {line[case]['rms']:.3f})" for case in cases
        ]
        rows.append([trigger, *cells])
    note = "Bias of O that is left (rows that are drawn, RMS of the error), D = 128, O / l rounded once."
    return Table(f"Which rows to draw, {fmt.upper()}", ["trigger", *cases], rows, note)


def example_table(result: Result) -> Table:
    """Return what was published, and what this arithmetic gives."""
    rows = [
        [f"{name}: {what}", repr(value)]
        for name, values in result["examples"].items()
        if name != "exact"
        for what, value in values.items()
    ]
    note = "Equal to what was published, bit for bit." if result["examples"]["exact"] else "NOT what was published."
    return Table("Worked examples in BF16", ["example", "result"], rows, note)


def verdict(result: Result) -> str:
    """Return what the exit status says."""
    checks = result["gate"]["checks"]
    head = f"{sum(each['passed'] for each in checks.values())} of {len(checks)} checks pass"
    return experiment.verdict(result, f"{head}.", f"{head}; FAILED")


EXPERIMENT = Experiment("bias", run_bias, report, "Bias of rounding")
