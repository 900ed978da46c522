"""Predicts a model's overflows from its weights and, where the model is run once, compares with its scores."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

from pasa import concentration
from pasa.eval.kit import output
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.tables import Table, number
from pasa.eval.models.diagnose import subjects
from pasa.eval.models.diagnose.subjects import EMBEDDED, TINY
from pasa.eval.models.predict.observe import Observed, observe
from pasa.prediction import Prediction, predict_overflow
from pasa.prediction.table import MEANINGS, VERDICTS

DELTA = 1e-6  # the paper's
KAPPA = 1.0  # the paper's, for data like those of the calibration
SHOWN = 20  # heads


def run_predict(
    model: str | None = None,
    *,
    delta: float = DELTA,
    seq_len: int | None = None,
    calibrate: bool = False,
    prompt: str | None = None,
    offset: float | None = None,
    progress: output.Report | None = None,
) -> dict[str, Any]:
    """Predict which heads of a model can overflow.

    A folder's tensors are read one by one; it is loaded as a model for a calibration alone, which runs the model once
    and adds the largest score of each head. `delta` and `seq_len` are those of :func:`pasa.predict_overflow`, `prompt`
    is a calibration's, and `offset` that of a built-in model's fixture. The result holds ``records`` (a head each,
    worst first), ``summary``, ``calibration`` or None, and ``gate`` (passed: no head beyond its proven bound).

    Raises
    ------
    FileNotFoundError, NotImplementedError, ValueError
        As :func:`pasa.predict_overflow`; options of another kind of model, or `prompt` without `calibrate`.
    """
    model = EMBEDDED if model is None else model
    if prompt is not None and not calibrate:
        raise ValueError(f"prompt={prompt!r} is for a calibration alone: give --calibrate")
    started, subject = time.perf_counter(), None
    if calibrate or model in (EMBEDDED, TINY):
        subject = subjects.load(model, prompt=prompt, offset=offset, dtype="float32")
    elif offset is not None:
        raise ValueError(f"--offset is for the built-in models, and {model!r} is a folder")
    loaded = time.perf_counter()
    target = Path(model) if subject is None else subject.model
    prediction = predict_overflow(target, delta=delta, seq_len=seq_len, progress=progress)
    predicted = time.perf_counter()
    observed = observe(subject.model, subject.run) if calibrate and subject is not None else {}
    compared = calibration(prediction, observed) if observed else None
    return {
        "experiment": "predict",
        "gate": {"passed": compared is None or not compared["beyond_proven"]},
        "model": model if subject is None else subject.name,
        "fixture": None if subject is None else subject.fixture,
        "settings": prediction.settings,
        "summary": summarise(prediction),
        "calibration": compared,
        "skipped": [list(pair) for pair in prediction.skipped],
        "seconds": {"prediction": predicted - loaded, "in all": time.perf_counter() - started},
        "environment": output.environment(),
        "records": [
            {**dataclasses.asdict(row), "observed": observed.get((row.module, row.head))} for row in prediction.rows
        ],
    }


def summarise(prediction: Prediction) -> dict[str, Any]:
    """Count modules and heads by verdict; a module has that of its worst head."""
    worst: dict[str, str] = {}
    for row in prediction.rows:  # worst first
        worst.setdefault(row.module, row.verdict)
    heads: Counter[str] = Counter(row.verdict for row in prediction.rows)
    counts = {"modules": Counter(worst.values()), "heads": heads}
    return {kind: {verdict: count[verdict] for verdict in VERDICTS} for kind, count in counts.items()}


def calibration(prediction: Prediction, observed: Observed, kappa: float = KAPPA) -> dict[str, Any]:
    """Return how much of the bounds was used, and the alpha that follows from it (paper section 3.5).

    A slack ratio is max|S| over B_max, here of a head over one run in place of a layer over 100 training steps.
    """
    pairs = [
        (observed[row.module, row.head], row)
        for row in prediction.rows
        if row.head is not None and (row.module, row.head) in observed and math.isfinite(row.proven)
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
        "beyond_proven": sum(ratio > 1 for ratio in proven),
        "beyond_probable": sum(ratio > 1 for ratio in probable),
        "auto_alpha": concentration.auto_alpha(slack, kappa=kappa),
        "kappa": kappa,
    }


def head_table(result: dict[str, Any]) -> Table:
    """Return the worst heads, in as few columns as 80 characters hold; module names may wrap."""
    numbers = ["probable", "proven", *["observed"] * (result["calibration"] is not None)]
    rows = [
        [
            each["verdict"],
            each["module"],
            number(each["head"], "d"),
            *(number(each[name], ",.0f") for name in numbers),
            each["verdict_fp8"],
        ]
        for each in result["records"][:SHOWN]
    ]
    title = f"{result['model']}: the {len(rows)} worst of {len(result['records'])} heads, from the weights alone"
    meanings = "; ".join(f"{name}: {meaning}" for name, meaning in MEANINGS.items())
    note = (
        f"FP16 ends at 65,504 on the unscaled q.k, E4M3 at 448 on q.k/sqrt(d_h). {meanings}. Probable: with "
        f"probability 1 - {result['settings']['delta']:g} for inputs of uniform direction, which is an assumption. "
        "The constant part and the FP8 scale of every head: --json FILE, --output-dir DIR."
    )
    return Table(title, ["verdict", "module", "head", *numbers, "FP8"], rows, note, wraps="module")


def verdict(result: dict[str, Any]) -> str:
    """Return the outcome in a few sentences."""
    counts = result["summary"]["modules"]
    parts = ", ".join(f"{counts[name]} {name}" for name in VERDICTS if counts[name])
    lines = [f"{sum(counts.values())} attention modules, each by its worst head: {parts}."]
    if compared := result["calibration"]:
        lines.append(
            f"Calibration over {compared['heads']} heads: {compared['beyond_proven']} beyond the proven bound, "
            f"{compared['beyond_probable']} beyond the probable one; used of the proven bound: at most "
            f"{compared['largest_of_proven']:.3g}, median {compared['median_of_proven']:.3g}; auto-alpha "
            f"{compared['auto_alpha']:.3g} (kappa {compared['kappa']:g})."
        )
    return " ".join([*lines, *(f"Not predicted: {name}: {reason}." for name, reason in result["skipped"])])


def origin(result: dict[str, Any]) -> str:
    """Return where and with which versions a run was made."""
    machine = result["environment"]
    return f"({machine['processor']}; torch {machine['torch']}, pasa {machine['pasa']}, commit {machine['commit']}.)"


EXPERIMENT = Experiment(
    name="predict",
    run=run_predict,
    report=lambda result: [head_table(result), f"{verdict(result)} {origin(result)}"],
    title="Heads that can overflow, from the weights alone",
    needs_models=True,
)
