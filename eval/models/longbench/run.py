"""LongBench with one model in several precisions: answers, scores, agreement with FP32, overflow by layer, speed."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import pasa
from pasa.eval.kit import output
from pasa.eval.kit.device import describe
from pasa.eval.kit.embedded_model import WEIGHTS, require
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.memory import peak_bytes, reset_peak
from pasa.eval.kit.options import at_least
from pasa.eval.models.longbench import metrics, offline, prompts, texts
from pasa.eval.models.longbench.data import Item, digest, load_items
from pasa.eval.models.longbench.generation import answer
from pasa.eval.models.longbench.overflow import count_overflow
from pasa.eval.models.longbench.report import report
from pasa.eval.models.longbench.store import Store, exclusive
from pasa.eval.models.longbench.summary import summarise
from pasa.eval.models.longbench.tasks import Task, find_task
from pasa.eval.models.precisions import Subject, choose_offset, parse_precisions

DEFAULT_PRECISIONS = ("fp32", "bf16", "fp16-eager", "pasa")
OVERFLOW = "overflow"
"""Takes the place of a precision in the store, where the scores of prompts are counted."""
PATIENCE = timedelta(days=1)
"""How long a process waits for the others; the default of torch's process groups is 10 minutes."""


def run_longbench(
    model: Annotated[str | None, "Folder of a causal language model (default: a built-in model)."] = None,
    data: Annotated[str | None, "Folder or zip of LongBench's data (default: an offline set)."] = None,
    precisions: Annotated[
        Sequence[str], "Among fp32-base, bf16[-eager], fp16-{eager,sdpa}, pasa; fp32 is always added."
    ] = DEFAULT_PRECISIONS,
    dataset: Annotated[Sequence[str] | None, "Names of data sets (all)."] = None,
    extended: Annotated[bool, typer.Option("--e", help="Use LongBench-E.")] = False,
    limit: Annotated[int | None, "First items of each data set to answer (all)."] = None,
    tokens: Annotated[Sequence[int] | None, "Approximate tokens of the offline set's contexts (1024)."] = None,
    items: Annotated[int | None, "Items of each length in the offline set (1)."] = None,
    max_length: Annotated[
        int | None, "Longest prompt in tokens; of a longer one the middle is cut (published)."
    ] = None,
    batch_size: Annotated[int, "Items in a batch."] = 1,
    chat: Annotated[bool, typer.Option("--chat/--no-chat", help="Use the tokenizer's chat template.")] = True,
    offset: Annotated[float | None, "Constant to add to every score (131072; 0 with --model)."] = None,
    half: Annotated[
        bool | None, typer.Option("--half/--emulate", help="FP16 models, or FP16 attention in FP32 (default on a CPU).")
    ] = None,
    diagnose: Annotated[int, "Items of each data set whose overflowing scores are counted by layer."] = 1,
    folder: Path | None = None,
    progress: output.Report = output.silent,
) -> dict[str, Any] | None:
    """Run LongBench by precision; exit 1 if PASA breaks an answer or, on the built-in model, differs from FP32.

    Every item is answered in every precision and scored. A run that was stopped goes on where it was in `folder`.
    ``layers`` of the result has the counts of scores that FP16 cannot store, ``identity`` what two runs must share to
    be one. Of several processes, the first alone returns a result. What cannot be used (data, model, precision, number,
    folder) is refused before anything is computed.
    """
    at_least(1, batch_size=batch_size, limit=limit)
    at_least(0, diagnose=diagnose)
    names = parse_precisions(precisions, injected=bool(choose_offset(model, offset)))
    sizes = _offline_sizes(data, tokens, items, dataset, extended=extended)
    questions = None if data is None else load_items(data, dataset, extended=extended, limit=limit)
    tasks = [find_task(name) for name in questions or dataset or offline.MAKERS]
    _require(tasks, [WEIGHTS] * (model is None) + [texts.BIBLE, texts.ZHOUYI] * (data is None))
    processes = _processes()
    with _folder(folder, processes) as place:
        subject = Subject(model, offset, processes.device, half=half)
        window = getattr(subject.config, "max_position_embeddings", math.inf)
        length = prompts.default_max_length(window) if max_length is None else max_length
        prompts.check_max_length(length, window, tasks)
        if questions is None:
            made = offline.build(*sizes, lambda text: len(subject.tokenizer(text).input_ids), dataset or ())
            questions = {name: each[:limit] for name, each in made.items()}
        settings = {"max_length": length, "batch_size": batch_size, "chat": chat}
        source = {"limit": limit, **({} if data else {"tokens": sizes[0], "items": sizes[1]})}
        identity = _identity(subject, questions, settings, source)
        run = _Run(subject, questions, settings, Store(place, identity), processes, progress)
        run.answer_all(names)
        run.count_all(diagnose)
        processes.wait_for_everyone()
        if processes.process_index > 0:
            return None
        options = {"datasets": dataset, "extended": extended, "diagnose": diagnose, **source}
        return {"data": data or "the offline set", "identity": identity, **run.collect(names, options)}


