"""LongBench with one model in several precisions: answers, scores, agreement with FP32, overflow by layer, speed."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from pasa.eval.kit import output
from pasa.eval.kit.device import describe, pick_device
from pasa.eval.kit.embedded_model import WEIGHTS, require
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.memory import peak_bytes, reset_peak
from pasa.eval.kit.model_folder import check_language_model
from pasa.eval.kit.options import at_least
from pasa.eval.models.longbench import offline, prompts
from pasa.eval.models.longbench.data import Item, digest, load_items
from pasa.eval.models.longbench.generation import answer, count_overflow
from pasa.eval.models.longbench.report import Line, report, summarise
from pasa.eval.models.longbench.tasks import Task, find_task
from pasa.eval.models.precisions import Subject, choose_offset, parse_precisions
from pasa.ops.versions import package_version

PRECISIONS = ("fp32", "bf16", "fp16-eager", "pasa")


def run_longbench(
    model: Annotated[str | None, "Folder of a causal language model (default: a built-in model)."] = None,
    data: Annotated[str | None, "Folder of LongBench's data (default: an offline set)."] = None,
    precisions: Annotated[Sequence[str], "Among fp32[-base], bf16[-eager], fp16-{eager,sdpa}, pasa."] = PRECISIONS,
    dataset: Annotated[Sequence[str] | None, "Names of data sets (all of LongBench); LongBench-E's end in _e."] = None,
    tokens: Annotated[Sequence[int] | None, "Tokens of the offline set's contexts, one for each item (1024)."] = None,
    max_length: Annotated[int | None, "Longest prompt; of a longer one the middle is cut (published)."] = None,
    batch_size: Annotated[int, "Items in a batch."] = 1,
    chat: Annotated[bool, typer.Option("--chat/--no-chat", help="Use the tokenizer's chat template.")] = True,
    offset: Annotated[float | None, "Constant to add to every score (131072; 0 with --model)."] = None,
    half: Annotated[
        bool | None, typer.Option("--half/--emulate", help="FP16 models, or FP16 attention in FP32 (default on a CPU).")
    ] = None,
    folder: Path | None = None,
    progress: output.Report = output.silent,
) -> dict[str, Any]:
    """Run LongBench by precision; exit 1 if PASA breaks an answer or, on the built-in model, differs from FP32.

    Every item is answered in every precision and scored. A run that was stopped goes on where it was in `folder`.
    ``layers`` of the result has the counts of scores that FP16 cannot store, over the first prompt of each data set.
    What cannot be used (data, model, precision, number, folder) is refused before anything is computed.
    """
    at_least(1, batch_size=batch_size)
    names = parse_precisions(precisions, injected=bool(choose_offset(model, offset)))
    if data is not None and tokens is not None:
        raise ValueError(f"tokens={tokens} is of the offline set, which data={data!r} is not")
    questions = None if data is None else load_items(data, dataset)
    if model is not None:
        check_language_model(model)
    texts = [offline.BIBLE, offline.ZHOUYI] * (data is None)
    require([*[WEIGHTS] * (model is None), *texts, prompts.SOURCE], "longbench", ("rouge", "jieba"))
    prompts.templates()
    subject = Subject(model, offset, pick_device(), half=half)
    tokens = tokens or offline.TOKENS
    if questions is None:
        questions = offline.build(tokens, lambda text: len(subject.tokenizer(text).input_ids), dataset)
    window = getattr(subject.config, "max_position_embeddings", math.inf)
    max_length = prompts.choose_length(max_length, window, [find_task(name) for name in questions])
    settings = {"max_length": max_length, "batch_size": batch_size, "chat": chat}
    with tempfile.TemporaryDirectory(prefix="pasa-longbench-") as scratch:
        run = _Run(subject, questions, settings, folder or Path(scratch), progress)
        identity = run.identify()
        answers = run.answer_all(names)
    counts = run.count_all() if "pasa" in names else []
    return {
        "data": data or "the offline set",
        "identity": identity,
        **summarise(answers, counts, injected=bool(subject.offset)),
        "model": subject.name,
        "fixture": {"offset": subject.offset, **(subject.fixture or {})} if subject.offset else None,
        "titles": subject.titles(names),
        "settings": {**settings, "tokens": None if data else tokens},
        "note": subject.note(names),
        "environment": describe(subject.device, "transformers", prompts.SOURCE[0], "rouge", "jieba"),
    }


@dataclass
class _Run:
    """The answers of one model; those of a data set in one precision are a file, so that a stopped run can go on."""

    subject: Subject
    questions: dict[str, list[Item]]
    settings: dict[str, Any]
    folder: Path
    progress: output.Report

    def identify(self) -> dict[str, Any]:
        """Return what must stay for the run to go on, and store it; ValueError if the folder holds another run."""
        subject, file = self.subject, self.folder / "settings.json"
        identity = {
            **{f"data.{dataset}": f"{len(items)} items, {digest(items)}" for dataset, items in self.questions.items()},
            **{name: package_version(name) for name in ("pasa", "torch", "transformers")},
            **subject.identity(),
            **self.settings,
            "files": subject.files(),
            "half": subject.half,
            "device": subject.device.type,
        }
        stored = output.read_json(file) if file.is_file() else {}
        pairs = {name: (old, identity.get(name)) for name, old in stored.items()}
        changes = [f"{name} was {old!r} and is {new!r}" for name, (old, new) in pairs.items() if old != new]
        if changes:
            raise ValueError(f"{self.folder} holds another run ({'; '.join(changes)}): choose another folder")
        output.write_text(file, json.dumps(identity, indent=1, ensure_ascii=False))
        return identity

    def answer_all(self, names: Sequence[str]) -> list[Line]:
        """Answer every data set that is not in the folder yet, a precision after the other, and return all answers."""
        folder = self.folder / "predictions"
        files = {(name, dataset): folder / name / f"{dataset}.jsonl" for name in names for dataset in self.questions}
        work = [pair for pair, file in files.items() if not file.is_file()]
        for done, (name, dataset) in enumerate(work):
            with self.subject.model(name) as model:
                lines = self._answer(model, name, dataset, partial(self.progress, done, len(work)))
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            output.write_text(files[name, dataset], text)
        return [
            {"precision": name, "dataset": dataset, **json.loads(line)}
            for (name, dataset), file in files.items()
            for line in file.read_text(encoding="utf-8").split("\n")[:-1]
        ]

    def _answer(self, model: Any, name: str, dataset: str, report: Callable[[str], None]) -> list[Line]:
        """Return a line for each item of a data set: the fields that the published scorer reads, times and memory."""
        task, items, size = find_task(dataset), self.questions[dataset], self.settings["batch_size"]
        tokenizer, device = self.subject.tokenizer, self.subject.device
        lines = []
        for start in range(0, len(items), size):
            report(f"{name} {dataset} {start}/{len(items)}")
            batch = items[start : start + size]
            ids = [self._prompt(task, item) for item in batch]
            reset_peak(device)
            answers = answer(model, tokenizer, ids, task.max_new_tokens, ends_at_newline=task.name == "samsum")
            peak = peak_bytes(device)
            for item, each in zip(batch, answers, strict=True):
                fields = {field: getattr(item, field) for field in ("answers", "all_classes", "length")}
                lines.append({**fields, **each, "peak_bytes": peak})
        return lines

    def _prompt(self, task: Task, item: Item) -> list[int]:
        length, chat = self.settings["max_length"], self.settings["chat"]
        return prompts.build_prompt(self.subject.tokenizer, task, item, length, chat=chat)

    def count_all(self) -> list[list[Line]]:
        """Count the scores beyond FP16 of the first prompt of each data set, layer by layer."""
        counts = []
        with self.subject.model("pasa") as model:
            for done, (dataset, items) in enumerate(self.questions.items()):
                self.progress(done, len(self.questions), f"scores {dataset}")
                ids = torch.tensor([self._prompt(find_task(dataset), items[0])], device=model.device)
                counts.append(count_overflow(model, ids))
        return counts


EXPERIMENT = Experiment(
    name="longbench",
    run=run_longbench,
    report=report,
    title="LongBench",
    needs_models=True,
    resume="start again with the same --output-dir to go on",
)
