"""LongBench with one model in several precisions: answers, scores, agreement with FP32, overflow by layer, speed."""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import pasa
from pasa.eval.accuracy.precisions import Subject, choose_offset, parse_precisions
from pasa.eval.kit import output
from pasa.eval.kit.embedded_model import WEIGHTS, require
from pasa.eval.kit.memory import peak_bytes, reset_peak
from pasa.eval.models.longbench import data, metrics, offline, templates, texts
from pasa.eval.models.longbench.generation import answer
from pasa.eval.models.longbench.overflow import count_overflow
from pasa.eval.models.longbench.prompts import build_prompt, check_max_length, default_max_length
from pasa.eval.models.longbench.store import OFFLINE, SOURCE, Line, Store, batches, exclusive, refuse_foreign
from pasa.eval.models.longbench.summary import summarise
from pasa.eval.models.longbench.tasks import Task, find_task
from pasa.eval.models.rescue.run import machine

DEFAULT_PRECISIONS = ("fp32", "bf16", "fp16-eager", "pasa")
OVERFLOW = "overflow"
"""Stands in the store for a precision, where the scores of prompts are counted."""

PATIENCE = timedelta(days=1)
"""How long a process waits for the others; the default of torch's process groups is 10 minutes."""


@dataclass(frozen=True)
class Settings:
    """What every answer depends on, besides model and data; units as in :func:`run_longbench`."""

    max_length: int
    batch_size: int
    chat: bool


@dataclass(frozen=True)
class Processes:
    """This process among those that share the work (torchrun, accelerate launch), and its device."""

    index: int
    count: int
    device: torch.device
    wait: Any


def run_longbench(
    model: str | None = None,
    source: str | None = None,
    *,
    precisions: Sequence[str] = DEFAULT_PRECISIONS,
    datasets: Sequence[str] | None = None,
    extended: bool = False,
    limit: int | None = None,
    tokens: Sequence[int] | None = None,
    items: int | None = None,
    max_length: int | None = None,
    batch_size: int = 1,
    chat: bool = True,
    offset: float | None = None,
    half: bool | None = None,
    diagnose: int = 1,
    folder: Path | None = None,
    progress: output.Report | None = None,
) -> dict[str, Any] | None:
    """Answer every item in every precision and score the answers; goes on where a run in `folder` was stopped.

    Parameters
    ----------
    model : str, optional
        Folder of a causal language model. Default: the built-in one, with scores that overflow FP16.
    source : str, optional
        As :func:`pasa.eval.models.longbench.data.load_items` takes it. Default: the offline set, built anew.
    precisions : sequence of str
        Names in :data:`pasa.eval.accuracy.precisions.PRECISIONS`.
    datasets, extended, limit
        Which data sets, those of LongBench-E or not, and how many items of each.
    tokens, items : optional
        Of the offline set alone: as :func:`pasa.eval.models.longbench.offline.build` takes them.
    max_length : int, optional
        Longest prompt in tokens; the middle of a longer one is cut out. Default: as published for the model's window.
    batch_size : int
        Items that are answered together.
    chat : bool
        Use the tokenizer's chat template where LongBench does.
    offset, half
        As :class:`pasa.eval.accuracy.precisions.Subject` takes them.
    diagnose : int
        Items of each data set whose scores are counted by layer.
    folder : Path, optional
        Where answers are kept; default: a temporary folder, and nothing to go on with.
    progress : callable, optional
        Called with (batches done, batches, what comes next).

    Returns
    -------
    dict or None
        JSON-able: ``datasets``, ``categories``, ``precisions`` (scores, agreement, speed), ``layers``, ``gate``,
        ``settings``, ``identity`` (digests and versions), ``environment``. None in all processes but the first.

    Raises
    ------
    FileNotFoundError, ValueError
        Before anything is computed: data, model, precision, number or folder that cannot be used.
    """
    most = 1 if limit is None else limit
    for name, number, least in (("batch_size", batch_size, 1), ("diagnose", diagnose, 0), ("limit", most, 1)):
        if number < least:
            raise ValueError(f"{name}={number} is below {least}")
    names = parse_precisions(precisions, injected=bool(choose_offset(model, offset)))
    processes = _processes()
    options: dict[str, Any] = {"datasets": datasets, "extended": extended, "limit": limit, "diagnose": diagnose}
    if source is None:
        options |= {
            "tokens": list(offline.TOKENS if tokens is None else tokens),
            "items": 1 if items is None else items,
        }
        offline.check(options["tokens"], options["items"], datasets, extended=extended)
        questions = None
    else:
        _refuse_offline_options(source, tokens=tokens, items=items)
        questions = data.load_items(source, datasets, extended=extended, limit=limit)
    tasks = [find_task(dataset) for dataset in questions or datasets or offline.MAKERS]
    _require(model, source, tasks)
    _try_out(tasks)
    with _folder(folder, processes) as place, tempfile.TemporaryDirectory(prefix="pasa-offline-") as scratch:
        if source is None:
            refuse_foreign(place)
        subject = Subject(model, offset, processes.device, half=half)
        window = getattr(subject.config, "max_position_embeddings", math.inf)
        length = default_max_length(window) if max_length is None else max_length
        check_max_length(length, window, tasks)
        if questions is None:
            sizes = options["tokens"], options["items"]
            offline.build(Path(scratch), *sizes, lambda text: len(subject.tokenizer(text).input_ids))
            questions = data.load_items(scratch, datasets, limit=limit)
        settings = Settings(length, batch_size, chat)
        made_from = {name: options.get(name) for name in ("tokens", "items", "limit")}
        store = Store(place, {**_identity(subject, settings, questions), SOURCE: {"data": source, **made_from}})
        if source is None and processes.index == 0:
            shutil.copytree(scratch, place / OFFLINE, dirs_exist_ok=True)
        run = _Run(subject, questions, settings, store, processes, progress or (lambda done, total, label: None))
        run.answer_all(names)
        if diagnose:
            run.count_all(diagnose)
        processes.wait()
        return run.collect(names, options, source) if processes.index == 0 else None


