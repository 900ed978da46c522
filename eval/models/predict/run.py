"""Predicts a model's overflows from its weights and, if the model is run once, compares with its scores.

`--paper-tables` solves the equations that the probable bound comes from for the paper's models.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from torch import Tensor

from pasa import concentration
from pasa.eval.kit import output
from pasa.eval.kit.device import origin
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.tables import Column, Table
from pasa.eval.models.diagnose import subjects
from pasa.eval.models.diagnose.peaks import advice, beyond_fp16, module_peaks
from pasa.eval.models.diagnose.probe import attention_calls
from pasa.eval.models.diagnose.streams import PARTS, StreamPeaks
from pasa.eval.models.diagnose.subjects import EMBEDDED, TINY
from pasa.first_nonfinite import models_of
from pasa.ops.attention.spec.diagnostics import FIELDS
from pasa.prediction import Prediction, StreamPrediction, predict_overflow
from pasa.prediction.table import MEANINGS, VERDICTS, describe_streams

DELTA = 1e-6  # the paper's
KAPPA = 1.0  # the paper's, for data like those of the calibration
SHOWN = 20  # heads
SEQ_LEN = 1024  # of the paper's tables
PRINTED: tuple[tuple[Any, ...], ...] = (
    ("GPT-2 XL", 1600, 64, 1200, "2.98", "8", "0.074"),
    ("Mistral-7B", 4096, 128, 1024, "2.26", "14", "0.035"),
    ("Llama-2-13B", 5120, 128, 1600, "2.28", "18", "0.028"),
    ("Llama-2-70B", 8192, 128, 5120, "2.32", "28", "0.018"),
)
"""Rows as printed: model, d, d_h, N = layers x heads; gamma and improvement (table 2); alpha_min (table 3)."""
PAPER_FIELDS = {"gamma": ".4f", "d/(gamma d_h)": ".1f", "alpha_min": ".4f"}
Observed = dict[tuple[str, int | None], float]


def run_predict(
    model: Annotated[str, 'Folder of a model or a pipeline, "embedded" or "tiny".'] = EMBEDDED,
    delta: Annotated[float, "Probability of any overflow that counts as unlikely."] = DELTA,
    seq_len: Annotated[int | None, "Positions (default: as many as the model is configured for)."] = None,
    calibrate: Annotated[bool, "Run the model once, and compare the largest score of each head."] = False,
    offset: Annotated[float | None, "Constant to add to the scores of a built-in model (131072)."] = None,
    streams: Annotated[bool, "Bound residual streams and MLPs, too, which reads all weights."] = False,
    progress: output.Report = output.silent,
) -> dict[str, Any]:
    """Predict which heads of a model can overflow; exit 1 if a calibration finds a value beyond its proven bound.

    A folder's tensors are read one by one; it is loaded as a model for a calibration alone.
    """
    subject = None
    if calibrate or model in (EMBEDDED, TINY):
        subject = subjects.load(model, offset=offset, dtype="float32")
    elif offset is not None:
        raise ValueError(f"--offset is for the built-in models, and {model!r} is a folder")
    target = Path(model) if subject is None else subject.model
    prediction = predict_overflow(target, delta=delta, seq_len=seq_len, streams=streams, progress=progress)
    observed: Observed = {}
    peaks: dict[str, float] = {}
    measured: dict[str, dict[str, Any]] = {}
    if calibrate and subject is not None:
        models = models_of(subject.model)
        with module_peaks(models) as peaks, StreamPeaks(models) as outside:
            observed = observe(subject.model, subject.run)
        measured = outside.layers
    compared = calibration(prediction, observed) if observed else None
    bounds = [_with_measured(asdict(each), measured.get(each.layer)) for each in prediction.streams]
    return {
        "gate": {"passed": not (compared and compared["beyond_proven"]) and not any(map(broken, bounds))},
        "model": model if subject is None else subject.name,
        "fixture": None if subject is None else subject.fixture,
        "settings": prediction.settings,
        "summary": {"modules": summarise(prediction)},
        "calibration": compared,
        "beyond_fp16": beyond_fp16(peaks),
        "skipped": [list(pair) for pair in prediction.skipped],
        "streams": bounds,
        "records": [asdict(row) | {"observed": observed.get((row.module, row.head))} for row in prediction.rows],
    }


def _with_measured(bound: dict[str, Any], measured: dict[str, Any] | None) -> dict[str, Any]:
    """Return the bounds of a layer with the peaks of a calibration, None without one."""
    return bound | {f"observed_{part}": measured and measured[part] for part in PARTS}


def broken(bound: dict[str, Any]) -> bool:
    """Return whether a calibration passed a bound on a layer's residual stream or MLP; a stored None is infinite."""
    return any((bound[f"observed_{part}"] or 0.0) > _number(bound[part]) for part in PARTS)


