"""Runs a model three times and says what leaves FP16: as it is, with attention probed, and with FP16 scores."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pasa
from pasa.eval.kit import output
from pasa.eval.kit.device import describe, origin, pick_device
from pasa.eval.kit.experiment import Experiment, gate
from pasa.eval.kit.options import stages
from pasa.eval.models.diagnose import report, subjects
from pasa.eval.models.diagnose.peaks import beyond_fp16, module_peaks
from pasa.eval.models.diagnose.probe import BATCH, MATRICES, ROWS, Findings, HeadMaps, probe
from pasa.eval.models.diagnose.streams import StreamPeaks, in_fp32
from pasa.eval.models.diagnose.subjects import EMBEDDED, Subject
from pasa.eval.models.video.run import EMULATED, EMULATION
from pasa.first_nonfinite import NonFiniteWatch, models_of
from pasa.ops.numerics.formats import FP16_MAX

SHOWN = 15  # heads in the table of the page; JSON has all
Run = dict[str, Any]


def run_diagnose(
    model: Annotated[str, 'Folder of a language model or of Stable Video Diffusion, "embedded" or "tiny".'] = EMBEDDED,
    prompt: Annotated[str | None, "Message to a language model."] = None,
    image: Annotated[str | None, "Picture that the video starts from."] = None,
    height: Annotated[int | None, "Height in pixels (128 if tiny, else 576)."] = None,
    width: Annotated[int | None, "Width in pixels (128 if tiny, else 1024)."] = None,
    frames: Annotated[int | None, "Frames (4 if tiny, else 25)."] = None,
    steps: Annotated[int | None, "Denoising steps (3 if tiny, else 25)."] = None,
    offload: Annotated[bool, "Save memory in a video model: offload to the CPU, chunk the forward pass."] = False,
    offset: Annotated[float | None, "Constant to add to the scores of a built-in model (0; tiny: 131072)."] = None,
    dtype: Annotated[str | None, "Dtype of the model: float16 or float32."] = None,
    folder: Path | None = None,
    progress: output.Report = output.silent,
) -> Run:
    """Show which heads, residual streams and MLPs of a model leave FP16, and why; exit 1 if PASA breaks its output."""
    video = {"image": image, "height": height, "width": width, "frames": frames, "steps": steps, "offload": offload}
    offset = 0 if offset is None and model == EMBEDDED else offset  # as published
    result, heads = look(model, progress, prompt=prompt, offset=offset, dtype=dtype, **video)
    if folder is not None:
        output.write_text(folder / "diagnose.html", render_page(result, heads))
    return result


def look(model: str, progress: output.Report = output.silent, **options: Any) -> tuple[Run, list[HeadMaps]]:
    """Run a model three times; return the result, and the matrices of its worst heads.

    Each run is watched for the first module that breaks; the last ends there. Values outside of attention are recorded
    in the first. A model that breaks in FP16 runs once more in FP32 for them.
    """
    say = stages(progress, 4)
    say("loading the model")
    subject = subjects.load(model, **options)
    say("its own attention")
    own, outside = _recorded(subject)
    if own["first_nonfinite"]:
        with in_fp32(models_of(subject.model)):
            outside = _recorded(subject)[1]
    runs = {"own": own | {"beyond_fp16": outside["beyond_fp16"]}}
    say("PASA, recorded")
    with probe(subject.model) as findings:
        runs["pasa"] = _watched(subject)
    say("FP16 scores (emulated)")
    with pasa.patch_pipeline(subject.model, config=EMULATED, backend="reference"):
        runs["fp16"] = _watched(subject, stop=True)
    return collect(subject, runs, findings) | {"streams": outside["streams"]}, findings.maps


def _recorded(subject: Subject) -> tuple[Run, Run]:
    """Run a model with its own attention; return the run, and what it says on values outside of attention."""
    models = models_of(subject.model)
    with module_peaks(models) as peaks, StreamPeaks(models) as streams:
        run = _watched(subject)
    return run, {"beyond_fp16": beyond_fp16(peaks), "streams": list(streams.layers.values())}


def _watched(subject: Subject, *, stop: bool = False) -> Run:
    started = time.perf_counter()
    with NonFiniteWatch(models_of(subject.model), stop=stop) as watch:
        subject.run()
    return {"seconds": time.perf_counter() - started, "first_nonfinite": watch.first}


def judge(runs: dict[str, Run]) -> Run:
    """Return the gate: PASA breaks no model that is finite with its own attention."""
    own, with_pasa = (runs[name]["first_nonfinite"] for name in ("own", "pasa"))
    return gate({"pasa_finite_where_the_model_is": with_pasa is None or own is not None})


def collect(subject: Subject, runs: dict[str, Run], findings: Findings) -> Run:
    """Return the JSON-able result; ``records`` holds every head, the largest score first."""
    records, patch, device = findings.worst(), findings.report, pick_device()
    return {
        "gate": judge(runs),
        "model": subject.name,
        "settings": {**subject.settings, "rows": ROWS, "batch": BATCH},
        "fixture": subject.fixture,
        "summary": summarise(records),
        "runs": runs,
        "modules": {
            "calls": findings.calls,
            "uncalled": [name for name in patch.patched if name not in findings.calls],
            "skipped": [list(pair) for pair in patch.skipped],
            "broken": findings.broken,
        },
        "note": EMULATION if device.type == "cuda" else f"{EMULATION}; {output.NOTE}",
        "environment": describe(device, "transformers"),
        "records": records,
    }


def summarise(records: list[Run]) -> Run:
    """Return what the verdict is made of; `records` with the largest score first."""
    beyond = [each for each in records if each["max_score"] > FP16_MAX]
    return {
        "heads": len(records),
        "heads_beyond": len(beyond),
        "modules": len({each["module"] for each in records}),
        "modules_beyond": len({each["module"] for each in beyond}),
        "worst": records[0] if records else None,
        "stored": max((each["stored"] for each in records), default=None),
        **{name: sum(each[name] for each in records) for name in ("rescued_tiles", "tiles")},
    }


def render_page(result: Run, heads: Sequence[HeadMaps]) -> str:
    """Return the HTML of a result, which asks for no script, font or file; every text in it is escaped."""
    from jinja2 import StrictUndefined, Template

    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    options: Any = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    records = {(each["module"], each["head"]): each for each in result["records"]}
    html: str = Template(template, autoescape=True, **options).render(
        result=result,
        report=report,
        map=report.draw_map(result) if records else "",
        table=report.head_table(result, report.PAGE, SHOWN),
        details=report.head_table(result, report.FOLDED, SHOWN),
        streams=report.stream_table(result, None),
        outside=report.leaves_outside(result),
        heads=[(each, records[each.module, each.head]) for each in heads],
        matrices=MATRICES,
        origin=origin(result),
    )
    return html


def write_map(result: Run, folder: Path) -> list[Path]:
    """Write the map of all heads, diagnose.svg."""
    output.write_text(folder / "diagnose.svg", report.draw_map(result))
    return [folder / "diagnose.svg"]


EXPERIMENT = Experiment(
    name="diagnose",
    run=run_diagnose,
    report=report.report,
    title="Where a model leaves FP16",
    figures=write_map,
    needs_models=True,
    appendix=lambda result: [report.head_table(result, report.OTHERS), report.MAP],
)
