"""Builds every architecture small, and judges it patched against unpatched."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pasa.eval.kit import output
from pasa.eval.kit.device import describe
from pasa.eval.models.zoo import diffusion, judging, language, pipelines
from pasa.eval.models.zoo.children import run_all

WORK: dict[str, tuple[Callable[[str], Any], Callable[..., list[judging.Case]]]] = {
    **{kind: (language.build, partial(language.cases, kind)) for kind in language.MAPPINGS},
    diffusion.MODELS: (diffusion.build, diffusion.cases),
    pipelines.PIPELINES: (pipelines.build, pipelines.cases),
}
"""How each kind is built (a model and its inputs, or why not), and the cases of what was built."""

KINDS = tuple(WORK)
Record = dict[str, Any]


def run_zoo(
    kinds: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    jobs: int = 2,
    kept: Path | None = None,
    progress: output.Report | None = None,
) -> Record:
    """Judge architectures of the installed transformers and diffusers.

    Parameters
    ----------
    kinds : sequence of str, optional
        Of `KINDS`; all.
    names : sequence of str, optional
        Classes; all of those kinds.
    jobs : int
        Processes at once.
    kept : Path, optional
        A file of records, a line each, that are not made again; new ones are added.
    progress : callable, optional

    Returns
    -------
    dict
        JSON-able: ``counts`` of verdicts by kind, ``records`` (an architecture each, with the commit that judged it),
        ``gate``.

    Raises
    ------
    ValueError
        For a kind that there is not, a class that is in none of the kinds, or fewer than one job.
    """
    chosen = select(kinds, names)
    if jobs < 1:
        raise ValueError(f"jobs={jobs} is below 1")
    records = [each for each in known(kept) if (each["kind"], each["name"]) in chosen]
    done = {(each["kind"], each["name"]) for each in records}
    own = {"commit": output.commit()}
    preload()
    for (kind, name), record in run_all([each for each in chosen if each not in done], judge_one, jobs):
        records.append({"kind": kind, "name": name, **record, **own})
        if kept is not None:
            keep(kept, records[-1])
        if progress:
            progress(len(records), len(chosen), f"{name}: {record['verdict']}")
    places = {each: place for place, each in enumerate(chosen)}
    records.sort(key=lambda each: places[each["kind"], each["name"]])
    return {
        "experiment": "zoo",
        "gate": gate(records),
        "counts": counts(records),
        "settings": {"jobs": jobs, "bounds": {name: getattr(judging, name) for name in BOUNDS}},
        "commits": sorted({str(each.get("commit")) for each in records}),
        "cpu_s": round(sum(each.get("seconds", 0.0) for each in records), 1),
        "records": records,
        "note": "random weights, FP32, on a CPU: patches are judged, not kernels; nothing was run on a GPU or an NPU",
        "environment": describe(torch.device("cpu")) | {name: importlib.metadata.version(name) for name in LIBRARIES},
    }


BUILD_SECONDS = 40
KEPT = "records.jsonl"
BOUNDS = ("PLUMBING", "LIKEWISE", "ROUNDING", "AMPLIFIED", "SEEN")
LIBRARIES = ("transformers", "diffusers")
SHARED = (
    "transformers.generation",
    "transformers.models.llama.modeling_llama",
    "transformers.models.clip.modeling_clip",
    "diffusers.models.unets.unet_2d_condition",
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion",
    "pasa.patching.transformers",
    "pasa.patching.diffusers",
)
"""What most architectures import."""


def select(kinds: Sequence[str] | None, names: Sequence[str] | None) -> list[tuple[str, str]]:
    """Kind and class of what is asked for."""
    if unknown := sorted(set(kinds or ()) - set(KINDS)):
        raise ValueError(f"{unknown[0]!r} is no kind: {', '.join(KINDS)}")
    found = [(kind, name) for kind in kinds or KINDS for name in architectures(kind)]
    if names is None:
        return found
    if missing := sorted(set(names) - {name for _, name in found}):
        raise ValueError(f"{missing[0]} is not among the {len(found)} classes of {', '.join(kinds or KINDS)}")
    return [(kind, name) for kind, name in found if name in names]


def architectures(kind: str) -> list[str]:
    """Class names of one kind."""
    if kind in language.MAPPINGS:
        return language.architectures(kind)
    return diffusion.models() if kind == diffusion.MODELS else pipelines.pipelines()


def known(kept: Path | None) -> list[Record]:
    """Records of a run that was stopped."""
    if kept is None or not kept.is_file():
        return []
    return [json.loads(each) for each in kept.read_text(encoding="utf-8").splitlines()]


def keep(kept: Path, record: Record) -> None:
    """Add a record to those of the run."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    with kept.open("a", encoding="utf-8") as file:
        file.write(json.dumps(output.jsonable(record)) + "\n")


def preload() -> None:
    """Import what all children share, once; they have one thread each."""
    import diffusers
    import transformers

    torch.set_num_threads(1)
    for library in (transformers, diffusers):
        library.utils.logging.set_verbosity_error()
    for name in SHARED:
        importlib.import_module(name)


def judge_one(item: tuple[str, str]) -> Record:
    """Build one architecture and judge it; runs in a child."""
    kind, name = item
    build, cases = WORK[kind]
    try:
        with limited(BUILD_SECONDS):
            built = build(name)
    except (Exception, OutOfTimeError) as error:
        built = f"{type(error).__name__}: {judging.line(error)}"
    if isinstance(built, str):
        return {"verdict": "not built", "why": built}
    try:
        return judging.judge(built[0], cases(*built))
    except Exception as error:
        return {"verdict": "crashed", "why": f"{type(error).__name__}: {judging.line(error)}"}


class OutOfTimeError(BaseException):
    """No Exception, which whoever tries the next level would catch."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Stop what does not end: a model that hangs unpatched is not built, and no finding."""

    def stop(number: int, frame: object) -> None:
        raise OutOfTimeError(f"not done after {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def counts(records: Sequence[Record]) -> dict[str, dict[str, int]]:
    """Architectures by kind and verdict."""
    found: dict[str, Counter[str]] = {}
    for each in records:
        found.setdefault(each["kind"], Counter())[each["verdict"]] += 1
    return {kind: {name: own[name] for name in judging.VERDICTS if own[name]} for kind, own in found.items()}


def gate(records: Sequence[Record]) -> Record:
    """Passed where no patched model is wrong, refused in the middle of a call, or crashed."""
    findings = [f"{each['kind']}: {each['name']}" for each in records if each["verdict"] in judging.FINDINGS]
    return {"passed": not findings, "findings": findings}