def _offline_sizes(
    data: str | None,
    tokens: Sequence[int] | None,
    items: int | None,
    datasets: Sequence[str] | None,
    *,
    extended: bool,
) -> tuple[Sequence[int], int]:
    """Return the offline set's lengths and items of each; ValueError where it, or `data`, has no such option."""
    if data is not None:
        for name, value in (("tokens", tokens), ("items", items)):
            if value is not None:
                raise ValueError(f"{name}={value} is of the offline set, which data={data!r} is not")
        return (), 0
    sizes = offline.TOKENS if tokens is None else tokens, 1 if items is None else items
    offline.check(*sizes, datasets, extended=extended)
    return sizes


def _require(tasks: Sequence[Task], distributions: Sequence[tuple[str, str]]) -> None:
    """Name what is not installed, read the templates and score an answer, before hours of work."""
    scorers = {name for task in tasks for name in metrics.PACKAGES.get(task.metric, ())}
    require([*distributions, prompts.SOURCE], "longbench", sorted(scorers))
    prompts.templates()
    trial = "Paragraph 1, 段落1"  # right by every metric
    for task in tasks:
        metrics.score_item(task, trial, [trial], [trial])


@dataclass
class _Run:
    """The parts of one run; `processes` is accelerate's state of those that share the work."""

    subject: Subject
    questions: dict[str, list[Item]]
    settings: dict[str, Any]
    store: Store
    processes: Any
    progress: output.Report

    def answer_all(self, names: Sequence[str]) -> None:
        """Answer every item that has no answer yet, a precision after the other."""
        work = {name: [each for dataset in self.questions for each in self._todo(name, dataset)] for name in names}
        total, done = sum(map(len, work.values())), 0
        for name in names:
            if not work[name]:
                continue
            with self.subject.model(name) as model:
                for dataset, batch in work[name]:
                    self.progress(done, total, f"{name} {dataset} {batch.start}/{len(self.questions[dataset])}")
                    self._append(name, dataset, self._answer(model, dataset, batch))
                    done += 1

    def _todo(self, name: str, dataset: str) -> list[tuple[str, range]]:
        """Return those of this process's batches that are not complete."""
        count, size = len(self.questions[dataset]), self.settings["batch_size"]
        batches = [range(start, min(start + size, count)) for start in range(0, count, size)]
        done = self.store.lines(name, dataset).keys()
        return [(dataset, batch) for batch in self._share(batches) if not done >= set(batch)]

    def _share(self, work: Sequence[Any]) -> Sequence[Any]:
        """Return this process's share of the work."""
        return work[self.processes.process_index :: self.processes.num_processes]

    def _append(self, name: str, dataset: str, lines: list[dict[str, Any]]) -> None:
        self.store.append(name, dataset, self.processes.process_index, lines)

    def _answer(self, model: Any, dataset: str, batch: range) -> list[dict[str, Any]]:
        """Return the lines of a batch."""
        task, items = find_task(dataset), [self.questions[dataset][index] for index in batch]
        ids = [self._prompt(task, item) for item in items]
        reset_peak(self.processes.device)
        answers = answer(model, self.subject.tokenizer, ids, task.max_new_tokens, ends_at_newline=task.name == "samsum")
        peak = peak_bytes(self.processes.device)
        fields = ("index", "answers", "all_classes", "length")
        return [
            {**{field: getattr(item, field) for field in fields}, **each, "peak_bytes": peak}
            for item, each in zip(items, answers, strict=True)
        ]

    def _prompt(self, task: Task, item: Item) -> list[int]:
        length, chat = self.settings["max_length"], self.settings["chat"]
        return prompts.build_prompt(self.subject.tokenizer, task, item, length, chat=chat)

    def count_all(self, most: int) -> None:
        """Count the scores beyond FP16 of the first items of each data set."""
        every = [(dataset, item) for dataset, items in self.questions.items() for item in items[:most]]
        known = {dataset: self.store.lines(OVERFLOW, dataset) for dataset in self.questions}
        work = [(dataset, item) for dataset, item in self._share(every) if item.index not in known[dataset]]
        if not work:
            return
        with self.subject.model("pasa") as model:
            for done, (dataset, item) in enumerate(work):
                self.progress(done, len(work), f"scores {dataset} {item.index}")
                ids = torch.tensor([self._prompt(find_task(dataset), item)], device=model.device)
                self._append(OVERFLOW, dataset, [{"index": item.index, "layers": count_overflow(model, ids)}])

    def collect(self, names: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
        """Write the predictions, and sum up all lines of all processes."""
        answers: dict[str, dict[str, list[dict[str, Any]]]] = {name: {} for name in names}
        for name, dataset in product(names, self.questions):
            lines = self.store.lines(name, dataset)
            answers[name][dataset] = [lines[index] for index in sorted(lines)]
            self.store.finish(name, dataset, answers[name][dataset])
        counted = self.questions if options["diagnose"] else ()
        counts = [line for dataset in counted for line in self.store.lines(OVERFLOW, dataset).values()]
        subject = self.subject
        scorers = [name for name in ("rouge", "jieba") if name in sys.modules]
        return {
            **summarise(answers, counts, injected=bool(subject.offset), progress=self.progress),
            "model": subject.name,
            "fixture": {"offset": subject.offset, **(subject.fixture or {})} if subject.offset else None,
            "titles": subject.titles(names),
            "settings": {**self.settings, **options, "processes": self.processes.num_processes},
            "note": subject.note(names),
            "environment": describe(self.processes.device, "transformers", prompts.SOURCE[0], *scorers),
        }


def _identity(
    subject: Subject, questions: dict[str, list[Item]], settings: dict[str, Any], source: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return what must be the same for a run to go on."""
    return {
        "model": {**subject.identity(), "half": subject.half, "device": subject.device.type},
        "files": subject.files(),
        "settings": settings,
        "source": source,
        "data": {dataset: f"{len(items)} items, {digest(items)}" for dataset, items in questions.items()},
        "versions": {"pasa": pasa.__version__, **{name: metadata.version(name) for name in ("torch", "transformers")}},
    }


def _processes() -> Any:
    """Return accelerate's state of the processes that share the work (torchrun, accelerate launch)."""
    from accelerate import PartialState

    # Without cpu=True, several processes on a CPU do not find each other. Waiting may take as long as an answer.
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=PATIENCE)


@contextmanager
def _folder(folder: Path | None, processes: Any) -> Iterator[Path]:
    """Lock the folder for this run, or make a temporary one, which several processes could not share."""
    if folder is not None:
        with exclusive(folder, processes.process_index):
            yield folder
        return
    if processes.num_processes > 1:
        raise ValueError("several processes need an output folder that all of them can reach")
    with tempfile.TemporaryDirectory(prefix="pasa-longbench-") as scratch:
        yield Path(scratch)


EXPERIMENT = Experiment(
    name="longbench",
    run=run_longbench,
    report=report,
    title="LongBench",
    needs_models=True,
    kept="start again with the same --output-dir to go on",
)
