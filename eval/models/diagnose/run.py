"""Runs a model three times and says where its attention leaves FP16: as it is, probed, and with FP16 scores."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import pasa
from pasa.eval.kit import output
from pasa.eval.kit.device import describe
from pasa.eval.kit.experiment import Experiment
from pasa.eval.models.diagnose import subjects
from pasa.eval.models.diagnose.maps import HeadMaps, draw
from pasa.eval.models.diagnose.probe import Findings, probe
from pasa.eval.models.diagnose.report import report
from pasa.eval.models.diagnose.statistics import BATCH, FP16_MAX, ROWS
from pasa.eval.models.diagnose.subjects import EMBEDDED, Subject
from pasa.eval.models.first_nonfinite import NonFiniteWatch, models_of
from pasa.eval.models.video.run import EMULATED, EMULATION

STAGES = ("loading the model", "its own attention", "PASA, looked at", "FP16 scores (emulated)")
Run = dict[str, Any]


def run_diagnose(
    model: Annotated[
        str, 'Folder of a language model or a Stable Video Diffusion pipeline, "embedded" or "tiny".'
    ] = EMBEDDED,
    prompt: Annotated[str | None, "Message to a language model."] = None,
    max_prompt_tokens: Annotated[int | None, "Length to cut the built-in prompt to."] = None,
    image: Annotated[str | None, "Picture that the video starts from."] = None,
    height: Annotated[int | None, "Height in pixels (128 if tiny, else 576)."] = None,
    width: Annotated[int | None, "Width in pixels (128 if tiny, else 1024)."] = None,
    frames: Annotated[int | None, "Frames (4 if tiny, else 25)."] = None,
    steps: Annotated[int | None, "Denoising steps (3 if tiny, else 25)."] = None,
    seed: Annotated[int | None, "Seed of a video's noise (42)."] = None,
    offload: Annotated[bool, "Save memory in a video model: offload to the CPU, chunk the forward pass."] = False,
    offset: Annotated[float | None, "Constant to add to the scores of a built-in model (131072)."] = None,
    dtype: Annotated[str | None, "Dtype of the model: float16 or float32."] = None,
    folder: Path | None = None,
    progress: output.Report | None = None,
) -> Run:
    """Show where a model's attention leaves FP16, head by head, and why; exit 1 if PASA breaks its output.

    Nothing is downloaded. With a folder, the page and the sheet of matrices are written there. The result and the
    exceptions are those of `collect` and :func:`pasa.eval.models.diagnose.subjects.load`.
    """
    options = {name: value for name, value in locals().items() if name in subjects.OPTIONS}
    result, maps = look(model, progress, **options)
    if folder is not None:
        from pasa.eval.models.diagnose.page import render_page

        output.write_text(folder / "diagnose.html", render_page(result, maps))
        if maps:
            draw(maps, result["note"], folder / "diagnose.png")
    return result


def look(model: str, progress: output.Report | None = None, **options: Any) -> tuple[Run, list[HeadMaps]]:
    """Return the result of the three runs of a model, and the matrices of its worst heads."""
    say = progress or (lambda done, total, label: None)
    say(0, len(STAGES), STAGES[0])
    subject = subjects.load(model, **options)
    runs, findings = run_all(subject, say)
    return collect(subject, runs, findings), findings.maps


def run_all(subject: Subject, say: output.Report) -> tuple[dict[str, Run], Findings]:
    """Run the subject three times. Each run is watched for the first module that breaks; the last ends there."""
    total = len(STAGES)
    say(1, total, STAGES[1])
    runs = {"own": _watched(subject, nullcontext())}
    say(2, total, STAGES[2])
    with probe(subject.model, seen=lambda name, call: say(2, total, f"{STAGES[2]}: {name}, call {call}")) as findings:
        runs["pasa"] = _watched(subject, nullcontext())
    say(3, total, STAGES[3])
    stored_in_fp16 = pasa.patch_pipeline(subject.model, config=EMULATED, backend="reference")
    runs["fp16"] = _watched(subject, stored_in_fp16, stop=True)
    say(total, total, "")
    return runs, findings


def _watched(subject: Subject, patch: AbstractContextManager[Any], *, stop: bool = False) -> Run:
    started = time.perf_counter()
    with patch, NonFiniteWatch(models_of(subject.model), stop=stop) as watch:
        subject.run()
    return {"seconds": time.perf_counter() - started, "first_nonfinite": watch.first}


def collect(subject: Subject, runs: dict[str, Run], findings: Findings) -> Run:
    """Return the JSON-able result; ``records`` holds every head, the largest score first."""
    records = findings.worst()
    healthy = runs["pasa"]["first_nonfinite"] is None or runs["own"]["first_nonfinite"] is not None
    return {
        "experiment": "diagnose",
        "gate": {"passed": healthy, "checks": {"pasa_finite_where_the_model_is": healthy}},
        "model": subject.name,
        "kind": subject.kind,
        "settings": {**subject.settings, "rows": ROWS, "batch": BATCH},
        "fixture": subject.fixture,
        "summary": summarise(records),
        "runs": runs,
        "modules": {
            "host": findings.report.host,
            "calls": findings.calls,
            "uncalled": findings.uncalled(),
            "skipped": [list(pair) for pair in findings.report.skipped],
            "broken": findings.broken,
        },
        "note": EMULATION if subject.device.type == "cuda" else f"{EMULATION}; {output.NOTE}",
        "environment": describe(subject.device) | {"transformers": version("transformers")},
        "records": records,
    }


def summarise(records: list[Run]) -> Run:
    """Return what the verdict is made of; `records` with the largest score first."""
    beyond = [each for each in records if each["max_score"] > FP16_MAX]
    return {
        "fp16_max": FP16_MAX,
        "heads": len(records),
        "heads_beyond": len(beyond),
        "modules": len({each["module"] for each in records}),
        "modules_beyond": len({each["module"] for each in beyond}),
        "worst": {name: records[0][name] for name in ("module", "head", "call", "max_score")} if records else None,
        "stored": max((each["stored"] for each in records), default=None),
        "rescued_tiles": sum(each["rescued_tiles"] for each in records),
        "tiles": sum(each["tiles"] for each in records),
    }


EXPERIMENT = Experiment(
    name="diagnose", run=run_diagnose, report=report, title="Where attention leaves FP16", needs_models=True
)