def _number(bound: float | None) -> float:
    return math.inf if bound is None else bound


def observe(model_or_pipeline: Any, run: Callable[[], object]) -> Observed:
    """Run a model once on PASA's reference backend; return the largest |q.k| of each (module, head) over all calls.

    Scores are unscaled and of visible pairs. Modules that PASA cannot serve are left out.
    """
    largest: Observed = {}

    def keep(module: str, q: Tensor, k: Tensor, counts: Tensor) -> None:
        for head, score in enumerate(counts[..., FIELDS.index("max_score_before")].amax(0).tolist()):
            largest[module, head] = max(score, largest.get((module, head), 0.0))

    with attention_calls(model_or_pipeline, keep):
        run()
    return largest


def summarise(prediction: Prediction) -> dict[str, int]:
    """Count modules by verdict; a module has that of its worst head."""
    worst = {row.module: row.verdict for row in reversed(prediction.rows)}  # rows are worst first
    return {verdict: list(worst.values()).count(verdict) for verdict in VERDICTS}


def calibration(prediction: Prediction, observed: Observed) -> dict[str, Any]:
    """Return how much of the bounds was used, and the alpha that follows from it (paper section 3.5).

    A slack ratio is max|S| over B_max, here of a head over one run in place of a layer over 100 training steps.
    """
    pairs = [
        (observed[row.module, row.head], row)
        for row in prediction.rows
        if (row.module, row.head) in observed and math.isfinite(row.proven)
    ]
    proven = sorted(score / row.proven for score, row in pairs)
    probable = [score / row.probable for score, row in pairs]
    slack = [score / row.interaction for score, row in pairs if row.interaction]
    return {
        "heads": len(pairs),
        "largest_score": max(score for score, _ in pairs),
        "largest_of_proven": proven[-1],
        "median_of_proven": proven[len(proven) // 2],
        "largest_of_probable": max(probable),
        "beyond_proven": sum(not ratio <= 1 for ratio in proven),
        "beyond_probable": sum(not ratio <= 1 for ratio in probable),
        "auto_alpha": concentration.auto_alpha(slack, kappa=KAPPA),
        "kappa": KAPPA,
    }


def head_table(result: dict[str, Any]) -> Table:
    """Return the worst heads, in as few columns as 80 characters hold; module names may wrap."""
    numbers = ["probable", "proven", *["observed"] * (result["calibration"] is not None)]
    columns: dict[str, Column] = {"verdict": "verdict", "module": "module", "head": "head"}
    columns |= {name: (name, ",.0f") for name in numbers} | {"FP8": "verdict_fp8"}
    shown, heads = result["records"][:SHOWN], len(result["records"])
    title = f"{result['model']}: the {len(shown)} worst of {heads} heads, from the weights alone"
    meanings = "; ".join(f"{name}: {meaning}" for name, meaning in MEANINGS.items())
    note = (
        f"FP16 ends at 65,504 on the unscaled q.k, E4M3 at 448 on q.k/sqrt(d_h). {meanings}. Probable: with "
        f"probability 1 - {result['settings']['delta']:g} for inputs of uniform direction, which is an assumption. "
        "The constant part and the FP8 scale of every head: --json FILE, --output-dir DIR."
    )
    return Table.of(title, shown, columns, note, wraps="module")


def count_verdicts(counts: dict[str, int]) -> str:
    """Return how often each verdict was reached, worst first."""
    return ", ".join(f"{counts[name]} {name}" for name in VERDICTS if counts[name])


def verdict(result: dict[str, Any]) -> str:
    """Return the outcome in a few sentences."""
    counts = result["summary"]["modules"]
    lines = [f"{sum(counts.values())} attention modules, each by its worst head: {count_verdicts(counts)}."]
    if compared := result["calibration"]:
        lines.append(
            f"Calibration over {compared['heads']} heads: {compared['beyond_proven']} beyond the proven bound, "
            f"{compared['beyond_probable']} beyond the probable one; used of the proven bound: at most "
            f"{compared['largest_of_proven']:.3g}, median {compared['median_of_proven']:.3g}; auto-alpha "
            f"{compared['auto_alpha']:.3g} (kappa {compared['kappa']:g})."
        )
    lines += [f"Not predicted: {name}: {reason}." for name, reason in result["skipped"]]
    lines += stream_lines(result)
    return " ".join(filter(None, [*lines, advice(result.get("beyond_fp16"))]))


def stream_lines(result: dict[str, Any]) -> list[str]:
    """Return a sentence on residual streams and one on MLPs, or how to ask for them; none of an older result."""
    if "streams" not in result:
        return []
    if not result["streams"]:
        return ["Residual streams and MLPs are not bounded: add --streams, or measure them with pasa diagnose."]
    rows = [
        StreamPrediction(each["layer"], _number(each["residual"]), _number(each["mlp"]), each["verdict"], each["note"])
        for each in result["streams"]
    ]
    lines = [f"{line[0].upper()}{line[1:]}." for line in describe_streams(rows)]
    if passed := sum(map(broken, result["streams"])):
        lines.append(f"The calibration passed the bounds of {passed} layers.")
    return lines


def run_paper_tables(progress: output.Report = output.silent) -> dict[str, Any]:
    """Solve equations (12) and (13) for the paper's models, and name the fields whose printed digits differ."""
    models = []
    for name, hidden, head_dim, heads, *printed in PRINTED:
        gamma = concentration.typicality(head_dim, heads, SEQ_LEN, DELTA)
        gain = concentration.concentration_gain(hidden, head_dim, gamma)
        solved = [gamma, gain, concentration.minimum_alpha(hidden, head_dim, heads, SEQ_LEN, DELTA)]
        rounded = [f"{value:.{len(text.partition('.')[2])}f}" for value, text in zip(solved, printed, strict=True)]
        differ = [field for field, *pair in zip(PAPER_FIELDS, printed, rounded, strict=True) if pair[0] != pair[1]]
        shape = {"name": name, "hidden": hidden, "head_dim": head_dim, "heads": heads}
        models.append({**shape, "printed": printed, "solved": solved, "differ": differ})
    return {"delta": DELTA, "seq_len": SEQ_LEN, "models": models}


def paper_table(result: dict[str, Any]) -> Table:
    """Return tables 2 and 3, printed and solved."""
    rows = []
    for model in result["models"]:
        solved = [format(*each) for each in zip(model["solved"], PAPER_FIELDS.values(), strict=True)]
        shape = [str(model[name]) for name in ("name", "hidden", "head_dim", "heads")]
        cells = chain.from_iterable(zip(model["printed"], solved, strict=True))
        rows.append([*shape, *cells, ", ".join(model["differ"]) or "none"])
    header = chain.from_iterable((f"{title}, printed", "solved") for title in PAPER_FIELDS)
    note = (
        f"delta = {result['delta']:g}, L = {result['seq_len']}. Solved: equations (12) and (13) exactly. Differ: "
        "fields whose solution, rounded to the printed digits, is not what is printed."
    )
    return Table("Tables 2 and 3 of the paper", ["model", "d", "d_h", "N", *header, "differ"], rows, note)


PAPER_TABLES = Experiment(
    name="paper-tables",
    run=run_paper_tables,
    report=lambda result: [paper_table(result)],
    title="Tables 2 and 3 of the paper",
)
EXPERIMENT = Experiment(
    name="predict",
    run=run_predict,
    report=lambda result: [verdict(result), head_table(result), origin(result)],
    title="Heads that can overflow, from the weights alone",
    needs_models=True,
)
