"""Builds every architecture small, judges it patched against unpatched, and shows which are right."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import math
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch

from pasa.eval.kit import output
from pasa.eval.kit.device import describe
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.tables import Table
from pasa.eval.models.zoo import diffusion, judging, language, pipelines
from pasa.eval.models.zoo.judging import AMPLIFIES, FINDINGS, RELAXED, VERDICTS
from pasa.eval.models.zoo.processes import run_all

Item = tuple[str, str]  # kind and class
Record = dict[str, Any]
Work = tuple[Callable[[], list[str]], Callable[[str], Any], Callable[..., Iterable[judging.Case]]]
WORK: dict[str, Work] = {
    **{
        kind: (partial(language.architectures, kind), language.build, partial(language.cases, kind))
        for kind in language.MAPPINGS
    },
    diffusion.MODELS: (diffusion.models, diffusion.build, diffusion.cases),
    pipelines.PIPELINES: (pipelines.pipelines, pipelines.build, pipelines.cases),
}
"""The classes of each kind, what builds one (a model and its inputs, or why not), and the cases of what was built."""
BUILD_SECONDS = 40
KEPT = "records.jsonl"
BOUNDS = ("PLUMBING", "RELAXED", "ROUNDING", "AMPLIFIED", "SEEN")
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


def run_zoo(
    kinds: Annotated[Sequence[str] | None, f"Kinds of classes to judge: {', '.join(WORK)} (all)."] = None,
    names: Annotated[Sequence[str] | None, "Names of classes to judge (all)."] = None,
    jobs: Annotated[int, "Processes that run at the same time."] = 2,
    folder: Path | None = None,
    progress: output.Report | None = None,
) -> Record:
    """Every architecture of transformers and diffusers, small, patched against unpatched; exit 1 if one is wrong.

    A folder keeps the records of a run that is stopped; they are not made again. The result holds ``counts`` of
    verdicts by kind, ``records`` (an architecture each, with the commit that judged it) and ``gate``: passed where no
    patched model is wrong, refused in the middle of a call, or crashed.

    Raises
    ------
    ValueError
        For a kind that there is not, a class that is in none of the kinds, or fewer than one job.
    """
    items = select(kinds, names)
    if jobs < 1:
        raise ValueError(f"jobs={jobs} is below 1")
    path = None if folder is None else folder / KEPT
    lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.is_file() else []
    done = {(each["kind"], each["name"]): each for each in map(json.loads, lines)}
    records: dict[Item, Record] = {item: done[item] for item in items if item in done}
    commit = output.commit()
    preload()
    for item, record in run_all([item for item in items if item not in done], judge_one, jobs):
        records[item] = {"kind": item[0], "name": item[1], **record, "commit": commit}
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(output.jsonable(records[item])) + "\n")
        if progress:
            progress(len(records), len(items), f"{item[1]}: {record['verdict']}")
    return collect([records[item] for item in items], jobs)


def collect(records: list[Record], jobs: int) -> Record:
    """Return the JSON-able result of a run."""
    counts: dict[str, Counter[str]] = {}
    for each in records:
        counts.setdefault(each["kind"], Counter())[each["verdict"]] += 1
    findings = [f"{each['kind']}: {each['name']}" for each in records if each["verdict"] in FINDINGS]
    return {
        "experiment": "zoo",
        "gate": {"passed": not findings, "findings": findings},
        "counts": {kind: {name: each[name] for name in VERDICTS if each[name]} for kind, each in counts.items()},
        "settings": {"jobs": jobs, "bounds": {name: getattr(judging, name) for name in BOUNDS}},
        "commits": sorted({str(each.get("commit")) for each in records}),
        "cpu_s": round(sum(each.get("seconds", 0.0) for each in records), 1),
        "records": records,
        "note": "random weights, FP32, on a CPU: patches are judged, not kernels; nothing was run on a GPU or an NPU",
        "environment": describe(torch.device("cpu")) | {name: importlib.metadata.version(name) for name in LIBRARIES},
    }


def select(kinds: Sequence[str] | None, names: Sequence[str] | None) -> list[Item]:
    """Return kind and class of what is asked for."""
    if unknown := sorted(set(kinds or ()) - set(WORK)):
        raise ValueError(f"{unknown[0]!r} is no kind: {', '.join(WORK)}")
    items = [(kind, name) for kind in kinds or WORK for name in WORK[kind][0]()]
    if missing := sorted(set(names or ()) - {name for _, name in items}):
        raise ValueError(f"{missing[0]} is not among the {len(items)} classes of {', '.join(kinds or WORK)}")
    return [(kind, name) for kind, name in items if names is None or name in names]


def preload() -> None:
    """Import what all children share, once; they have one thread each."""
    torch.set_num_threads(1)
    for library in LIBRARIES:
        importlib.import_module(library).utils.logging.set_verbosity_error()
    for name in SHARED:
        importlib.import_module(name)


class OutOfTimeError(BaseException):
    """Ends a model that hangs unpatched; no Exception, which the code that tries the next level would catch."""


def _out_of_time(number: int, frame: object) -> None:
    raise OutOfTimeError(f"not done after {BUILD_SECONDS} s")


def judge_one(item: Item) -> Record:
    """Build one architecture and judge it; runs in a child."""
    _, build, cases = WORK[item[0]]
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.alarm(BUILD_SECONDS)
    try:
        built = build(item[1])
    except (Exception, OutOfTimeError) as error:
        built = judging.error_line(error)
    finally:
        signal.alarm(0)
    if isinstance(built, str):
        return {"verdict": "not built", "why": built}
    try:
        return judging.judge(built[0], cases(*built))
    except Exception as error:
        return {"verdict": "crashed", "why": judging.error_line(error)}


def count_table(result: Record) -> Table:
    """Return architectures by kind and verdict."""
    rows = [
        [kind, str(sum(each.values())), *(str(each.get(name, 0)) for name in VERDICTS)]
        for kind, each in result["counts"].items()
    ]
    libraries = " and ".join(f"{name} {result['environment'][name]}" for name in LIBRARIES)
    return Table("Architectures, patched against unpatched", ["kind", "classes", *VERDICTS], rows, f"Of {libraries}.")


def case_table(result: Record) -> Table:
    """Return how far right ones are from the bounds, by kind and case."""
    cases: dict[str, list[Record]] = {}
    amplified: set[str] = set()
    for each in result["records"]:
        if each["verdict"] == "right":
            for name, errors in each["cases"].items():
                cases.setdefault(f"{each['kind']}: {name}", []).append(errors)
                amplified |= {each["name"]} if "rounded" in errors else set()
    bounds = result["settings"]["bounds"]
    note = (
        "Largest difference from the unpatched model, relative to the RMS of its output. With FP64 attention in the "
        f"place of PASA: at most {bounds['PLUMBING']:g} ({', '.join(AMPLIFIES)}: 2^{math.log2(RELAXED):.0f} of what "
        f"FP16's roundings do to it). With PASA, whose reference rounds q, k and v to FP16: at most "
        f"{bounds['ROUNDING']:g}, or, where a model amplifies roundings, {bounds['AMPLIFIED']:g} times what rounding "
        f"q, k and v alone does to it (amplified: {', '.join(sorted(amplified))}). Planted: with a wrong mask."
    )
    header = ["case", "models", "FP64, worst", "PASA, median", "PASA, worst", "amplified", "planted, median"]
    return Table("What right ones err by", header, [_case_row(*each) for each in cases.items()], note)


def _case_row(name: str, records: list[Record]) -> list[str]:
    """Return a row of `case_table`; JSON, which has no infinity, has None for it."""

    def values(error: str) -> list[float]:
        return sorted(math.inf if each[error] is None else each[error] for each in records if error in each)

    plumbing, errors, planted = values("plumbing"), values("error"), values("planted")
    shown = [f"{each:.1e}" for each in (plumbing[-1], errors[len(errors) // 2], errors[-1])]
    amplified = sum("rounded" in each for each in records)
    return [name, str(len(records)), *shown, str(amplified), f"{planted[len(planted) // 2]:.1e}" if planted else "-"]


def reason_table(result: Record) -> Table:
    """Return every architecture that is not right."""
    rows = [
        [each["name"], each["kind"], each["verdict"], each["why"][:160]]
        for each in result["records"]
        if each["verdict"] not in ("right", "nothing to patch")
    ]
    return Table("Why others are not right", ["class", "kind", "verdict", "why"], rows)


def verdict(result: Record) -> str:
    """Return what the exit status says, and where and with which versions it was run."""
    total: Counter[str] = sum((Counter(each) for each in result["counts"].values()), Counter())
    judged = sum(total[name] for name in ("right", "refused", *FINDINGS))
    others = sum(total[name] for name in FINDINGS) - total["wrong"]
    more = f", {others} refused or crashed in a call" if others else ""
    failed = "" if result["gate"]["passed"] else f" FINDINGS: {', '.join(result['gate']['findings'])}."
    machine = result["environment"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", *LIBRARIES, "pasa"))
    return (
        f"{judged} architectures with attention: {total['right']} right, {total['refused']} refused by name, "
        f"{total['wrong']} wrong{more}.{failed} ({machine['processor']}; {versions}, commit {machine['commit']}; "
        f"{result['cpu_s'] / 60:.0f} minutes of CPU; {result['note']}.)"
    )


def summary(result: Record) -> str:
    """Return the verdict and the tables as Markdown, without the reasons."""
    parts = [verdict(result)]
    for table in (count_table(result), case_table(result)):
        parts += [table.markdown(), table.note]
    return "\n\n".join(parts)


EXPERIMENT = Experiment(
    name="zoo",
    run=run_zoo,
    report=lambda result: [count_table(result), case_table(result), reason_table(result), verdict(result)],
    title="Architectures",
    needs_models=True,
    kept="records in --output-dir are kept, and the same command goes on",
)
