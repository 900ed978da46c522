"""Predicts a model's overflows from its weights and, where it is run once, compares with what it forms."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

from pasa import concentration
from pasa.eval.kit import output
from pasa.eval.models.diagnose import subjects
from pasa.eval.models.diagnose.subjects import EMBEDDED, TINY
from pasa.eval.models.predict.observe import Observed, observe
from pasa.prediction import Prediction, predict_overflow
from pasa.prediction.table import VERDICTS

KAPPA = 1.0  # the paper's, for data like those of the calibration
UNSET = dict.fromkeys(
    (*subjects.TEXT_OPTIONS, *subjects.VIDEO_OPTIONS, *subjects.BUILT_IN_OPTIONS, "dtype", "steps", "frames")
)


def run_predict(
    model: str = EMBEDDED,
    *,
    delta: float = 1e-6,
    seq_len: int | None = None,
    calibrate: bool = False,
    prompt: str | None = None,
    offset: float | None = None,
    kappa: float = KAPPA,
    progress: output.Report | None = None,
) -> dict[str, Any]:
    """Predict the overflows of a model.

    Parameters
    ----------
    model : str
        "embedded" or "tiny", as :func:`pasa.eval.models.diagnose.run.run_diagnose` takes them, or a folder, whose
        tensors are read one by one and which is loaded as a model for a calibration alone.
    delta, seq_len
        As :func:`pasa.predict_overflow` takes them.
    calibrate : bool
        Run the model once and add what its heads formed.
    prompt : str, optional
        Of a language model's calibration.
    offset : float, optional
        Of a built-in model's fixture (131,072).
    kappa : float
        Of auto-alpha.

    Returns
    -------
    dict
        JSON-able: ``records`` (a head each, worst first), ``summary``, ``calibration`` or None, ``settings``.

    Raises
    ------
    FileNotFoundError, NotImplementedError, ValueError
        As :func:`pasa.predict_overflow`; options of another kind of model, or `prompt` without `calibrate`.
    """
    if prompt is not None and not calibrate:
        raise ValueError(f"prompt={prompt!r} is for a calibration alone: give --calibrate")
    started = time.perf_counter()
    subject = None
    if calibrate or model in (EMBEDDED, TINY):
        options = {**UNSET, "prompt": prompt, "offset": offset, "dtype": "float32"}
        subject = subjects.load(model, options)
    elif offset is not None:
        raise ValueError(f"--offset is for the built-in models, and {model!r} is a folder")
    loaded = time.perf_counter()
    target: object = Path(model) if model not in (EMBEDDED, TINY) and not calibrate else subject and subject.model
    prediction = predict_overflow(target, delta=delta, seq_len=seq_len, progress=progress)
    predicted = time.perf_counter()
    observed = observe(subject.model, subject.run) if calibrate and subject is not None else {}
    return {
        "experiment": "predict",
        "model": subject.name if subject is not None else model,
        "fixture": subject.fixture if subject is not None else None,
        "settings": prediction.settings,
        "summary": summarise(prediction),
        "calibration": calibration(prediction, observed, kappa) if observed else None,
        "skipped": [list(pair) for pair in prediction.skipped],
        "seconds": {"prediction": predicted - loaded, "in all": time.perf_counter() - started},
        "environment": output.environment(),
        "records": [record(row, observed) for row in prediction.rows],
    }


def summarise(prediction: Prediction) -> dict[str, Any]:
    """Modules and heads by verdict; a module has that of its worst head."""
    worst: dict[str, str] = {}
    for row in prediction.rows:  # worst first
        worst.setdefault(row.module, row.verdict)
    modules, heads = Counter(worst.values()), Counter(row.verdict for row in prediction.rows)
    return {
        "modules": {verdict: modules[verdict] for verdict in VERDICTS},
        "heads": {verdict: heads[verdict] for verdict in VERDICTS},
    }


def record(row: Any, observed: Observed) -> dict[str, Any]:
    """A row of the prediction, with what was observed of it (None where nothing was)."""
    return {**dataclasses.asdict(row), "observed": observed.get((row.module, row.head))}


def calibration(prediction: Prediction, observed: Observed, kappa: float) -> dict[str, Any]:
    """How much of the bounds was used, and the alpha that follows from it (paper section 3.5).

    A slack ratio is max|S| over B_max, here of a head over one run in place of a layer over 100 training steps.
    """
    rows = [row for row in prediction.rows if (row.module, row.head) in observed and math.isfinite(row.proven)]
    seen = [observed[row.module, row.head] for row in rows if row.head is not None]
    slack = [score / row.interaction for score, row in zip(seen, rows, strict=True) if row.interaction]
    proven = [score / row.proven for score, row in zip(seen, rows, strict=True)]
    probable = [score / row.probable for score, row in zip(seen, rows, strict=True)]
    return {
        "heads": len(rows),
        "largest_score": max(seen),
        "largest_of_proven": max(proven),
        "median_of_proven": sorted(proven)[len(proven) // 2],
        "largest_of_probable": max(probable),
        "beyond_proven": sum(ratio > 1 for ratio in proven),
        "beyond_probable": sum(ratio > 1 for ratio in probable),
        "auto_alpha": concentration.auto_alpha(slack, kappa=kappa),
        "kappa": kappa,
    }
