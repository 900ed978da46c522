"""Runs a model three times and says where its attention leaves FP16: as it is, looked at, and with FP16 scores."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

import pasa
from pasa.eval.kit import output
from pasa.eval.models.diagnose import subjects
from pasa.eval.models.diagnose.findings import Findings
from pasa.eval.models.diagnose.maps import HeadMaps
from pasa.eval.models.diagnose.probe import probe
from pasa.eval.models.diagnose.statistics import BATCH, FP16_MAX, ROWS
from pasa.eval.models.diagnose.subjects import EMBEDDED, Subject
from pasa.eval.models.video.run import EMULATED, EMULATION
from pasa.eval.watch import NonFiniteWatch, models_of

STAGES = ("loading the model", "its own attention", "PASA, looked at", "FP16 scores (emulated)")
Run = dict[str, Any]


def run_diagnose(
    model: str = EMBEDDED,
    *,
    prompt: str | None = None,
    max_prompt_tokens: int | None = None,
    image: str | None = None,
    height: int | None = None,
    width: int | None = None,
    frames: int | None = None,
    steps: int | None = None,
    seed: int | None = None,
    offload: bool = False,
    offset: float | None = None,
    dtype: str | None = None,
    progress: output.Report | None = None,
) -> tuple[dict[str, Any], list[HeadMaps]]:
    """Look at all attention of one run of a model.

    Parameters
    ----------
    model : str
        "embedded": SmolLM2-135M-Instruct, whose scores a fixture makes overflow. "tiny": a Stable Video Diffusion
        pipeline of random weights, with a fixture likewise. Else a folder: a Stable Video Diffusion checkpoint, or a
        causal language model. Nothing is downloaded.
    prompt, max_prompt_tokens
        Of a language model, as :func:`pasa.eval.models.rescue.run.run_rescue` takes them.
    image, height, width, frames, steps, seed, offload
        Of a video pipeline, as :func:`pasa.eval.models.video.run.run_video` takes them.
    offset : float, optional
        What a built-in model's fixture adds to its scores (131,072); 0: the model as it is.
    dtype : str, optional
        Of the model: "float32" (default on a CPU) or "float16" (default elsewhere). Attention is FP16 either way.
    progress : callable, optional

    Returns
    -------
    result : dict
        JSON-able: ``gate``, ``summary``, ``runs``, ``modules`` (what was looked at, and what was not and why),
        ``fixture``, ``settings``, ``environment``, and ``records``: every head, largest score first.
    maps : list of HeadMaps
        Matrices of the worst heads.

    Raises
    ------
    FileNotFoundError, NotImplementedError, ValueError
        As :func:`pasa.eval.models.diagnose.subjects.load` and :func:`pasa.patch_pipeline`.
    """
    options = {
        "prompt": prompt,
        "max_prompt_tokens": max_prompt_tokens,
        "image": image,
        "height": height,
        "width": width,
        "frames": frames,
        "steps": steps,
        "seed": seed,
        "offload": offload,
        "offset": offset,
        "dtype": dtype,
    }
    say = progress or (lambda done, total, label: None)
    say(0, len(STAGES), STAGES[0])
    subject = subjects.load(model, options)
    runs, findings = run_all(subject, say)
    return collect(subject, runs, findings), findings.gallery.worst()


def run_all(subject: Subject, say: output.Report) -> tuple[dict[str, Run], Findings]:
    """The three runs. Each is watched for the first module that breaks; the last ends there."""
    total = len(STAGES)
    say(1, total, STAGES[1])
    runs = {"own": _watched(subject, nullcontext())}
    say(2, total, STAGES[2])
    looking = probe(subject.model, seen=lambda name, call: say(2, total, f"{STAGES[2]}: {name}, call {call}"))
    with looking as findings:
        runs["pasa"] = _watched(subject, nullcontext())
    say(3, total, STAGES[3])
    ordinary = pasa.patch_pipeline(subject.model, config=EMULATED, backend="reference")
    runs["fp16"] = _watched(subject, ordinary, stop=True)
    say(total, total, "")
    return runs, findings


def _watched(subject: Subject, patch: AbstractContextManager[Any], *, stop: bool = False) -> Run:
    started = time.perf_counter()
    with patch, NonFiniteWatch(models_of(subject.model), stop=stop) as watch:
        subject.run()
    return {"seconds": time.perf_counter() - started, "first_nonfinite": watch.first}


def collect(subject: Subject, runs: dict[str, Run], findings: Findings) -> dict[str, Any]:
    """The result, as `run_diagnose` returns it."""
    records = [{"module": name, "head": head, **seen.as_dict()} for name, head, seen in findings.worst()]
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
        "environment": _environment(subject.device),
        "records": records,
    }


def summarise(records: list[dict[str, Any]]) -> dict[str, Any]:
    """What the verdict is made of; `records` with the largest score first."""
    beyond = [each for each in records if each["max_score"] > FP16_MAX]
    worst = records[0] if records else None
    return {
        "fp16_max": FP16_MAX,
        "heads": len(records),
        "heads_beyond": len(beyond),
        "modules": len({each["module"] for each in records}),
        "modules_beyond": len({each["module"] for each in beyond}),
        "worst": None if worst is None else {name: worst[name] for name in ("module", "head", "call", "max_score")},
        "stored": max((each["stored"] for each in records), default=None),
        "rescued_tiles": sum(each["rescued_tiles"] for each in records),
        "tiles": sum(each["tiles"] for each in records),
    }


def _environment(device: torch.device) -> dict[str, Any]:
    """The machine, and the host library that the model is of."""
    import transformers

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {**output.environment(), "device": name, "transformers": transformers.__version__}
