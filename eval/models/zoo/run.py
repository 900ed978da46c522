"""Builds every architecture small, judges it patched against unpatched, and shows which are right.

Each architecture runs in a forked process of its own, so that none can stop the run or leave anything behind in it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import math
import multiprocessing
import os
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Annotated, Any

import torch

from pasa.eval.kit import output
from pasa.eval.kit.device import describe
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.options import at_least
from pasa.eval.kit.tables import Column, Table
from pasa.eval.models.zoo import diffusion, judging, language, pipelines
from pasa.eval.models.zoo.judging import AMPLIFIES, FINDINGS, RELAXED, VERDICTS

Item = tuple[str, str]  # kind and class
Record = dict[str, Any]
Work = tuple[Callable[[], list[str]], Callable[[str], Any], Callable[..., Iterable[judging.Case]]]
WORK: dict[str, Work] = {
    **{
        kind: (partial(language.classes, kind), language.build, partial(language.cases, kind))
        for kind in language.MAPPINGS
    },
    "diffusers model": (partial(diffusion.classes, "models", "ModelMixin"), diffusion.build, diffusion.cases),
    "diffusers pipeline": (
        partial(diffusion.classes, "pipelines", "DiffusionPipeline"),
        pipelines.build,
        pipelines.cases,
    ),
}
"""The classes of each kind, what builds one (a model and its inputs, or why not), and the cases of what was built."""
SECONDS, BUILD_SECONDS, GIGABYTES = 90, 40, 12  # of one architecture
BOUNDS = ("PLUMBING", "RELAXED", "ROUNDING", "AMPLIFIED", "SEEN")
LIBRARIES = {
    "transformers": ("LlamaForCausalLM", "CLIPModel"),
    "diffusers": ("UNet2DConditionModel", "StableDiffusionPipeline"),
}
"""Classes of each library that import what most architectures share."""


def run_zoo(
    kinds: Annotated[Sequence[str] | None, f"Kinds of classes to judge: {', '.join(WORK)} (all)."] = None,
    names: Annotated[Sequence[str] | None, "Names of classes to judge (all)."] = None,
    jobs: Annotated[int, "Processes that run at the same time."] = 2,
    progress: output.Report = output.silent,
) -> Record:
    """Every architecture of transformers and diffusers, small, patched against unpatched; exit 1 if one is wrong.

    The result holds ``counts`` of verdicts by kind, ``records`` (an architecture each) and ``gate``: passed where no
    patched model is wrong, refused in the middle of a call, or crashed.
    """
    at_least(1, jobs=jobs)
    classes = [(kind, name) for kind in WORK for name in WORK[kind][0]()]
    items = [(kind, name) for kind, name in classes if kind in (kinds or WORK) and (not names or name in names)]
    if absent := {*(kinds or ()), *(names or ())} - {each for item in items for each in item}:
        raise ValueError(f"no class is selected by {', '.join(map(repr, sorted(absent)))}; kinds: {', '.join(WORK)}")
    preload()
    records: dict[Item, Record] = {}
    for item, record in run_all(items, judge_one, jobs):
        records[item] = {"kind": item[0], "name": item[1], **record}
        progress(len(records), len(items), f"{item[1]}: {record['verdict']}")
    return collect([records[item] for item in items], jobs)


def collect(records: list[Record], jobs: int) -> Record:
    """Return the JSON-able result of a run."""
    counts: dict[str, Counter[str]] = {}
    for each in records:
        counts.setdefault(each["kind"], Counter())[each["verdict"]] += 1
    findings = [f"{each['kind']}: {each['name']}" for each in records if each["verdict"] in FINDINGS]
    return {
        "gate": {"passed": not findings, "findings": findings},
        "counts": {kind: {name: each[name] for name in VERDICTS if each[name]} for kind, each in counts.items()},
        "settings": {"jobs": jobs, "bounds": {name: getattr(judging, name) for name in BOUNDS}},
        "cpu_s": round(sum(each.get("seconds", 0.0) for each in records), 1),
        "records": records,
        "note": "random weights, FP32, on a CPU: patches are judged, not kernels; nothing was run on a GPU or an NPU",
        "environment": describe(torch.device("cpu"), *LIBRARIES),
    }


def preload() -> None:
    """Import what all children share, once; they have one thread each."""
    torch.set_num_threads(1)
    for library, names in LIBRARIES.items():
        module = importlib.import_module(library)
        module.utils.logging.set_verbosity_error()
        importlib.import_module(f"pasa.patching.{library}")
        for name in names:
            getattr(module, name)


def run_all(
    items: Sequence[Any], work: Callable[[Any], Record], jobs: int, seconds: float = SECONDS
) -> Iterator[tuple[Any, Record]]:
    """Yield each item with its record as it is done; one that crashes or takes too long has a record that says so.

    `work` takes an item and returns what can be pickled; it runs in a child. There are so many `jobs` at once.
    """
    waiting, running = list(items), dict[Connection, tuple[Any, ForkProcess, float]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            item = waiting.pop(0)
            answer, process = _start(item, work)
            running[answer] = item, process, time.monotonic() + seconds
        soonest = min(ends for _, _, ends in running.values()) - time.monotonic()
        ready = wait(list(running), max(0.0, soonest))
        for answer in [each for each in running if each in ready or running[each][2] <= time.monotonic()]:
            item, process, _ = running.pop(answer)
            yield item, _end(process, answer, f"not done after {seconds:.0f} s")


def _start(item: Any, work: Callable[[Any], Record]) -> tuple[Connection, ForkProcess]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(item, work, sender))
    process.start()
    sender.close()
    return receiver, process


def _work(item: Any, work: Callable[[Any], Record], answer: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (GIGABYTES << 30,) * 2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    started = time.process_time()
    record = work(item)
    answer.send(record | {"seconds": round(time.process_time() - started, 1)})


def _end(process: ForkProcess, answer: Connection, why: str) -> Record:
    try:
        record: Record = answer.recv() if answer.poll() else {"verdict": "crashed", "why": why}
    except EOFError:
        process.join()
        record = {"verdict": "crashed", "why": f"its process ended with {process.exitcode}"}
    process.kill()
    process.join()
    answer.close()
    return record


def judge_one(item: Item) -> Record:
    """Build one architecture and judge it; runs in a child."""
    _, build, cases = WORK[item[0]]
    # A model that hangs unpatched is no finding. The code that tries the next level does not catch KeyboardInterrupt.
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(BUILD_SECONDS)
    try:
        built = build(item[1])
    except KeyboardInterrupt:
        built = f"not done after {BUILD_SECONDS} s"
    except Exception as error:
        built = output.error_line(error)
    finally:
        signal.alarm(0)
    if isinstance(built, str):
        return {"verdict": "not built", "why": built}
    try:
        return judging.judge(built[0], cases(*built))
    except Exception as error:
        return {"verdict": "crashed", "why": output.error_line(error)}


def count_table(result: Record) -> Table:
    """Return architectures by kind and verdict."""
    rows = [
        {"kind": kind, "classes": sum(each.values())} | dict.fromkeys(VERDICTS, 0) | each
        for kind, each in result["counts"].items()
    ]
    libraries = " and ".join(f"{name} {result['environment'][name]}" for name in LIBRARIES)
    columns: dict[str, Column] = {name: name for name in ("kind", "classes", *VERDICTS)}
    return Table.of("Architectures, patched against unpatched", rows, columns, f"Of {libraries}.")


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
        f"FP16's roundings do to it). With PASA, which rounds q, k and v to FP16: at most "
        f"{bounds['ROUNDING']:g}, or, where a model amplifies roundings, {bounds['AMPLIFIED']:g} times what rounding "
        f"q, k and v alone does to it (amplified: {', '.join(sorted(amplified))}). Planted: with a wrong mask."
    )

    def value(error: str, place: float) -> Callable[[Any], str]:  # at 0.5 the median, at 1 the worst
        def cell(row: Any) -> str:  # JSON has None in the place of infinity
            known = sorted(math.inf if each[error] is None else each[error] for each in row["errors"] if error in each)
            return f"{known[min(int(place * len(known)), len(known) - 1)]:.1e}" if known else "-"

        return cell

    columns: dict[str, Column] = {
        "case": "case",
        "models": lambda row: str(len(row["errors"])),
        "FP64, worst": value("plumbing", 1),
        "PASA, median": value("error", 0.5),
        "PASA, worst": value("error", 1),
        "amplified": lambda row: str(sum("rounded" in each for each in row["errors"])),
        "planted, median": value("planted", 0.5),
    }
    rows = [{"case": name, "errors": errors} for name, errors in cases.items()]
    return Table.of("What right ones err by", rows, columns, note)


def reason_table(result: Record) -> Table:
    """Return every architecture that is not right."""
    left = [each for each in result["records"] if each["verdict"] not in ("right", "nothing to patch")]
    rows = [[each["name"], each["kind"], each["verdict"], each["why"][:160]] for each in left]
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
    tables = (count_table(result), case_table(result))
    return "\n\n".join([verdict(result), *(part for table in tables for part in (table.markdown(), table.note))])


EXPERIMENT = Experiment(
    name="zoo",
    run=run_zoo,
    report=lambda result: [verdict(result), count_table(result), case_table(result), reason_table(result)],
    title="Architectures",
    needs_models=True,
)