def _refuse_offline_options(source: str, **options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name}={value} is of the offline set, which data={source!r} is not")


def _require(model: str | None, source: str | None, tasks: Sequence[Task]) -> None:
    """Refuse, with one command, where something is not installed."""
    alone = [WEIGHTS] * (model is None) + [texts.BIBLE, texts.ZHOUYI] * (source is None) + [templates.SOURCE]
    scorers = {name for task in tasks for name in metrics.PACKAGES.get(task.metric, ())}
    require(alone, "longbench", sorted(scorers))


def _try_out(tasks: Sequence[Task]) -> None:
    """Read every template and score an answer: what is broken is told before hours of work, not after them."""
    trial = "Paragraph 1, 段落1"  # right by every metric
    for task in tasks:
        templates.template(task.name)
        metrics.score_item(task, trial, [trial], [trial])


class _Run:
    """The parts of one run, and what is done with them."""

    def __init__(
        self,
        subject: Subject,
        questions: dict[str, list[data.Item]],
        settings: Settings,
        store: Store,
        processes: Processes,
        report: output.Report,
    ) -> None:
        self.subject, self.questions, self.settings = subject, questions, settings
        self.store, self.processes, self.report = store, processes, report

    def answer_all(self, names: Sequence[str]) -> None:
        """Every item that has no answer yet, a precision after the other."""
        work = {name: [task for dataset in self.questions for task in self._todo(name, dataset)] for name in names}
        total, done = sum(map(len, work.values())), 0
        for name in names:
            if not work[name]:
                continue
            with self.subject.model(name) as model:
                for dataset, batch in work[name]:
                    self.report(done, total, f"{name} {dataset} {batch.start}/{len(self.questions[dataset])}")
                    self._answer(model, name, dataset, batch)
                    done += 1

    def _todo(self, name: str, dataset: str) -> list[tuple[str, range]]:
        """Those of this process's batches that are not complete."""
        own = batches(len(self.questions[dataset]), self.settings.batch_size)
        done = self.store.lines(name, dataset)
        return [
            (dataset, batch)
            for batch in own[self.processes.index :: self.processes.count]
            if done.keys() < {*done, *batch}
        ]

    def _answer(self, model: Any, name: str, dataset: str, batch: range) -> None:
        task = find_task(dataset)
        rows = [self.questions[dataset][index] for index in batch]
        prompts = [self._prompt(dataset, item) for item in rows]
        reset_peak(self.processes.device)
        found = answer(
            model, self.subject.tokenizer, prompts, task.max_new_tokens, ends_at_newline=task.name == "samsum"
        )
        peak = peak_bytes(self.processes.device)
        lines = [
            {
                "index": index,
                "pred": found.texts[row],
                "answers": rows[row].answers,
                "all_classes": rows[row].all_classes,
                "length": rows[row].length,
                "broken": found.broken[row],
                "prompt_tokens": found.prompt_tokens[row],
                "new_tokens": found.new_tokens[row],
                "prefill_s": found.prefill_s / len(batch),
                "decode_s": found.decode_s / len(batch),
                "peak_bytes": peak,
            }
            for row, index in enumerate(batch)
        ]
        self.store.append(name, dataset, self.processes.index, lines)

    def _prompt(self, dataset: str, item: data.Item) -> list[int]:
        task = find_task(dataset)
        return build_prompt(self.subject.tokenizer, task, item, self.settings.max_length, chat=self.settings.chat)

    def count_all(self, most: int) -> None:
        """Scores beyond FP16, of the first items of each data set."""
        wanted = [(dataset, index) for dataset, own in self.questions.items() for index in range(min(most, len(own)))]
        wanted = wanted[self.processes.index :: self.processes.count]
        known = {dataset: self.store.lines(OVERFLOW, dataset) for dataset in self.questions}
        wanted = [(dataset, index) for dataset, index in wanted if index not in known[dataset]]
        if not wanted:
            return
        with self.subject.model("pasa") as model:
            for done, (dataset, index) in enumerate(wanted):
                self.report(done, len(wanted), f"scores {dataset} {index}")
                ids = torch.tensor([self._prompt(dataset, self.questions[dataset][index])], device=model.device)
                line = {"index": index, "prompt_tokens": ids.shape[1], "layers": count_overflow(model, ids)}
                self.store.append(OVERFLOW, dataset, self.processes.index, [line])

    def collect(self, names: Sequence[str], options: dict[str, Any], source: str | None) -> dict[str, Any]:
        """Write the predictions, and sum up all lines of all processes."""
        answers: dict[str, dict[str, dict[int, Line]]] = {}
        for name in names:
            answers[name] = {dataset: self.store.lines(name, dataset) for dataset in self.questions}
            for dataset, lines in answers[name].items():
                self.store.finish(name, dataset, lines)
        looked = self.questions if options["diagnose"] else ()
        counted = {dataset: self.store.lines(OVERFLOW, dataset) for dataset in looked}
        scorers = [name for name in ("rouge", "jieba") if name in sys.modules]
        packages = {name: metadata.version(name) for name in (templates.SOURCE[0], *scorers)}
        return {
            "experiment": "longbench",
            **summarise(answers, counted, injected=bool(self.subject.offset), report=self.report),
            "model": self.subject.name,
            "fixture": {"offset": self.subject.offset, **(self.subject.fixture or {})} if self.subject.offset else None,
            "data": source or "the offline set",
            "titles": self.subject.titles(names),
            "settings": {**vars(self.settings), **options, "processes": self.processes.count},
            "identity": _identity(self.subject, self.settings, self.questions),
            "note": self.subject.note(names),
            "environment": {**machine(self.processes.device), **packages},
        }


def _identity(subject: Subject, settings: Settings, questions: dict[str, list[data.Item]]) -> dict[str, dict[str, Any]]:
    import transformers

    return {
        "model": {**subject.identity(), "half": subject.half, "device": subject.device.type},
        "files": subject.files(),
        "settings": vars(settings),
        "data": {dataset: f"{len(own)} items, {data.digest(own)}" for dataset, own in questions.items()},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "pasa": pasa.__version__},
    }


def _processes() -> Processes:
    from accelerate import PartialState

    # Told of a CPU, several processes find each other; and one may wait for another as long as an answer takes.
    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=PATIENCE)
    return Processes(state.process_index, state.num_processes, state.device, state.wait_for_everyone)


@contextmanager
def _folder(folder: Path | None, processes: Processes) -> Iterator[Path]:
    """The folder, for this run alone, or a temporary one.

    Raises
    ------
    ValueError
        Another run is at work there; several processes, which a temporary folder of each would keep apart.
    """
    if folder is not None:
        with exclusive(folder, processes.index):
            yield folder
        return
    if processes.count > 1:
        raise ValueError("several processes need an output folder that all of them can reach")
    with tempfile.TemporaryDirectory(prefix="pasa-longbench-") as scratch:
        yield Path(scratch)
